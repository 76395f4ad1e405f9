/* The gated delta rule (linear attention of hybrid models) and what stands around it; part of
 * nvfp4.h, which includes it.
 *
 * The same rules hold: status and sentence, nothing written by a refused call, only enqueued on the
 * stream, no allocation, the same bits from the same inputs.
 *
 * Batches. Tokens of all sequences lie one after the other; query_start [sequences + 1] gives the
 * first row of each, never falling. The leading decode_sequences have one token each, or none (a
 * padded graph); of more, only the first is computed. Any number behind them. A sequence without
 * tokens is left alone.
 *
 * Slots. Each sequence keeps its state at a slot of the caller's cache. A slot below first_slot or
 * not below slot_count is padding: nothing of that sequence is read or written, its rows of the
 * result neither. So are rows that belong to no sequence. first_slot is 0, or 1 where the engine's
 * slot 0 is its null block. Slots that are used must differ.
 *
 * States. has_initial_state [sequences] of bytes: 0 = start from zero, what the slot holds is not
 * read; null = every sequence has one. The state is read before the first token and written after
 * the last.
 *
 * What lies in device memory may change between replays of a graph, within the sizes that the host
 * gave. */
#ifndef NVFP4_GDN_H_
#define NVFP4_GDN_H_
#ifndef NVFP4_H_
#error "include nvfp4.h"
#endif

/* Causal convolution over the tokens of each sequence, channel by channel, FP32 sums:
 *   y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - (width - 1) + j, c])
 * x before the first token comes from the state, element (slot, c, j) at slot * state_slot_stride +
 * c * state_channel_stride + j * state_time_stride elements: the last width - 1 inputs, the oldest
 * at j = 0. y must not overlap x.
 *
 * Alignment. x and y: 16 bytes, and strides that are multiples of 16 bytes. */
typedef struct nvfp4_conv {
  uint32_t struct_size;
  int32_t io_type;     /* of x and y: NVFP4_F16; the host library takes F32 too */
  int32_t state_type;  /* NVFP4_F16 or NVFP4_F32 */
  int32_t weight_type; /* of weight and bias: NVFP4_F16 or NVFP4_F32 */
  int32_t width;       /* 2, 3, 4 */
  int32_t silu;        /* 1: act(z) = silu(z); 0: act(z) = z */
  int64_t tokens;      /* rows of x and y */
  int64_t sequences;   /* 1 .. 65535 */
  int64_t decode_sequences;
  int64_t channels; /* a multiple of 8, 8 .. 2^20 */
  const void* x;    /* [tokens, channels] */
  int64_t x_stride;
  void* y; /* [tokens, channels] */
  int64_t y_stride;
  const void* weight; /* [channels, width], contiguous */
  const void* bias;   /* [channels], or null */
  const int32_t* query_start;
  const int32_t* slots; /* [sequences] */
  const uint8_t* has_initial_state;
  int64_t first_slot;
  int64_t slot_count;
  void* state;
  int64_t state_slot_stride;
  int64_t state_channel_stride;
  int64_t state_time_stride;
} nvfp4_conv;

NVFP4_API nvfp4_status nvfp4_causal_conv(const nvfp4_conv* conv, void* stream);

/* The gated delta rule. For every sequence and value head h, with key head h / (v_heads / k_heads)
 * and S [v_dim, k_dim], token by token:
 *   g = -exp(a_log[h]) * softplus(a + dt_bias[h]), softplus(x) = x above 20
 *   beta = sigmoid(b)
 *   with normalize: q and k are divided by sqrt(sum of their squares + 1e-6)
 *   S = exp(g) * S;  u = beta * (v - S k);  S = S + u k^T;  out = S (scale * q)
 * Gates, norms, sums and the state are FP32. Sequences of more than 16 tokens are computed in
 * chunks of 64 on the GPU: S, u, the scores and the inverse of a chunk are rounded to FP16 as
 * operands of tensor cores (so their magnitude must stay below 65504), never the state that is
 * kept; a NaN or an infinity reaches the other tokens of its chunk there.
 *
 * Alignment. q, k, v, out: 16 bytes, and strides that are multiples of 16 bytes. state: 16 bytes,
 * and a stride that is a multiple of 16 bytes. */
