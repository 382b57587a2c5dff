// Decides, from the callers' waits for OpenMP's threads, for how long the team runs all ops. Used by share_out.cpp.

#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace fastformer {

// Two long waits within a short time are no accident: other processes keep the cores busy. The team then runs all ops
// for a while, during which it is unknown whether they still do. If waits are long again right afterwards, it runs
// them for twice the time.
class LongWaits {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = Clock::duration;

  // Records the caller's work in an OpenMP region that has ended, and its wait for the other threads. Returns until
  // when the team runs all ops, if that begins now.
  std::optional<Clock::time_point> record(Clock::time_point now, Duration worked, Duration waited) {
    if (waited < kLong || kShare * waited < worked || now < end_) return std::nullopt;
    const bool is_second = now - last_ < kTwice;
    last_ = now;
    if (!is_second) return std::nullopt;
    hold_ = now - end_ < kAgain ? std::min(2 * hold_, kMostHold) : kLeastHold;
    end_ = now + hold_;
    return end_;
  }

 private:
  // Longer than a thread with a core takes to start or to end its task, and shorter than a scheduler's slice.
  static constexpr Duration kLong = std::chrono::microseconds(500);
  static constexpr int kShare = 4;  // of the caller's work; a shorter wait costs little
  static constexpr Duration kTwice = std::chrono::milliseconds(100), kAgain = std::chrono::milliseconds(200);
  static constexpr Duration kLeastHold = std::chrono::milliseconds(250), kMostHold = std::chrono::seconds(4);

  // Before the first long wait, long ago.
  Clock::time_point last_{-std::chrono::hours(1)}, end_{-std::chrono::hours(1)};
  Duration hold_ = kLeastHold;
};

}  // namespace fastformer
