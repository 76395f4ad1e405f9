// The argument checks of every ABI call, without any device work. Shared by both libraries: one
// wrong call gets one answer.
#ifndef NVFP4_COMMON_CHECK_H_
#define NVFP4_COMMON_CHECK_H_

#include <cstdint>

#include "status.h"

namespace nvfp4 {

// Which handles a library takes for its own.
struct LayoutId {
  uint32_t layout;   // nvfp4_layout
  uint32_t version;  // of the packed form
};

// Rows of one matrix in memory; `type` gives the element size.
struct RowsArgument {
  const char* name;
  const void* data;
  int64_t stride;   // elements
  int64_t columns;  // elements
};

// A scratch argument against what the call needs.
struct WorkspaceArgument {
  const void* data;
  int64_t bytes;
  int64_t needed_bytes;
};

inline constexpr int64_t kSizeLimit = INT64_C(0x7fffffff);  // of m, n and k
inline constexpr int64_t kExpertsLimit = 4096;
inline constexpr int64_t kTopKLimit = 64;
inline constexpr int64_t kHiddenLimit = 65536;
inline constexpr int64_t kHeadDimLimit = 512;

// Bytes of one element; 0 for a number that is no nvfp4_type.
int64_t TypeBytes(int32_t type);
bool IsAligned(const void* pointer, int64_t alignment);
// `value` up to a multiple of `step`.
int64_t RoundUp(int64_t value, int64_t step);
uint64_t WeightChecksum(const nvfp4_weight& weight);
// A handle with what its description says; places, sizes and checksum are left 0.
nvfp4_weight HandleOf(const nvfp4_weight_desc& desc, const LayoutId& layout);

nvfp4_status CheckSize(const char* name, int64_t value, int64_t limit);
nvfp4_status CheckIoType(int32_t type);
nvfp4_status CheckAligned(const char* name, const void* data, int64_t alignment);
// Not null, aligned to the element, stride no shorter than the row.
nvfp4_status CheckRows(int32_t type, const RowsArgument& rows);
// As CheckRows, and pointer and stride are multiples of 16 bytes.
nvfp4_status CheckVectorRows(int32_t type, const RowsArgument& rows);
nvfp4_status CheckWorkspace(const WorkspaceArgument& workspace);

nvfp4_status CheckDesc(const nvfp4_weight_desc* desc);
nvfp4_status CheckBuffer(const void* buffer, int64_t bytes, int64_t needed_bytes);
nvfp4_status CheckWeight(const nvfp4_weight* weight, const LayoutId& expected);
nvfp4_status CheckSource(const nvfp4_source* source, int64_t codes_alignment);
nvfp4_status CheckReportPointer(const nvfp4_report* report);
nvfp4_status CheckRepack(const nvfp4_weight* weight, const nvfp4_source* source, int64_t expert,
                         int64_t row_begin, const LayoutId& expected);
// The flags of nvfp4_dequantize and nvfp4_dequantize_source.
nvfp4_status CheckFlags(uint32_t flags);
nvfp4_status CheckDequantize(const nvfp4_weight* weight, int64_t expert, int64_t row_begin,
                             int64_t rows, uint32_t flags, int32_t out_type,
                             const RowsArgument& out, const LayoutId& expected);
// A weight that nvfp4_matmul takes, and m; the workspace query uses it too.
nvfp4_status CheckMatmulWeight(const nvfp4_weight* weight, int64_t m, const LayoutId& expected);
nvfp4_status CheckMatmul(int32_t io_type, const RowsArgument& x, const RowsArgument& y,
                         const void* bias, const WorkspaceArgument& workspace);
nvfp4_status CheckProblem(const nvfp4_problem* problem, const nvfp4_choice* choice);

nvfp4_status CheckRouting(int64_t m, int64_t top_k, int64_t experts);
// What a plan is made from; expert_map may be null.
nvfp4_status CheckRoutedIds(const int32_t* topk_ids, int64_t m, int64_t top_k, int64_t experts,
                            const int32_t* expert_map, int64_t map_size);
nvfp4_status CheckPlan(const void* plan, int64_t bytes, int64_t needed_bytes);
// The weight of a grouped product: the right kind, and m * top_k pairs.
nvfp4_status CheckGroupedWeight(const nvfp4_weight* weight, int32_t kind, int64_t m, int64_t top_k,
                                const LayoutId& expected);
// The weights of both grouped products as a workspace query names them; either may be null.
nvfp4_status CheckGroupedWeights(const nvfp4_weight* gate_up, const nvfp4_weight* down,
                                 int64_t m_max, int64_t top_k, const LayoutId& expected);
nvfp4_status CheckGrouped(int32_t io_type, const RowsArgument& x, const RowsArgument& y,
                          const WorkspaceArgument& workspace);
nvfp4_status CheckTopK(int32_t logits_type, int64_t m, int64_t experts, int64_t top_k,
                       const RowsArgument& logits, const int32_t* ids, const float* weights);

nvfp4_status CheckNorm(const nvfp4_norm* norm);
nvfp4_status CheckSiluMul(int32_t io_type, int64_t rows, int64_t width, const RowsArgument& x,
                          const RowsArgument& y);
nvfp4_status CheckRotary(const nvfp4_rotary* rotary);

}  // namespace nvfp4

#endif  // NVFP4_COMMON_CHECK_H_