typedef struct nvfp4_delta {
  uint32_t struct_size;
  int32_t io_type;      /* of q, k, v and out: NVFP4_F16; the host library takes F32 too */
  int32_t gate_type;    /* of a and b: NVFP4_F16 or NVFP4_F32 */
  int32_t a_log_type;   /* NVFP4_F16 or NVFP4_F32 */
  int32_t dt_bias_type; /* NVFP4_F16 or NVFP4_F32 */
  int32_t state_type;   /* NVFP4_F32, or NVFP4_F16: rounded at the end of a call, on the GPU also
                           where a prompt fills the workspace */
  int32_t normalize;    /* 0 or 1 */
  float scale;          /* finite and above 0 */
  int64_t tokens;       /* rows of q, k, v, a, b and out */
  int64_t sequences;    /* 1 .. 65535 */
  int64_t decode_sequences;
  int64_t max_query_len; /* no sequence has more tokens; chooses kernels, need not be exact */
  int64_t k_heads;
  int64_t v_heads;  /* a multiple of k_heads */
  int64_t k_dim;    /* 64 or 128; the host library: a multiple of 8 up to 256 */
  int64_t v_dim;    /* 64 or 128; the host library: a multiple of 8 up to 256 */
  const void* q;    /* [tokens, k_heads, k_dim], heads contiguous */
  int64_t q_stride; /* elements from token to token */
  const void* k;    /* [tokens, k_heads, k_dim] */
  int64_t k_stride;
  const void* v; /* [tokens, v_heads, v_dim] */
  int64_t v_stride;
  const void* a; /* [tokens, v_heads] */
  int64_t a_stride;
  const void* b; /* [tokens, v_heads] */
  int64_t b_stride;
  const void* a_log;   /* [v_heads] */
  const void* dt_bias; /* [v_heads] */
  const int32_t* query_start;
  const int32_t* slots; /* [sequences] */
  const uint8_t* has_initial_state;
  int64_t first_slot;
  int64_t slot_count;
  void* state;               /* [slot_count][v_heads, v_dim, k_dim], contiguous within a slot */
  int64_t state_slot_stride; /* elements */
  void* out;                 /* [tokens, v_heads, v_dim], heads contiguous; must overlap no input */
  int64_t out_stride;
} nvfp4_delta;

/* Bytes of workspace that suffice for nvfp4_gated_delta with these sizes, and with any that have no
 * more tokens, sequences and max_query_len; at most NVFP4_WORKSPACE_LIMIT_BYTES, may be 0. Pure
 * host function that reads no pointer: they may be null. */
NVFP4_API nvfp4_status nvfp4_gated_delta_workspace_bytes(const nvfp4_delta* delta, int64_t* bytes);

/* The workspace needs no initial value, is shared by calls on one stream, and is null if 0 bytes
 * are needed. */
NVFP4_API nvfp4_status nvfp4_gated_delta(const nvfp4_delta* delta, void* workspace,
                                         int64_t workspace_bytes, void* stream);

typedef enum nvfp4_gate { NVFP4_GATE_SILU = 1, NVFP4_GATE_SIGMOID = 2 } nvfp4_gate;

/* y = x / sqrt(mean(x^2) + eps) * weight * gate(z) for every head of every token, in FP32, one
 * rounding. y may be x or z.
 *
 * Alignment. x, z and y: 16 bytes, and strides that are multiples of 16 bytes. */
typedef struct nvfp4_gate_norm {
  uint32_t struct_size;
  int32_t io_type;     /* of x, z and y: NVFP4_F16 or NVFP4_F32 */
  int32_t weight_type; /* NVFP4_F16 or NVFP4_F32 */
  int32_t gate;        /* nvfp4_gate */
  float eps;           /* finite, 0 or more */
  int32_t reserved;    /* 0 */
  int64_t tokens;
  int64_t heads;
  int64_t hidden;     /* of a head: a multiple of 8, 8 .. 512 */
  const void* weight; /* [hidden] */
  const void* x;      /* [tokens, heads, hidden], heads contiguous */
  int64_t x_stride;   /* elements from token to token */
  const void* z;
  int64_t z_stride;
  void* y;
  int64_t y_stride;
} nvfp4_gate_norm;

NVFP4_API nvfp4_status nvfp4_gated_rms_norm(const nvfp4_gate_norm* norm, void* stream);

#endif /* NVFP4_GDN_H_ */
