// Decides for how long the thread team runs all ops, from the times that callers wait for OpenMP's threads. Used by
// share_out.cpp.

#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace fastformer {

// Two long waits in quick succession mean that other processes keep the cores busy. The team then runs all ops for a
// while; in that time it is unknown whether the cores are still busy. If waits are long again right afterwards, the
// team runs all ops for twice as long.
class LongWaits {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = Clock::duration;

  // Records how long the caller worked in an OpenMP region, and how long it then waited for the other threads. If the
  // team is to run all ops from now on, returns the time at which that ends.
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
  // Longer than a running thread takes to start or finish its task, and shorter than a scheduler's time slice.
  static constexpr Duration kLong = std::chrono::microseconds(500);
  static constexpr int kShare = 4;  // waits below 1 / kShare of the caller's work cost little
  static constexpr Duration kTwice = std::chrono::milliseconds(100), kAgain = std::chrono::milliseconds(200);
  static constexpr Duration kLeastHold = std::chrono::milliseconds(250), kMostHold = std::chrono::seconds(4);

  // Initially in the distant past, because there was no long wait yet.
  Clock::time_point last_{-std::chrono::hours(1)}, end_{-std::chrono::hours(1)};
  Duration hold_ = kLeastHold;
};

}  // namespace fastformer
