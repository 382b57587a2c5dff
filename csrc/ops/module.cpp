// The Python module of the ops, which register themselves under torch.ops.fastformer_cpp, each in its own file; and what
// tests ask of share_out.h.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/long_waits.h"
#include "common/parallel.h"

namespace fastformer {
namespace {

namespace py = pybind11;

// How the ops that are called from now on share out their tasks among the threads.
void set_sharing_named(const std::string& name) {
  if (name != "by_load" && name != "openmp" && name != "team")
    throw std::invalid_argument("expected 'by_load', 'openmp' or 'team', got '" + name + "'");
  set_sharing(name == "team" ? Sharing::team : name == "openmp" ? Sharing::openmp : Sharing::by_load);
}

// How often each of an op's tasks runs, and on how many threads, in the round of `rounds` with the most of them. From
// task `breaks` on they throw.
std::pair<std::vector<int64_t>, int64_t> tasks_check(int64_t tasks, int64_t rounds, int64_t breaks) {
  std::vector<int64_t> counts(tasks);
  std::vector<std::thread::id> ids(tasks);
  const py::gil_scoped_release released;
  int64_t most = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    for_each_task(tasks, true, [&](int64_t task) {
      if (task >= breaks) throw std::runtime_error("a task broke");
      ++counts[task];
      ids[task] = std::this_thread::get_id();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
    most = std::max<int64_t>(most, std::set(ids.begin(), ids.end()).size());
  }
  return {counts, most};
}

// For how many milliseconds the team is to run all ops after each of some regions of OpenMP, of (microseconds since the
// first, those that the caller worked, those that it waited); 0: it goes on as before.
std::vector<int64_t> waits_check(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& regions) {
  using std::chrono::microseconds;
  LongWaits waits;
  const auto first = LongWaits::Clock::now();
  std::vector<int64_t> found;
  for (const auto& [at, worked, waited] : regions) {
    const auto now = first + microseconds(at);
    const auto end = waits.record(now, microseconds(worked), microseconds(waited));
    found.push_back(end ? std::chrono::duration_cast<std::chrono::milliseconds>(*end - now).count() : 0);
  }
  return found;
}

}  // namespace
}  // namespace fastformer

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fastformer;
  m.doc() = "fastformer's ops for the CPU";
  m.attr("instruction_set") = FASTFORMER_ISA;
  m.def("_set_sharing", &set_sharing_named);
  m.def("_tasks_check", &tasks_check);
  m.def("_waits_check", &waits_check);
  m.def("_hush_openmp", [](int64_t ms) { hush_openmp(std::chrono::milliseconds(ms)); });
}
