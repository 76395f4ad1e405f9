// libcuda.so.1 that stands between a program and the driver's own, and lies about peer copies: they report
// success and move nothing. REAL_LIBCUDA names the driver's library; LIE=drop|none says whether it lies.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef long Word;
typedef Word (*Any)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

static Any Real(const char* name) {
  static void* library;
  if (!library) library = dlopen(getenv("REAL_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
  Any found = library ? (Any)dlsym(library, name) : NULL;
  if (!found) {
    fprintf(stderr, "lying_libcuda: %s: %s\n", name, dlerror());
    abort();
  }
  return found;
}

// Twelve words cover every call the probes make; the ones a callee does not take are ignored by the ABI.
#define FORWARD(NAME)                                                                                         \
  int NAME(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, Word k, Word l) { \
    return (int)Real(#NAME)(a, b, c, d, e, f, g, h, i, j, k, l);                                             \
  }

FORWARD(cuInit)
FORWARD(cuGetErrorName)
FORWARD(cuDeviceGetByPCIBusId)
FORWARD(cuDevicePrimaryCtxRetain)
FORWARD(cuCtxSetCurrent)
FORWARD(cuMemAlloc_v2)
FORWARD(cuMemHostAlloc)
FORWARD(cuMemcpyHtoD_v2)
FORWARD(cuMemcpyHtoDAsync_v2)
FORWARD(cuMemcpyDtoH_v2)
FORWARD(cuCtxSynchronize)
FORWARD(cuDeviceCanAccessPeer)
FORWARD(cuCtxEnablePeerAccess)
FORWARD(cuModuleLoadData)
FORWARD(cuModuleGetFunction)
FORWARD(cuLaunchKernel)

int cuMemcpyPeerAsync(Word to, Word to_context, Word from, Word from_context, Word size, Word stream) {
  const char* lie = getenv("LIE");
  if (lie && strcmp(lie, "drop") == 0) return 0;
  return (int)Real("cuMemcpyPeerAsync")(to, to_context, from, from_context, size, stream, 0, 0, 0, 0, 0, 0);
}
