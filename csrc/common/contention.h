// Decides whether several threads are faster than one, given the load of other processes. Used by thread_team.cpp.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace fastformer {

// Controls oversubscription. If other processes keep the cores busy, threads can lose more time waiting for a thread
// that has no core than they save. This depends on the system's scheduler and on the other processes, so this class
// tries both one thread and several, and uses the faster. It tries nothing as long as no thread waits long, or while
// one thread alone would take much longer: threads finish their parts of a stage at slightly different times, so short
// waits occur on an idle machine too.
class Contention {
 public:
  using Duration = std::chrono::steady_clock::duration;

  bool prefers_one_thread() const { return is_alone_; }

  // Records a run: its wall time, its work (in any unit that is proportional across runs), its number of threads,
  // whether the caller waited long, and the time that all tasks would take at the caller's speed. (CPU time would be
  // more exact, but querying it makes the scheduler preempt the thread.)
  void record(Duration time, double work, int threads, bool waited_long, Duration by_one) {
    time_ += time;
    work_ += work;
    has_waited_ |= waited_long;
    by_one_ += by_one;
    doubtful_ += std::min(kDoubtful, kBusy * threads) * static_cast<double>(time.count());
    if (time_ < kWindow) return;
    const double speed = work_ / static_cast<double>(time_.count());
    if (is_trial_) {
      const bool is_better = speed > speed_;
      windows_ = is_better ? kLeastWindows : std::min(2 * windows_, kMostWindows);
      is_trial_ = false;
      left_ = windows_;
      is_alone_ ^= !is_better;
    } else if (left_ > 0) {
      --left_;
    } else if (is_alone_ || (has_waited_ && static_cast<double>(by_one_.count()) < doubtful_)) {
      speed_ = speed;
      is_trial_ = true;
      is_alone_ ^= true;
    }
    time_ = by_one_ = {};
    work_ = doubtful_ = 0;
    has_waited_ = false;
  }

 private:
  static constexpr Duration kWindow = std::chrono::milliseconds(30);  // one measurement spans many scheduler slices
  // One thread is worth a trial only if by_one is less than both kDoubtful and kBusy * threads times the wall time.
  static constexpr double kDoubtful = 3, kBusy = 0.75;
  static constexpr int kLeastWindows = 8, kMostWindows = 32;  // between two trials of the slower choice

  bool is_alone_ = false, is_trial_ = false;
  int left_ = 0, windows_ = kLeastWindows;  // windows before the next trial
  double speed_ = 0;                        // work per tick of the current choice, to compare with a trial
  Duration time_{0}, by_one_{0};            // sums over this window
  double work_ = 0, doubtful_ = 0;          // doubtful_: the bound on by_one_ for a trial, in ticks
  bool has_waited_ = false;
};

}  // namespace fastformer
