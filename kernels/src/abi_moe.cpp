// Grouped products of the sm_70 library.
#include <algorithm>

#include "abi.h"

namespace nvfp4::sm70 {
namespace {

PlanLayout PlanAt(int64_t m, int64_t top_k, int64_t experts) {
  const int64_t pairs = m * top_k;
  const auto after = [](int64_t begin, int64_t bytes) { return RoundUp(begin + bytes, 16); };
  PlanLayout at{};
  const int32_t rows = GroupedTileRows(pairs, experts);
  const int64_t tiles = GroupedTileLimit(pairs, experts, rows);
  at.pairs = after(at.tiles, tiles * static_cast<int64_t>(sizeof(RowTile)));
  at.expert_of = after(at.pairs, 4 * tiles * rows);
  // Grows with m: a plan's room for m_max holds every smaller batch.
  at.bytes = RoundUp(after(at.expert_of, 4 * pairs), NVFP4_BUFFER_ALIGNMENT);
  return at;
}

struct Call {
  const void* plan;
  int64_t plan_bytes, m, top_k;
};

MoeRows RowsOf(const nvfp4_weight& weight, const Call& call, const MoeRows& strides) {
  const PlanLayout at = PlanAt(call.m, call.top_k, weight.experts);
  const auto* base = static_cast<const char*>(call.plan);
  MoeRows rows = strides;
  rows.tiles = reinterpret_cast<const RowTile*>(base + at.tiles);
  rows.pairs = reinterpret_cast<const int32_t*>(base + at.pairs);
  rows.expert_of = reinterpret_cast<const int32_t*>(base + at.expert_of);
  rows.pair_count = static_cast<int32_t>(call.m * call.top_k);
  rows.top_k = static_cast<int32_t>(call.top_k);
  return rows;
}

nvfp4_status Run(const nvfp4_weight& weight, const Call& call, MatmulArgs args, Mode mode,
                 cudaStream_t stream) {
  args.moe = RowsOf(weight, call, args.moe);
  const bool float_scale = HasFloatScales(weight);
  const MatmulPlan plan = ChooseGrouped(call.m * call.top_k, weight.experts, weight.n, weight.k,
                                        mode == Mode::kGateUp, float_scale);
  const bool tensor = plan.kernel == NVFP4_KERNEL_GROUPED_TENSOR;
  return CheckCuda(tensor ? LaunchTensor(args, plan, float_scale, mode, stream)
                          : LaunchSkinny(args, plan, float_scale, mode, stream),
                   "a grouped product");
}

// Few enough pairs that two rarely share an expert, and enough experts that each has its own.
bool IsFewTokens(int64_t pairs, int64_t experts) { return pairs * 4 <= experts; }

int64_t DownBytes(const nvfp4_weight& weight, int64_t m, int64_t top_k) {
  return m * top_k * weight.n * static_cast<int64_t>(sizeof(float));
}

}  // namespace
}  // namespace nvfp4::sm70

using namespace nvfp4;
using namespace nvfp4::sm70;

