// Small operations, build information and the self-test of the sm_70 library.
#include "abi.h"
#include "self_test.h"

namespace nvfp4::sm70 {
namespace {

class CudaDevice : public SelfTestDevice {
 public:
  ~CudaDevice() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  nvfp4_status Start() {
    return CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                     "cudaStreamCreate");
  }
  nvfp4_status Allocate(int64_t bytes, void** memory) override {
    return CheckCuda(cudaMalloc(memory, static_cast<size_t>(bytes)), "cudaMalloc");
  }
  void Free(void* memory) override { cudaFree(memory); }
  nvfp4_status CopyIn(void* target, const void* source, int64_t bytes) override {
    NVFP4_TRY(CheckCuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes),
                                        cudaMemcpyHostToDevice, stream_),
                        "the copy to the device"));
    return CheckCuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  nvfp4_status CopyOut(void* target, const void* source, int64_t bytes) override {
    NVFP4_TRY(CheckCuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"));
    return CheckCuda(cudaMemcpy(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost),
                     "the copy to the host");
  }
  void* stream() override { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

nvfp4_status RunOn(int32_t device, nvfp4_self_test_result* result) {
  CudaDevice memory;
  NVFP4_TRY(memory.Start());
  return RunSelfTest(memory, device, result);
}

}  // namespace
}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

#define NVFP4_TEXT_(value) #value
#define NVFP4_TEXT(value) NVFP4_TEXT_(value)

extern "C" {

const char* nvfp4_build_info(void) {
  return "libnvfp4_sm70 " NVFP4_PROJECT_VERSION
         ", CUDA " NVFP4_TEXT(CUDART_VERSION) ", sm_70 code and compute_70 PTX";
}

nvfp4_status nvfp4_topk_softmax(int32_t logits_type, int64_t m, int64_t experts, int64_t top_k,
                                const void* logits, int64_t logits_stride, int32_t renormalize,
                                int32_t* ids, float* weights, void* stream) {
  NVFP4_TRY(CheckTopK(logits_type, m, experts, top_k, {"logits", logits, logits_stride, experts},
                      ids, weights));
  return CheckCuda(LaunchTopK(static_cast<nvfp4_type>(logits_type), m, experts, top_k, logits,
                              logits_stride, renormalize != 0, ids, weights, StreamOf(stream)),
                   "topk_softmax");
}

nvfp4_status nvfp4_rms_norm(const nvfp4_norm* norm, void* stream) {
  NVFP4_TRY(CheckNorm(norm));
  return CheckCuda(LaunchNorm(*norm, StreamOf(stream)), "rms_norm");
}

nvfp4_status nvfp4_silu_mul(int32_t io_type, int64_t rows, int64_t width, const void* x,
                            int64_t x_stride, void* y, int64_t y_stride, void* stream) {
  NVFP4_TRY(
      CheckSiluMul(io_type, rows, width, {"x", x, x_stride, 2 * width}, {"y", y, y_stride, width}));
  return CheckCuda(LaunchSiluMul(static_cast<nvfp4_type>(io_type), rows, width, x, x_stride, y,
                                 y_stride, StreamOf(stream)),
                   "silu_mul");
}

nvfp4_status nvfp4_rotary_write_kv(const nvfp4_rotary* rotary, void* stream) {
  NVFP4_TRY(CheckRotary(rotary));
  return CheckCuda(LaunchRotary(*rotary, StreamOf(stream)), "rotary_write_kv");
}

nvfp4_status nvfp4_self_test(int32_t device, nvfp4_self_test_result* result) {
  int count = 0, before = 0;
  NVFP4_TRY(CheckCuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  if (device < 0 || device >= count) {
    return Fail(NVFP4_ESHAPE, "the device must be 0 to %d, is %d.", count - 1, device);
  }
  NVFP4_TRY(CheckCuda(cudaGetDevice(&before), "cudaGetDevice"));
  NVFP4_TRY(CheckCuda(cudaSetDevice(device), "cudaSetDevice"));
  const nvfp4_status status = RunOn(device, result);
  const cudaError_t restored = cudaSetDevice(before);
  return status != NVFP4_OK ? status : CheckCuda(restored, "cudaSetDevice");
}

}  // extern "C"
