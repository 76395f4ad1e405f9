// C ABI of the NVFP4 weight quantizer (libnvfp4_quant.so). Host memory only; no CUDA, no torch.
//
// A weight matrix [N, K] with K % 16 == 0 is a flat run of blocks of 16 consecutive weights. Each
// block gets one E4M3 scale; the tensor (or all tensors of a fused site) shares one FP32 divisor,
// so that weight = e2m1(code) * e4m3(scale) / divisor.
#ifndef NVFP4_QUANT_H_
#define NVFP4_QUANT_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NVFP4_QUANT_ABI_VERSION 2
#define NVFP4_QUANT_API __attribute__((visibility("default")))

// Element type of the weights; little-endian, any alignment.
enum { NVFP4_QUANT_F16 = 0, NVFP4_QUANT_BF16 = 1, NVFP4_QUANT_F32 = 2 };

// How the block scale is chosen: RTN takes the code of amax / 6; SWEEP tries the codes from 9 below
// to 7 above that one and keeps the code with the smallest squared error.
enum { NVFP4_QUANT_RTN = 0, NVFP4_QUANT_SWEEP = 1 };

enum {
  NVFP4_QUANT_OK = 0,
  NVFP4_QUANT_EINVAL = 1,  // null pointer, unknown type or mode, count < 0 or not a multiple of 16
  NVFP4_QUANT_ENOMEM = 2,
  NVFP4_QUANT_ERANGE = 3,  // a scale is beyond the largest FP16
};

NVFP4_QUANT_API int nvfp4_quant_abi_version(void);

// Finds the largest |weight| of `count` weights and how many are NaN or infinite (those do not
// enter `amax`). `count` may be any number >= 0. `threads` < 1 means 1.
NVFP4_QUANT_API int nvfp4_quant_scan(const void* weights, int dtype, int64_t count, int threads,
                                     float* amax, int64_t* non_finite);

// Quantizes `count` finite weights, count % 16 == 0.
//   packed: uint8 [count / 2], element 2j in the low nibble of byte j.
//   scales: uint8 [count / 16], E4M3 codes 0x01..0x7E; an all-zero block gets 0x20.
//   squared_error, squared_weight: sums of (w - dequantized)^2 and w^2, for the relative error.
// The output does not depend on `threads` nor on the instruction set that is picked at run time.
NVFP4_QUANT_API int nvfp4_quant_encode(const void* weights, int dtype, int64_t count, float divisor,
                                       int mode, int threads, uint8_t* packed, uint8_t* scales,
                                       double* squared_error, double* squared_weight);

// Picks the E4M3 code of every block of a matrix [rows, columns] of finite FP32 weights, columns %
// 16 == 0: of the sweep's window the one with the smallest error, where the squared error of a
// weight counts `importance` [columns] of its column (finite, >= 0).
//   scales: uint8 [rows, columns / 16], codes 0x01..0x7E.
NVFP4_QUANT_API int nvfp4_quant_scales(const float* weights, int64_t rows, int64_t columns,
                                       float divisor, const float* importance, int threads,
                                       uint8_t* scales);

// Rounds a panel of columns one after the other and lets the columns right of each make up for its
// error (GPTQ). `width` is at most 1024.
//   weights: FP32 [rows, width]; in: what the columns should be by now, out: the rounded values.
//   steps: FP32 [rows, width], block scale / divisor of every weight, > 0.
//   factor: FP32 [width, width], of the upper Cholesky factor of the inverse Hessian the square on
//     the diagonal that belongs to the panel; the diagonal is > 0.
//   codes: uint8 [rows, width], E2M1 with its sign.
//   errors: FP32 [rows, width], (wanted - rounded) / diagonal, for the columns after the panel.
NVFP4_QUANT_API int nvfp4_quant_panel(float* weights, const float* steps, int64_t rows,
                                      int64_t width, const float* factor, int threads,
                                      uint8_t* codes, float* errors);

// Encodes groups of `group` (a multiple of 16) consecutive FP32 weights with one FP16 scale each:
// the best of 41 scales from 0.60 to 1.10 of amax / 6 by squared error.
//   packed: uint8 [count / 2], element 2j in the low nibble of byte j.
//   scales: FP16 bits [count / group]; 0 for an all-zero group.
// A group whose scale FP16 cannot hold is NVFP4_QUANT_ERANGE.
NVFP4_QUANT_API int nvfp4_quant_groups(const float* weights, int64_t count, int group, int threads,
                                       uint8_t* packed, uint16_t* scales, double* squared_error,
                                       double* squared_weight);

#ifdef __cplusplus
}
#endif

#endif  // NVFP4_QUANT_H_
