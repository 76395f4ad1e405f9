#include "self_test.h"

#include <chrono>
#include <cinttypes>
#include <cmath>
#include <new>
#include <vector>

#include "check.h"
#include "numbers.h"
#include "self_test_problem.h"

namespace nvfp4 {
namespace {

// Over the expected answers of every problem, in order. It guards the generator: a test that fell
// silent would change it.
constexpr uint64_t kStoredChecksum = UINT64_C(0xaa1fc135ac900a4c);
// silu leaves exact arithmetic, so the gate/up product is held to FP16's own rounding and the error
// of a hardware exp.
constexpr double kSiluTolerance = 2e-3;

// Device memory for the length of a problem.
class Memory {
 public:
  explicit Memory(SelfTestDevice& device) : device_(device) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* block : blocks_) {
      device_.Free(block);
    }
  }

  nvfp4_status Take(int64_t bytes, void** block) {
    NVFP4_TRY(device_.Allocate(bytes > 0 ? bytes : 1, block));
    blocks_.push_back(*block);
    return NVFP4_OK;
  }

  template <typename T>
  nvfp4_status Put(const std::vector<T>& values, void** block) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    NVFP4_TRY(Take(bytes, block));
    return device_.CopyIn(*block, values.data(), bytes);
  }

 private:
  SelfTestDevice& device_;
  std::vector<void*> blocks_;
};

struct Run {
  SelfTestDevice& device;
  nvfp4_self_test_result& result;
  uint64_t computed_hash;
  uint64_t expected_hash;
};

uint64_t Mix(uint64_t hash, uint16_t half) {
  return (hash ^ half) * UINT64_C(0x100000001b3);  // FNV-1a with 16-bit steps
}

nvfp4_status Wrong(Run& run, int64_t row, int64_t column, double bad, double good) {
  run.result.bad_problem = run.result.problems;
  run.result.bad_row = row;
  run.result.bad_column = column;
  run.result.bad_value = bad;
  run.result.good_value = good;
  return Fail(NVFP4_ESELFTEST,
              "self-test problem %d: row %" PRId64 ", column %" PRId64 " is %.9g, must be %.9g.",
              run.result.problems, row, column, bad, good);
}

// Copies y [rows, columns] back and compares it. Exact answers enter the checksums; with a
// tolerance they do not.
nvfp4_status Compare(Run& run, const void* y, int64_t columns, const std::vector<double>& good,
                     double tolerance) {
  std::vector<uint16_t> halves(good.size());
  NVFP4_TRY(run.device.CopyOut(halves.data(), y, static_cast<int64_t>(good.size() * 2)));
  for (size_t i = 0; i < good.size(); ++i) {
    const uint16_t right = DoubleToHalf(good[i]);
    const auto value = static_cast<double>(HalfToFloat(halves[i]));
    // +0 and -0 are one value: the sign of an empty sum is nobody's promise.
    const bool is_same = halves[i] == right || (value == 0.0 && (right & 0x7fffU) == 0);
    if (tolerance == 0.0) {
      run.computed_hash = Mix(run.computed_hash, is_same ? right : halves[i]);
      run.expected_hash = Mix(run.expected_hash, right);
    }
    const double allowed = tolerance * std::fmax(std::fabs(good[i]), 0x1p-14);
    if (!is_same && !(std::fabs(value - good[i]) <= allowed && tolerance > 0.0)) {
      const auto at = static_cast<int64_t>(i);
      return Wrong(run, at / columns, at % columns, value, static_cast<double>(HalfToFloat(right)));
    }
  }
  return NVFP4_OK;
}

