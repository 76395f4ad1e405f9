// The write of keys and values into the paged cache: 16 bytes a thread, bound by launch and
// bandwidth.
#include "attention_args.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

// `pieces`: 16-byte pieces of the KV heads of a token, `head_pieces` those of one head.
__global__ void __launch_bounds__(kThreads)
    WriteKvKernel(const nvfp4_cache_rows p, int pieces, int head_pieces, int element_bytes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = i / pieces;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (slot < 0 || slot / p.block_size >= p.blocks) return;
  const int piece = static_cast<int>(i % pieces), head = piece / head_pieces;
  const int64_t to = (slot / p.block_size * p.cache_block_stride +
                      slot % p.block_size * p.cache_token_stride + head * p.cache_head_stride) *
                         element_bytes +
                     piece % head_pieces * 16;
  const int64_t k = token * p.k_stride * element_bytes + piece * 16;
  const int64_t v = token * p.v_stride * element_bytes + piece * 16;
  *reinterpret_cast<uint4*>(static_cast<char*>(p.k_cache) + to) =
      *reinterpret_cast<const uint4*>(static_cast<const char*>(p.k) + k);
  *reinterpret_cast<uint4*>(static_cast<char*>(p.v_cache) + to) =
      *reinterpret_cast<const uint4*>(static_cast<const char*>(p.v) + v);
}

}  // namespace

cudaError_t LaunchWriteKv(const nvfp4_cache_rows& p, cudaStream_t stream) {
  const int bytes = p.io_type == NVFP4_F16 ? 2 : 4;
  const int head_pieces = static_cast<int>(p.head_dim * bytes / 16);
  const int pieces = static_cast<int>(p.kv_heads) * head_pieces;
  const auto grid = static_cast<unsigned>(CeilDiv(p.tokens * pieces, kThreads));
  WriteKvKernel<<<grid, kThreads, 0, stream>>>(p, pieces, head_pieces, bytes);
  return cudaGetLastError();
}

}  // namespace nvfp4
