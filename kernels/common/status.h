// Statuses and the sentence that goes with the last refused call of a thread. Shared by both
// libraries.
#ifndef NVFP4_COMMON_STATUS_H_
#define NVFP4_COMMON_STATUS_H_

#include "nvfp4.h"

namespace nvfp4 {

// Keeps a printf-formatted sentence for nvfp4_last_error() and returns `status`.
__attribute__((format(printf, 2, 3))) nvfp4_status Fail(nvfp4_status status, const char* format,
                                                        ...);

}  // namespace nvfp4

// Returns from the calling function with the status of `expression` unless it is NVFP4_OK.
#define NVFP4_TRY(expression)                           \
  do {                                                  \
    const nvfp4_status nvfp4_try_status = (expression); \
    if (nvfp4_try_status != NVFP4_OK) {                 \
      return nvfp4_try_status;                          \
    }                                                   \
  } while (0)

#endif  // NVFP4_COMMON_STATUS_H_
