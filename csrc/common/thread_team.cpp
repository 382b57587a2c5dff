#include "common/thread_team.h"

#include <dlfcn.h>
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "common/contention.h"
#include "common/helpers.h"

namespace fastformer {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

constexpr int kMostThreads = 256;
constexpr int kSpins = 10000;                                // 10 to 50 ns each, before a waiting thread sleeps
constexpr Duration kIdle = std::chrono::microseconds(300);   // for which a helper without tasks stays awake
constexpr Duration kSlice = std::chrono::microseconds(500);  // shorter than a time slice of any scheduler
constexpr Duration kStay = std::chrono::milliseconds(1);     // minimum time between two moves of a thread

// Waits for another thread, which finishes within microseconds, or within milliseconds if it has no core at the moment.
// After a while the waiting thread sleeps instead of yielding: a thread that yields gives up its share of the core, and
// Linux may not return it soon.
class Waiting {
 public:
  void once() {
    if (spins_ < kSpins) {
      ++spins_;
      _mm_pause();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(1));
    }
  }
  bool is_long() const { return spins_ == kSpins; }

 private:
  int spins_ = 0;
};

int64_t num_tasks(const std::vector<Stage>& stages) {
  int64_t tasks = 0;
  for (const Stage& stage : stages) tasks += std::max<int64_t>(stage.tasks, 0);
  return tasks;
}

double work_of(const std::vector<Stage>& stages) {
  double work = 0;
  for (const Stage& stage : stages) work += stage.work;
  return work > 0 ? work : static_cast<double>(num_tasks(stages));
}

void run_alone(const std::vector<Stage>& stages) {
  for (const Stage& stage : stages)
    for (int64_t task = 0; task < stage.tasks; ++task) stage.run(task);
}

// Looks up a function of the OpenMP library in the process, which is PyTorch's; null if there is none. This library
// doesn't link to OpenMP, because a second OpenMP runtime in a process would have a second set of threads.
template <typename F>
F* openmp(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

// OMP_PROC_BIND binds each thread of the program to a core of its own, including the main thread. Threads that the main
// thread starts would inherit its core, so this lets a helper use all cores that OpenMP has.
void leave_bound_core() {
  constexpr int kNotBound = 0;  // omp_proc_bind_false
  const auto binding = openmp<int()>("omp_get_proc_bind"), num_places = openmp<int()>("omp_get_num_places");
  const auto place_size = openmp<int(int)>("omp_get_place_num_procs");
  const auto place_cores = openmp<void(int, int*)>("omp_get_place_proc_ids");
  if (!binding || !num_places || !place_size || !place_cores || binding() == kNotBound) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int place = 0; place < num_places(); ++place) {
    std::vector<int> numbers(place_size(place));
    place_cores(place, numbers.data());
    for (const int number : numbers)
      if (number < CPU_SETSIZE) CPU_SET(number, &cores);
  }
  if (CPU_COUNT(&cores) > 0) sched_setaffinity(0, sizeof cores, &cores);
}

