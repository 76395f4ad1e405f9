// The rest of nvml.c: heat, power, clocks, events, and the calls that Volta refuses.
#pragma once

#include "nvml_state.h"

// --- heat, power, clocks ---------------------------------------------------------------------------------------

EXPORT Ret nvmlDeviceGetTemperature(Handle device, int sensor, unsigned* out) {
  (void)sensor;
  return GpuUnsigned("nvmlDeviceGetTemperature", device, "thermal.gpu", out);
}
EXPORT Ret nvmlDeviceGetTemperatureThreshold(Handle device, int which, unsigned* out) {
  static const char* const kPaths[] = {"thermal.shutdown", "thermal.slowdown", "thermal.hbm_max", "thermal.gpu_max"};
  return GpuUnsigned("nvmlDeviceGetTemperatureThreshold", device, which >= 0 && which < 4 ? kPaths[which] : "none", out);
}
static Ret Milliwatts(const char* call, Handle device, const char* path, unsigned* out) {
  double watts = 0;
  Ret ret = GpuNumber(call, device, path, &watts);
  if (ret == kOk) *out = (unsigned)(watts * 1000 + 0.5);
  return ret;
}
#define WATTS(NAME, PATH) \
  EXPORT Ret NAME(Handle device, unsigned* out) { return Milliwatts(#NAME, device, PATH, out); }
WATTS(nvmlDeviceGetPowerUsage, "power.draw")
WATTS(nvmlDeviceGetPowerManagementLimit, "power.limit")
WATTS(nvmlDeviceGetPowerManagementDefaultLimit, "power.default")
WATTS(nvmlDeviceGetEnforcedPowerLimit, "power.limit")
EXPORT Ret nvmlDeviceGetPowerManagementLimitConstraints(Handle device, unsigned* low, unsigned* high) {
  Ret ret = Milliwatts("nvmlDeviceGetPowerManagementLimitConstraints", device, "power.min", low);
  if (ret == kOk && Milliwatts("", device, "power.max", high) != kOk) *high = *low;
  return ret;
}
static const char* ClockPath(int type, int limit) {
  static const char* const kPaths[2][4] = {{"clocks.graphics", "clocks.sm", "clocks.mem", "clocks.video"},
                                           {"clocks.graphics_max", "clocks.sm_max", "clocks.mem_max", "clocks.video_max"}};
  return kPaths[limit][type >= 0 && type < 4 ? type : 3];
}
EXPORT Ret nvmlDeviceGetClockInfo(Handle device, int type, unsigned* out) {
  return GpuUnsigned("nvmlDeviceGetClockInfo", device, ClockPath(type, 0), out);
}
EXPORT Ret nvmlDeviceGetMaxClockInfo(Handle device, int type, unsigned* out) {
  return GpuUnsigned("nvmlDeviceGetMaxClockInfo", device, ClockPath(type, 1), out);
}
#define REASONS(NAME, PATH)                                         \
  EXPORT Ret NAME(Handle device, unsigned long long* out) {        \
    double value = 0;                                              \
    Ret ret = GpuNumber(#NAME, device, PATH, &value);              \
    if (ret == kOk) *out = (unsigned long long)value;              \
    return ret;                                                    \
  }
REASONS(nvmlDeviceGetCurrentClocksThrottleReasons, "reasons")
REASONS(nvmlDeviceGetCurrentClocksEventReasons, "reasons")
REASONS(nvmlDeviceGetSupportedClocksThrottleReasons, "reasons_supported")
REASONS(nvmlDeviceGetSupportedClocksEventReasons, "reasons_supported")
REASONS(nvmlDeviceGetSupportedEventTypes, "event_types")
EXPORT Ret nvmlDeviceGetViolationStatus(Handle device, int policy, Violation* out) {
  (void)policy;
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetViolationStatus", device, "violation_ns", &value);
  if (ret == kOk) *out = (Violation){0, (unsigned long long)value};
  return ret;
}
UNSIGNED(nvmlDeviceGetPersistenceMode, "persistence")
UNSIGNED(nvmlDeviceGetComputeMode, "compute_mode")
UNSIGNED(nvmlDeviceGetPerformanceState, "performance_state")
EXPORT Ret nvmlDeviceGetUtilizationRates(Handle device, Utilization* out) {
  double value = 0;
  Ret ret = GpuNumber("nvmlDeviceGetUtilizationRates", device, "utilization", &value);
  if (ret == kOk) *out = (Utilization){(unsigned)value, 0};
  return ret;
}

// --- events ------------------------------------------------------------------------------------------------------

EXPORT Ret nvmlEventSetCreate(void** out) {
  Ret ret = Begin("nvmlEventSetCreate", -1);
  if (ret == kOk) *out = &g_event;
  return End(ret);
}
EXPORT Ret nvmlEventSetFree(void* set) {
  (void)set;
  return End(Begin("nvmlEventSetFree", -1));
}
EXPORT Ret nvmlDeviceRegisterEvents(Handle device, unsigned long long types, void* set) {
  (void)types;
  (void)set;
  return End(Begin("nvmlDeviceRegisterEvents", IndexOf(device)));
}
EXPORT Ret nvmlEventSetWait_v2(void* set, EventData* out, unsigned timeout_ms) {
  (void)set;
  Ret ret = Begin("nvmlEventSetWait_v2", -1);
  const Json* event = JsonIndex(JsonAt(g_root, "events"), g_event);
  if (ret == kOk && event) {
    ++g_event;
    *out = (EventData){HandleOf((int)JsonNumber(JsonAt(event, "gpu"), 0)),
                       (unsigned long long)JsonNumber(JsonAt(event, "type"), 8),
                       (unsigned long long)JsonNumber(JsonAt(event, "data"), 0), 0, 0};
    return End(kOk);
  }
  End(ret);
  if (ret != kOk) return ret;
  Sleep(timeout_ms > 200 ? 200 : timeout_ms);  // short, so that an event added to the file is seen soon
  return kTimeout;
}

// --- what Volta does not have ----------------------------------------------------------------------------------------

REFUSED(nvmlDeviceGetRemappedRows)
REFUSED(nvmlDeviceGetRowRemapperHistogram)
REFUSED(nvmlDeviceGetSramEccErrorStatus)
REFUSED(nvmlDeviceGetRepairStatus)
REFUSED(nvmlDeviceGetMigMode)
REFUSED(nvmlDeviceGetMaxMigDeviceCount)
REFUSED(nvmlDeviceGetGspFirmwareMode)
REFUSED(nvmlDeviceGetDriverModel_v2)
REFUSED(nvmlDeviceGetGpuFabricInfo)
REFUSED(nvmlDeviceGetGpuFabricInfoV)
REFUSED(nvmlDeviceGetBridgeChipInfo)
