// Chooses the threads that run the tasks of an op: PyTorch's OpenMP threads, or the library's own thread team.

#pragma once

#include <chrono>
#include <functional>

namespace fastformer {

// Calls work() concurrently on up to `threads` threads, including the caller's, and returns when all calls that have
// started have ended. The calls share the tasks among themselves: a call that starts late finds none left.
//
// If PyTorch's operators run in between, OpenMP's threads are ready at once, but an OpenMP region ends only when all
// threads have started and finished. If other processes are busy, one of the threads may have no core at that time, and
// the caller waits for whole time slices. The team (thread_team.h) waits only for tasks that have started. But OpenMP's
// threads spin for milliseconds after each region, on the cores that the team's threads need. So the team runs ops
//   - that follow each other without an operator of PyTorch in between: see OpsAlone;
//   - for a while after callers have waited long for OpenMP's threads, which then sleep between regions.
void share_out(int threads, const std::function<void()>& work);

// While an instance exists, this thread runs no operators of PyTorch between its ops.
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
void suppress_openmp_spinning(std::chrono::milliseconds time);  // for this time, OpenMP's threads sleep between regions

}  // namespace fastformer
