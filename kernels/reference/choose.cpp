// The chooser of the host library: there is one kernel.
#include "product.h"

extern "C" nvfp4_status nvfp4_choose(const nvfp4_problem* problem, nvfp4_choice* choice) {
  using namespace nvfp4;
  using namespace nvfp4::host;
  NVFP4_TRY(CheckProblem(problem, choice));
  const bool is_dense = problem->experts == 1 && problem->kind == NVFP4_LINEAR;
  const int64_t rows = is_dense || problem->kind == NVFP4_GATE_UP ? kTileRows : problem->top_k;
  *choice = {};
  choice->struct_size = sizeof(*choice);
  choice->kernel = NVFP4_KERNEL_HOST;
  choice->tile_m = static_cast<int32_t>(rows);
  choice->tile_n = 1;
  choice->tile_k = problem->group;
  choice->warps = 1;
  choice->split_k = 1;
  choice->ctas = 1;
  choice->workspace_bytes = ScratchBytes(problem->k, rows);
  return NVFP4_OK;
}
