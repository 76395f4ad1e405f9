// Rows are shared out once each, whatever the number of workers.
#include <atomic>
#include <vector>

#include "expect.h"
#include "host.h"

namespace {

using namespace nvfp4::host;

void EveryRowIsVisitedOnce() {
  for (const int64_t rows : {1, 2, 7, 64, 1000}) {
    for (const int workers : {1, 2, 3, 16, kMaxThreads}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(rows));
      std::atomic<int> worst_worker{0};
      ForRows(rows, workers, [&](int worker, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          visits[static_cast<size_t>(row)] += 1;
        }
        if (worker > worst_worker) {
          worst_worker = worker;
        }
      });
      EXPECT(worst_worker < workers);
      for (const auto& visit : visits) {
        EXPECT(visit == 1);
      }
    }
  }
}

void WorkersFollowTheWorkAndTheLimit() {
  EXPECT(nvfp4_set_threads(8) == NVFP4_OK);
  EXPECT(WorkersFor(1, 1 << 30, kMaxThreads) == 1);
  EXPECT(WorkersFor(100, 16, kMaxThreads) == 1);
  EXPECT(WorkersFor(4096, 4096, kMaxThreads) == 8);
  EXPECT(WorkersFor(4096, 4096, 3) == 3);
  EXPECT(nvfp4_set_threads(0) == NVFP4_OK);
  EXPECT(WorkersFor(4096, 4096, kMaxThreads) >= 1);
}

}  // namespace

int main() {
  EveryRowIsVisitedOnce();
  WorkersFollowTheWorkAndTheLimit();
  return nvfp4::test::Result();
}