nvfp4_status PackExpert(Run& run, Memory& memory, const SelfTestWeight& w, int64_t expert,
                        const nvfp4_weight& weight, nvfp4_report* report) {
  const auto slice = [expert](const auto& all, int64_t count) {
    const auto first = all.begin() + expert * count;
    return std::vector<typename std::decay_t<decltype(all)>::value_type>(first, first + count);
  };
  const int64_t blocks = w.k / w.group;
  void* codes = nullptr;
  void* scales = nullptr;
  void* globals = nullptr;
  NVFP4_TRY(memory.Put(slice(w.codes, w.n * w.k / 2), &codes));
  NVFP4_TRY(memory.Put(slice(w.scales, w.n * blocks * TypeBytes(w.scale_type)), &scales));
  NVFP4_TRY(memory.Put(slice(w.globals, w.n), &globals));
  // In two calls, split at a row that is no tile border.
  const int64_t first_rows = w.n / 2 | 1;
  for (int64_t begin = 0; begin < w.n; begin += first_rows) {
    nvfp4_source source = {};
    source.struct_size = sizeof(source);
    source.group = w.group;
    source.scale_type = w.scale_type;
    source.global_kind = w.global_kind;
    source.n = begin + first_rows < w.n ? first_rows : w.n - begin;
    source.k = w.k;
    source.codes = static_cast<const uint8_t*>(codes) + begin * (w.k / 2);
    source.codes_stride = w.k / 2;
    source.scales = static_cast<const uint8_t*>(scales) + begin * blocks * TypeBytes(w.scale_type);
    source.scales_stride = blocks;
    source.globals = static_cast<const float*>(globals) + begin;
    NVFP4_TRY(nvfp4_repack(&weight, &source, expert, begin, report, run.device.stream()));
  }
  return NVFP4_OK;
}

nvfp4_status Pack(Run& run, Memory& memory, const SelfTestWeight& w, int32_t kind,
                  nvfp4_weight* weight) {
  nvfp4_weight_desc desc = {};
  desc.struct_size = sizeof(desc);
  desc.kind = kind;
  desc.experts = w.experts;
  desc.n = w.n;
  desc.k = w.k;
  desc.group = w.group;
  desc.scale_type = w.scale_type;
  desc.global_kind = w.global_kind;
  int64_t bytes = 0;
  void* buffer = nullptr;
  void* report = nullptr;
  NVFP4_TRY(nvfp4_weight_bytes(&desc, &bytes));
  NVFP4_TRY(memory.Take(bytes, &buffer));
  NVFP4_TRY(memory.Take(sizeof(nvfp4_report), &report));
  NVFP4_TRY(nvfp4_weight_create(&desc, buffer, bytes, weight, run.device.stream()));
  NVFP4_TRY(nvfp4_report_reset(static_cast<nvfp4_report*>(report), run.device.stream()));
  for (int64_t expert = 0; expert < w.experts; ++expert) {
    NVFP4_TRY(PackExpert(run, memory, w, expert, *weight, static_cast<nvfp4_report*>(report)));
  }
  nvfp4_report copy = {};
  NVFP4_TRY(run.device.CopyOut(&copy, report, sizeof(copy)));
  return nvfp4_report_status(&copy, weight);
}

nvfp4_status CompareDequantized(Run& run, Memory& memory, const SelfTestWeight& w,
                                const nvfp4_weight& weight) {
  void* out = nullptr;
  NVFP4_TRY(memory.Take(w.n * w.k * 2, &out));
  NVFP4_TRY(nvfp4_dequantize(&weight, 0, 0, w.n, NVFP4_DEQUANTIZE_UNSCALED, NVFP4_F16, out, w.k,
                             run.device.stream()));
  std::vector<double> good;
  for (int64_t row = 0; row < w.n; ++row) {
    for (int64_t column = 0; column < w.k; ++column) {
      good.push_back(w.Unscaled(0, row, column));
    }
  }
  return Compare(run, out, w.k, good, 0.0);
}

