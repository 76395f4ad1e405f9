/* The C ABI of the NVFP4 weight-only kernels.
 *
 * Two libraries export exactly these symbols: libnvfp4_ref.so computes on host memory (the oracle,
 * and the engine of the CPU profile), libnvfp4_sm70.so on the memory of a Tesla V100. "Device
 * memory" below means host memory to the first.
 *
 * Numbers. A weight is w[n, k] = e2m1(code[n, k]) * scale[n, k / group] * multiplier[n], or /
 * divisor[n]. The product of a code and an E4M3 scale is exact in FP16; the FP32 global of each row
 * is applied to the FP32 accumulator, never folded into FP16 and never merged between the parts of
 * a fused matrix.
 *
 * Codes. uint8 [n, k / 2], k contiguous: element 2 j is the low nibble of byte j, element 2 j + 1
 * the high one.
 *
 * Scales. [n, k / group]. E4M3 is the "fn" kind (no infinity; 0x7f and 0xff are NaN). A NaN, an
 * infinity or a set sign bit is refused.
 *
 * Sizes and strides are 64-bit. A stride counts elements of its own array from one row to the next;
 * a size in bytes says so.
 *
 * Alignment. Codes: 8 bytes, and a stride that is a multiple of 8 bytes. Activations read by a
 * matmul (x) and the output of nvfp4_dequantize: 16 bytes, and a stride that is a multiple of 16
 * bytes. Packed buffers, plans and workspaces: NVFP4_BUFFER_ALIGNMENT. All else: its own type.
 *
 * Calls. Each returns NVFP4_OK, or the reason as a status with one sentence in nvfp4_last_error().
 * A refused call writes nothing through the caller's pointers. Calls that take a stream only
 * enqueue: no allocation, no synchronisation, no host copy; they may be captured into a CUDA graph,
 * and the same inputs give the same bits. Thread safe as long as two calls do not write the same
 * memory. `stream` is a cudaStream_t. The host library ignores it and has finished when a call
 * returns.
 *
 * Structs that cross the border start with struct_size = sizeof(the struct), set by the caller.
 */
#ifndef NVFP4_H_
#define NVFP4_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NVFP4_API __attribute__((visibility("default")))
#else
#define NVFP4_API
#endif

/* Major in the upper, minor in the lower 16 bits. A binding needs its own major and at least its
 * own minor. */
#define NVFP4_ABI_VERSION 0x00010000u
#define NVFP4_WEIGHT_MAGIC 0x34504656u /* "VFP4" in memory */
#define NVFP4_BUFFER_ALIGNMENT 256
/* The most that one matmul or one dequantized slice of a large-M product asks for. */
#define NVFP4_WORKSPACE_LIMIT_BYTES (INT64_C(96) << 20)

typedef int32_t nvfp4_status;
enum {
  NVFP4_OK = 0,
  NVFP4_ENULL = 1,       /* a pointer that must not be null is */
  NVFP4_EALIGN = 2,      /* a pointer or stride is not aligned */
  NVFP4_ESHAPE = 3,      /* a size is out of range: m, n, k, experts, top_k, head_dim ... */
  NVFP4_EGROUP = 4,      /* not 16, 32, 64 or 128, does not divide k, or not the weight's */
  NVFP4_ESTRIDE = 5,     /* a row stride is shorter than the row */
  NVFP4_ETYPE = 6,       /* an enumerated argument has no such value */
  NVFP4_EVERSION = 7,    /* struct_size or layout version is not this library's */
  NVFP4_EHANDLE = 8,     /* not a weight of this library: wrong magic, other library, or damaged */
  NVFP4_EBUFFER = 9,     /* a packed buffer or plan is too small */
  NVFP4_EWORKSPACE = 10, /* the workspace is too small */
  NVFP4_ERANGE = 11,     /* rows or expert lie outside of the weight */
  NVFP4_EUNSUPPORTED = 12,    /* valid, but this library has no kernel for it */
  NVFP4_ESCALE_NAN = 13,      /* a block scale is NaN or infinite */
  NVFP4_ESCALE_NEGATIVE = 14, /* a block scale has its sign bit set */
  NVFP4_EGLOBAL = 15,         /* a row's global is NaN, infinite, negative, or a zero divisor */
  NVFP4_EREPORT = 16,         /* the report was never reset, or is damaged */
  NVFP4_ESELFTEST = 17,       /* the self-test computed a wrong value */
  NVFP4_EDEVICE = 18,         /* the device or its driver failed */
  NVFP4_ENOMEM = 19,          /* host memory ran out (host library, self-test) */
  NVFP4_STATUS_COUNT = 20
};

