// silu(gate) * up over rows that hold both.
#include "host.h"

extern "C" nvfp4_status nvfp4_silu_mul(int32_t io_type, int64_t rows, int64_t width, const void* x,
                                       int64_t x_stride, void* y, int64_t y_stride,
                                       void* /*stream*/) {
  using namespace nvfp4;
  using namespace nvfp4::host;
  NVFP4_TRY(
      CheckSiluMul(io_type, rows, width, {"x", x, x_stride, 2 * width}, {"y", y, y_stride, width}));
  ForRows(rows, WorkersFor(rows, width, kMaxThreads), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        const auto gate = static_cast<double>(Load(io_type, x, row * x_stride + i));
        const auto up = static_cast<double>(Load(io_type, x, row * x_stride + width + i));
        Store(io_type, y, row * y_stride + i, Silu(gate) * up);
      }
    }
  });
  return NVFP4_OK;
}
