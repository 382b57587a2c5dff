#include "common/share_out.h"

#include <omp.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "common/helpers.h"
#include "common/long_waits.h"
#include "common/thread_team.h"

namespace fastformer {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

constexpr int kMostIdle = 16;  // the most additional OpenMP threads that SpinSuppressor starts

// Makes OpenMP's threads sleep between regions for a while. libgomp's threads spin for some milliseconds after a
// region, unless libgomp manages more threads than there are processors: then they sleep at once. This class therefore
// makes libgomp start additional threads that do nothing. It has no effect on other OpenMP libraries.
class SpinSuppressor {
 public:
  void until(Clock::time_point end) {
    const std::lock_guard lock(mutex_);
    end_ = end;
    changed_.notify_one();
    const int idle = omp_get_num_procs() - omp_get_max_threads() + 1;
    if (is_on_ || idle > kMostIdle) return;
    is_on_ = start_helper([this, idle] { keep_idle_threads(std::max(idle, 1) + 1); });
  }

 private:
  void keep_idle_threads(int threads) {
    std::atomic<int> begun{0};  // the compiler would remove an empty region
#pragma omp parallel num_threads(threads)
    begun.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    while (Clock::now() < end_) changed_.wait_until(lock, end_);
    is_on_ = false;
  }  // when this thread ends, so do its OpenMP threads

  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point end_;
  bool is_on_ = false;
};

// Records whether callers wait for OpenMP's threads.
class Load {
 public:
  bool prefers_team() const { return Clock::now().time_since_epoch().count() < team_until_.load(kAnyOrder); }

  void record(Duration worked, Duration waited) {
    if (waited < kNoticed) return;  // before taking the lock
    const std::lock_guard lock(mutex_);
    const auto end = waits_.record(Clock::now(), worked, waited);
    if (!end) return;
    team_until_.store(end->time_since_epoch().count(), kAnyOrder);
    suppressor_.until(*end);
  }

  void suppress_spinning(Duration time) { suppressor_.until(Clock::now() + time); }

 private:
  static constexpr auto kAnyOrder = std::memory_order_relaxed;
  static constexpr Duration kNoticed = std::chrono::microseconds(100);

  std::atomic<Duration::rep> team_until_{0};
  std::mutex mutex_;
  LongWaits waits_;
  SpinSuppressor suppressor_;
};

Load& load() { return of_process<Load>(); }

std::atomic<Sharing> the_sharing{Sharing::by_load};
thread_local int ops_alone = 0;
thread_local int inside_region = 0;

// While an instance exists, this thread runs all tasks of its ops itself.
struct Inside {
  Inside() { ++inside_region; }
  ~Inside() { --inside_region; }
};

// Carries an exception out of a parallel region, because PyTorch's C function can't pass it on.
struct Region {
  const std::function<void()>& work;
  Clock::time_point done;  // when the caller finished its own part
  std::exception_ptr thrown;
  std::atomic<bool> has_thrown{false};

  static void run(int64_t begin, int64_t end, void* context) {
    auto& region = *static_cast<Region*>(context);
    for (int64_t part = begin; part < end; ++part) {
      try {
        const Inside inside;
        region.work();
      } catch (...) {
        if (!region.has_thrown.exchange(true)) region.thrown = std::current_exception();
      }
    }
    if (begin == 0) region.done = Clock::now();
  }
};

void by_openmp(int threads, const std::function<void()>& work) {
  const auto begun = Clock::now();
  Region region{work, begun, nullptr};
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, threads, 1, &Region::run, &region));
  load().record(region.done - begun, Clock::now() - region.done);
  if (region.thrown) std::rethrow_exception(region.thrown);
}

}  // namespace

OpsAlone::OpsAlone() { ++ops_alone; }
OpsAlone::~OpsAlone() { --ops_alone; }

void suppress_openmp_spinning(std::chrono::milliseconds time) { load().suppress_spinning(time); }

void set_sharing(Sharing sharing) { the_sharing.store(sharing, std::memory_order_relaxed); }

void share_out(int threads, const std::function<void()>& work) {
  if (threads <= 1 || inside_region > 0) return work();
  const Sharing sharing = the_sharing.load(std::memory_order_relaxed);
  const bool by_team =
      sharing == Sharing::team || (sharing == Sharing::by_load && (ops_alone > 0 || load().prefers_team()));
  if (!by_team || !run_together(threads, work)) by_openmp(threads, work);
}

}  // namespace fastformer
