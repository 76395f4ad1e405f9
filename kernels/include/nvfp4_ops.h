/* The small operations beside the matmul; part of nvfp4.h, which includes it.
 *
 * The same rules hold: status and sentence, nothing written by a refused call, only enqueued on the stream.
 */
#ifndef NVFP4_OPS_H_
#define NVFP4_OPS_H_
#ifndef NVFP4_H_
#error "include nvfp4.h"
#endif

/* ---- small operations ------------------------------------------------------------------------ */

/* One row of `hidden` elements at a time, in FP32: y = x / sqrt(mean(x^2) + eps) * (weight +
 * weight_offset); weight_offset is 1 for the Gemma and Qwen3.5 convention, else 0. y may be x. */
typedef struct nvfp4_norm {
  uint32_t struct_size;
  int32_t io_type;     /* of x, residual, y */
  int32_t weight_type; /* NVFP4_F16 or NVFP4_F32 */
  float eps;
  float weight_offset;
  int32_t reserved;
  int64_t rows;
  int64_t hidden;     /* 1 .. 65536 */
  const void* weight; /* [hidden] */
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  void* residual; /* null, or: residual += x first (rounded to io_type), and the sum before that
                     rounding is normalised */
  int64_t residual_stride;
} nvfp4_norm;

NVFP4_API nvfp4_status nvfp4_rms_norm(const nvfp4_norm* norm, void* stream);

/* y[rows, width] = silu(x[rows, 0 .. width-1]) * x[rows, width .. 2 width-1], in FP32, one
 * rounding. */
NVFP4_API nvfp4_status nvfp4_silu_mul(int32_t io_type, int64_t rows, int64_t width, const void* x,
                                      int64_t x_stride, void* y, int64_t y_stride, void* stream);

/* Rotates q and k in place, then writes k and v into the paged cache. Each half can be left out: q,
 * cos_sin or the caches may be null. */
typedef struct nvfp4_rotary {
  uint32_t struct_size;
  int32_t io_type; /* of q, k, v and the caches */
  int64_t tokens;
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_dim;     /* 2 .. 512, even */
  int64_t rotary_dim;   /* even, <= head_dim; the rest of a head passes unchanged */
  int32_t is_neox;      /* 1: element i turns with i + rotary_dim / 2; 0: 2 i with 2 i + 1 */
  int32_t cos_sin_type; /* NVFP4_F16 or NVFP4_F32 */
  const void* cos_sin;  /* [max_position, rotary_dim]: cosines, then sines; null = no rotation */
  int64_t max_position;
  const int64_t* positions; /* [tokens]; one outside of 0 .. max_position-1 is not rotated */
  void* q;                  /* [tokens, q_heads, head_dim], heads contiguous; may be null */
  int64_t q_stride;         /* elements from token to token */
  void* k;                  /* [tokens, kv_heads, head_dim] */
  int64_t k_stride;
  const void* v; /* needed with caches */
  int64_t v_stride;
  const int64_t* slots; /* [tokens]: block * block_size + offset; -1 or outside = not written */
  void* k_cache;        /* null = no write; [block][token][head][head_dim] at the strides below */
  void* v_cache;
  int64_t blocks;
  int64_t block_size;
  int64_t cache_block_stride; /* elements */
  int64_t cache_token_stride;
  int64_t cache_head_stride;
} nvfp4_rotary;

NVFP4_API nvfp4_status nvfp4_rotary_write_kv(const nvfp4_rotary* rotary, void* stream);

#endif /* NVFP4_OPS_H_ */
