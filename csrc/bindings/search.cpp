// Python bindings of the searches; fastformer/generation/native_search.py wraps them.

#include "engine/search.h"

#include <algorithm>
#include <limits>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "engine/warping.h"

namespace fastformer {
namespace {

using python::Object;

// Advances a search with candidates from Python. A row may have more of them than this search needs, because another
// search needs more, or fewer, because the vocabulary is smaller.
std::vector<int32_t> advance(Search& search, PyObject* ids, PyObject* values, int64_t first) {
  const int64_t rows = search.num_rows, per_row = search.num_candidates;
  std::vector<int32_t> flat_ids(rows * per_row, 0);
  std::vector<float> flat_values(rows * per_row, -std::numeric_limits<float>::infinity());
  const Object all_ids = python::as_list(ids), all_values = python::as_list(values);
  for (int64_t row = 0; row < rows; ++row) {
    const Object own_ids = python::as_list(python::sure(PyList_GetItem(all_ids.get(), first + row))),
                 own_values = python::as_list(python::sure(PyList_GetItem(all_values.get(), first + row)));
    const int64_t count = std::min<int64_t>({per_row, PyList_Size(own_ids.get()), PyList_Size(own_values.get())});
    for (int64_t i = 0; i < count; ++i) {
      flat_ids[row * per_row + i] = python::Cast<int32_t>::from(python::sure(PyList_GetItem(own_ids.get(), i)));
      flat_values[row * per_row + i] = python::Cast<float>::from(python::sure(PyList_GetItem(own_values.get(), i)));
    }
  }
  return search.advance(flat_ids.data(), flat_values.data(), per_row);
}

std::vector<int32_t> last_tokens(const std::vector<const Search*>& searches) {
  int64_t rows = 0;
  for (const Search* search : searches) {
    if (!search) throw std::invalid_argument("expected searches, got None");
    if (!search->has_begun())
      throw std::invalid_argument("expected searches that have made a step: there is no last token before that");
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
                                    int64_t num_return, bool early_stopping, std::optional<int64_t> min_tokens,
                                    std::optional<std::vector<int32_t>> suppressed,
                                    std::optional<bool> by_transformers_rules, std::optional<bool> never_stops,
                                    std::optional<int64_t> begun, std::optional<bool> keeps_shares) {
  constexpr int64_t kMost = 1 << 20;  // candidates; counts derived from this number are 64-bit
  if (num_beams > kMost || std::ssize(eos) >= kMost / std::max<int64_t>(1, num_beams))
    throw std::invalid_argument("expected fewer beams or end ids");
  if (num_return < 1 || num_return > num_beams)
    throw std::invalid_argument("expected num_return from 1 to num_beams = " + std::to_string(num_beams) + ", got " +
                                std::to_string(num_return));
  if (begun.value_or(0) < 0)
    throw std::invalid_argument("expected begun to be at least 0, got " + std::to_string(*begun));
  const auto stopping = never_stops.value_or(false) ? EarlyStopping::kNever
                        : early_stopping            ? EarlyStopping::kYes
                                                    : EarlyStopping::kNo;
  auto search = make_beam_search(limit, std::move(eos), num_beams, alpha, num_return, stopping,
                                 by_transformers_rules.value_or(false), begun.value_or(0));
  search->min_tokens = min_tokens.value_or(0), search->keeps_shares = keeps_shares.value_or(false);
  if (suppressed) search->suppressed = std::move(*suppressed);
  return search;
}

std::unique_ptr<Search> greedy_search(int64_t limit, std::vector<int32_t> eos, std::optional<int64_t> min_tokens,
                                      std::optional<std::vector<int32_t>> suppressed) {
  auto search = make_greedy_search(limit, std::move(eos));
  search->min_tokens = min_tokens.value_or(0);
  if (suppressed) search->suppressed = std::move(*suppressed);
  return search;
}

// A search by the rules of `TokenRules`: greedy, with beams or, if top_k isn't 1, sampling.
std::unique_ptr<Search> ruled_search(int64_t limit, int32_t eos, int64_t num_beams, int64_t num_return, double alpha,
                                     int64_t most_finished, std::vector<int32_t> suppressed,
                                     std::vector<int32_t> suppressed_first, std::vector<int32_t> prefix,
                                     float repetition_penalty, int64_t no_repeat_ngram_size, int32_t timestamp_begin,
                                     int32_t max_initial_timestamp, int64_t top_k, float temperature, int64_t seed,
                                     int32_t probed_token, int32_t probed_at, int64_t probed_position) {
  constexpr int64_t kMost = 1 << 16;
  const auto is_count = [](int64_t n) { return 1 <= n && n <= kMost; };
  if (limit < 1 || !is_count(num_beams) || !is_count(num_return) || !is_count(most_finished) || top_k < 0 ||
      no_repeat_ngram_size < 0 || !(temperature > 0) || !(repetition_penalty > 0))
    throw std::invalid_argument("expected positive numbers of tokens and beams, and a positive temperature");
  const auto begun = std::ssize(prefix);
  std::unique_ptr<Search> search;
  if (top_k != 1) search = make_sampling_search(limit, {eos}, num_return, alpha, begun);
  else if (num_beams == 1) search = make_greedy_search(limit, {eos});
  else search = make_patient_beam_search(limit, {eos}, num_beams, alpha, num_return, most_finished, begun);
  search->rules = std::make_shared<const TokenRules>(TokenRules{.prefix = std::move(prefix),
                                                                .suppressed = std::move(suppressed),
                                                                .suppressed_first = std::move(suppressed_first),
                                                                .repetition_penalty = repetition_penalty,
                                                                .no_repeat_ngram_size = no_repeat_ngram_size,
                                                                .timestamp_begin = timestamp_begin,
                                                                .max_initial_timestamp = max_initial_timestamp,
                                                                .end_of_text = eos,
                                                                .top_k = top_k,
                                                                .temperature = temperature,
                                                                .seed = static_cast<uint64_t>(seed)});
  search->probed = {probed_token, probed_at, probed_position};
  return search;
}

std::vector<int64_t> places_of_done(const std::vector<const Search*>& searches) {
  std::vector<int64_t> places;
  for (size_t i = 0; i < searches.size(); ++i)
    if (!searches[i]) throw std::invalid_argument("expected searches, got None");
    else if (searches[i]->is_done) places.push_back(static_cast<int64_t>(i));
  return places;
}

std::vector<int32_t> tokens(Search& search, int64_t row) {
  if (row < 0 || row >= search.num_rows)
    throw std::out_of_range("expected one of " + std::to_string(search.num_rows) + " rows, got " + std::to_string(row));
  return search.tokens(row);
}

Object results(Search& search) {
  const std::vector<Hypothesis> all = search.results();
  Object list(python::sure(PyList_New(static_cast<Py_ssize_t>(all.size()))));
  for (size_t i = 0; i < all.size(); ++i) {
    Object one = python::make_tuple(all[i].tokens, all[i].log_probs, all[i].score);
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), one.release());
  }
  return list;
}

std::vector<std::pair<int64_t, int64_t>> warp_matrix(const python::Floats& matrix) {
  if (matrix.array.ndim() != 2) throw std::invalid_argument("matrix: expected two dimensions");
  return warp(matrix.data(), matrix.array.shape(0), matrix.array.shape(1));
}

int64_t limit(const Search& search) { return search.limit; }
double probed(const Search& search) { return search.probed.probability; }
int64_t num_candidates(const Search& search) { return search.num_candidates; }
int64_t num_tokens(const Search& search) { return search.num_tokens; }
int64_t num_rows(const Search& search) { return search.num_rows; }
int64_t peak_rows(const Search& search) { return search.peak_rows; }
std::vector<double> scores(const Search& search) { return search.scores(); }
bool is_done(const Search& search) { return search.is_done; }
bool is_broken(const Search& search) { return search.is_broken; }

}  // namespace