extern "C" {

nvfp4_status nvfp4_moe_plan_bytes(int64_t m_max, int64_t top_k, int64_t experts, int64_t* bytes) {
  NVFP4_TRY(CheckRouting(m_max, top_k, experts));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = PlanAt(m_max, top_k, experts).bytes;
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_plan(const int32_t* topk_ids, int64_t m, int64_t top_k, int64_t experts,
                            const int32_t* expert_map, int64_t map_size, void* plan,
                            int64_t plan_bytes, void* stream) {
  NVFP4_TRY(CheckRoutedIds(topk_ids, m, top_k, experts, expert_map, map_size));
  const PlanLayout at = PlanAt(m, top_k, experts);
  NVFP4_TRY(CheckPlan(plan, plan_bytes, at.bytes));
  PlanArgs args{};
  args.ids = topk_ids;
  args.expert_map = expert_map;
  args.map_size = map_size;
  args.pair_count = static_cast<int32_t>(m * top_k);
  args.experts = static_cast<int32_t>(experts);
  args.tile_rows = GroupedTileRows(m * top_k, experts);
  args.row_tiles = static_cast<int32_t>(GroupedTileLimit(m * top_k, experts, args.tile_rows));
  args.plan = static_cast<char*>(plan);
  args.at = at;
  return CheckCuda(LaunchMoePlan(args, StreamOf(stream)), "the plan");
}

nvfp4_status nvfp4_moe_workspace_bytes(const nvfp4_weight* gate_up, const nvfp4_weight* down,
                                       int64_t m_max, int64_t top_k, int64_t* bytes) {
  NVFP4_TRY(CheckGroupedWeights(gate_up, down, m_max, top_k, kLayout));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = down == nullptr ? 0 : DownBytes(*down, m_max, top_k);
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_gate_up(const nvfp4_weight* weight, const void* plan, int64_t plan_bytes,
                               int32_t io_type, int64_t m, int64_t top_k, const void* x,
                               int64_t x_stride, void* y, int64_t y_stride, void* workspace,
                               int64_t workspace_bytes, void* stream) {
  NVFP4_TRY(CheckGroupedWeight(weight, NVFP4_GATE_UP, m, top_k, kLayout));
  NVFP4_TRY(CheckPlan(plan, plan_bytes, PlanAt(m, top_k, weight->experts).bytes));
  NVFP4_TRY(CheckGrouped(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n / 2},
                         {workspace, workspace_bytes, 0}));
  NVFP4_TRY(CheckActivations(io_type, m, x_stride));
  MatmulArgs args = ArgsOf(*weight);
  args.x = static_cast<const __half*>(x);
  args.ldx = x_stride;
  args.y = static_cast<__half*>(y);
  args.ldy = y_stride;
  return Run(*weight, {plan, plan_bytes, m, top_k}, args, Mode::kGateUp, StreamOf(stream));
}

nvfp4_status nvfp4_moe_down(const nvfp4_weight* weight, const void* plan, int64_t plan_bytes,
                            int32_t io_type, int64_t m, int64_t top_k, const void* x,
                            int64_t x_stride, const float* topk_weights, void* y, int64_t y_stride,
                            void* workspace, int64_t workspace_bytes, void* stream) {
  NVFP4_TRY(CheckGroupedWeight(weight, NVFP4_LINEAR, m, top_k, kLayout));
  NVFP4_TRY(CheckPlan(plan, plan_bytes, PlanAt(m, top_k, weight->experts).bytes));
  NVFP4_TRY(CheckAligned("topk_weights", topk_weights, alignof(float)));
  NVFP4_TRY(CheckGrouped(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n},
                         {workspace, workspace_bytes, DownBytes(*weight, m, top_k)}));
  NVFP4_TRY(CheckActivations(io_type, m * top_k, x_stride));
  MatmulArgs args = ArgsOf(*weight);
  args.x = static_cast<const __half*>(x);
  args.ldx = x_stride;
  const Call call{plan, plan_bytes, m, top_k};
  if (IsFewTokens(m * top_k, weight->experts)) {
    args.y = static_cast<__half*>(y);
    args.ldy = y_stride;
    args.moe = RowsOf(*weight, call, args.moe);
    return CheckCuda(
        LaunchTokenDown(args, topk_weights, m, HasFloatScales(*weight), StreamOf(stream)),
        "the down product");
  }
  args.partial = static_cast<float*>(workspace);
  NVFP4_TRY(Run(*weight, call, args, Mode::kDown, StreamOf(stream)));
  const auto* expert_of = RowsOf(*weight, call, args.moe).expert_of;
  return CheckCuda(LaunchCombine({args.partial, topk_weights, expert_of, static_cast<__half*>(y), m,
                                  top_k, weight->n, y_stride},
                                 StreamOf(stream)),
                   "the sum over slots");
}

}  // extern "C"
