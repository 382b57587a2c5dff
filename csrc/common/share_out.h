// Which threads the tasks of an op run on: PyTorch's OpenMP threads, or the library's own team.

#pragma once

#include <chrono>
#include <functional>

namespace fastformer {

// Calls work() on up to `threads` threads at once, the caller's included, and returns when those that have begun are
// done. The calls share out the tasks among themselves: a call that begins late finds none left.
//
// OpenMP's threads are ready at once where operators of PyTorch run in between, but a region of OpenMP ends when all of
// them have come and gone. Beside busy processes one of them may have no core just then, and the caller waits for whole
// slices of the system's scheduler. The team (thread_team.h) waits only for tasks that have begun. But OpenMP's threads
// spin for milliseconds behind each region, on the cores that the team's threads need. So the team runs ops
//   - that follow each other without an operator of PyTorch in between: see OpsAlone;
//   - for a while after callers have waited long for OpenMP's threads. For that time those sleep between their regions.
void share_out(int threads, const std::function<void()>& work);

// As long as it lives, the ops of this thread are on their own.
class OpsAlone {
 public:
  OpsAlone();
  ~OpsAlone();
  OpsAlone(const OpsAlone&) = delete;
  OpsAlone& operator=(const OpsAlone&) = delete;
};

// For tests and measurements.
enum class Sharing { by_load, openmp, team };
void set_sharing(Sharing sharing);
void hush_openmp(std::chrono::milliseconds time);  // has OpenMP's threads sleep between their regions for so long

}  // namespace fastformer
