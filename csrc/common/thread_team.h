// A computation as stages of tasks, run by a team of a few threads.
//
// Threads take tasks by number. A stage opens when all tasks before it are done, not when all threads have arrived: a
// thread that the system suspends delays the others only if it is inside a task. Which thread runs a task does not
// matter, as long as each task writes outputs of its own.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/export.h"

namespace fastformer {

struct Stage {
  int64_t tasks;                     // 0: the stage is skipped
  std::function<void(int64_t)> run;  // of a task's number; doesn't fork
  // About how long it takes, in any unit: the speeds of two runs are compared by it. 0: little beside other stages. In
  // a run without any, tasks count.
  double work = 0;
};

// Runs stage after stage, the tasks of each in any order and concurrently; a stage may read what earlier stages wrote.
// The caller is one of the `threads`; the others belong to the one team of the process and sleep when idle. The caller
// runs all tasks itself while the team works for another caller, and while other work on the machine makes the team
// slower than one thread.
//
// If tasks throw, the caller gets one of the exceptions at the end; later stages may or may not have run.
FASTFORMER_API void run_stages(const std::vector<Stage>& stages, int threads);

// Runs long, independent tasks, one a thread, and returns when the last is done. Returns false, without running any,
// while the team works for another caller. Exceptions: see run_stages.
FASTFORMER_API bool run_workers(const Stage& tasks);

// Calls work() on up to `threads` threads at once, the caller's included, and returns when the calls that have begun
// have ended: it doesn't wait for a thread without a core. Returns false like run_workers. Exceptions: see run_stages.
FASTFORMER_API bool run_together(int threads, const std::function<void()>& work);

}  // namespace fastformer
