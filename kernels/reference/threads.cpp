// Threads of the host library: started for one call and joined before it returns, so a fork of the
// process is safe.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "host.h"

namespace nvfp4::host {
namespace {

// Below this a thread costs more than it saves; a start and join is about 30 us, a step about 1 ns.
constexpr int64_t kStepsPerWorker = INT64_C(1) << 18;

std::atomic<int> configured_threads{0};

int AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return 1;
  }
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

int WorkersFor(int64_t rows, int64_t row_cost, int limit) {
  const int configured = configured_threads.load(std::memory_order_relaxed);
  const int64_t available = std::min(configured == 0 ? AllowedCpus() : configured, limit);
  const int64_t rows_per_worker =
      std::max<int64_t>(1, kStepsPerWorker / std::max<int64_t>(1, row_cost));
  const int64_t useful = std::max<int64_t>(1, rows / rows_per_worker);
  return static_cast<int>(std::min(available, useful));
}

void ForRowsErased(int64_t rows, int workers, void* context,
                   void (*body)(void* context, int worker, int64_t begin, int64_t end)) {
  const auto begin_of = [&](int worker) { return rows * worker / workers; };
  std::thread threads[kMaxThreads];
  int started = 0;
  try {
    for (; started < workers - 1; ++started) {
      threads[started] =
          std::thread(body, context, started, begin_of(started), begin_of(started + 1));
    }
  } catch (const std::system_error&) {
    // No more threads to be had: the rest of the rows runs here.
  }
  for (int worker = started; worker < workers; ++worker) {
    body(context, worker, begin_of(worker), begin_of(worker + 1));
  }
  for (int i = 0; i < started; ++i) {
    threads[i].join();
  }
}

}  // namespace nvfp4::host

extern "C" nvfp4_status nvfp4_set_threads(int32_t threads) {
  using namespace nvfp4;
  if (threads < 0 || threads > host::kMaxThreads) {
    return Fail(NVFP4_ESHAPE, "threads must be 0 to %d, is %d.", host::kMaxThreads, threads);
  }
  host::configured_threads.store(threads, std::memory_order_relaxed);
  return NVFP4_OK;
}