// The helper threads and the current run, of which there is at most one.
//
// The tasks of all stages ever opened are numbered consecutively. `next_` is the first task that is not taken, `end_`
// the end of the open stage. A thread takes task t by advancing next_ from t to t + 1. It may then read stage_ and
// start_, which change only when all tasks of the stage are done, and t is not. A thread that was suspended before it
// took a task finds that next_ has changed, and takes another one.
class ThreadTeam {
 public:
  // Runs the stages on `threads` threads, including the caller's. Returns false without running any if another run is
  // in progress. `meets`: the threads wait for each other at each stage, so helpers join only while that is faster.
  bool run(const std::vector<Stage>& stages, int threads, bool meets) {
    if (is_busy_.exchange(true, std::memory_order_acquire)) return false;
    const auto begun = Clock::now();
    const int helpers = meets && contention_.prefers_one_thread() ? 0 : grow(std::min(threads, kMostThreads) - 1);
    stages_ = &stages;
    place_ = 0;
    note_core(0);
    is_finished_.store(false, std::memory_order_relaxed);
    wanted_.store(helpers, std::memory_order_seq_cst);  // before checking which helpers are asleep: see idle()
    for (int i = 0; i < helpers; ++i) {
      if (helpers_[i].is_asleep.load(std::memory_order_seq_cst) == 0) continue;
      helpers_[i].is_asleep.store(0, std::memory_order_seq_cst);
      helpers_[i].is_asleep.notify_one();
    }
    int64_t own = go_on();
    Duration waited{0};
    bool has_waited = false;
    while (!is_finished_.load(std::memory_order_acquire)) {
      const int64_t worked = work(0);
      own += worked;
      if (worked > 0 || is_finished_.load(std::memory_order_acquire)) continue;
      const auto before = Clock::now();
      Waiting waiting;
      while (!is_open() && !is_finished_.load(std::memory_order_acquire)) waiting.once();
      has_waited |= waiting.is_long();
      waited += Clock::now() - before;
    }
    wanted_.store(0, std::memory_order_relaxed);
    const std::exception_ptr thrown = std::exchange(thrown_, nullptr);
    has_thrown_.store(false, std::memory_order_relaxed);
    if (meets) {
      const Duration time = Clock::now() - begun;
      const int64_t tasks = num_tasks(stages);
      contention_.record(time, work_of(stages), helpers + 1, has_waited,
                         (time - waited) * tasks / std::max<int64_t>(own, 1));
    }
    is_busy_.store(false, std::memory_order_release);
    if (thrown) std::rethrow_exception(thrown);
    return true;
  }

 private:
  struct alignas(64) Helper {
    std::atomic<uint32_t> is_asleep{0};
  };
  struct alignas(64) Core {
    std::atomic<int> number{-1};
    Clock::time_point yielded{}, moved{};  // by the thread itself
  };

  bool is_open() const { return next_.load(std::memory_order_relaxed) < end_.load(std::memory_order_acquire); }

  // Runs tasks while there are any, and returns how many. A helper takes part only in runs that want that many helpers.
  int64_t work(int place) {
    int64_t worked = 0;
    while (true) {
      int64_t task = next_.load(std::memory_order_relaxed);
      // The order matters: wanted_ belongs to the same run as end_ or to a later one, in which case the task is taken.
      if (task >= end_.load(std::memory_order_acquire)) return worked;
      if (wanted_.load(std::memory_order_relaxed) < place) return worked;
      note_core(place);
      if (place > 0) settle(place);
      if (!next_.compare_exchange_weak(task, task + 1, std::memory_order_relaxed)) continue;
      call(*stage_, task - start_);
      ++worked;
      worked += finish_task();
    }
  }

  void note_core(int place) {
    const int core = sched_getcpu();
    std::atomic<int>& noted = cores_[place].number;
    if (noted.load(std::memory_order_relaxed) != core) noted.store(core, std::memory_order_relaxed);
  }

  // If other processes are busy, yields the helper's core while the helper has no task, not in the middle of one.
  void settle(int place) {
    Core& own = cores_[place];
    auto now = Clock::now();
    if (now - own.yielded > kSlice) {
      // The time slice ends now or soon. If it ended during a task, the caller would wait for the slices of others.
      sched_yield();
      own.yielded = now = Clock::now();
      note_core(place);
    }
    const int core = own.number.load(std::memory_order_relaxed);
    if (cores_[0].number.load(std::memory_order_relaxed) == core && now - own.moved > kStay) {
      own.moved = now;
      leave_core();
    }
  }