typedef enum nvfp4_type { NVFP4_F16 = 1, NVFP4_F32 = 2, NVFP4_E4M3 = 3 } nvfp4_type;

typedef enum nvfp4_global_kind {
  NVFP4_GLOBAL_MULTIPLIER = 1, /* ModelOpt weight_scale_2 */
  NVFP4_GLOBAL_DIVISOR = 2     /* compressed-tensors weight_global_scale */
} nvfp4_global_kind;

typedef enum nvfp4_weight_kind {
  NVFP4_LINEAR = 1, /* rows are output features */
  NVFP4_GATE_UP = 2 /* n is even: rows 0 .. n/2-1 gate, the rest up; for nvfp4_moe_gate_up */
} nvfp4_weight_kind;

typedef enum nvfp4_layout { NVFP4_LAYOUT_HOST = 1, NVFP4_LAYOUT_SM70 = 2 } nvfp4_layout;

/* ---- library --------------------------------------------------------------------------------- */

NVFP4_API uint32_t nvfp4_abi_version(void);
/* One line: library, version, compiler, targets. Static storage. */
NVFP4_API const char* nvfp4_build_info(void);
/* The sentence of this thread's last refused call; "" before one. Valid until the thread's next
 * call. */
NVFP4_API const char* nvfp4_last_error(void);
/* What a status means, for every value: static storage, never null. */
NVFP4_API const char* nvfp4_status_text(nvfp4_status status);
/* The name of the status, "NVFP4_EGROUP"; "NVFP4_EUNKNOWN" for any other number. */
NVFP4_API const char* nvfp4_status_name(nvfp4_status status);

/* ---- weights --------------------------------------------------------------------------------- */

/* What a packed weight is going to hold. */
typedef struct nvfp4_weight_desc {
  uint32_t struct_size;
  int32_t kind;        /* nvfp4_weight_kind */
  int64_t experts;     /* 1 for a dense layer, 1 .. 4096 */
  int64_t n;           /* rows (output features) of one expert, 1 .. 2^31-1 */
  int64_t k;           /* columns (input features), a multiple of 16 and of group, 16 .. 2^31-1 */
  int32_t group;       /* elements of k per block scale: 16, 32, 64, 128 */
  int32_t scale_type;  /* NVFP4_E4M3, NVFP4_F16, NVFP4_F32 */
  int32_t global_kind; /* nvfp4_global_kind, one for all rows */
  int32_t reserved;    /* 0 */
} nvfp4_weight_desc;

/* A packed weight. Plain data in memory of the caller: copy it freely, do not edit it. It owns
 * nothing; `buffer` must outlive it. */
typedef struct nvfp4_weight {
  uint32_t struct_size;
  uint32_t magic;
  uint32_t layout;         /* nvfp4_layout: which library made it */
  uint32_t layout_version; /* refused when the library has moved on */
  int32_t kind;
  int32_t group;
  int32_t scale_type;
  int32_t global_kind;
  int64_t experts;
  int64_t n;
  int64_t k;
  int64_t n_padded; /* rows and columns as stored; the padding is zero */
  int64_t k_padded;
  int64_t buffer_bytes;
  void* buffer;               /* device memory; the three arrays lie in it */
  void* codes;                /* first expert's */
  void* scales;               /* first expert's, in the library's own encoding */
  float* globals;             /* first expert's, [n_padded] as given (multipliers or divisors) */
  int64_t codes_expert_bytes; /* distance from one expert to the next */
  int64_t scales_expert_bytes;
  int64_t globals_expert_bytes;
  uint64_t checksum; /* over all fields before it */
} nvfp4_weight;

