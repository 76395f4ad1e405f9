// Launches of the prefill kernels.
#include "sm70_attention_combine.cuh"
#include "sm70_attention_prefill.cuh"

namespace nvfp4 {
namespace {

template <int D>
cudaError_t Launch(const AttentionArgs& args, cudaStream_t stream) {
  using Shape = PrefillShape<D>;
  constexpr int kShared = PrefillSharedBytes<D>();
  if (kShared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        AttentionPrefillKernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return error;
  }
  const auto tiles = static_cast<unsigned>(args.tiles),
             heads = static_cast<unsigned>(args.kv_heads);
  const dim3 grid(tiles, heads, static_cast<unsigned>(args.tile_splits));
  AttentionPrefillKernel<D><<<grid, Shape::kThreads, kShared, stream>>>(args);
  if (args.tile_splits > 1)
    AttentionTileCombineKernel<D><<<dim3(tiles, heads, kPrefillRows / 8), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPrefill(const AttentionArgs& args, int64_t head_dim, cudaStream_t stream) {
  return head_dim == 64    ? Launch<64>(args, stream)
         : head_dim == 128 ? Launch<128>(args, stream)
                           : Launch<256>(args, stream);
}

}  // namespace nvfp4
