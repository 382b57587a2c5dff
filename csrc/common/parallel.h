// Distributes work among threads. Any thread may run any task: each task owns its output, and sums over tasks are added
// in the order of the tasks, so results depend neither on timing nor on the number of threads. For little work, a
// second thread costs more than it saves, so the caller states whether the work is large enough.

#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/gemm.h"
#include "common/memory_report.h"
#include "common/share_out.h"

namespace fastformer {

constexpr int64_t kSerialFlops = 1 << 20;     // products with fewer FLOPs run on one thread
constexpr int64_t kSerialElements = 1 << 15;  // memory-bound work on fewer elements runs on one thread

// The number of threads that PyTorch uses for its own operators.
inline int64_t num_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// Calls worker(next) once on each thread that takes part. next() returns the next task number, or at least n if no
// tasks are left. A thread that is suspended or has a long task takes fewer tasks; a thread that starts after all are
// taken does not call worker.
template <typename F>
void for_each_worker(int64_t n, bool parallel, F&& worker) {
  std::atomic<int64_t> counter{0};
  const auto work = [&] {
    worker([&] { return counter.fetch_add(1, std::memory_order_relaxed); });
    gemm_release();
  };
  const int64_t threads = parallel ? std::min<int64_t>(n, num_threads()) : 1;
  if (threads <= 1) return work();
  const Watcher watcher;
  share_out(static_cast<int>(threads), [&] {
    if (counter.load(std::memory_order_relaxed) >= n) return;
    watcher.run(work);
  });
}

// Runs task(0), ..., task(n - 1) once each.
template <typename F>
void for_each_task(int64_t n, bool parallel, F&& task) {
  for_each_worker(n, parallel, [&](auto next) {
    for (int64_t i = next(); i < n; i = next()) task(i);
  });
}

// Calls range(begin, end) for contiguous parts of [0, rows). A row has `elements` elements.
template <typename F>
void for_row_ranges(int64_t rows, int64_t elements, F&& range) {
  constexpr int64_t kTurns = 4;  // parts per thread, so that a suspended thread delays the others less
  const int64_t least = std::max<int64_t>(1, kSerialElements / std::max<int64_t>(elements, 1));
  const int64_t parts = std::min((rows + least - 1) / least, kTurns * num_threads());
  if (parts > 1) for_each_task(parts, true, [&](int64_t i) { range(rows * i / parts, rows * (i + 1) / parts); });
  else if (rows > 0) range(0, rows);
}

}  // namespace fastformer
