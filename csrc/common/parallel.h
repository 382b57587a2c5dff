// The distribution of work to threads. It doesn't matter which thread does a task: a task owns its output, and sums
// over tasks are added in the order of the tasks, so a result depends neither on timing nor on the number of threads.
// Below some amount of work a second thread costs more than it saves: the caller tells whether the work is large
// enough.

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

constexpr int64_t kSerialFlops = 1 << 20;     // products with fewer run on one thread
constexpr int64_t kSerialElements = 1 << 15;  // read or written; work on memory with fewer runs on one thread

// The number of threads that PyTorch gives its own operators.
inline int64_t num_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// Calls worker(next) once on each thread that takes part; next() returns 0, 1, ... and ends with n or more. A thread
// that is held up, or has a long task, takes fewer, and one that starts when all are taken is not called.
template <typename F>
void for_each_worker(int64_t n, bool parallel, F&& worker) {
  std::atomic<int64_t> taken{0};
  const auto work = [&] {
    worker([&] { return taken.fetch_add(1, std::memory_order_relaxed); });
    gemm_release();
  };
  const int64_t threads = parallel ? std::min<int64_t>(n, num_threads()) : 1;
  if (threads <= 1) return work();
  const Watcher watcher;
  share_out(static_cast<int>(threads), [&] {
    if (taken.load(std::memory_order_relaxed) >= n) return;
    watcher.run(work);
  });
}

// Runs task(0), ..., task(n - 1), each once.
template <typename F>
void for_each_task(int64_t n, bool parallel, F&& task) {
  for_each_worker(n, parallel, [&](auto next) {
    for (int64_t i = next(); i < n; i = next()) task(i);
  });
}

// Calls range(begin, end) for parts of [0, rows), with `elements` each: neighbouring rows stay together.
template <typename F>
void for_row_ranges(int64_t rows, int64_t elements, F&& range) {
  constexpr int64_t kTurns = 4;  // of each thread, so that one that is held up delays the others less
  const int64_t least = std::max<int64_t>(1, kSerialElements / std::max<int64_t>(elements, 1));
  const int64_t parts = std::min((rows + least - 1) / least, kTurns * num_threads());
  if (parts > 1) for_each_task(parts, true, [&](int64_t i) { range(rows * i / parts, rows * (i + 1) / parts); });
  else if (rows > 0) range(0, rows);
}

}  // namespace fastformer
