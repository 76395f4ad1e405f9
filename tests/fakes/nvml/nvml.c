// libnvidia-ml.so.1 for tests: the ABI of the real one, driven by the JSON scenario that NVML_FAKE_SCENARIO
// names. docs: README.md beside this file. A key that the scenario lacks answers NOT_SUPPORTED; a value
// {"error": n} answers n. The file is read again when its mtime changes.
#include "nvml_state.h"

// --- library -----------------------------------------------------------------------------------------------

EXPORT Ret nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  Ret ret = Begin("nvmlInitWithFlags", -1);
  double code = 0;
  if (ret == kOk && JsonAt(g_root, "init")) ret = Number(JsonAt(g_root, "init"), &code);
  if (ret == kOk && !g_root) ret = 9;  // no scenario, no driver
  if (ret == kOk) g_open = 1;
  return End(ret);
}
EXPORT Ret nvmlInit(void) { return nvmlInitWithFlags(0); }
EXPORT Ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT Ret nvmlShutdown(void) {
  Ret ret = Begin("nvmlShutdown", -1);
  g_open = 0;
  return End(ret);
}
EXPORT const char* nvmlErrorString(Ret ret) {
  switch (ret) {
    case 0: return "Success";
    case 3: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
static Ret SystemText(const char* call, const char* path, char* out, unsigned room) {
  Ret ret = Begin(call, -1);
  return End(ret == kOk ? Text(JsonAt(g_root, path), out, room) : ret);
}
EXPORT Ret nvmlSystemGetDriverVersion(char* out, unsigned room) {
  return SystemText("nvmlSystemGetDriverVersion", "driver_version", out, room);
}
EXPORT Ret nvmlSystemGetNVMLVersion(char* out, unsigned room) {
  return SystemText("nvmlSystemGetNVMLVersion", "nvml_version", out, room);
}
static Ret CudaVersion(const char* call, int* out) {
  Ret ret = Begin(call, -1);
  double value = 0;
  if (ret == kOk) ret = Number(JsonAt(g_root, "cuda_version"), &value);
  if (ret == kOk) *out = (int)value;
  return End(ret);
}
EXPORT Ret nvmlSystemGetCudaDriverVersion(int* out) { return CudaVersion("nvmlSystemGetCudaDriverVersion", out); }
EXPORT Ret nvmlSystemGetCudaDriverVersion_v2(int* out) {
  return CudaVersion("nvmlSystemGetCudaDriverVersion_v2", out);
}

// --- handles and identity ------------------------------------------------------------------------------------

EXPORT Ret nvmlDeviceGetCount_v2(unsigned* out) {
  Ret ret = Begin("nvmlDeviceGetCount_v2", -1);
  if (ret == kOk) *out = JsonCount(JsonAt(g_root, "gpus"));
  return End(ret);
}
EXPORT Ret nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
  Ret ret = Begin("nvmlDeviceGetHandleByIndex_v2", (int)index);
  if (ret == kOk && index >= JsonCount(JsonAt(g_root, "gpus"))) ret = kInvalid;
  double code = 0;
  const Json* handle = JsonAt(JsonIndex(JsonAt(g_root, "gpus"), index), "handle");
  if (ret == kOk && handle) ret = Number(handle, &code);
  if (ret == kOk) *out = HandleOf((int)index);
  return End(ret);
}
static Ret HandleBy(const char* call, const char* path, const char* wanted, Handle* out) {
  Ret ret = Begin(call, -1);
  int index = 0, found = -1;
  for (const Json* gpu = JsonIndex(JsonAt(g_root, "gpus"), 0); gpu; gpu = gpu->next, ++index) {
    if (strcmp(JsonText(JsonAt(gpu, path), ""), wanted) == 0) found = index;
  }
  if (ret == kOk && found < 0) ret = kNotFound;
  if (ret == kOk) *out = HandleOf(found);
  return End(ret);
}
EXPORT Ret nvmlDeviceGetHandleByUUID(const char* uuid, Handle* out) {
  return HandleBy("nvmlDeviceGetHandleByUUID", "uuid", uuid, out);
}
EXPORT Ret nvmlDeviceGetHandleBySerial(const char* serial, Handle* out) {
  return HandleBy("nvmlDeviceGetHandleBySerial", "serial", serial, out);
}
EXPORT Ret nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, Handle* out) {
  return HandleBy("nvmlDeviceGetHandleByPciBusId_v2", "bus_id", bus_id, out);
}
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom.image")
EXPORT Ret nvmlDeviceGetInforomVersion(Handle device, unsigned object, char* out, unsigned room) {
  static const char* const kPaths[] = {"inforom.oem", "inforom.ecc", "inforom.power"};
  return GpuText("nvmlDeviceGetInforomVersion", device, kPaths[object < 3 ? object : 0], out, room);
}
EXPORT Ret nvmlDeviceGetIndex(Handle device, unsigned* out) {
  Ret ret = Begin("nvmlDeviceGetIndex", IndexOf(device));
  if (ret == kOk) *out = (unsigned)IndexOf(device);
  return End(ret);
}
EXPORT Ret nvmlDeviceGetMinorNumber(Handle device, unsigned* out) { return nvmlDeviceGetIndex(device, out); }
static Ret Pci(const char* call, Handle device, const char* bus_id, PciInfo* out) {
  (void)device;
  (void)call;
  memset(out, 0, sizeof *out);
  unsigned function = 0;
  if (sscanf(bus_id, "%x:%x:%x.%x", &out->domain, &out->bus, &out->device, &function) < 3) return kInvalid;
  snprintf(out->busId, sizeof out->busId, "%s", bus_id);
  snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.%X", out->domain & 0xFFFF, out->bus & 0xFF,
           out->device & 0xFF, function & 0xF);
  out->pciDeviceId = 0x1DB610DE;
  return kOk;
}
EXPORT Ret nvmlDeviceGetPciInfo_v3(Handle device, PciInfo* out) {
  char bus_id[32] = "";
  Ret ret = GpuText("nvmlDeviceGetPciInfo_v3", device, "bus_id", bus_id, sizeof bus_id);
  return ret == kOk ? Pci("nvmlDeviceGetPciInfo_v3", device, bus_id, out) : ret;
}
UNSIGNED(nvmlDeviceGetBrand, "brand")
UNSIGNED(nvmlDeviceGetArchitecture, "architecture")
EXPORT Ret nvmlDeviceGetCudaComputeCapability(Handle device, int* major, int* minor) {
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetCudaComputeCapability", device, "compute_capability", &value);
  if (ret == kOk) {
    *major = (int)value;
    *minor = (int)(value * 10 + 0.5) % 10;
  }
  return ret;
}

