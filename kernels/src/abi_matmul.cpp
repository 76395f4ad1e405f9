// Dense products and the chooser of the sm_70 library.
#include <algorithm>

#include "abi.h"

namespace nvfp4::sm70 {
namespace {

nvfp4_status Run(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                 cudaStream_t stream) {
  const bool tensor = plan.kernel == NVFP4_KERNEL_TENSOR;
  NVFP4_TRY(CheckCuda(tensor ? LaunchTensor(args, plan, float_scale, Mode::kDense, stream)
                             : LaunchSkinny(args, plan, float_scale, Mode::kDense, stream),
                      "matmul"));
  if (plan.split_k == 1) return NVFP4_OK;
  return CheckCuda(LaunchReduce(args, plan.split_k, stream), "the reduction of a matmul");
}

void Describe(const MatmulPlan& plan, nvfp4_choice* choice) {
  const bool tensor =
      plan.kernel == NVFP4_KERNEL_TENSOR || plan.kernel == NVFP4_KERNEL_GROUPED_TENSOR;
  choice->kernel = plan.kernel;
  choice->tile_m = plan.m_tiles * 8;
  choice->tile_n = plan.n_tiles * kTileN;
  choice->tile_k = tensor || plan.m_tiles == 4 ? kTileK / 2 : kTileK;
  choice->warps = plan.warps;
  choice->split_k = plan.split_k;
  choice->ctas = static_cast<int64_t>(plan.column_groups) * plan.row_tiles * plan.split_k;
}

}  // namespace
}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

extern "C" {

nvfp4_status nvfp4_matmul_workspace_bytes(const nvfp4_weight* weight, int64_t m_max,
                                          int64_t* bytes) {
  NVFP4_TRY(CheckMatmulWeight(weight, m_max, kLayout));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = WorkspaceBytes(m_max, weight->n, weight->k, HasFloatScales(*weight));
  return NVFP4_OK;
}

nvfp4_status nvfp4_matmul(const nvfp4_weight* weight, int32_t io_type, int64_t m, const void* x,
                          int64_t x_stride, void* y, int64_t y_stride, const void* bias,
                          void* workspace, int64_t workspace_bytes, void* stream) {
  NVFP4_TRY(CheckMatmulWeight(weight, m, kLayout));
  const bool float_scale = HasFloatScales(*weight);
  const MatmulPlan plan = ChooseMatmul(m, weight->n, weight->k, float_scale);
  NVFP4_TRY(CheckMatmul(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n}, bias,
                        {workspace, workspace_bytes, PartialBytes(plan, m, weight->n)}));
  NVFP4_TRY(CheckActivations(io_type, m, x_stride));
  MatmulArgs args = ArgsOf(*weight);
  args.x = static_cast<const __half*>(x);
  args.ldx = x_stride;
  args.y = static_cast<__half*>(y);
  args.ldy = y_stride;
  args.bias = static_cast<const __half*>(bias);
  args.m = static_cast<int>(m);
  args.partial = plan.split_k > 1 ? static_cast<float*>(workspace) : nullptr;
  args.parts = plan.span > 0 ? static_cast<float*>(workspace) : nullptr;
  args.span = plan.span;
  return Run(args, plan, float_scale, StreamOf(stream));
}

nvfp4_status nvfp4_choose(const nvfp4_problem* problem, nvfp4_choice* choice) {
  NVFP4_TRY(CheckProblem(problem, choice));
  const nvfp4_problem p = *problem;
  const bool float_scale = p.scale_type != NVFP4_E4M3, gate_up = p.kind == NVFP4_GATE_UP;
  *choice = {};
  choice->struct_size = sizeof(*choice);
  if (p.experts > 1 || gate_up) {
    Describe(ChooseGrouped(p.m * p.top_k, p.experts, p.n, p.k, gate_up, float_scale), choice);
    choice->workspace_bytes =
        gate_up ? 0 : p.m * p.top_k * p.n * static_cast<int64_t>(sizeof(float));
    return NVFP4_OK;
  }
  const MatmulPlan plan = ChooseMatmul(p.m, p.n, p.k, float_scale);
  Describe(plan, choice);
  choice->workspace_bytes = PartialBytes(plan, p.m, p.n);
  // Rows of more than 786432 k make no slice within the limit.
  const int64_t slice_rows = SliceRows(p.n, p.k);
  if (p.m > kBreakEven && 2 * slice_rows * p.k <= NVFP4_WORKSPACE_LIMIT_BYTES) {
    choice->kernel = NVFP4_KERNEL_DEQUANTIZE;
    choice->slice_rows = slice_rows;
    choice->workspace_bytes = std::max(choice->workspace_bytes, 2 * slice_rows * p.k);
  }
  return NVFP4_OK;
}

}  // extern "C"
