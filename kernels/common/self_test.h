// The self-test of both libraries: fixed problems through the public calls, compared with answers
// computed here in exact arithmetic.
#ifndef NVFP4_COMMON_SELF_TEST_H_
#define NVFP4_COMMON_SELF_TEST_H_

#include <cstdint>

#include "status.h"

namespace nvfp4 {

// What the test needs of a device. Each call returns NVFP4_OK, or a status with its sentence.
class SelfTestDevice {
 public:
  virtual ~SelfTestDevice() = default;
  // At least 256-byte aligned memory.
  virtual nvfp4_status Allocate(int64_t bytes, void** memory) = 0;
  virtual void Free(void* memory) = 0;
  // Host to device.
  virtual nvfp4_status CopyIn(void* target, const void* source, int64_t bytes) = 0;
  // Waits for everything on stream(), then device to host.
  virtual nvfp4_status CopyOut(void* target, const void* source, int64_t bytes) = 0;
  virtual void* stream() = 0;
};

// The whole of nvfp4_self_test once a device is at hand. `result` may be null.
nvfp4_status RunSelfTest(SelfTestDevice& device, int32_t index, nvfp4_self_test_result* result);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_SELF_TEST_H_
