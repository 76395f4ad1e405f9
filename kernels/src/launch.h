// Host entry of every kernel: plain arguments in, cudaError_t out. The ABI files check and fill;
// the .cu files launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "chooser.h"
#include "matmul_args.h"
#include "nvfp4.h"

namespace nvfp4 {

struct DeviceReport {
  uint64_t magic;
  unsigned long long nan_count, nan_first, negative_count, negative_first, global_count,
      global_first;
  uint64_t reserved;
};
static_assert(sizeof(DeviceReport) == sizeof(nvfp4_report),
              "the report crosses the border as it is");

struct RepackArgs {
  const uint8_t* codes;  // [rows, k / 2]
  const void* scales;    // [rows, k / group]
  const float* globals;  // [rows]
  char* out;             // records of one expert
  float* out_globals;    // [padded rows] of one expert
  DeviceReport* report;
  int64_t codes_stride, scales_stride, rows, row_begin, n, k, tiles_n;
  int64_t first_row;  // expert * n + row_begin, for the report
  int32_t group, scale_type;
  bool gate_up, is_divisor;
};
cudaError_t LaunchReportReset(DeviceReport* report, uint64_t magic, cudaStream_t stream);
cudaError_t LaunchRepack(const RepackArgs& args, cudaStream_t stream);

struct DequantizeArgs {
  const char* packed;
  const float* globals;
  void* out;
  int64_t out_stride, row_begin, rows, n, k, tiles_n, tiles_k;
  int64_t first_tile, last_tile;  // the tiles that hold the rows
  bool out_half, float_scale, gate_up, is_divisor, unscaled;
};
cudaError_t LaunchDequantize(const DequantizeArgs& args, cudaStream_t stream);

cudaError_t LaunchSkinny(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                         Mode mode, cudaStream_t stream);
cudaError_t LaunchTensor(const MatmulArgs& args, const MatmulPlan& plan, bool float_scale,
                         Mode mode, cudaStream_t stream);
// The whole down product of few tokens, without partial rows: args.y is written.
cudaError_t LaunchTokenDown(const MatmulArgs& args, const float* weights, int64_t tokens,
                            bool float_scale, cudaStream_t stream);
// Sums `splits` planes of args.partial in order and finishes them.
cudaError_t LaunchReduce(const MatmulArgs& args, int32_t splits, cudaStream_t stream);

// Where the parts of a plan lie, in bytes from its start.
struct PlanLayout {
  int64_t tiles, pairs, expert_of, bytes;
};
struct PlanArgs {
  const int32_t* ids;         // [pairs]
  const int32_t* expert_map;  // [map_size] or null
  int64_t map_size;
  int32_t pair_count, experts, tile_rows, row_tiles;  // row_tiles: of a launch, the last are empty
  char* plan;
  PlanLayout at;
};
cudaError_t LaunchMoePlan(const PlanArgs& args, cudaStream_t stream);
// y[token] = sum over slots of weight * rows[token * top_k + slot], in slot order, skipped pairs
// left out.
struct CombineArgs {
  const float* rows;  // [tokens * top_k, n]
  const float* weights;
  const int32_t* expert_of;
  __half* y;
  int64_t tokens, top_k, n, ldy;
};
cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream);

cudaError_t LaunchTopK(nvfp4_type type, int64_t m, int64_t experts, int64_t top_k,
                       const void* logits, int64_t stride, bool renormalize, int32_t* ids,
                       float* weights, cudaStream_t stream);
cudaError_t LaunchNorm(const nvfp4_norm& norm, cudaStream_t stream);
cudaError_t LaunchSiluMul(nvfp4_type type, int64_t rows, int64_t width, const void* x, int64_t ldx,
                          void* y, int64_t ldy, cudaStream_t stream);
cudaError_t LaunchRotary(const nvfp4_rotary& rotary, cudaStream_t stream);

}  // namespace nvfp4
