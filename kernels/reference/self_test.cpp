// The self-test on host memory.
#include "self_test.h"

#include <cstring>
#include <new>

#include "host.h"

namespace nvfp4::host {
namespace {

class HostDevice : public SelfTestDevice {
 public:
  nvfp4_status Allocate(int64_t bytes, void** memory) override {
    *memory = ::operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow);
    if (*memory == nullptr) {
      return Fail(NVFP4_ENOMEM, "host memory ran out for %lld bytes.",
                  static_cast<long long>(bytes));
    }
    return NVFP4_OK;
  }
  void Free(void* memory) override { ::operator delete(memory, kAlignment); }
  nvfp4_status CopyIn(void* target, const void* source, int64_t bytes) override {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return NVFP4_OK;
  }
  nvfp4_status CopyOut(void* target, const void* source, int64_t bytes) override {
    return CopyIn(target, source, bytes);
  }
  void* stream() override { return nullptr; }

 private:
  static constexpr std::align_val_t kAlignment{NVFP4_BUFFER_ALIGNMENT};
};

}  // namespace
}  // namespace nvfp4::host

extern "C" nvfp4_status nvfp4_self_test(int32_t device, nvfp4_self_test_result* result) {
  using namespace nvfp4;
  if (device != 0) {
    return Fail(NVFP4_ESHAPE, "the host is device 0, not %d.", device);
  }
  host::HostDevice memory;
  return RunSelfTest(memory, device, result);
}