/* Canonical tensors of `n` consecutive rows, in device memory: a whole matrix, a part of a fused
 * one, or a slice of a shard. */
typedef struct nvfp4_source {
  uint32_t struct_size;
  int32_t group;
  int32_t scale_type;
  int32_t global_kind;
  int64_t n;
  int64_t k;
  const uint8_t* codes; /* [n, k / 2] */
  int64_t codes_stride; /* bytes */
  const void* scales;   /* [n, k / group] */
  int64_t scales_stride;
  const float* globals; /* [n], one for each row, even where all are equal */
} nvfp4_source;

/* What a repack found wrong, written on the device. 64 bytes, 8-byte aligned. Indices count blocks
 * over [experts, n, k / group], or rows over [experts, n] for globals; UINT64_MAX = none. The first
 * is the smallest index. */
typedef struct nvfp4_report {
  uint64_t magic;
  uint64_t nan_count;
  uint64_t nan_first;
  uint64_t negative_count;
  uint64_t negative_first;
  uint64_t global_count;
  uint64_t global_first;
  uint64_t reserved;
} nvfp4_report;

/* Bytes of the buffer for a weight. Pure host function. */
NVFP4_API nvfp4_status nvfp4_weight_bytes(const nvfp4_weight_desc* desc, int64_t* bytes);

/* Lays a weight out in `buffer` (device memory of at least nvfp4_weight_bytes) and fills it with
 * zeros; a row has no defined value until it is repacked. */
NVFP4_API nvfp4_status nvfp4_weight_create(const nvfp4_weight_desc* desc, void* buffer,
                                           int64_t buffer_bytes, nvfp4_weight* weight,
                                           void* stream);

/* NVFP4_OK if the weight is whole and of this library. Pure host function; looks at the handle
 * only. */
NVFP4_API nvfp4_status nvfp4_weight_check(const nvfp4_weight* weight);

/* Makes a report in device memory ready for repacks. */
NVFP4_API nvfp4_status nvfp4_report_reset(nvfp4_report* report, void* stream);

/* Repacks the rows of `source` into rows row_begin .. row_begin + source->n - 1 of one expert. Any
 * row_begin and any n, so fused parts go in one by one, and a caller bounds the memory of the
 * sources by the rows of one call. Uses no workspace. Bad scales and globals are counted in
 * `report` (device memory, reset before); the weight must then be thrown away. */
NVFP4_API nvfp4_status nvfp4_repack(const nvfp4_weight* weight, const nvfp4_source* source,
                                    int64_t expert, int64_t row_begin, nvfp4_report* report,
                                    void* stream);

/* Turns a report, copied to host memory by the caller, into a status; the sentence names expert,
 * row and block of the first fault. */
NVFP4_API nvfp4_status nvfp4_report_status(const nvfp4_report* host_report,
                                           const nvfp4_weight* weight);

enum {
  /* Leaves the globals out: e2m1 * scale, which is exact in FP16 for E4M3 scales (at most 2688). */
  NVFP4_DEQUANTIZE_UNSCALED = 1
};

/* Writes rows row_begin .. row_begin + rows - 1 of one expert as out[rows, k]. FP32: the value
 * nearest to the exact one (multiplier or divisor; with FP32 scales and divisors, within one unit
 * of the last place). FP16: that FP32 value rounded to nearest even (overflow gives infinity).
 * `flags`: NVFP4_DEQUANTIZE_*. */
NVFP4_API nvfp4_status nvfp4_dequantize(const nvfp4_weight* weight, int64_t expert,
                                        int64_t row_begin, int64_t rows, uint32_t flags,
                                        int32_t out_type, void* out, int64_t out_stride,
                                        void* stream);

/* ---- dense matmul ---------------------------------------------------------------------------- */

/* Bytes of workspace that suffice for nvfp4_matmul with this weight for every batch of 1 .. m_max
 * rows; may be 0. */
NVFP4_API nvfp4_status nvfp4_matmul_workspace_bytes(const nvfp4_weight* weight, int64_t m_max,
                                                    int64_t* bytes);

