// Checks of single arguments.
#include <cinttypes>

#include "check.h"

namespace nvfp4 {

int64_t TypeBytes(int32_t type) {
  switch (type) {
    case NVFP4_F16:
      return 2;
    case NVFP4_F32:
      return 4;
    case NVFP4_E4M3:
      return 1;
    default:
      return 0;
  }
}

bool IsAligned(const void* pointer, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) == 0;
}

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

nvfp4_status CheckSize(const char* name, int64_t value, int64_t limit) {
  if (value < 1 || value > limit) {
    return Fail(NVFP4_ESHAPE, "%s must be 1 to %" PRId64 ", is %" PRId64 ".", name, limit, value);
  }
  return NVFP4_OK;
}

nvfp4_status CheckIoType(int32_t type) {
  if (type != NVFP4_F16 && type != NVFP4_F32) {
    return Fail(NVFP4_ETYPE, "activations are NVFP4_F16 (1) or NVFP4_F32 (2), not %d.", type);
  }
  return NVFP4_OK;
}

nvfp4_status CheckAligned(const char* name, const void* data, int64_t alignment) {
  if (data == nullptr) {
    return Fail(NVFP4_ENULL, "%s must not be null.", name);
  }
  if (!IsAligned(data, alignment)) {
    return Fail(NVFP4_EALIGN, "%s is at %p, which is not a multiple of %" PRId64 " bytes.", name,
                data, alignment);
  }
  return NVFP4_OK;
}

nvfp4_status CheckRows(int32_t type, const RowsArgument& rows) {
  NVFP4_TRY(CheckAligned(rows.name, rows.data, TypeBytes(type)));
  if (rows.stride < rows.columns) {
    return Fail(NVFP4_ESTRIDE,
                "the stride of %s is %" PRId64 " elements, shorter than its row of %" PRId64 ".",
                rows.name, rows.stride, rows.columns);
  }
  if (rows.stride > INT64_MAX / kSizeLimit) {  // rows times stride must not leave 64 bits
    return Fail(NVFP4_ESTRIDE, "the stride of %s is %" PRId64 " elements, more than 2^32.",
                rows.name, rows.stride);
  }
  return NVFP4_OK;
}

nvfp4_status CheckVectorRows(int32_t type, const RowsArgument& rows) {
  constexpr int64_t kVectorBytes = 16;
  NVFP4_TRY(CheckRows(type, rows));
  NVFP4_TRY(CheckAligned(rows.name, rows.data, kVectorBytes));
  if (rows.stride * TypeBytes(type) % kVectorBytes != 0) {
    return Fail(NVFP4_EALIGN,
                "the stride of %s is %" PRId64 " elements, which is not a multiple of 16 bytes.",
                rows.name, rows.stride);
  }
  return NVFP4_OK;
}

nvfp4_status CheckWorkspace(const WorkspaceArgument& workspace) {
  if (workspace.bytes < workspace.needed_bytes) {
    return Fail(NVFP4_EWORKSPACE,
                "the workspace has %" PRId64 " bytes, this call needs %" PRId64 ".",
                workspace.bytes, workspace.needed_bytes);
  }
  if (workspace.needed_bytes == 0) {
    return NVFP4_OK;
  }
  return CheckAligned("workspace", workspace.data, NVFP4_BUFFER_ALIGNMENT);
}

nvfp4_status CheckBuffer(const void* buffer, int64_t bytes, int64_t needed_bytes) {
  NVFP4_TRY(CheckAligned("buffer", buffer, NVFP4_BUFFER_ALIGNMENT));
  if (bytes < needed_bytes) {
    return Fail(NVFP4_EBUFFER, "the buffer has %" PRId64 " bytes, the weight needs %" PRId64 ".",
                bytes, needed_bytes);
  }
  return NVFP4_OK;
}

}  // namespace nvfp4
