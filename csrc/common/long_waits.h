// For how long the team is to run all ops, by how callers wait for OpenMP's threads; share_out.cpp asks.

#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace fastformer {

// Two long waits within a short time are no accident: other processes keep the cores busy. The team then runs all ops
// for a while, in which nothing tells whether they still do. If waits are long again right afterwards, it does so for
// twice the time.
class LongWaits {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = Clock::duration;

  // What a region of OpenMP that ended now took the caller, and how long the caller then waited for the other threads.
  // Returns until when the team runs all ops, where that begins now.
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
  // Longer than a thread that has a core takes to come or to end its task, and shorter than a scheduler's slice.
  static constexpr Duration kLong = std::chrono::microseconds(500);
  static constexpr int kShare = 4;  // of what the caller worked, else such a wait costs little
  static constexpr Duration kTwice = std::chrono::milliseconds(100), kAgain = std::chrono::milliseconds(200);
  static constexpr Duration kLeastHold = std::chrono::milliseconds(250), kMostHold = std::chrono::seconds(4);

  // Before the first long wait, long ago.
  Clock::time_point last_{-std::chrono::hours(1)}, end_{-std::chrono::hours(1)};
  Duration hold_ = kLeastHold;
};

}  // namespace fastformer
