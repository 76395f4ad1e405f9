// Which values of a source are refused, and where the first one is.
#ifndef NVFP4_REFERENCE_VALIDATE_H_
#define NVFP4_REFERENCE_VALIDATE_H_

#include "host.h"

namespace nvfp4::host {

enum class ScaleFault { kNone, kNan, kNegative };

// A NaN or an infinity is kNan whatever its sign; then a set sign bit, also of zero, is kNegative.
ScaleFault ScaleFaultOf(int32_t type, const void* scales, int64_t index);
bool IsBadGlobal(int32_t global_kind, float global);

// Whether any scale or global of rows begin .. end-1 is refused; fast, says nothing about where.
bool HasFaults(const nvfp4_source& source, int64_t begin, int64_t end);

// Adds the faults of `source` to `report`, with the indices the rows will have in a weight whose
// first row is `first_row` (over all experts).
void CountFaults(const nvfp4_source& source, int64_t first_row, nvfp4_report* report);

}  // namespace nvfp4::host

#endif  // NVFP4_REFERENCE_VALIDATE_H_
