// Rotary positions on q and k, and the write of k and v into the paged cache.
#include <cstring>

#include "host.h"

namespace nvfp4::host {
namespace {

// Rotates one head in place; `first` is its first element in `data`, `turn` its row of cos_sin.
void RotateHead(const nvfp4_rotary& r, void* data, int64_t first, int64_t turn) {
  const int64_t half = r.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = first + (r.is_neox != 0 ? i : 2 * i);
    const int64_t b = first + (r.is_neox != 0 ? i + half : 2 * i + 1);
    const auto cosine = static_cast<double>(Load(r.cos_sin_type, r.cos_sin, turn + i));
    const auto sine = static_cast<double>(Load(r.cos_sin_type, r.cos_sin, turn + half + i));
    const auto u = static_cast<double>(Load(r.io_type, data, a));
    const auto v = static_cast<double>(Load(r.io_type, data, b));
    Store(r.io_type, data, a, u * cosine - v * sine);
    Store(r.io_type, data, b, v * cosine + u * sine);
  }
}

void RotateToken(const nvfp4_rotary& r, int64_t token) {
  const int64_t position = r.positions[token];
  if (position < 0 || position >= r.max_position) {
    return;
  }
  const int64_t turn = position * r.rotary_dim;
  for (int64_t head = 0; r.q != nullptr && head < r.q_heads; ++head) {
    RotateHead(r, r.q, token * r.q_stride + head * r.head_dim, turn);
  }
  for (int64_t head = 0; head < r.kv_heads; ++head) {
    RotateHead(r, r.k, token * r.k_stride + head * r.head_dim, turn);
  }
}

void CopyHead(const nvfp4_rotary& r, const void* from, int64_t from_first, void* to,
              int64_t to_first) {
  const int64_t bytes = TypeBytes(r.io_type);
  std::memcpy(static_cast<uint8_t*>(to) + to_first * bytes,
              static_cast<const uint8_t*>(from) + from_first * bytes,
              static_cast<size_t>(r.head_dim * bytes));
}

void WriteToken(const nvfp4_rotary& r, int64_t token) {
  const int64_t slot = r.slots[token];
  if (slot < 0 || slot / r.block_size >= r.blocks) {
    return;
  }
  const int64_t place =
      slot / r.block_size * r.cache_block_stride + slot % r.block_size * r.cache_token_stride;
  for (int64_t head = 0; head < r.kv_heads; ++head) {
    const int64_t target = place + head * r.cache_head_stride;
    CopyHead(r, r.k, token * r.k_stride + head * r.head_dim, r.k_cache, target);
    CopyHead(r, r.v, token * r.v_stride + head * r.head_dim, r.v_cache, target);
  }
}

}  // namespace
}  // namespace nvfp4::host

extern "C" nvfp4_status nvfp4_rotary_write_kv(const nvfp4_rotary* rotary, void* /*stream*/) {
  using namespace nvfp4;
  using namespace nvfp4::host;
  NVFP4_TRY(CheckRotary(rotary));
  // One thread: two tokens may name one slot, and the later one must win every time.
  for (int64_t token = 0; token < rotary->tokens; ++token) {
    if (rotary->cos_sin != nullptr) {
      RotateToken(*rotary, token);
    }
    if (rotary->k_cache != nullptr) {
      WriteToken(*rotary, token);
    }
  }
  return NVFP4_OK;
}