nvfp4_status RunDense(Run& run, const SelfTestProblem& p) {
  Memory memory(run.device);
  const SelfTestWeight w = MakeSelfTestWeight(p, p.n, p.k, 1);
  const std::vector<uint16_t> x = MakeSelfTestRows(p.m, p.k, 2);
  nvfp4_weight weight;
  void* rows = nullptr;
  void* y = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  NVFP4_TRY(Pack(run, memory, w, NVFP4_LINEAR, &weight));
  NVFP4_TRY(CompareDequantized(run, memory, w, weight));
  NVFP4_TRY(memory.Put(x, &rows));
  NVFP4_TRY(memory.Take(p.m * p.n * 2, &y));
  NVFP4_TRY(nvfp4_matmul_workspace_bytes(&weight, p.m, &workspace_bytes));
  NVFP4_TRY(memory.Take(workspace_bytes, &workspace));
  NVFP4_TRY(nvfp4_matmul(&weight, NVFP4_F16, p.m, rows, p.k, y, p.n, nullptr, workspace,
                         workspace_bytes, run.device.stream()));
  std::vector<double> good;
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t column = 0; column < p.n; ++column) {
      good.push_back(SelfTestProduct(w, 0, column, x, row));
    }
  }
  return Compare(run, y, p.n, good, 0.0);
}

