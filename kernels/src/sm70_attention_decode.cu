// Launches of the decode kernels.
#include "sm70_attention_combine.cuh"
#include "sm70_attention_decode.cuh"

namespace nvfp4 {
namespace {

template <int D>
cudaError_t Launch(const AttentionArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.kv_heads * args.row_tiles),
                  static_cast<unsigned>(args.splits), static_cast<unsigned>(args.decode_sequences));
  // With D = 256 the sums of 16 rows do not fit the registers.
  constexpr int kTiles = D == 256 ? 1 : 2;
  if (DecodeRowsOf(D, args.rows) == 8) {
    AttentionDecodeKernel<D, 1><<<grid, kDecodeWarps * 32, 0, stream>>>(args);
  } else {
    AttentionDecodeKernel<D, kTiles><<<grid, kDecodeWarps * 32, 0, stream>>>(args);
  }
  if (args.splits > 1) {
    const dim3 rows(static_cast<unsigned>(args.kv_heads * args.rows),
                    static_cast<unsigned>(args.decode_sequences));
    AttentionCombineKernel<D><<<rows, 256, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDecode(const AttentionArgs& args, int64_t head_dim, cudaStream_t stream) {
  return head_dim == 64    ? Launch<64>(args, stream)
         : head_dim == 128 ? Launch<128>(args, stream)
                           : Launch<256>(args, stream);
}

}  // namespace nvfp4