// --- memory --------------------------------------------------------------------------------------------------

static Ret MemoryOf(const char* call, Handle device, double* total, double* used) {
  Ret ret = GpuNumber(call, device, "memory.total", total);
  if (ret == kOk && GpuNumber("", device, "memory.used", used) != kOk) *used = 0;
  return ret;
}
EXPORT Ret nvmlDeviceGetMemoryInfo(Handle device, Memory* out) {
  double total = 0, used = 0;
  Ret ret = MemoryOf("nvmlDeviceGetMemoryInfo", device, &total, &used);
  if (ret == kOk) *out = (Memory){(unsigned long long)total, (unsigned long long)(total - used), (unsigned long long)used};
  return ret;
}
EXPORT Ret nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2* out) {
  double total = 0, used = 0;
  Ret ret = MemoryOf("nvmlDeviceGetMemoryInfo_v2", device, &total, &used);
  if (ret == kOk) {
    *out = (MemoryV2){out->version, (unsigned long long)total, 0, (unsigned long long)(total - used),
                      (unsigned long long)used};
  }
  return ret;
}
static Ret Processes(const char* call, Handle device, unsigned* count, Process* out) {
  Ret ret = Begin(call, IndexOf(device));
  const Json* list = JsonAt(Gpu(device), "processes");
  double code = 0;
  if (ret == kOk && !list) ret = kNotSupported;
  if (ret == kOk && list->kind == kObject) ret = Number(list, &code);
  unsigned have = JsonCount(list), room = *count;
  if (ret == kOk) {
    *count = have;
    if (have > room) ret = kTooSmall;
    for (unsigned i = 0; ret == kOk && i < have; ++i) {
      out[i] = (Process){(unsigned)JsonNumber(JsonAt(JsonIndex(list, i), "pid"), 0),
                         (unsigned long long)JsonNumber(JsonAt(JsonIndex(list, i), "used"), 0), 0, 0};
    }
  }
  return End(ret);
}
EXPORT Ret nvmlDeviceGetComputeRunningProcesses_v2(Handle device, unsigned* count, Process* out) {
  return Processes("nvmlDeviceGetComputeRunningProcesses_v2", device, count, out);
}
EXPORT Ret nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned* count, Process* out) {
  return Processes("nvmlDeviceGetComputeRunningProcesses_v3", device, count, out);
}

