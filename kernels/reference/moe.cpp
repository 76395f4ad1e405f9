// Grouped products: which expert computes which (token, slot) pair, gate/up with silu-mul, and the
// weighted sum.
#include <algorithm>
#include <cstring>

#include "product.h"

namespace nvfp4::host {
namespace {

constexpr uint64_t kPlanMagic = UINT64_C(0x4e4c5034504656);  // "VFP4PLN"

struct PlanHeader {
  uint64_t magic;
  int64_t m;
  int64_t top_k;
  int64_t experts;
};

// A plan as the host library keeps it: the pairs of expert e are pairs[offsets[e] .. offsets[e + 1]
// - 1], ascending; expert_of[pair] is -1 for a skipped one.
struct Plan {
  PlanHeader* header;
  int32_t* offsets;    // [experts + 1]
  int32_t* pairs;      // [m * top_k]
  int32_t* expert_of;  // [m * top_k]
};

int64_t PlanBytes(int64_t m, int64_t top_k, int64_t experts) {
  const int64_t words = experts + 1 + 2 * m * top_k;
  const auto bytes = static_cast<int64_t>(sizeof(PlanHeader)) + words * 4;
  return RoundUp(bytes, NVFP4_BUFFER_ALIGNMENT);
}

Plan PlanIn(void* memory, int64_t m, int64_t top_k, int64_t experts) {
  auto* header = static_cast<PlanHeader*>(memory);
  auto* offsets = reinterpret_cast<int32_t*>(header + 1);
  int32_t* pairs = offsets + experts + 1;
  return {header, offsets, pairs, pairs + m * top_k};
}

nvfp4_status CheckPlanFor(const void* memory, int64_t bytes, int64_t m, int64_t top_k,
                          int64_t experts) {
  NVFP4_TRY(CheckPlan(memory, bytes, PlanBytes(m, top_k, experts)));
  const auto& header = *static_cast<const PlanHeader*>(memory);
  if (header.magic != kPlanMagic || header.m != m || header.top_k != top_k ||
      header.experts != experts) {
    return Fail(NVFP4_EHANDLE, "the plan was not made for this m, top_k and number of experts.");
  }
  return NVFP4_OK;
}

// The local expert of a routed id, -1 if it is skipped.
int32_t LocalExpert(int32_t id, int64_t experts, const int32_t* map, int64_t map_size) {
  if (id < 0 || id >= (map == nullptr ? experts : map_size)) {
    return -1;
  }
  const int32_t local = map == nullptr ? id : map[id];
  return local >= 0 && local < experts ? local : -1;
}

// Counting sort of the pairs by expert; stable, so that the order is the same every time.
void SortPairs(const Plan& plan) {
  const int64_t count = plan.header->m * plan.header->top_k;
  const int64_t experts = plan.header->experts;
  std::fill(plan.offsets, plan.offsets + experts + 1, 0);
  for (int64_t pair = 0; pair < count; ++pair) {
    if (plan.expert_of[pair] >= 0) {
      plan.offsets[plan.expert_of[pair] + 1] += 1;
    }
  }
  for (int64_t expert = 0; expert < experts; ++expert) {
    plan.offsets[expert + 1] += plan.offsets[expert];
  }
  // offsets[e] walks to its end, which is the start of e + 1; the loop below it puts the starts
  // back.
  for (int64_t pair = 0; pair < count; ++pair) {
    if (plan.expert_of[pair] >= 0) {
      plan.pairs[plan.offsets[plan.expert_of[pair]]++] = static_cast<int32_t>(pair);
    }
  }
  for (int64_t expert = experts; expert > 0; --expert) {
    plan.offsets[expert] = plan.offsets[expert - 1];
  }
  plan.offsets[0] = 0;
}

void ZeroSkipped(const Plan& plan, int32_t type, void* y, int64_t y_stride, int64_t width) {
  const int64_t count = plan.header->m * plan.header->top_k;
  for (int64_t pair = 0; pair < count; ++pair) {
    if (plan.expert_of[pair] < 0) {
      std::memset(static_cast<uint8_t*>(y) + pair * y_stride * TypeBytes(type), 0,
                  static_cast<size_t>(width * TypeBytes(type)));
    }
  }
}

// The sum of one weight row with a widened row of x, its global applied.
double Product(const nvfp4_weight& weight, int64_t expert, int64_t row, const double* x,
               const double* w) {
  return ApplyGlobal(weight.global_kind, Dot(x, w, weight.k), GlobalOf(weight, expert, row));
}

struct Activations {
  int32_t type;
  int64_t top_k;
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
};

// Gate and up rows begin .. end-1 of one expert for `count` of its pairs, at most kTileRows.
void GateUpTile(const nvfp4_weight& weight, int64_t expert, const int32_t* pairs, int64_t count,
                int64_t begin, int64_t end, const Activations& a, const Scratch& scratch) {
  constexpr int64_t kLimit = kTileRows;
  double gates[kLimit] = {};
  const int64_t k = weight.k;
  for (int64_t i = 0; i < count; ++i) {
    Widen(a.type, a.x, pairs[i] / a.top_k * a.x_stride, k, scratch.x + i * k);
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t up_row = weight.n / 2 + row;
    DecodeUnscaled(RowOf(weight, expert, row), scratch.w);
    for (int64_t i = 0; i < count; ++i) {
      gates[i] = Silu(Product(weight, expert, row, scratch.x + i * k, scratch.w));
    }
    DecodeUnscaled(RowOf(weight, expert, up_row), scratch.w);
    for (int64_t i = 0; i < count; ++i) {
      const double up = Product(weight, expert, up_row, scratch.x + i * k, scratch.w);
      Store(a.type, a.y, pairs[i] * a.y_stride + row, gates[i] * up);
    }
  }
}

// Output rows begin .. end-1 of one token: the slots are added in ascending order.
void DownToken(const nvfp4_weight& weight, const Plan& plan, int64_t token, const float* weights,
               int64_t begin, int64_t end, const Activations& a, const Scratch& scratch) {
  const int64_t k = weight.k;
  for (int64_t slot = 0; slot < a.top_k; ++slot) {
    Widen(a.type, a.x, (token * a.top_k + slot) * a.x_stride, k, scratch.x + slot * k);
  }
  for (int64_t row = begin; row < end; ++row) {
    double sum = 0.0;
    for (int64_t slot = 0; slot < a.top_k; ++slot) {
      const int64_t pair = token * a.top_k + slot;
      const int32_t expert = plan.expert_of[pair];
      if (expert < 0) {
        continue;
      }
      DecodeUnscaled(RowOf(weight, expert, row), scratch.w);
      sum += static_cast<double>(weights[pair]) *
             Product(weight, expert, row, scratch.x + slot * k, scratch.w);
    }
    Store(a.type, a.y, token * a.y_stride + row, sum);
  }
}

}  // namespace
}  // namespace nvfp4::host

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_moe_plan_bytes(int64_t m_max, int64_t top_k, int64_t experts, int64_t* bytes) {
  NVFP4_TRY(CheckRouting(m_max, top_k, experts));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = PlanBytes(m_max, top_k, experts);
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_plan(const int32_t* topk_ids, int64_t m, int64_t top_k, int64_t experts,
                            const int32_t* expert_map, int64_t map_size, void* plan,
                            int64_t plan_bytes, void* /*stream*/) {
  NVFP4_TRY(CheckRoutedIds(topk_ids, m, top_k, experts, expert_map, map_size));
  NVFP4_TRY(CheckPlan(plan, plan_bytes, PlanBytes(m, top_k, experts)));
  const Plan target = PlanIn(plan, m, top_k, experts);
  *target.header = {kPlanMagic, m, top_k, experts};
  for (int64_t pair = 0; pair < m * top_k; ++pair) {
    target.expert_of[pair] = LocalExpert(topk_ids[pair], experts, expert_map, map_size);
  }
  SortPairs(target);
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_workspace_bytes(const nvfp4_weight* gate_up, const nvfp4_weight* down,
                                       int64_t m_max, int64_t top_k, int64_t* bytes) {
  NVFP4_TRY(CheckGroupedWeights(gate_up, down, m_max, top_k, kLayout));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = std::max(gate_up == nullptr ? 0 : ScratchBytes(gate_up->k, kTileRows),
                    down == nullptr ? 0 : ScratchBytes(down->k, top_k));
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_gate_up(const nvfp4_weight* weight, const void* plan, int64_t plan_bytes,
                               int32_t io_type, int64_t m, int64_t top_k, const void* x,
                               int64_t x_stride, void* y, int64_t y_stride, void* workspace,
                               int64_t workspace_bytes, void* /*stream*/) {
  NVFP4_TRY(CheckGroupedWeight(weight, NVFP4_GATE_UP, m, top_k, kLayout));
  NVFP4_TRY(CheckPlanFor(plan, plan_bytes, m, top_k, weight->experts));
  NVFP4_TRY(CheckGrouped(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n / 2},
                         {workspace, workspace_bytes, ScratchBytes(weight->k, kTileRows)}));
  const Plan sorted = PlanIn(const_cast<void*>(plan), m, top_k, weight->experts);
  const Activations a{io_type, top_k, x, x_stride, y, y_stride};
  ZeroSkipped(sorted, io_type, y, y_stride, weight->n / 2);
  const int workers =
      WorkersFor(weight->n / 2, 2 * m * top_k * weight->k, ScratchWorkers(weight->k, kTileRows));
  ForRows(weight->n / 2, workers, [&](int worker, int64_t begin, int64_t end) {
    const Scratch scratch = ScratchOf(workspace, worker, weight->k, kTileRows);
    for (int64_t expert = 0; expert < weight->experts; ++expert) {
      for (int64_t i = sorted.offsets[expert]; i < sorted.offsets[expert + 1]; i += kTileRows) {
        const int64_t count = std::min<int64_t>(kTileRows, sorted.offsets[expert + 1] - i);
        GateUpTile(*weight, expert, sorted.pairs + i, count, begin, end, a, scratch);
      }
    }
  });
  return NVFP4_OK;
}

nvfp4_status nvfp4_moe_down(const nvfp4_weight* weight, const void* plan, int64_t plan_bytes,
                            int32_t io_type, int64_t m, int64_t top_k, const void* x,
                            int64_t x_stride, const float* topk_weights, void* y, int64_t y_stride,
                            void* workspace, int64_t workspace_bytes, void* /*stream*/) {
  NVFP4_TRY(CheckGroupedWeight(weight, NVFP4_LINEAR, m, top_k, kLayout));
  NVFP4_TRY(CheckPlanFor(plan, plan_bytes, m, top_k, weight->experts));
  NVFP4_TRY(CheckAligned("topk_weights", topk_weights, alignof(float)));
  NVFP4_TRY(CheckGrouped(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n},
                         {workspace, workspace_bytes, ScratchBytes(weight->k, top_k)}));
  const Plan sorted = PlanIn(const_cast<void*>(plan), m, top_k, weight->experts);
  const Activations a{io_type, top_k, x, x_stride, y, y_stride};
  const int workers =
      WorkersFor(weight->n, m * top_k * weight->k, ScratchWorkers(weight->k, top_k));
  ForRows(weight->n, workers, [&](int worker, int64_t begin, int64_t end) {
    const Scratch scratch = ScratchOf(workspace, worker, weight->k, top_k);
    for (int64_t token = 0; token < m; ++token) {
      DownToken(*weight, sorted, token, topk_weights, begin, end, a, scratch);
    }
  });
  return NVFP4_OK;
}

}  // extern "C"