  // Moves a helper away from the caller's core, where one of them would wait for the other. The system would leave it
  // there: Linux wakes a thread on the core of its waker, and load balancing doesn't tell two of these threads on one
  // core from another process with a core of its own.
  void leave_core() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t others = allowed;
    const int threads = wanted_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < threads; ++i) {
      const int core = cores_[i].number.load(std::memory_order_relaxed);
      if (core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &others);
    }
    if (CPU_COUNT(&others) == 0) return;
    if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
  }

  // Runs a task, and stores its exception: it must not end a helper, nor let the caller leave a run with helpers in it.
  void call(const Stage& stage, int64_t task) {
    try {
      stage.run(task);
    } catch (...) {
      if (!has_thrown_.exchange(true, std::memory_order_relaxed)) thrown_ = std::current_exception();
    }
  }

  // Counts a task as done. The last task of a stage opens the next stage. Returns how many of its tasks ran here.
  int64_t finish_task() { return remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1 ? go_on() : 0; }

  // Opens the next stage. No other thread can take a task until end_ advances, so this thread owns the members until
  // then. It runs stages of one task, and the first task of other stages, at once, which is faster than waking another
  // thread. Returns how many tasks ran.
  int64_t go_on() {
    int64_t worked = 0;
    while (place_ < stages_->size()) {
      const Stage& stage = (*stages_)[place_++];
      if (stage.tasks <= 0) continue;
      ++worked;
      if (stage.tasks == 1) {
        call(stage, 0);
        continue;
      }
      start_ = end_.load(std::memory_order_relaxed);
      stage_ = &stage;
      remaining_.store(stage.tasks, std::memory_order_relaxed);
      next_.store(start_ + 1, std::memory_order_relaxed);
      end_.store(start_ + stage.tasks, std::memory_order_release);
      call(stage, 0);
      if (remaining_.fetch_sub(1, std::memory_order_acq_rel) != 1) return worked;
    }
    is_finished_.store(true, std::memory_order_release);
    return worked;
  }

  // The loop of a helper thread.
  void help(int place) {
    while (true) {
      work(place);
      Waiting waiting;
      while (!is_open() && wanted_.load(std::memory_order_relaxed) >= place) waiting.once();
      if (wanted_.load(std::memory_order_relaxed) < place) idle(place);
    }
  }

  void idle(int place) {
    Helper& self = helpers_[place - 1];
    const auto begun = Clock::now();
    for (Waiting waiting; wanted_.load(std::memory_order_relaxed) < place;) {
      waiting.once();
      if (!waiting.is_long() || Clock::now() - begun < kIdle) continue;
      // A caller sets wanted_ and then reads is_asleep; a helper sets is_asleep and then reads wanted_. So at least one
      // of them sees the other's write.
      self.is_asleep.store(1, std::memory_order_seq_cst);
      if (wanted_.load(std::memory_order_seq_cst) < place) self.is_asleep.wait(1);
      self.is_asleep.store(0, std::memory_order_relaxed);
    }
  }

  // Starts helpers until there are `count`, or as many as the system allows. Returns how many this run uses.
  int grow(int count) {
    const auto start = [this](int place) {
      return start_helper([this, place] {
        leave_bound_core();
        help(place);
      });
    };
    while (num_helpers_ < count && start(num_helpers_ + 1)) ++num_helpers_;
    return std::min(num_helpers_, count);
  }

  // These share one cache line: ending a stage, opening the next one and taking a task transfers it three times. Two
  // lines would need twice as many transfers.
  alignas(64) std::atomic<int64_t> next_{0};
  std::atomic<int64_t> end_{0};
  std::atomic<int64_t> remaining_{0};  // tasks of the open stage that aren't done
  const Stage* stage_ = nullptr;       // the open stage
  int64_t start_ = 0;                  // the number of its first task
  size_t place_ = 0;                   // the index of the next stage
  const std::vector<Stage>* stages_ = nullptr;
  std::atomic<int> wanted_{0};  // the number of helpers in the current run; 0 between runs
  std::atomic<bool> is_finished_{false};
  std::atomic<bool> has_thrown_{false};  // set if a task threw; its exception is in thrown_
  std::exception_ptr thrown_;
  std::array<Core, kMostThreads> cores_;  // where the caller and the helpers took their last tasks

  // Used by callers, not by helpers.
  alignas(64) std::atomic<bool> is_busy_{false};
  int num_helpers_ = 0;
  std::array<Helper, kMostThreads> helpers_;  // those up to num_helpers_ have threads
  Contention contention_;
};

ThreadTeam& team() { return of_process<ThreadTeam>(); }

}  // namespace

void run_stages(const std::vector<Stage>& stages, int threads) {
  if (threads <= 1 || !team().run(stages, threads, true)) run_alone(stages);
}

bool run_together(int threads, const std::function<void()>& work) {
  return team().run({{threads, [&work](int64_t) { work(); }}}, threads, false);
}

bool run_workers(const Stage& tasks) { return team().run({tasks}, static_cast<int>(tasks.tasks), false); }

}  // namespace fastformer
