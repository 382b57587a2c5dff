// Chooses the threads for the tasks of an op: PyTorch's OpenMP threads, or the library's own team.

#pragma once

#include <chrono>
#include <functional>

namespace fastformer {

// Calls work() on up to `threads` threads at once, the caller's included, and returns when the calls that have begun
// have ended. The calls share the tasks among themselves: a call that begins late finds none left.
//
// OpenMP's threads are ready at once if PyTorch's operators run in between, but a region of OpenMP ends only when all
// of them have started and ended. Beside busy processes one of them may have no core at that time, and the caller waits
// for whole slices of the system's scheduler. The team (thread_team.h) waits only for tasks that have begun. But
// OpenMP's threads spin for milliseconds after each region, on the cores that the team's threads need. So the team runs
// ops   - that follow each other without an operator of PyTorch in between: see OpsAlone;
//   - for a while after callers have waited long for OpenMP's threads, which meanwhile sleep between their regions.
void share_out(int threads, const std::function<void()>& work);

// While it lives, no operators of PyTorch run between the ops of this thread.
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
void hush_openmp(std::chrono::milliseconds time);  // makes OpenMP's threads sleep between their regions for this time

}  // namespace fastformer
