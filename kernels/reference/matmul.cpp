// The dense product as written down: every weight decoded exactly, every sum in FP64, one rounding.
#include <algorithm>

#include "product.h"

using namespace nvfp4;
using namespace nvfp4::host;

extern "C" {

nvfp4_status nvfp4_matmul_workspace_bytes(const nvfp4_weight* weight, int64_t m_max,
                                          int64_t* bytes) {
  NVFP4_TRY(CheckMatmulWeight(weight, m_max, kLayout));
  NVFP4_TRY(CheckAligned("bytes", bytes, alignof(int64_t)));
  *bytes = ScratchBytes(weight->k, kTileRows);
  return NVFP4_OK;
}

nvfp4_status nvfp4_matmul(const nvfp4_weight* weight, int32_t io_type, int64_t m, const void* x,
                          int64_t x_stride, void* y, int64_t y_stride, const void* bias,
                          void* workspace, int64_t workspace_bytes, void* /*stream*/) {
  NVFP4_TRY(CheckMatmulWeight(weight, m, kLayout));
  NVFP4_TRY(CheckMatmul(io_type, {"x", x, x_stride, weight->k}, {"y", y, y_stride, weight->n}, bias,
                        {workspace, workspace_bytes, ScratchBytes(weight->k, kTileRows)}));
  const int64_t k = weight->k;
  const int workers = WorkersFor(weight->n, m * k, ScratchWorkers(k, kTileRows));
  ForRows(weight->n, workers, [&](int worker, int64_t begin, int64_t end) {
    const Scratch scratch = ScratchOf(workspace, worker, k, kTileRows);
    for (int64_t first = 0; first < m; first += kTileRows) {
      const int64_t rows = std::min(kTileRows, m - first);
      for (int64_t i = 0; i < rows; ++i) {
        Widen(io_type, x, (first + i) * x_stride, k, scratch.x + i * k);
      }
      for (int64_t column = begin; column < end; ++column) {
        DecodeUnscaled(RowOf(*weight, 0, column), scratch.w);
        const float global = GlobalOf(*weight, 0, column);
        const double offset =
            bias == nullptr ? 0.0 : static_cast<double>(Load(io_type, bias, column));
        for (int64_t i = 0; i < rows; ++i) {
          const double sum = Dot(scratch.x + i * k, scratch.w, k);
          Store(io_type, y, (first + i) * y_stride + column,
                ApplyGlobal(weight->global_kind, sum, global) + offset);
        }
      }
    }
  });
  return NVFP4_OK;
}

}  // extern "C"
