/* Attention over a paged KV cache; part of nvfp4.h, which includes it.
 *
 * The same rules hold: status and sentence, nothing written by a refused call, only enqueued on the
 * stream, no allocation, the same bits from the same inputs.
 *
 * Cache. Keys and values of one layer at k_cache and v_cache, element (block, token, head, d) of
 * either at block * cache_block_stride + token * cache_token_stride + head * cache_head_stride + d
 * elements from its pointer. So one tensor [blocks, block_size, kv_heads, 2 * head_dim] that keeps
 * a head's value behind its key is v_cache = k_cache + head_dim, and a block may be padded.
 *
 * Alignment. query, k, v, caches and out: 16 bytes, and strides that are multiples of 16 bytes.
 */
#ifndef NVFP4_ATTENTION_H_
#define NVFP4_ATTENTION_H_
#ifndef NVFP4_H_
#error "include nvfp4.h"
#endif

/* Causal attention of a batch of sequences, each with the last tokens of it as queries: one token
 * (decode), a chunk, or a whole prompt. Keys and values of these tokens are in the cache already.
 *
 * Query i of a sequence of seq_len keys and query_len queries stands at position p = seq_len -
 * query_len + i and sees the keys j <= p, with a window those of p - window < j <= p:
 *   out = sum_j softmax_j(scale * query . k_j) v_j
 * Softmax and sums are FP32; one rounding of each weight to FP16 on the GPU, one of the result. A
 * query that sees no key (seq_len 0) gives zeros. Keys that no query of the sequence sees are not
 * used: the rest of the cache and of the block table may hold anything, NaN included; so may rows
 * of query that belong to no sequence, and such rows of out are not written. On the GPU a NaN in a
 * value that some queries see can reach the others of that sequence.
 *
 * Query head h reads KV head h / (q_heads / kv_heads).
 *
 * The fields above `query` are read on the host when the call is made; what lies in device memory
 * may change between replays of a graph, within max_seq_len and tokens. */
typedef struct nvfp4_attention {
  uint32_t struct_size;
  int32_t io_type;   /* of query, caches and out: NVFP4_F16; the host library takes F32 too */
  int64_t tokens;    /* rows of query and out */
  int64_t sequences; /* 1 .. 65535 */
  int64_t decode_sequences; /* this many leading sequences have at most decode_query_len queries
                               each (0 .. decode_query_len); 0 is right for every batch, slower */
  int64_t decode_query_len; /* 1, or more for drafted tokens; not read if decode_sequences is 0 */
  int64_t max_seq_len;      /* no seq_len is larger; chooses the split, need not be exact */
  int64_t q_heads;          /* a multiple of kv_heads */
  int64_t kv_heads;
  int64_t head_dim;           /* 64, 128, 256; the host library: a multiple of 8 up to 512 */
  int64_t window;             /* keys that a query sees, itself included; 0 = all */
  float scale;                /* of query . key, finite and above 0 */
  int32_t reserved;           /* 0 */
  const void* query;          /* [tokens, q_heads, head_dim], heads contiguous */
  int64_t query_stride;       /* elements from token to token */
  const int32_t* query_start; /* [sequences + 1], from 0, never falling: first row of each */
  const int32_t* seq_lens;    /* [sequences], keys of each, its queries included */
  const int32_t* block_table; /* [sequences, ...]: block of the first block_size keys, ... */
  int64_t block_table_stride; /* elements from sequence to sequence */
  const void* k_cache;
  const void* v_cache;
  int64_t block_size; /* tokens of a block, a multiple of 16 */
  int64_t cache_block_stride;
  int64_t cache_token_stride;
  int64_t cache_head_stride;
  void* out; /* [tokens, q_heads, head_dim], heads contiguous */
  int64_t out_stride;
} nvfp4_attention;

/* Bytes of workspace that suffice for nvfp4_attend with these sizes, and with any that have no more
 * tokens, decode sequences, other sequences, decode_query_len and max_seq_len; at most 12 MiB on
 * the GPU, may be 0. Pure host function that reads no pointer: they may be null. */
NVFP4_API nvfp4_status nvfp4_attend_workspace_bytes(const nvfp4_attention* attention,
                                                    int64_t* bytes);

/* The workspace needs no initial value, is shared by calls on one stream, and is null if 0 bytes
 * are needed. */
NVFP4_API nvfp4_status nvfp4_attend(const nvfp4_attention* attention, void* workspace,
                                    int64_t workspace_bytes, void* stream);

/* Writes rows of k and v into the cache. nvfp4_rotary_write_kv rotates first, for FP16 and FP32. */
typedef struct nvfp4_cache_rows {
  uint32_t struct_size;
  int32_t io_type; /* of k, v and the caches */
  int64_t tokens;
  int64_t kv_heads;
  int64_t head_dim; /* a multiple of 8 up to 512 */
  const void* k;    /* [tokens, kv_heads, head_dim], heads contiguous */
  int64_t k_stride; /* elements from token to token */
  const void* v;
  int64_t v_stride;
  const int64_t* slots; /* [tokens]: block * block_size + offset; -1 or outside = not written. Slots
                           that are written must differ. */
  void* k_cache;
  void* v_cache;
  int64_t blocks;
  int64_t block_size;
  int64_t cache_block_stride;
  int64_t cache_token_stride;
  int64_t cache_head_stride;
} nvfp4_cache_rows;

NVFP4_API nvfp4_status nvfp4_write_kv(const nvfp4_cache_rows* rows, void* stream);

#endif /* NVFP4_ATTENTION_H_ */