/* y[m, n] = x[m, k] * w^T + bias. x, y and bias (null = none) are of io_type; sums in FP32 or
 * better; one rounding at the end. Works for every m >= 1; above the break-even that nvfp4_choose
 * reports, slices of nvfp4_dequantize and a GEMM of the caller's are faster. A NaN or an infinity
 * in a row of x touches that row of y only; where k is no multiple of 64, an infinity among the
 * last eight of x may give NaN for an infinite sum. The weight is NVFP4_LINEAR with one expert. The
 * workspace needs no initial value, is shared by calls on one stream, and is null if 0 bytes are
 * needed. */
NVFP4_API nvfp4_status nvfp4_matmul(const nvfp4_weight* weight, int32_t io_type, int64_t m,
                                    const void* x, int64_t x_stride, void* y, int64_t y_stride,
                                    const void* bias, void* workspace, int64_t workspace_bytes,
                                    void* stream);

/* ---- the chooser ----------------------------------------------------------------------------- */

typedef enum nvfp4_kernel {
  NVFP4_KERNEL_HOST = 1,           /* the reference loop */
  NVFP4_KERNEL_SKINNY = 2,         /* decode: each weight read once, m <= 32 */
  NVFP4_KERNEL_TENSOR = 3,         /* tensor-core GEMM, weights dequantized in registers */
  NVFP4_KERNEL_DEQUANTIZE = 4,     /* slice_rows rows at a time to FP16, then the caller's GEMM */
  NVFP4_KERNEL_GROUPED_SKINNY = 5, /* experts, few rows each */
  NVFP4_KERNEL_GROUPED_TENSOR = 6  /* experts, many rows each */
} nvfp4_kernel;

typedef struct nvfp4_problem {
  uint32_t struct_size;
  int32_t kind; /* nvfp4_weight_kind */
  int64_t m;    /* tokens */
  int64_t n;
  int64_t k;
  int64_t experts; /* 1 = dense */
  int64_t top_k;   /* experts of one token; 1 when dense; m * top_k is below 2^30 */
  int32_t group;
  int32_t scale_type;
} nvfp4_problem;

typedef struct nvfp4_choice {
  uint32_t struct_size;
  int32_t kernel; /* nvfp4_kernel */
  int32_t tile_m; /* rows of x, rows of the weight and columns of k in one step of one CTA */
  int32_t tile_n;
  int32_t tile_k;
  int32_t warps;   /* per CTA */
  int32_t split_k; /* CTAs that share one output tile */
  int32_t reserved;
  int64_t ctas;       /* of the launch */
  int64_t slice_rows; /* NVFP4_KERNEL_DEQUANTIZE: rows of the weight for one slice, else 0 */
  int64_t workspace_bytes;
} nvfp4_choice;

/* What would run for a problem. Pure host function of its argument: the same on every machine. */
NVFP4_API nvfp4_status nvfp4_choose(const nvfp4_problem* problem, nvfp4_choice* choice);
/* "skinny", "tensor", ...; "unknown" for any other number. */
NVFP4_API const char* nvfp4_kernel_name(int32_t kernel);

/* ---- mixture of experts ---------------------------------------------------------------------- */

/* A plan is opaque device memory: which (token, slot) pairs each expert computes. All calls of this
 * part take fewer than 2^30 pairs. */
NVFP4_API nvfp4_status nvfp4_moe_plan_bytes(int64_t m_max, int64_t top_k, int64_t experts,
                                            int64_t* bytes);

/* Makes the plan for topk_ids[m, top_k] (contiguous). expert_map (null = identity) [map_size] gives
 * the local expert of a global id, or -1; ids outside 0 .. map_size-1 (or 0 .. experts-1 without a
 * map) and those mapped outside 0 .. experts-1 are skipped: such a pair adds nothing to the result.
 */
NVFP4_API nvfp4_status nvfp4_moe_plan(const int32_t* topk_ids, int64_t m, int64_t top_k,
                                      int64_t experts, const int32_t* expert_map, int64_t map_size,
                                      void* plan, int64_t plan_bytes, void* stream);

/* Bytes of workspace that suffice for both grouped products for every batch of 1 .. m_max tokens;
 * either weight may be null. */
