// What every pass over weights shares: bodies per instruction set, scale values, threads.
#ifndef NVFP4_QUANT_WEIGHT_PASSES_H_
#define NVFP4_QUANT_WEIGHT_PASSES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "tile.h"

// One compiled body per instruction set, picked by the dynamic loader; GCC has that on x86 only.
// The tests build without, to see that every body gives the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(NVFP4_QUANT_BASELINE)
#define NVFP4_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NVFP4_CLONES
#endif

namespace nvfp4_quant {

struct ScaleTable {
  float value[kMaxCode + 1];
  float reciprocal[kMaxCode + 1];
};

inline ScaleTable MakeScaleTable() {
  ScaleTable table;
  for (uint32_t code = 0; code <= kMaxCode; ++code) {
    table.value[code] = ValueE4m3(code);
    table.reciprocal[code] = code == 0 ? 0.0f : 1.0f / table.value[code];
  }
  return table;
}

inline const ScaleTable kScales = MakeScaleTable();

// Runs `work(unit)` for every unit. The caller's thread works too, so a machine that refuses more
// threads only gets slower.
template <typename Work>
void ForEachUnit(int64_t units, int threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto drain = [&] {
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) work(unit);
  };
  std::vector<std::thread> helpers;
  const int64_t wanted = std::min<int64_t>(threads, units);
  helpers.reserve(static_cast<size_t>(std::max<int64_t>(wanted, 1)));
  for (int64_t i = 1; i < wanted; ++i) {
    try {
      helpers.emplace_back(drain);
    } catch (const std::system_error&) {
      break;
    }
  }
  drain();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace nvfp4_quant

#endif  // NVFP4_QUANT_WEIGHT_PASSES_H_
