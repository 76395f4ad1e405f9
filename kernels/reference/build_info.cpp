#include "nvfp4.h"

#define NVFP4_TEXT_(value) #value

extern "C" const char* nvfp4_build_info(void) {
#if defined(__x86_64__)
  return "libnvfp4_ref " NVFP4_PROJECT_VERSION ", gcc " __VERSION__
         ", x86-64 with AVX2 at run time";
#else
  return "libnvfp4_ref " NVFP4_PROJECT_VERSION ", gcc " __VERSION__ ", portable";
#endif
}