NVFP4_API nvfp4_status nvfp4_moe_workspace_bytes(const nvfp4_weight* gate_up,
                                                 const nvfp4_weight* down, int64_t m_max,
                                                 int64_t top_k, int64_t* bytes);

/* y[token * top_k + slot, n / 2] = silu(gate) * up of x[token, k] under the expert of that pair;
 * rows of skipped pairs are zero. Globals on the FP32 accumulators, silu and product in FP32, one
 * rounding. The plan is for the same m, top_k and experts. */
NVFP4_API nvfp4_status nvfp4_moe_gate_up(const nvfp4_weight* weight, const void* plan,
                                         int64_t plan_bytes, int32_t io_type, int64_t m,
                                         int64_t top_k, const void* x, int64_t x_stride, void* y,
                                         int64_t y_stride, void* workspace, int64_t workspace_bytes,
                                         void* stream);

/* y[token, n] = sum over slots, in ascending order, of topk_weights[token, slot] * (x[token * top_k
 * + slot, k] * w^T) in FP32; one rounding. topk_weights is FP32 [m, top_k], contiguous. */
NVFP4_API nvfp4_status nvfp4_moe_down(const nvfp4_weight* weight, const void* plan,
                                      int64_t plan_bytes, int32_t io_type, int64_t m, int64_t top_k,
                                      const void* x, int64_t x_stride, const float* topk_weights,
                                      void* y, int64_t y_stride, void* workspace,
                                      int64_t workspace_bytes, void* stream);

/* Routing: softmax over logits[m, experts] in FP32, then the top_k largest (a tie goes to the lower
 * expert) in falling order; with renormalize != 0 the weights are divided by their sum. ids and
 * weights are [m, top_k], contiguous. A row without a softmax (a NaN, +infinity, or -infinity only)
 * is given the experts 0 .. top_k-1 and NaN weights, so that the fault shows and no id is out of
 * range. */
NVFP4_API nvfp4_status nvfp4_topk_softmax(int32_t logits_type, int64_t m, int64_t experts,
                                          int64_t top_k, const void* logits, int64_t logits_stride,
                                          int32_t renormalize, int32_t* ids, float* weights,
                                          void* stream);

#include "nvfp4_attention.h" /* attention over the paged KV cache, and the write into it */
#include "nvfp4_gdn.h"       /* the gated delta rule, its convolution and its norm */
#include "nvfp4_ops.h" /* norms, activations, rotary and the KV cache write */

/* ---- self-test ------------------------------------------------------------------------------- */

typedef struct nvfp4_self_test_result {
  uint32_t struct_size;
  int32_t device;
  uint64_t checksum; /* of all outputs, as computed */
  uint64_t expected; /* as stored in the library */
  double elapsed_s;
  int32_t problems;    /* how many fixed problems ran */
  int32_t bad_problem; /* index of the first wrong one, -1 = none */
  int64_t bad_row;     /* its first wrong coordinate, -1 = none */
  int64_t bad_column;
  double bad_value;
  double good_value;
} nvfp4_self_test_result;

/* Runs fixed problems through repack, dequantize, matmul and the grouped products on one device and
 * compares with stored answers; under 3 s. Allocates and synchronises, so not for the hot path.
 * NVFP4_ESELFTEST names problem, row, column, value and the right value. `result` may be null. */
NVFP4_API nvfp4_status nvfp4_self_test(int32_t device, nvfp4_self_test_result* result);

/* ---- host library only (the other answers NVFP4_EUNSUPPORTED) -------------------------------- */

/* Dequantizes canonical tensors straight to out[n, k], with the values of nvfp4_dequantize; refuses
 * bad scales and globals with row and block before it writes. Host memory; no alignment of the
 * codes is needed. Spreads the rows over the threads of nvfp4_set_threads. */
NVFP4_API nvfp4_status nvfp4_dequantize_source(const nvfp4_source* source, uint32_t flags,
                                               int32_t out_type, void* out, int64_t out_stride);

/* Threads of the host library, 1 .. 64; 0 = one for each CPU this process may use, which is the
 * initial value. */
NVFP4_API nvfp4_status nvfp4_set_threads(int32_t threads);

#ifdef __cplusplus
}
#endif

#endif /* NVFP4_H_ */
