#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace nvfp4 {
namespace {

constexpr int kSentenceBytes = 512;
thread_local char sentence[kSentenceBytes] = "";

struct StatusWords {
  const char* name;
  const char* text;
};

// In the order of the enumeration.
constexpr StatusWords kStatusWords[NVFP4_STATUS_COUNT] = {
    {"NVFP4_OK", "The call did what it says."},
    {"NVFP4_ENULL", "A pointer that must not be null is null."},
    {"NVFP4_EALIGN", "A pointer or a stride is not aligned as the header asks."},
    {"NVFP4_ESHAPE", "A size is out of its range."},
    {"NVFP4_EGROUP",
     "The group is not 16, 32, 64 or 128, does not divide k, or is not the weight's."},
    {"NVFP4_ESTRIDE", "A row stride is shorter than the row."},
    {"NVFP4_ETYPE", "An enumerated argument has no such value, or two of them do not agree."},
    {"NVFP4_EVERSION", "A struct_size or a layout version is not the one of this library."},
    {"NVFP4_EHANDLE", "The handle is not a weight that this library laid out, or it was damaged."},
    {"NVFP4_EBUFFER", "A packed buffer or a plan is too small."},
    {"NVFP4_EWORKSPACE", "The workspace is too small."},
    {"NVFP4_ERANGE", "The rows or the expert lie outside of the weight."},
    {"NVFP4_EUNSUPPORTED", "The call is valid, but this library has no kernel for it."},
    {"NVFP4_ESCALE_NAN", "A block scale is NaN or infinite."},
    {"NVFP4_ESCALE_NEGATIVE", "A block scale has its sign bit set."},
    {"NVFP4_EGLOBAL", "A row's global is NaN, infinite, negative, or a divisor of zero."},
    {"NVFP4_EREPORT", "The report was never reset, or it was damaged."},
    {"NVFP4_ESELFTEST", "The self-test computed a wrong value."},
    {"NVFP4_EDEVICE", "The device or its driver failed."},
    {"NVFP4_ENOMEM", "Host memory ran out."},
};

bool IsKnown(nvfp4_status status) { return status >= 0 && status < NVFP4_STATUS_COUNT; }

}  // namespace

nvfp4_status Fail(nvfp4_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof(sentence), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace nvfp4

extern "C" {

uint32_t nvfp4_abi_version(void) { return NVFP4_ABI_VERSION; }

const char* nvfp4_last_error(void) { return nvfp4::sentence; }

const char* nvfp4_status_text(nvfp4_status status) {
  return nvfp4::IsKnown(status) ? nvfp4::kStatusWords[status].text
                                : "The number is not a status of this library.";
}

const char* nvfp4_status_name(nvfp4_status status) {
  return nvfp4::IsKnown(status) ? nvfp4::kStatusWords[status].name : "NVFP4_EUNKNOWN";
}

const char* nvfp4_kernel_name(int32_t kernel) {
  switch (kernel) {
    case NVFP4_KERNEL_HOST:
      return "host";
    case NVFP4_KERNEL_SKINNY:
      return "skinny";
    case NVFP4_KERNEL_TENSOR:
      return "tensor";
    case NVFP4_KERNEL_DEQUANTIZE:
      return "dequantize";
    case NVFP4_KERNEL_GROUPED_SKINNY:
      return "grouped_skinny";
    case NVFP4_KERNEL_GROUPED_TENSOR:
      return "grouped_tensor";
    default:
      return "unknown";
  }
}

}  // extern "C"