void bind_search(PyObject* module) {
  using python::function;
  using python::method;
  using python::property;
  static PyMethodDef methods[] = {method<"advance", "ids values first", &advance>(),
                                  method<"tokens", "row", &tokens>(),
                                  method<"results", "", &results>(),
                                  {}};
  static PyGetSetDef properties[] = {property<&limit>("limit"),           property<&num_candidates>("num_candidates"),
                                     property<&num_tokens>("num_tokens"), property<&num_rows>("num_rows"),
                                     property<&peak_rows>("peak_rows"),   property<&scores>("scores"),
                                     property<&is_done>("is_done"),       property<&is_broken>("is_broken"),
                                     property<&probed>("probed"),         {}};
  python::add_class<Search>(module, "Search", nullptr, methods, properties);
  static PyMethodDef functions[] = {
      function<"greedy_search", "limit eos min_tokens? suppressed?", &greedy_search>(),
      function<"beam_search",
               "limit eos num_beams alpha num_return early_stopping min_tokens? suppressed? by_transformers_rules? "
               "never_stops? begun? keeps_shares?",
               &beam_search>(),
      function<"ruled_search",
               "limit eos num_beams num_return alpha most_finished suppressed suppressed_first prefix "
               "repetition_penalty no_repeat_ngram_size timestamp_begin max_initial_timestamp top_k temperature seed "
               "probed_token probed_at probed_position",
               &ruled_search>(),
      function<"last_tokens", "searches", &last_tokens>(),
      function<"warp", "matrix", &warp_matrix>(),
      function<"places_of_done", "searches", &places_of_done>(),
      {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
