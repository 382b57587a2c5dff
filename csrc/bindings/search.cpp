// The Python bindings of the searches, which fastformer/generation/native_search.py wraps, and of the thread team, for
// tests.

#include "engine/search.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "common/contention.h"
#include "common/long_waits.h"
#include "common/parallel.h"
#include "common/thread_team.h"

namespace fastformer {
namespace {

namespace py = pybind11;

// A step's candidates as the interpreter has them: a row may have more of them than this search wants, because a
// neighbour does, or fewer, because the vocabulary has.
std::vector<int32_t> advance(Search& search, const py::sequence& ids, const py::sequence& values, int64_t first) {
  const int64_t rows = search.num_rows, wanted = search.num_candidates;
  std::vector<int32_t> flat_ids(rows * wanted, 0);
  std::vector<float> flat_values(rows * wanted, -std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < rows; ++row) {
    const py::sequence own_ids = ids[first + row], own_values = values[first + row];
    const int64_t count = std::min<int64_t>({wanted, py::ssize_t(own_ids.size()), py::ssize_t(own_values.size())});
    for (int64_t i = 0; i < count; ++i) {
      flat_ids[row * wanted + i] = own_ids[i].cast<int32_t>();
      flat_values[row * wanted + i] = own_values[i].cast<float>();
    }
  }
  return search.advance(flat_ids.data(), flat_values.data(), wanted);
}

std::vector<int32_t> last_tokens(const std::vector<const Search*>& searches) {
  int64_t rows = 0;
  for (const Search* search : searches) {
    if (!search) throw py::value_error("expected searches, got None");
    if (!search->has_begun())
      throw py::value_error("expected searches that have begun: before, there is no last token");
    rows += search->num_rows;
  }
  std::vector<int32_t> all(rows);
  int32_t* to = all.data();
  for (const Search* search : searches) {
    search->last_tokens(to);
    to += search->num_rows;
  }
  return all;
}

std::unique_ptr<Search> beam_search(int64_t limit, std::vector<int32_t> eos, int64_t num_beams, double alpha,
                                    int64_t num_return, bool early_stopping, int64_t min_tokens,
                                    std::vector<int32_t> suppressed, bool by_transformers_rules, bool never_stops,
                                    int64_t begun) {
  constexpr int64_t kMost = 1 << 20;  // of candidates: what is made of them is counted in 64 bits
  if (num_beams > kMost || static_cast<int64_t>(eos.size()) >= kMost / std::max<int64_t>(1, num_beams))
    throw py::value_error("expected fewer beams and ends");
  if (num_return < 1 || num_return > num_beams)
    throw py::value_error("expected num_return from 1 to num_beams = " + std::to_string(num_beams) + ", got " +
                          std::to_string(num_return));
  if (begun < 0) throw py::value_error("expected begun of at least 0, got " + std::to_string(begun));
  const auto stopping = never_stops ? EarlyStopping::kNever : early_stopping ? EarlyStopping::kYes : EarlyStopping::kNo;
  auto search =
      make_beam_search(limit, std::move(eos), num_beams, alpha, num_return, stopping, by_transformers_rules, begun);
  search->min_tokens = min_tokens, search->suppressed = std::move(suppressed);
  return search;
}

std::unique_ptr<Search> greedy_search(int64_t limit, std::vector<int32_t> eos, int64_t min_tokens,
                                      std::vector<int32_t> suppressed) {
  auto search = make_greedy_search(limit, std::move(eos));
  search->min_tokens = min_tokens, search->suppressed = std::move(suppressed);
  return search;
}

std::vector<int64_t> places_of_done(const std::vector<const Search*>& searches) {
  std::vector<int64_t> places;
  for (size_t i = 0; i < searches.size(); ++i)
    if (!searches[i]) throw py::value_error("expected searches, got None");
    else if (searches[i]->is_done) places.push_back(static_cast<int64_t>(i));
  return places;
}

// For tests: each stage adds the numbers of the stage before to its own, so that the result shows tasks that ran twice,
// not at all, or too early. Returns the numbers of the last stage.
std::vector<uint64_t> stages_check(const std::vector<int64_t>& sizes, int64_t rounds, int threads) {
  std::vector<std::vector<uint64_t>> written;
  const std::vector<uint64_t> nothing;  // read by a stage that is the only one
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
  const py::gil_scoped_release released;
  for (int64_t round = 0; round < rounds; ++round) run_stages(stages, threads);
  return written.empty() ? std::vector<uint64_t>{} : written.back();
}

// Stages of which every third task throws.
void stages_break(int64_t tasks, int threads) {
  const auto run = [](int64_t task) {
    if (task % 3 == 1) throw std::runtime_error("a task broke");
  };
  const py::gil_scoped_release released;
  run_stages({{tasks, run}, {1, [](int64_t) {}}, {tasks, run}}, threads);
}

// How many threads run the tasks of a stage, in the round of `rounds` with the most of them.
int64_t stages_threads(int64_t tasks, int64_t rounds, int threads) {
  std::vector<std::thread::id> ids(tasks);
  const std::vector<Stage> stages = {{tasks, [&ids](int64_t task) {
                                        ids[task] = std::this_thread::get_id();
                                        // Every thread of the team gets a turn, even on a busy machine.
                                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                                      }}};
  const py::gil_scoped_release released;
  int64_t most = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    run_stages(stages, threads);
    most = std::max<int64_t>(most, std::set(ids.begin(), ids.end()).size());
  }
  return most;
}

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

// Which of runs, of (milliseconds, tasks, whether the caller waited long, milliseconds by one), are the caller's alone.
std::vector<bool> contention_check(const std::vector<std::tuple<int64_t, int64_t, bool, int64_t>>& runs) {
  using Milliseconds = std::chrono::milliseconds;
  Contention contention;
  std::vector<bool> alone;
  for (const auto& [time, tasks, waited_long, by_one] : runs) {
    alone.push_back(contention.prefers_one_thread());
    contention.record(Milliseconds(time), tasks, waited_long, Milliseconds(by_one));
  }
  return alone;
}

}  // namespace

