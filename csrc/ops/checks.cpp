// Functions with which the package and its tests check this library.

#include <chrono>
#include <cmath>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include "common/long_waits.h"
#include "common/parallel.h"
#include "common/share_out.h"
#include "ops/library.h"

namespace fastformer {
namespace {

void set_sharing_named(std::string_view name) {
  check<std::invalid_argument>(name == "openmp" || name == "team" || name == "by_load",
                               "expected 'by_load', 'openmp' or 'team', got '", name, "'");
  set_sharing(name == "openmp" ? Sharing::openmp : name == "team" ? Sharing::team : Sharing::by_load);
}

void suppress_spinning(int64_t milliseconds) { suppress_openmp_spinning(std::chrono::milliseconds(milliseconds)); }

// Returns how often each task of an op ran, and the maximum number of threads over `rounds` rounds. Tasks from `breaks`
// on throw.
std::tuple<Tensor, int64_t> tasks_check(int64_t tasks, int64_t rounds, int64_t breaks) {
  const Tensor counts = zeros({tasks}, kLong);
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  std::vector<std::thread::id> ids(tasks);
  int64_t most = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    for_each_task(tasks, true, [&](int64_t task) {
      if (task >= breaks) throw std::runtime_error("a task broke");
      ++count[task];
      ids[task] = std::this_thread::get_id();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
    most = std::max<int64_t>(most, std::set(ids.begin(), ids.end()).size());
  }
  return {counts, most};
}

// Returns, for each OpenMP region, for how many milliseconds the team should run all ops after it; 0: no change.
// regions: int64 (n, 3), in microseconds: the time since the first region, the caller's work, and the caller's wait.
Tensor waits_check(const Tensor& regions) {
  using std::chrono::microseconds;
  LongWaits waits;
  const auto first = LongWaits::Clock::now();
  const Tensor rows = regions.contiguous(), result = empty({rows.size(0)}, kLong);
  const int64_t* region = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i, region += 3) {
    const auto now = first + microseconds(region[0]);
    const auto end = waits.record(now, microseconds(region[1]), microseconds(region[2]));
    result.mutable_data_ptr<int64_t>()[i] =
        end ? std::chrono::duration_cast<std::chrono::milliseconds>(*end - now).count() : 0;
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastformer_checks, m) {
  m.def("fill_new_tensors(bool fills) -> ()");
  m.def("set_sharing(str sharing) -> ()");
  m.def("suppress_openmp_spinning(int milliseconds) -> ()");
  m.def("tasks_check(int tasks, int rounds, int breaks) -> (Tensor, int)");
  m.def("waits_check(Tensor regions) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastformer_checks, CompositeExplicitAutograd, m) {
  m.impl("fill_new_tensors", boxed<fill_new_tensors>);
  m.impl("set_sharing", boxed<set_sharing_named>);
  m.impl("suppress_openmp_spinning", boxed<suppress_spinning>);
  m.impl("tasks_check", boxed<tasks_check>);
  m.impl("waits_check", boxed<waits_check>);
}

}  // namespace fastformer
