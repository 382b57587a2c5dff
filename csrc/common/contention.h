// Decides whether several threads pay off beside the other work on the machine. Used by thread_team.cpp.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace fastformer {

// Control of oversubscription. If other processes keep the cores busy, threads may lose more time waiting for a thread
// without a core than they save. That depends on the system's scheduler and on the other processes, so both ways are
// tried, and the faster one is used. Nothing is tried as long as no thread waits long, or while one thread alone would
// take much longer: as threads end their shares of a stage at slightly different times, some wait on a quiet machine
// too.
class Contention {
 public:
  using Duration = std::chrono::steady_clock::duration;

  bool prefers_one_thread() const { return is_alone_; }

  // Records a run: its time, its work, in a unit by which the speeds of different runs compare, its threads, whether
  // its caller waited long, and the time of all its tasks at the caller's pace. (Processor time would be more exact,
  // but a query for it makes the scheduler take the core away.)
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
  static constexpr Duration kWindow = std::chrono::milliseconds(30);  // many slices of a scheduler, for one speed
  // A trial costs little while by_one is fewer times the time than this, or than this share of the threads.
  static constexpr double kDoubtful = 3, kBusy = 0.75;
  static constexpr int kLeastWindows = 8, kMostWindows = 32;  // between trials of what was slower

  bool is_alone_ = false, is_trial_ = false;
  int left_ = 0, windows_ = kLeastWindows;  // before the next trial
  double speed_ = 0;                        // work a tick, of what is compared with a trial
  Duration time_{0}, by_one_{0};            // of this window
  double work_ = 0, doubtful_ = 0;          // doubtful_: of by_one_, in ticks
  bool has_waited_ = false;
};

}  // namespace fastformer
