// The second halves of two products: K splits of a dense one, slots of a grouped one. Sums run in a
// fixed order.
#include "launch.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) ReduceKernel(const MatmulArgs p, int splits) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.n) return;
  for (int64_t row = blockIdx.y; row < p.m; row += gridDim.y) {
    float sum = 0.0f;
    for (int s = 0; s < splits; ++s)
      sum += p.partial[(static_cast<int64_t>(s) * p.m + row) * p.n + column];
    StoreFinal(p, row, column, sum);
  }
}

__global__ void __launch_bounds__(kThreads) CombineKernel(const CombineArgs p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.n) return;
  for (int64_t token = blockIdx.y; token < p.tokens; token += gridDim.y) {
    float sum = 0.0f;
    for (int64_t pair = token * p.top_k; pair < (token + 1) * p.top_k; ++pair) {
      if (p.expert_of[pair] >= 0) sum += p.weights[pair] * p.rows[pair * p.n + column];
    }
    p.y[token * p.ldy + column] = __float2half_rn(sum);
  }
}

dim3 Grid(int64_t columns, int64_t rows) {
  return dim3(static_cast<unsigned>(CeilDiv(columns, kThreads)),
              static_cast<unsigned>(rows < 65535 ? rows : 65535));
}

}  // namespace

cudaError_t LaunchReduce(const MatmulArgs& args, int32_t splits, cudaStream_t stream) {
  ReduceKernel<<<Grid(args.n, args.m), kThreads, 0, stream>>>(args, splits);
  return cudaGetLastError();
}

cudaError_t LaunchCombine(const CombineArgs& args, cudaStream_t stream) {
  CombineKernel<<<Grid(args.n, args.tokens), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nvfp4
