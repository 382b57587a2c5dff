// Test helpers that check the thread team.

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include "bindings/module.h"
#include "common/contention.h"
#include "common/thread_team.h"

namespace fastformer {
namespace {

// Runs stages of which each adds the previous stage's numbers to its own, so that the result reveals tasks that ran
// twice, never, or too early. Returns the numbers of the last stage.
std::vector<uint64_t> stages_check(const std::vector<int64_t>& sizes, int64_t rounds, int32_t threads) {
  std::vector<std::vector<uint64_t>> written;
  const std::vector<uint64_t> nothing;  // the input of the only stage
  for (const int64_t size : sizes) written.emplace_back(size, 0);
  std::vector<Stage> stages;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::vector<uint64_t>& before = sizes.size() == 1 ? nothing : written[(i + sizes.size() - 1) % sizes.size()];
    stages.push_back({sizes[i], [&before, &own = written[i]](int64_t task) {
                        uint64_t sum = 0;
                        for (const uint64_t number : before) sum = sum * 31 + number;
                        own[task] = own[task] * 7 + sum + static_cast<uint64_t>(task) + 1;
                      }});
  }
  const python::Released released;
  for (int64_t round = 0; round < rounds; ++round) run_stages(stages, threads);
  return written.empty() ? std::vector<uint64_t>{} : written.back();
}

// Runs stages in which every third task throws.
void stages_break(int64_t tasks, int32_t threads) {
  const auto run = [](int64_t task) {
    if (task % 3 == 1) throw std::runtime_error("a task broke");
  };
  const python::Released released;
  run_stages({{tasks, run}, {1, [](int64_t) {}}, {tasks, run}}, threads);
}

// Returns the maximum number of threads that ran the tasks of a stage, over `rounds` rounds.
int64_t stages_threads(int64_t tasks, int64_t rounds, int32_t threads) {
  std::vector<std::thread::id> ids(tasks);
  const std::vector<Stage> stages = {{tasks, [&ids](int64_t task) {
                                        ids[task] = std::this_thread::get_id();
                                        // Long enough that every thread gets a task, even on a busy machine.
                                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                                      }}};
  const python::Released released;
  int64_t most = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    run_stages(stages, threads);
    most = std::max<int64_t>(most, std::set(ids.begin(), ids.end()).size());
  }
  return most;
}

// Returns, for each run (milliseconds, work, threads, whether the caller waited long, milliseconds for one thread),
// whether the caller alone runs the tasks.
std::vector<bool> contention_check(const std::vector<std::tuple<int64_t, double, int32_t, bool, int64_t>>& runs) {
  using Milliseconds = std::chrono::milliseconds;
  Contention contention;
  std::vector<bool> alone;
  for (const auto& [time, work, threads, waited_long, by_one] : runs) {
    alone.push_back(contention.prefers_one_thread());
    contention.record(Milliseconds(time), work, threads, waited_long, Milliseconds(by_one));
  }
  return alone;
}

}  // namespace

void bind_team(PyObject* module) {
  using python::function;
  static PyMethodDef functions[] = {function<"_stages_check", "sizes rounds threads", &stages_check>(),
                                    function<"_stages_break", "tasks threads", &stages_break>(),
                                    function<"_stages_threads", "tasks rounds threads", &stages_threads>(),
                                    function<"_contention_check", "runs", &contention_check>(),
                                    {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
