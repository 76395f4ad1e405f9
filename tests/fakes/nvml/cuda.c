// libcuda.so.1 for tests: device memory is host memory, and CUDA_FAKE_SCENARIO says what goes wrong.
//   {"init": 0, "devices": ["0000:10:00.0", ...], "alloc": [0, 2], "peer_access": 1,
//    "peer": "ok" | "zeros" | "flip" | "hang" | "segv" | "refuse", "direction": "ab" | "ba" | "both"}
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#include "json.h"

#define EXPORT __attribute__((visibility("default")))
enum { kOk = 0, kInvalid = 1, kNoMemory = 2, kNoDevice = 100, kInvalidDevice = 101 };

static Json* g_root;
static intptr_t g_current;  // 1 + device of the current context

static const Json* Root(void) {
  if (!g_root) g_root = JsonFile(getenv("CUDA_FAKE_SCENARIO"));
  return g_root;
}

EXPORT int cuInit(unsigned flags) {
  (void)flags;
  if (!Root()) return kNoDevice;
  return (int)JsonNumber(JsonAt(Root(), "init"), 0);
}
EXPORT int cuGetErrorName(int status, const char** out) {
  *out = status == kNoMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : status == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR";
  return kOk;
}
static int Same(const char* a, const char* b) {
  unsigned d1, b1, s1, d2, b2, s2;
  if (sscanf(a, "%x:%x:%x", &d1, &b1, &s1) != 3 || sscanf(b, "%x:%x:%x", &d2, &b2, &s2) != 3) return 0;
  return d1 == d2 && b1 == b2 && s1 == s2;
}
EXPORT int cuDeviceGetByPCIBusId(int* out, const char* bus_id) {
  int index = 0;
  for (const Json* item = JsonIndex(JsonAt(Root(), "devices"), 0); item; item = item->next, ++index) {
    if (Same(JsonText(item, ""), bus_id)) {
      *out = index;
      return kOk;
    }
  }
  return kInvalidDevice;
}
EXPORT int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = (void*)(intptr_t)(device + 1);
  return (int)JsonNumber(JsonIndex(JsonAt(Root(), "context"), (unsigned)device), 0);
}
EXPORT int cuCtxSetCurrent(void* context) {
  g_current = (intptr_t)context;
  return kOk;
}
EXPORT int cuMemAlloc_v2(uint64_t* out, size_t size) {
  int refused = (int)JsonNumber(JsonIndex(JsonAt(Root(), "alloc"), (unsigned)(g_current - 1)), 0);
  if (refused) return refused;
  *out = (uint64_t)(uintptr_t)malloc(size);
  return kOk;
}
EXPORT int cuMemHostAlloc(void** out, size_t size, unsigned flags) {
  (void)flags;
  *out = malloc(size);
  return *out ? kOk : kNoMemory;
}
EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t size) {
  memcpy((void*)(uintptr_t)target, source, size);
  return kOk;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t size, void* stream) {
  (void)stream;
  return cuMemcpyHtoD_v2(target, source, size);
}
EXPORT int cuMemcpyDtoH_v2(void* target, uint64_t source, size_t size) {
  memcpy(target, (const void*)(uintptr_t)source, size);
  return kOk;
}
EXPORT int cuCtxSynchronize(void) { return kOk; }
EXPORT int cuDeviceCanAccessPeer(int* out, int device, int peer) {
  (void)device;
  (void)peer;
  *out = (int)JsonNumber(JsonAt(Root(), "peer_access"), 1);
  return kOk;
}
EXPORT int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  (void)peer;
  (void)flags;
  return kOk;
}
static int Move(uint64_t target, uint64_t source, size_t size, int forward) {
  const char* mode = JsonText(JsonAt(Root(), "peer"), "ok");
  const char* direction = JsonText(JsonAt(Root(), "direction"), "both");
  int hit = strcmp(direction, "both") == 0 || strcmp(direction, forward ? "ab" : "ba") == 0;
  if (hit && strcmp(mode, "zeros") == 0) return kOk;
  if (hit && strcmp(mode, "refuse") == 0) return 217;
  if (hit && strcmp(mode, "segv") == 0) raise(SIGSEGV);
  while (hit && strcmp(mode, "hang") == 0) pause();
  memcpy((void*)(uintptr_t)target, (const void*)(uintptr_t)source, size);
  if (hit && strcmp(mode, "flip") == 0) ((char*)(uintptr_t)target)[size / 2] ^= 1;
  return kOk;
}
EXPORT int cuMemcpyPeerAsync(uint64_t target, void* to, uint64_t source, void* of, size_t size, void* stream) {
  (void)stream;
  return Move(target, source, size, (intptr_t)of < (intptr_t)to);
}
EXPORT int cuModuleLoadData(void** out, const void* image) {
  *out = (void*)(intptr_t)1;
  return strstr((const char*)image, ".entry move_words(") ? kOk : kInvalid;
}
EXPORT int cuModuleGetFunction(void** out, void* module, const char* name) {
  (void)module;
  *out = (void*)(intptr_t)1;
  return strcmp(name, "move_words") == 0 ? kOk : kInvalid;
}
EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
  (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
  (void)shared, (void)stream, (void)extra;
  uint64_t target = *(uint64_t*)parameters[0], source = *(uint64_t*)parameters[1], words = *(uint64_t*)parameters[2];
  return Move(target, source, words * 8, g_current == 1);
}
