// A computation as phases of tasks, on a few threads.
//
// Tasks are taken by number, and a phase opens when all tasks before it are done, not when all threads have come: a
// thread that the system holds up keeps nobody waiting unless it is inside a task. Which thread runs a task is of no
// consequence, as long as each task writes outputs of its own.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace fastformer {

struct Phase {
  int64_t tasks;                     // none: the phase is passed over
  std::function<void(int64_t)> run;  // of a task's number; doesn't fork
};

// Runs the tasks of each phase, in any order and side by side, phase after phase; what a phase has written, the next
// ones read. The caller is one of the `threads`; the others belong to a team that the process has once, and sleep when
// there is nothing to do. While the team is busy with another caller's phases, and while other work on the machine
// makes them slower than one thread, the caller does all alone.
//
// What a task throws, the caller gets when all is over; where several do, one of it. Later phases run all the same, or
// don't.
void run_phases(const std::vector<Phase>& phases, int threads);

// Runs tasks that are long and wait for nobody, one a thread; it is over when the last one is. False, and nothing is
// done, while the team is busy with another caller. What a task throws: see run_phases.
bool run_apart(const Phase& tasks);

}  // namespace fastformer
