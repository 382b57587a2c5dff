// A computation as stages of tasks, on a few threads.
//
// Tasks are taken by number, and a stage opens when all tasks before it are done, not when all threads have come: a
// thread that the system holds up keeps nobody waiting unless it is inside a task. Which thread runs a task is of no
// consequence, as long as each task writes outputs of its own.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace fastformer {

struct Stage {
  int64_t tasks;                     // none: the stage is passed over
  std::function<void(int64_t)> run;  // of a task's number; doesn't fork
};

// Runs the tasks of each stage, in any order and side by side, stage after stage; what a stage has written, the next
// ones read. The caller is one of the `threads`; the others belong to a team that the process has once, and sleep when
// there is nothing to do. While the team is busy with another caller's stages, and while other work on the machine
// makes them slower than one thread, the caller does all alone.
//
// What a task throws, the caller gets when all is over; where several do, one of it. Later stages run all the same, or
// don't.
void run_stages(const std::vector<Stage>& stages, int threads);

// Runs tasks that are long and wait for nobody, one a thread; it is over when the last one is. False, and nothing is
// done, while the team is busy with another caller. What a task throws: see run_stages.
bool run_workers(const Stage& tasks);

}  // namespace fastformer
