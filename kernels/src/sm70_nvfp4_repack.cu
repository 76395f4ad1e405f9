// Canonical NVFP4 rows to packed records (layout/tile.h).
//
// Idea   One thread owns one row of one tile: it reads 64 codes (32 bytes, one sector) and their
// scales, and writes
//        two 16-byte code pieces and a scale word. A warp takes 32 rows of one tile, so its writes
//        are whole lines. Any row range may be written: no two rows share a byte. Columns past K
//        become zero codes with zero scale.
// Limit  memory bandwidth; 1 read and 1 write of the weight.
#include <cuda_fp16.h>

#include "launch.h"
#include "layout/tile.h"

namespace nvfp4 {
namespace {

constexpr int kRowsOfBlock = 32;
constexpr int kTilesOfBlock = 8;

__device__ void Count(unsigned long long* count, unsigned long long* first,
                      unsigned long long index) {
  atomicAdd(count, 1ULL);
  atomicMin(first, index);
}

__device__ float LoadScaleFloat(const RepackArgs& p, int64_t index) {
  return p.scale_type == NVFP4_F16 ? __half2float(static_cast<const __half*>(p.scales)[index])
                                   : static_cast<const float*>(p.scales)[index];
}

// NaN and infinity are one fault, a set sign bit (zero included) the other.
__device__ void ReportScale(const RepackArgs& p, int64_t row, int64_t block, bool is_nan) {
  auto* report = p.report;
  const auto index = static_cast<unsigned long long>((p.first_row + row) * (p.k / p.group) + block);
  if (is_nan) {
    Count(&report->nan_count, &report->nan_first, index);
  } else {
    Count(&report->negative_count, &report->negative_first, index);
  }
}

// Four E5M3 bytes for the 64 k from `k0` on; a scale of a larger group is repeated, and reported
// where it starts.
__device__ uint32_t PackE4m3(const RepackArgs& p, int64_t row, int64_t k0) {
  uint32_t word = 0;
  for (int g = 0; g < 4; ++g) {
    const int64_t k = k0 + 16 * g;
    if (k >= p.k) break;
    const uint32_t code =
        static_cast<const uint8_t*>(p.scales)[row * p.scales_stride + k / p.group];
    if (code < 0x7Fu) {
      word |= E5m3FromE4m3(code) << (8 * g);
    } else if (k % p.group == 0) {
      ReportScale(p, row, k / p.group, (code & 0x7Fu) == 0x7Fu);
    }
  }
  return word;
}

__device__ uint32_t PackFloat(const RepackArgs& p, int64_t row, int64_t k0) {
  const float scale = LoadScaleFloat(p, row * p.scales_stride + k0 / p.group);
  const uint32_t bits = __float_as_uint(scale);
  if (bits < 0x7F800000u) return bits;
  if (k0 % p.group == 0) ReportScale(p, row, k0 / p.group, (bits & 0x7F800000u) == 0x7F800000u);
  return 0;
}

__device__ void PackGlobal(const RepackArgs& p, int64_t row, int64_t physical) {
  const float global = p.globals[row];
  const uint32_t bits = __float_as_uint(global);
  p.out_globals[physical] = global;
  if (bits >= 0x7F800000u || (p.is_divisor && bits == 0)) {
    Count(&p.report->global_count, &p.report->global_first,
          static_cast<unsigned long long>(p.first_row + row));
  }
}

__global__ void __launch_bounds__(kRowsOfBlock* kTilesOfBlock) RepackKernel(const RepackArgs p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x;
  const int64_t tiles_k = TilesK(p.k);
  for (int64_t tile_k = static_cast<int64_t>(blockIdx.y) * kTilesOfBlock + threadIdx.y;
       tile_k < tiles_k; tile_k += static_cast<int64_t>(gridDim.y) * kTilesOfBlock) {
    if (row >= p.rows) return;
    const int64_t physical = PhysicalRow(p.row_begin + row, p.n, p.gate_up);
    const int lane = LaneOfColumn(static_cast<int>(physical % kTileN));
    char* record = p.out + RecordOffset(physical / kTileN, tile_k, p.tiles_n);
    const int64_t k0 = tile_k * kTileK;
    const uint8_t* codes = p.codes + row * p.codes_stride + k0 / 2;
    uint32_t words[8] = {};
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      if (k0 + 16 * g >= p.k) break;
      const uint2 pair = __ldg(reinterpret_cast<const uint2*>(codes + 8 * g));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[2 * g] |= PlaceCode((pair.x >> (4 * i)) & 15u, i);
        words[2 * g + 1] |= PlaceCode((pair.y >> (4 * i)) & 15u, i);
      }
    }
    auto* target = reinterpret_cast<uint4*>(record + lane * 16);
    target[0] = make_uint4(words[0], words[1], words[2], words[3]);
    target[kHalfBytes / 16] = make_uint4(words[4], words[5], words[6], words[7]);
    const uint32_t scale =
        p.scale_type == NVFP4_E4M3 ? PackE4m3(p, row, k0) : PackFloat(p, row, k0);
    *reinterpret_cast<uint32_t*>(record + kScaleOffset + lane * 4) = scale;
    if (tile_k == 0) PackGlobal(p, row, physical);
  }
}

__global__ void ResetKernel(DeviceReport* report, uint64_t magic) {
  *report = {magic, 0, ~0ULL, 0, ~0ULL, 0, ~0ULL, 0};
}

}  // namespace

cudaError_t LaunchReportReset(DeviceReport* report, uint64_t magic, cudaStream_t stream) {
  ResetKernel<<<1, 1, 0, stream>>>(report, magic);
  return cudaGetLastError();
}

cudaError_t LaunchRepack(const RepackArgs& args, cudaStream_t stream) {
  const dim3 block(kRowsOfBlock, kTilesOfBlock);
  const auto blocks_k = static_cast<unsigned>(CeilDiv(TilesK(args.k), kTilesOfBlock));
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.rows, kRowsOfBlock)),
                  blocks_k < 65535u ? blocks_k : 65535u);
  RepackKernel<<<grid, block, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nvfp4