// --- ECC and retired pages -------------------------------------------------------------------------------------

EXPORT Ret nvmlDeviceGetEccMode(Handle device, unsigned* current, unsigned* pending) {
  Ret ret = GpuUnsigned("nvmlDeviceGetEccMode", device, "ecc.mode_current", current);
  if (ret == kOk && GpuUnsigned("", device, "ecc.mode_pending", pending) != kOk) *pending = *current;
  return ret;
}
UNSIGNED(nvmlDeviceGetDefaultEccMode, "ecc.mode_default")
static const char* EccPath(int error, int counter) {
  static const char* const kPaths[2][2] = {{"ecc.volatile_sbe", "ecc.aggregate_sbe"},
                                           {"ecc.volatile_dbe", "ecc.aggregate_dbe"}};
  return kPaths[error & 1][counter & 1];
}
EXPORT Ret nvmlDeviceGetTotalEccErrors(Handle device, int error, int counter, unsigned long long* out) {
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetTotalEccErrors", device, EccPath(error, counter), &value);
  if (ret == kOk) *out = (unsigned long long)value;
  return ret;
}
EXPORT Ret nvmlDeviceGetMemoryErrorCounter(Handle device, int error, int counter, int place, unsigned long long* out) {
  static const char* const kPlaces[] = {"l1", "l2", "device", "register", "texture", "shared", "cbu"};
  char path[96];
  snprintf(path, sizeof path, "%s_at.%s", EccPath(error, counter), kPlaces[place >= 0 && place < 7 ? place : 4]);
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetMemoryErrorCounter", device, path, &value);
  if (ret == kOk) *out = (unsigned long long)value;
  return ret;
}
EXPORT Ret nvmlDeviceGetDetailedEccErrors(Handle device, int error, int counter, EccCounts* out) {
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetDetailedEccErrors", device, EccPath(error, counter), &value);
  if (ret == kOk) *out = (EccCounts){0, 0, (unsigned long long)value, 0};
  return ret;
}
// The binding's first call of _v2 passes four of five arguments, so `times` may only be touched with pages.
static Ret Retired(const char* call, Handle device, int cause, unsigned* count, unsigned long long* pages) {
  double value = 0;
  Ret ret = GpuNumber(call, device, cause ? "retired.dbe" : "retired.sbe", &value);
  if (ret != kOk) return ret;
  unsigned have = (unsigned)value, room = *count;
  *count = have;
  if (pages && room >= have) {
    for (unsigned i = 0; i < have; ++i) pages[i] = 0x10000ULL * (i + 1);
    return kOk;
  }
  return have > room ? kTooSmall : kOk;
}
EXPORT Ret nvmlDeviceGetRetiredPages(Handle device, int cause, unsigned* count, unsigned long long* pages) {
  return Retired("nvmlDeviceGetRetiredPages", device, cause, count, pages);
}
EXPORT Ret nvmlDeviceGetRetiredPages_v2(Handle device, int cause, unsigned* count, unsigned long long* pages,
                                        unsigned long long* times) {
  Ret ret = Retired("nvmlDeviceGetRetiredPages_v2", device, cause, count, pages);
  if (ret == kOk && pages) memset(times, 0, *count * sizeof *times);
  return ret;
}
UNSIGNED(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending")
EXPORT Ret nvmlDeviceValidateInforom(Handle device) {
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceValidateInforom", device, "inforom_valid", &value);
  return ret == kOk && value == 0 ? 14 : ret;
}
static const char* FieldPath(unsigned field) {
  switch (field) {
    case 29: return "retired.sbe";
    case 30: return "retired.dbe";
    case 31: return "retired.pending";
    case 82: return "thermal.hbm";
    case 92: return "retired.pending_sbe";
    case 93: return "retired.pending_dbe";
    case 94: return "pcie.replays";
    case 95: return "pcie.replay_rollovers";
    default: return "";
  }
}
EXPORT Ret nvmlDeviceGetFieldValues(Handle device, int count, FieldValue* values) {
  Ret ret = Begin("nvmlDeviceGetFieldValues", IndexOf(device));
  for (int i = 0; ret == kOk && i < count; ++i) {
    const char* path = FieldPath(values[i].field);
    double value = 0;
    values[i].ret = *path ? Number(JsonAt(Gpu(device), path), &value) : kNotSupported;
    values[i].type = 1;
    values[i].value.ull = (unsigned long long)value;
  }
  return End(ret);
}

// --- link and peers --------------------------------------------------------------------------------------------

UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width_max")
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation_max")
UNSIGNED(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie.generation_device")
UNSIGNED(nvmlDeviceGetPcieReplayCounter, "pcie.replays")

static const Json* Pair(int a, int b) {
  for (const Json* pair = JsonIndex(JsonAt(g_root, "pairs"), 0); pair; pair = pair->next) {
    int first = (int)JsonNumber(JsonAt(pair, "a"), -1), second = (int)JsonNumber(JsonAt(pair, "b"), -1);
    if ((first == a && second == b) || (first == b && second == a)) return pair;
  }
  return NULL;
}
EXPORT Ret nvmlDeviceGetP2PStatus(Handle from, Handle to, int what, int* out) {
  static const char* const kNames[] = {"read", "write", "nvlink", "atomics", "pci"};
  Ret ret = Begin("nvmlDeviceGetP2PStatus", IndexOf(from));
  char path[32];
  const Json* pair = Pair(IndexOf(from), IndexOf(to));
  int forward = (int)JsonNumber(JsonAt(pair, "a"), -1) == IndexOf(from);
  snprintf(path, sizeof path, "%s_%s", kNames[what >= 0 && what < 5 ? what : 0], forward ? "ab" : "ba");
  double value = 0;
  if (ret == kOk) ret = IndexOf(from) == IndexOf(to) ? kInvalid : Number(JsonAt(pair, path), &value);
  if (ret == kOk) *out = (int)value;
  return End(ret);
}
EXPORT Ret nvmlDeviceGetTopologyCommonAncestor(Handle from, Handle to, int* out) {
  Ret ret = Begin("nvmlDeviceGetTopologyCommonAncestor", IndexOf(from));
  double value = 0;
  if (ret == kOk) ret = Number(JsonAt(Pair(IndexOf(from), IndexOf(to)), "topology"), &value);
  if (ret == kOk) *out = (int)value;
  return End(ret);
}
EXPORT Ret nvmlDeviceGetTopologyNearestGpus(Handle device, int level, unsigned* count, Handle* out) {
  (void)level;
  (void)out;
  Ret ret = Begin("nvmlDeviceGetTopologyNearestGpus", IndexOf(device));
  if (ret == kOk) *count = 0;
  return End(ret);
}
static Ret LinkNumber(const char* call, Handle device, unsigned link, const char* path, double* out) {
  Ret ret = Begin(call, IndexOf(device));
  const Json* lane = JsonIndex(JsonAt(Gpu(device), "links"), link);
  if (ret == kOk) ret = !JsonAt(Gpu(device), "links") ? kNotSupported : !lane ? kInvalid : Number(JsonAt(lane, path), out);
  return End(ret);
}
EXPORT Ret nvmlDeviceGetNvLinkState(Handle device, unsigned link, unsigned* out) {
  double value = 0;
  Ret ret = LinkNumber("nvmlDeviceGetNvLinkState", device, link, "active", &value);
  if (ret == kOk) *out = (unsigned)value;
  return ret;
}
EXPORT Ret nvmlDeviceGetNvLinkVersion(Handle device, unsigned link, unsigned* out) {
  double value = 0;
  Ret ret = LinkNumber("nvmlDeviceGetNvLinkVersion", device, link, "version", &value);
  if (ret == kOk) *out = (unsigned)value;
  return ret;
}
EXPORT Ret nvmlDeviceGetNvLinkCapability(Handle device, unsigned link, int what, unsigned* out) {
  (void)what;
  return nvmlDeviceGetNvLinkState(device, link, out);
}
EXPORT Ret nvmlDeviceGetNvLinkErrorCounter(Handle device, unsigned link, int counter, unsigned long long* out) {
  static const char* const kNames[] = {"replays", "recoveries", "crc_errors", "crc_data_errors", "ecc_errors"};
  double value = 0;
  Ret ret = LinkNumber("nvmlDeviceGetNvLinkErrorCounter", device, link, kNames[counter >= 0 && counter < 5 ? counter : 0],
                       &value);
  if (ret == kOk) *out = (unsigned long long)value;
  return ret;
}
EXPORT Ret nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle device, unsigned link, PciInfo* out) {
  char bus_id[32] = "";
  Ret ret = Begin("nvmlDeviceGetNvLinkRemotePciInfo_v2", IndexOf(device));
  if (ret == kOk) ret = Text(JsonAt(JsonIndex(JsonAt(Gpu(device), "links"), link), "remote"), bus_id, sizeof bus_id);
  if (ret == kOk) ret = Pci("", device, bus_id, out);
  return End(ret);
}

#include "nvml_sensors.h"
