// A computation as stages of tasks, run by a team of a few threads.
//
// Threads take tasks by number. A stage opens when all earlier tasks are done, not when all threads have arrived: a
// thread that the system suspends delays the others only if it is inside a task. Any thread may run any task, so each
// task has to write outputs of its own.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/export.h"

namespace fastformer {

struct Stage {
  int64_t tasks;                     // 0: the stage is skipped
  std::function<void(int64_t)> run;  // gets the number of a task; must not fork
  // Roughly how long the stage takes, in any unit, to compare the speeds of two runs. 0: negligible beside other
  // stages. If all stages of a run have 0, the number of tasks is used instead.
  double work = 0;
};

// Runs the stages one after the other, and the tasks of a stage concurrently in any order. A stage may read the outputs
// of earlier stages. The caller is one of the `threads`; the others belong to the team, of which a process has one, and
// sleep when idle. The caller runs all tasks itself while the team works for another caller, and while other load on
// the machine makes the team slower than one thread.
//
// If tasks throw, one of the exceptions is thrown to the caller at the end; later stages may or may not have run.
FASTFORMER_API void run_stages(const std::vector<Stage>& stages, int threads);

// Runs long, independent tasks, one per thread, and returns when the last one is done. Returns false without running
// any if the team is working for another caller. For exceptions, see run_stages.
FASTFORMER_API bool run_workers(const Stage& tasks);

// Calls work() concurrently on up to `threads` threads, including the caller's, and returns when the calls that have
// started have ended: it doesn't wait for a thread that has no core. For the result and exceptions, see run_workers.
FASTFORMER_API bool run_together(int threads, const std::function<void()>& work);

}  // namespace fastformer