std::vector<double> GoodGateUp(const SelfTestProblem& p, const SelfTestWeight& w,
                               const std::vector<int32_t>& ids, const std::vector<uint16_t>& x) {
  std::vector<double> good;
  for (int64_t pair = 0; pair < p.m * p.top_k; ++pair) {
    const int32_t expert = ids[static_cast<size_t>(pair)];
    for (int64_t column = 0; column < p.n; ++column) {
      if (expert < 0) {
        good.push_back(0.0);
        continue;
      }
      const double gate = SelfTestProduct(w, expert, column, x, pair / p.top_k);
      const double up = SelfTestProduct(w, expert, p.n + column, x, pair / p.top_k);
      good.push_back(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
  return good;
}

std::vector<double> GoodDown(const SelfTestProblem& p, const SelfTestWeight& w,
                             const std::vector<int32_t>& ids, const std::vector<float>& weights,
                             const std::vector<uint16_t>& x) {
  std::vector<double> good;
  for (int64_t token = 0; token < p.m; ++token) {
    for (int64_t column = 0; column < w.n; ++column) {
      double sum = 0.0;
      for (int64_t pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
        const auto at = static_cast<size_t>(pair);
        if (ids[at] >= 0) {
          sum += static_cast<double>(weights[at]) * SelfTestProduct(w, ids[at], column, x, pair);
        }
      }
      good.push_back(sum);
    }
  }
  return good;
}

// Device memory of a grouped problem.
struct Grouped {
  nvfp4_weight gate_up;
  nvfp4_weight down;
  void* plan;
  int64_t plan_bytes;
  void* workspace;
  int64_t workspace_bytes;
};

nvfp4_status PrepareGrouped(Run& run, Memory& memory, const SelfTestProblem& p,
                            const std::vector<int32_t>& ids, Grouped* g) {
  void* device_ids = nullptr;
  NVFP4_TRY(memory.Put(ids, &device_ids));
  NVFP4_TRY(nvfp4_moe_plan_bytes(p.m, p.top_k, p.experts, &g->plan_bytes));
  NVFP4_TRY(memory.Take(g->plan_bytes, &g->plan));
  NVFP4_TRY(nvfp4_moe_plan(static_cast<const int32_t*>(device_ids), p.m, p.top_k, p.experts,
                           nullptr, 0, g->plan, g->plan_bytes, run.device.stream()));
  NVFP4_TRY(nvfp4_moe_workspace_bytes(&g->gate_up, &g->down, p.m, p.top_k, &g->workspace_bytes));
  return memory.Take(g->workspace_bytes, &g->workspace);
}

nvfp4_status RunGrouped(Run& run, const SelfTestProblem& p) {
  Memory memory(run.device);
  const SelfTestWeight gate_up = MakeSelfTestWeight(p, 2 * p.n, p.k, 3);
  const SelfTestWeight down = MakeSelfTestWeight(p, p.k, p.n, 4);
  const std::vector<uint16_t> x = MakeSelfTestRows(p.m, p.k, 5);
  const std::vector<uint16_t> middle = MakeSelfTestRows(p.m * p.top_k, p.n, 6);
  const std::vector<int32_t> ids = MakeSelfTestRouting(p);
  const std::vector<float> weights = MakeSelfTestRoutingWeights(p);
  Grouped g = {};
  void* rows = nullptr;
  void* middle_rows = nullptr;
  void* device_weights = nullptr;
  void* activated = nullptr;
  void* y = nullptr;
  NVFP4_TRY(Pack(run, memory, gate_up, NVFP4_GATE_UP, &g.gate_up));
  NVFP4_TRY(Pack(run, memory, down, NVFP4_LINEAR, &g.down));
  NVFP4_TRY(PrepareGrouped(run, memory, p, ids, &g));
  NVFP4_TRY(memory.Put(x, &rows));
  NVFP4_TRY(memory.Put(middle, &middle_rows));
  NVFP4_TRY(memory.Put(weights, &device_weights));
  NVFP4_TRY(memory.Take(p.m * p.top_k * p.n * 2, &activated));
  NVFP4_TRY(memory.Take(p.m * p.k * 2, &y));
  NVFP4_TRY(nvfp4_moe_gate_up(&g.gate_up, g.plan, g.plan_bytes, NVFP4_F16, p.m, p.top_k, rows, p.k,
                              activated, p.n, g.workspace, g.workspace_bytes, run.device.stream()));
  NVFP4_TRY(Compare(run, activated, p.n, GoodGateUp(p, gate_up, ids, x), kSiluTolerance));
  NVFP4_TRY(nvfp4_moe_down(&g.down, g.plan, g.plan_bytes, NVFP4_F16, p.m, p.top_k, middle_rows, p.n,
                           static_cast<const float*>(device_weights), y, p.k, g.workspace,
                           g.workspace_bytes, run.device.stream()));
  return Compare(run, y, p.k, GoodDown(p, down, ids, weights, middle), 0.0);
}

nvfp4_status RunAll(Run& run) {
  for (const SelfTestProblem& problem : SelfTestProblems()) {
    NVFP4_TRY(problem.experts > 1 ? RunGrouped(run, problem) : RunDense(run, problem));
    run.result.problems += 1;
  }
  run.result.checksum = run.computed_hash;
  if (run.expected_hash != kStoredChecksum) {
    return Fail(NVFP4_ESELFTEST,
                "the self-test's own answers have checksum 0x%" PRIx64 ", stored is 0x%" PRIx64 ".",
                run.expected_hash, kStoredChecksum);
  }
  return NVFP4_OK;
}

}  // namespace

nvfp4_status RunSelfTest(SelfTestDevice& device, int32_t index, nvfp4_self_test_result* result) {
  if (result != nullptr && result->struct_size != sizeof(*result)) {
    return Fail(NVFP4_EVERSION, "nvfp4_self_test_result has %zu bytes here, the caller's has %u.",
                sizeof(*result), result->struct_size);
  }
  const auto start = std::chrono::steady_clock::now();
  nvfp4_self_test_result own = {};
  own.struct_size = sizeof(own);
  own.device = index;
  own.expected = kStoredChecksum;
  own.bad_problem = -1;
  own.bad_row = -1;
  own.bad_column = -1;
  Run run{device, own, UINT64_C(0xcbf29ce484222325), UINT64_C(0xcbf29ce484222325)};
  nvfp4_status status = NVFP4_OK;
  try {
    status = RunAll(run);
  } catch (const std::bad_alloc&) {
    status = Fail(NVFP4_ENOMEM, "host memory ran out in self-test problem %d.", own.problems);
  }
  own.elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (result != nullptr) {
    *result = own;
  }
  return status;
}

}  // namespace nvfp4