void bind_search(py::module_& m) {
  py::class_<Search>(m, "Search")
      .def_readonly("limit", &Search::limit)
      .def_readonly("num_candidates", &Search::num_candidates)
      .def_readonly("num_rows", &Search::num_rows)
      .def_readonly("peak_rows", &Search::peak_rows)
      .def_readonly("is_done", &Search::is_done)
      .def_readonly("is_broken", &Search::is_broken)
      .def("advance", &advance)
      .def("tokens",
           [](const Search& search, int64_t row) {
             if (row < 0 || row >= search.num_rows)
               throw py::index_error("expected one of " + std::to_string(search.num_rows) + " rows, got " +
                                     std::to_string(row));
             return search.tokens(row);
           })
      .def("results", [](const Search& search) {
        py::list found;
        for (const Hypothesis& one : search.results())
          found.append(py::make_tuple(one.tokens, one.log_probs, one.score));
        return found;
      });
  m.def("greedy_search", &greedy_search, py::arg(), py::arg(), py::arg("min_tokens") = 0,
        py::arg("suppressed") = std::vector<int32_t>());
  m.def("beam_search", &beam_search, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
        py::arg("min_tokens") = 0, py::arg("suppressed") = std::vector<int32_t>(),
        py::arg("by_transformers_rules") = false, py::arg("never_stops") = false, py::arg("begun") = 0);
  m.def("last_tokens", &last_tokens);
  m.def("places_of_done", &places_of_done);
  m.def("_stages_check", &stages_check);
  m.def("_contention_check", &contention_check);
  m.def("_stages_break", &stages_break);
  m.def("_stages_threads", &stages_threads);
  m.def("_set_sharing", &set_sharing_named);
  m.def("_tasks_check", &tasks_check);
  m.def("_waits_check", &waits_check);
  m.def("_hush_openmp", [](int64_t ms) { hush_openmp(std::chrono::milliseconds(ms)); });
}

}  // namespace fastformer
