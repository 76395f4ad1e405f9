// The self-test passes on a whole device and names the coordinate on one that errs.
#include "self_test.h"

#include <cstring>
#include <new>

#include "expect.h"

namespace {

using namespace nvfp4;

// Host memory whose `bad_copy`-th copy back has one bit flipped at `bad_byte`; -1 = none.
class FlawedDevice : public SelfTestDevice {
 public:
  FlawedDevice(int bad_copy, int64_t bad_byte) : bad_copy_(bad_copy), bad_byte_(bad_byte) {}

  nvfp4_status Allocate(int64_t bytes, void** memory) override {
    ++live_;
    *memory = ::operator new(static_cast<size_t>(bytes), kAlignment);
    return NVFP4_OK;
  }
  void Free(void* memory) override {
    --live_;
    ::operator delete(memory, kAlignment);
  }
  nvfp4_status CopyIn(void* target, const void* source, int64_t bytes) override {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return NVFP4_OK;
  }
  nvfp4_status CopyOut(void* target, const void* source, int64_t bytes) override {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    if (copies_++ == bad_copy_) {
      static_cast<uint8_t*>(target)[bad_byte_] ^= 0x40;
    }
    return NVFP4_OK;
  }
  void* stream() override { return nullptr; }
  int live() const { return live_; }

 private:
  static constexpr std::align_val_t kAlignment{NVFP4_BUFFER_ALIGNMENT};
  int bad_copy_;
  int64_t bad_byte_;
  int copies_ = 0;
  int live_ = 0;
};

nvfp4_self_test_result EmptyResult() {
  nvfp4_self_test_result result = {};
  result.struct_size = sizeof(result);
  return result;
}

void WholeDevicePasses() {
  FlawedDevice device(-1, 0);
  nvfp4_self_test_result result = EmptyResult();
  EXPECT(RunSelfTest(device, 0, &result) == NVFP4_OK);
  EXPECT(result.checksum == result.expected);
  EXPECT(result.bad_problem == -1);
  EXPECT(device.live() == 0);
}

// Copies of a dense problem: report, dequantized weight [33, 80], product [1, 33].
void WrongWeightIsNamed() {
  FlawedDevice device(1, (5 * 80 + 7) * 2 + 1);
  nvfp4_self_test_result result = EmptyResult();
  EXPECT(RunSelfTest(device, 0, &result) == NVFP4_ESELFTEST);
  EXPECT(result.bad_problem == 0);
  EXPECT(result.bad_row == 5);
  EXPECT(result.bad_column == 7);
  EXPECT(std::strstr(nvfp4_last_error(), "row 5, column 7") != nullptr);
  EXPECT(device.live() == 0);
}

void WrongProductIsNamed() {
  FlawedDevice device(2, 32 * 2 + 1);
  nvfp4_self_test_result result = EmptyResult();
  EXPECT(RunSelfTest(device, 0, &result) == NVFP4_ESELFTEST);
  EXPECT(result.bad_row == 0);
  EXPECT(result.bad_column == 32);
  EXPECT(result.bad_value != result.good_value);
}

void DamagedReportIsRefused() {
  FlawedDevice device(0, 0);
  EXPECT(RunSelfTest(device, 0, nullptr) == NVFP4_EREPORT);
  EXPECT(device.live() == 0);
}

}  // namespace

int main() {
  WholeDevicePasses();
  WrongWeightIsNamed();
  WrongProductIsNamed();
  DamagedReportIsRefused();
  return nvfp4::test::Result();
}
