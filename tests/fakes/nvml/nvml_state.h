// What nvml.c answers from: the ABI's structs, the scenario, its faults, and values by path.
#pragma once

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "json.h"

enum { kOk = 0, kUninitialized = 1, kInvalid = 2, kNotSupported = 3, kNotFound = 6, kTooSmall = 7, kTimeout = 10 };

typedef int Ret;
typedef struct Device* Handle;  // 1 + index, never dereferenced

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { unsigned long long l1, l2, device, registers; } EccCounts;
typedef struct { unsigned long long reference, violation; } Violation;
typedef struct { Handle device; unsigned long long type, data; unsigned gi, ci; } EventData;
typedef union { double d; unsigned ui; unsigned long long ull; long long sll; int si; } Value;
typedef struct {
  unsigned field, scope;
  int64_t timestamp, latency;
  unsigned type;
  Ret ret;
  Value value;
} FieldValue;

#define EXPORT __attribute__((visibility("default")))
#define MAX_FAULTS 256

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static Json* g_root;
static struct timespec g_mtime;
static int g_open;
static unsigned g_seen[MAX_FAULTS];  // calls that matched a fault so far
static unsigned g_event;

static void Load(void) {
  const char* path = getenv("NVML_FAKE_SCENARIO");
  struct stat info;
  if (!path || stat(path, &info) != 0) return;
  if (g_root && info.st_mtim.tv_sec == g_mtime.tv_sec && info.st_mtim.tv_nsec == g_mtime.tv_nsec) return;
  Json* fresh = JsonFile(path);
  if (!fresh) return;
  JsonFree(g_root);
  g_root = fresh;
  g_mtime = info.st_mtim;
}

static void Trace(const char* call, int gpu) {
  const char* path = getenv("NVML_FAKE_TRACE");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %d\n", call, gpu);
  fclose(file);
}

static void Sleep(double milliseconds) {
  if (milliseconds < 0) {
    for (;;) pause();
  }
  struct timespec span = {(time_t)(milliseconds / 1000), (long)((long long)(milliseconds * 1e6) % 1000000000LL)};
  nanosleep(&span, NULL);
}

// Takes the lock, and the scenario's faults into account: a hang keeps the lock, as a wedged driver does.
static Ret Begin(const char* call, int gpu) {
  pthread_mutex_lock(&g_lock);
  Load();
  Trace(call, gpu);
  unsigned number = 0;
  for (const Json* fault = JsonIndex(JsonAt(g_root, "faults"), 0); fault && number < MAX_FAULTS;
       fault = fault->next, ++number) {
    const char* name = JsonText(JsonAt(fault, "call"), "*");
    double which = JsonNumber(JsonAt(fault, "gpu"), -1);
    if ((strcmp(name, "*") != 0 && strcmp(name, call) != 0) || (which >= 0 && which != gpu)) continue;
    unsigned seen = g_seen[number]++;
    double after = JsonNumber(JsonAt(fault, "after"), 0), times = JsonNumber(JsonAt(fault, "times"), 1e9);
    if (seen < after || seen >= after + times) continue;
    const Json* hang = JsonAt(fault, "hang_ms");
    if (hang) Sleep(hang->number);
    const Json* signal = JsonAt(fault, "abort");
    if (signal) abort();
    double code = JsonNumber(JsonAt(fault, "return"), 0);
    if (code != 0) return (Ret)code;
  }
  return kOk;
}

static Ret End(Ret ret) {
  pthread_mutex_unlock(&g_lock);
  return ret;
}

static int IndexOf(Handle device) { return (int)(intptr_t)device - 1; }
static Handle HandleOf(int index) { return (Handle)(intptr_t)(index + 1); }
static const Json* Gpu(Handle device) { return JsonIndex(JsonAt(g_root, "gpus"), (unsigned)IndexOf(device)); }

static Ret Number(const Json* at, double* out) {
  if (!at) return kNotSupported;
  const Json* error = at->kind == kObject ? JsonAt(at, "error") : NULL;
  if (error) return (Ret)error->number;
  *out = JsonNumber(at, 0);
  return kOk;
}

static Ret Text(const Json* at, char* out, unsigned room) {
  if (!at) return kNotSupported;
  const Json* error = at->kind == kObject ? JsonAt(at, "error") : NULL;
  if (error) return (Ret)error->number;
  const char* text = JsonText(at, "");
  if (strlen(text) + 1 > room) return kTooSmall;
  strcpy(out, text);
  return kOk;
}

static Ret GpuNumber(const char* call, Handle device, const char* path, double* out) {
  Ret ret = Begin(call, IndexOf(device));
  if (ret == kOk) ret = !g_open ? kUninitialized : !Gpu(device) ? kInvalid : Number(JsonAt(Gpu(device), path), out);
  return End(ret);
}

static Ret GpuUnsigned(const char* call, Handle device, const char* path, unsigned* out) {
  double value = 0;
  Ret ret = GpuNumber(call, device, path, &value);
  if (ret == kOk) *out = (unsigned)value;
  return ret;
}

static Ret GpuText(const char* call, Handle device, const char* path, char* out, unsigned room) {
  Ret ret = Begin(call, IndexOf(device));
  if (ret == kOk) ret = Gpu(device) ? Text(JsonAt(Gpu(device), path), out, room) : kInvalid;
  return End(ret);
}

#define UNSIGNED(NAME, PATH) \
  EXPORT Ret NAME(Handle device, unsigned* out) { return GpuUnsigned(#NAME, device, PATH, out); }
#define TEXT(NAME, PATH) \
  EXPORT Ret NAME(Handle device, char* out, unsigned room) { return GpuText(#NAME, device, PATH, out, room); }
#define REFUSED(NAME) \
  EXPORT Ret NAME(void) { Begin(#NAME, -1); return End(kNotSupported); }
