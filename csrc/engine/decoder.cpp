#include "engine/decoder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "common/thread_team.h"

namespace fastformer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPrefillTokens = 512;  // tokens per pass through a stack: their activations stay in the cache
constexpr int64_t kRowsPerWorker = 16;   // with fewer, reading the weights costs more than waiting at each stage

CacheType type_of(Precision precision) { return precision == Precision::fp32 ? CacheType::fp32 : CacheType::bf16; }

// The number of blocks in a cache, at least one.
int64_t blocks_for(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > std::numeric_limits<int32_t>::max())
    throw std::length_error("expected room for a number of tokens from 0 to 2^31 - 1");
  return std::max<int64_t>(1, blocks_of(num_tokens));
}

// Work is split into as many tasks as threads, so 0 threads would do nothing.
void check_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("expected at least one thread");
}

std::vector<TokenCache::Heads> cached_heads(const PackedModel& model) {
  std::vector<TokenCache::Heads> heads;
  for (const PackedLayer& layer : model.decoder.layers)
    if (layer.has_keys) heads.push_back({layer.num_kv_heads, layer.head_dim});
  return heads;
}

std::shared_ptr<const PackedModel> with_decoder(std::shared_ptr<const PackedModel> model) {
  if (!model->options.has_decoder()) throw std::invalid_argument("expected a model with a decoder");
  return model;
}

}  // namespace

// Each worker of a run steps groups of its own. Cache blocks are allocated and collected under `mutex`.
struct Session::Run {
  const std::vector<Search*>& searches;
  const RunLimits& limits;
  bool log_probs;
  std::vector<int64_t> steps;  // of each group
  std::atomic<int64_t> rows_left;
  std::atomic<bool> is_over{false};  // tells all workers to return
  std::mutex mutex;
};

Session::Session(std::shared_ptr<const PackedModel> model, int64_t num_tokens, std::optional<CacheType> type)
    : model_(with_decoder(std::move(model))),
      cache_(cached_heads(*model_), type.value_or(type_of(model_->options.precision)), blocks_for(num_tokens),
             model_->state_bytes()) {}

Forward& Session::forward(size_t worker) {
  while (forwards_.size() <= worker) forwards_.push_back(std::make_unique<Forward>(*model_, shortlist_, cache_));
  return *forwards_[worker];
}

int64_t Session::num_rows() const {
  int64_t rows = 0;
  for (const TokenCache::Group& group : cache_.groups) rows += std::ssize(group.rows);
  return rows;
}

void Session::check(const std::vector<Source>& sources, const std::vector<Ids>& tokens) const {
  const auto inside = [](const int32_t* ids, int64_t count, int64_t size) {
    return std::all_of(ids, ids + count, [=](int32_t id) { return 0 <= id && id < size; });
  };
  if (model_->options.has_encoder() && sources.size() != tokens.size())
    throw std::invalid_argument("expected a source for each prompt");
  for (const Source& source : sources)
    if ((source.states != nullptr) != model_->options.is_bare)
      throw std::invalid_argument("expected states of sources for a model without embeddings, and ids for others");
    else if (source.ids &&
             (!inside(source.ids, source.count, model_->source_vocab_size()) || source.count > model_->max_len()))
      throw std::invalid_argument("expected sources with ids in the vocabulary and at most max_len tokens");
  for (const Ids& prompt : tokens)
    if (!inside(prompt.data(), std::ssize(prompt), model_->vocab_size()) || std::ssize(prompt) > model_->max_len())
      throw std::invalid_argument("expected prompts with ids in the vocabulary and at most max_len tokens");
}

std::vector<int64_t> Session::admit(const std::vector<Source>& sources, const std::vector<Ids>& tokens, int threads,
                                    const std::vector<SharedAdapter>& adapters) {
  check_threads(threads);
  check(sources, tokens);
  if (!adapters.empty() && adapters.size() != tokens.size())
    throw std::invalid_argument("expected an adapter, or none, for each prompt");
  for (const SharedAdapter& adapter : adapters)
    if (adapter && &adapter->model() != model_.get())
      throw std::invalid_argument("expected adapters that were packed for the session's model");
  read_pending();
  const bool has_encoder = model_->options.has_encoder();
  const size_t first = cache_.groups.size();
  std::vector<TokenCache::Beginning> beginnings(tokens.size());
  std::vector<int64_t> cached;
  try {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const bool is_packed = model_->options.is_bare;
      TokenCache::Group& group = cache_.add(has_encoder && !is_packed ? sources[i].count : 0);
      if (!adapters.empty()) group.adapter = adapters[i];
      if (is_packed) {
        group.packed_source = PooledMemory(Forward::packed_source_bytes(*model_, sources[i].count));
        group.packed_tokens = sources[i].count;
      }
      // With an encoder, the states of a token depend on the source as well; a state contains all tokens before it.
      if (has_encoder || cache_.state_bytes()) cache_.append(group, tokens[i].size());
      else
        beginnings[i] =
            cache_.begin_prompt(group, tokens[i], group.adapter ? group.adapter->root() : PrefixTable::kNoBlock);
      cached.push_back(beginnings[i].cached);
    }
    if (has_encoder) read_sources(sources, first, threads);
    pending_from_ = first, pending_threads_ = threads;
    pending_ = read_prompts(tokens, beginnings, first, threads);
    if (pending_.count() == 0) end_pending();
    return cached;
  } catch (...) {
    for (; cache_.groups.size() > first;) cache_.release({std::ssize(cache_.groups) - 1});
    throw;
  }
}

// Encodes the sources of the groups from `first` on. If there are too many tokens for one pass through the stack, whole
// sources are distributed among the threads.
void Session::read_sources(const std::vector<Source>& sources, size_t first, int threads) {
  int64_t total = 0, most = kPrefillTokens;
  for (const Source& source : sources) total += source.count;
  const bool is_apart = threads > 1 && total > kPrefillTokens;
  if (is_apart) {
    const int64_t rounds = (total + kPrefillTokens * threads - 1) / (kPrefillTokens * threads);
    most = std::max<int64_t>(1, (total + rounds * threads - 1) / (rounds * threads));
  }
  std::vector<Batch> batches;
  for (size_t i = 0; i < sources.size(); ++i) {
    const int64_t length = sources[i].count;
    // If they are distributed, a batch ends with the source that fills it, so that there are no more batches than
    // planned.
    if (batches.empty() || batches.back().count() + (is_apart ? 0 : length - 1) >= most) batches.emplace_back();
    for (int64_t t = 0; sources[i].states && t < length; ++t)
      batches.back().embedded.push_back(sources[i].states + t * model_->options.d_model);
    batches.back().add(sources[i].ids, length, 0, &cache_.groups[first + i], nullptr, true);
  }
  const int64_t workers = is_apart ? std::min<int64_t>(threads, batches.size()) : 1;
  for (int64_t worker = 0; worker < workers; ++worker) forward(worker);
  std::atomic<size_t> next{0};
  const auto read = [&](int64_t worker) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < batches.size();)
      forwards_[worker]->read_sources(batches[i], 1);
  };
  if (workers > 1 && run_workers({workers, read})) return;
  for (const Batch& batch : batches) forward(0).read_sources(batch, threads);
}

// Prefills the prompts of the groups from `first` on, wave by wave, and returns the last batch, which is still to be
// run. A prompt may be split into chunks; the tokens before a chunk are then in the cache.
Batch Session::read_prompts(const std::vector<Ids>& tokens, const std::vector<TokenCache::Beginning>& beginnings,
                            size_t first, int threads) {
  std::vector<size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return beginnings[a].wave < beginnings[b].wave; });
  Batch batch;
  const auto flush = [&] {
    if (batch.count() == 0) return;
    forward(0).read_prompts(batch, threads);
    batch = Batch();
  };
  int32_t wave = 0;
  for (const size_t i : order) {
    const TokenCache::Group& group = cache_.groups[first + i];
    if (beginnings[i].wave != wave) flush();
    wave = beginnings[i].wave;
    for (int64_t at = beginnings[i].cached, length = tokens[i].size(); at < length;) {
      const int64_t count = std::min(length - at, kPrefillTokens - batch.count());
      batch.add(tokens[i].data() + at, count, at, &group, &group.rows[0], true);
      at += count;
      if (batch.count() == kPrefillTokens) flush();
    }
  }
  return batch;
}

void Session::read_pending() {
  if (!has_pending()) return;
  forward(0).read_prompts(pending_, pending_threads_);
  end_pending();
}

void Session::end_pending() {
  pending_ = Batch();
  for (size_t i = pending_from_; i < cache_.groups.size(); ++i) cache_.set_read(cache_.groups[i]);
  pending_from_ = cache_.groups.size();
}

const Candidates& Session::step_of(const Places& groups, const Places& counts, Batch batch, Forward& forward,
                                   const Selection& selection, int threads) try {
  if (!has_pending()) return forward.step(batch, selection, threads);
  batch.append(pending_);
  const Candidates& candidates = forward.step(batch, selection, std::max(threads, pending_threads_));
  end_pending();
  return candidates;
} catch (...) {
  for (size_t i = 0; i < groups.size(); ++i) cache_.take_back(cache_.groups[groups[i]], counts.empty() ? 1 : counts[i]);
  throw;
}

Session::Places Session::all_groups() const {
  Places all(cache_.groups.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void Session::check_step(const Ids& tokens, const Places& counts) {
  int64_t expected = 0;
  for (int64_t i = 0; i < num_groups(); ++i) expected += std::ssize(cache_.groups[i].rows) * counts[i];
  if (std::ssize(tokens) != expected || tokens.empty()) throw std::invalid_argument("expected tokens for each row");
  for (const int32_t token : tokens)
    if (token < 0 || token >= model_->vocab_size()) throw std::invalid_argument("expected tokens in the vocabulary");
  for (int64_t i = 0; i < num_groups(); ++i) check_length(cache_.groups[i], counts[i]);
  if (cache_.step_tokens(all_groups(), counts) > cache_.free_tokens())
    throw std::length_error("the cache has no room for another token");
}

void Session::begin_step(const Places& counts) {
  for (int64_t i = 0; i < num_groups(); ++i) cache_.append(cache_.groups[i], counts[i]);
}

void Session::check_length(const TokenCache::Group& group, int64_t tokens) const {
  for (const TokenCache::Row& row : group.rows)
    if (std::ssize(row.slots) + tokens > model_->max_len())
      throw std::length_error("a row has no room for so many more of max_len tokens");
}

Batch Session::batch_of(const Places& groups, const Places& counts, const Ids& tokens) const {
  Batch batch;
  const int32_t* token = tokens.data();
  for (size_t i = 0; i < groups.size(); ++i) {
    const TokenCache::Group& group = cache_.groups[groups[i]];
    const int64_t count = counts.empty() ? 1 : counts[i];
    for (const TokenCache::Row& row : group.rows) {
      if (count > 0) batch.add(token, count, std::ssize(row.slots) - count, &group, &row, false);
      token += count;
    }
  }
  return batch;
}

const Candidates& Session::step(const Ids& tokens, const Places& counts, const Selection& selection, int threads) {
  check_threads(threads);
  if (selection.k < 1) throw std::invalid_argument("expected k to be at least 1");
  const Places each = counts.empty() ? Places(num_groups(), 1) : counts;
  if (std::ssize(each) != num_groups() || std::any_of(each.begin(), each.end(), [](int64_t n) { return n < 0; }))
    throw std::invalid_argument("expected counts of at least 0, one for each group");
  check_step(tokens, each);
  const Places all = all_groups();
  Forward& first = forward(0);
  begin_step(each);
  const Batch batch = batch_of(all, each, tokens);
  const Candidates& candidates = step_of(all, each, batch, first, selection, threads_for(std::ssize(tokens), threads));
  for (int64_t i = 0; i < num_groups(); ++i) cache_.groups[i].num_drafts += each[i];
  return candidates;
}

std::vector<Draft> Session::draft(const Ids& tokens, const Places& counts, const std::vector<float>& chances,
                                  const std::vector<std::vector<float>>& least, int threads) {
  if (std::ssize(counts) != num_groups() || least.size() != counts.size() || chances.empty())
    throw std::invalid_argument("expected counts and limits for each group, and chances");
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > 0 && (least[i].empty() || cache_.groups[i].rows.size() != 1))
      throw std::invalid_argument("expected groups of one row, and a limit for each of their drafted tokens");
  std::vector<Draft> drafts(counts.size());
  std::vector<float> sums(counts.size());
  const auto last = static_cast<int32_t>(chances.size()) - 1;
  Ids next = tokens;
  Places each = counts;
  do {
    const Candidates& best = step(next, each, {1, true, {}}, threads);
    next.clear();
    int64_t end = 0;
    for (size_t i = 0; i < each.size(); ++i) {
      if (each[i] == 0) continue;
      end += std::exchange(each[i], 0);
      Draft& draft = drafts[i];
      const float probability = std::exp(best.values[end - 1]);  // NaN after NaN among the logits
      draft.ids.push_back(best.ids[end - 1]);
      draft.parts.push_back(probability > 0 ? std::min(last, static_cast<int32_t>(probability * chances.size())) : 0);
      sums[i] += chances[draft.parts.back()];
      if (const size_t count = draft.ids.size(); count < least[i].size() && sums[i] >= least[i][count - 1]) {
        next.push_back(draft.ids.back());
        each[i] = 1;
      }
    }
  } while (!next.empty());
  return drafts;
}

void Session::cut(const Places& counts) {
  if (std::ssize(counts) != num_groups()) throw std::invalid_argument("expected counts, one for each group");
  if (cache_.state_bytes() && std::any_of(counts.begin(), counts.end(), [](int64_t n) { return n > 0; }))
    throw std::invalid_argument("expected no counts for a model whose layers have states, which keep all tokens");
  for (int64_t i = 0; i < num_groups(); ++i)
    if (counts[i] < 0 || counts[i] > std::max<int64_t>(0, cache_.groups[i].num_drafts))
      throw std::invalid_argument("expected counts of tokens that steps have appended, but not the first of them");
  for (int64_t i = 0; i < num_groups(); ++i) {
    cache_.take_back(cache_.groups[i], counts[i]);
    cache_.groups[i].num_drafts -= counts[i];
  }
}

void Session::align(int64_t group, const Ids& tokens, const Ids& targets, int32_t end,
                    const std::vector<std::pair<int64_t, int64_t>>& pairs, int threads, float* probabilities,
                    float* scores) {
  check_threads(threads);
  read_pending();
  const TokenCache::Group& of_group = cache_.groups.at(group);
  const TokenCache::Row& row = of_group.rows.at(0);
  const int64_t count = std::ssize(tokens), vocab = model_->vocab_size();
  if (of_group.rows.size() != 1 || std::ssize(row.slots) != count || std::ssize(targets) != count || end < 1 ||
      end > vocab)
    throw std::invalid_argument("expected the tokens of a group's prompt, and a target after each of them");
  Batch batch;
  Selection selection{1, false, {}};
  for (int64_t i = 0; i < count; ++i) {
    batch.add(tokens.data() + i, 1, i, &of_group, &row, false);
    batch.spans.back().stores = false;
    selection.logit_rows.push_back(static_cast<int32_t>(i));
  }
  FloatBuffer logits;
  logits.reserve(count * vocab);
  selection.logits = logits.data();
  selection.choose = [&](int64_t i, float* z, int32_t* id, float* value) {
    *id = targets[i], *value = 0;
    probabilities[i] = *id < 0 || *id >= end ? 0.f : std::exp(z[*id] - log_sum_exp(z, end));
  };
  const Forward::Probe probe{pairs, count, scores};
  Forward& first = forward(0);
  first.probe = &probe;
  first.step(batch, selection, threads);
  first.probe = nullptr;
}

// ---- searches ----

std::vector<int64_t> Session::run(const std::vector<Search*>& searches, const Ids& tokens, const RunLimits& limits,
                                  bool log_probs, int threads) {
  check_threads(threads);
  if (std::ssize(searches) != num_groups()) throw std::invalid_argument("expected one search per group");
  int64_t peak_rows = 0;
  for (size_t i = 0; i < searches.size(); ++i) {
    if (!searches[i] || searches[i]->is_done || searches[i]->num_rows != std::ssize(cache_.groups[i].rows))
      throw std::invalid_argument("expected unfinished searches with as many rows as their groups");
    peak_rows += searches[i]->peak_rows;
  }
  if (std::set<Search*>(searches.begin(), searches.end()).size() != searches.size())
    throw std::invalid_argument("expected a different search for each group");
  const Places ones(num_groups(), 1);
  check_step(tokens, ones);
  Run run{.searches = searches, .limits = limits, .log_probs = log_probs, .rows_left = peak_rows};
  run.steps.resize(searches.size());
  const int64_t rows = num_rows();
  const std::vector<Places> workers = partition(searches, workers_for(rows, threads));
  if (workers.size() > 1) read_pending();
  std::vector<Ids> worker_tokens;
  const int32_t* token = tokens.data();
  for (const Places& worker : workers) {
    int64_t count = 0;
    for (const int64_t place : worker) count += std::ssize(cache_.groups[place].rows);
    worker_tokens.emplace_back(token, token + count);
    token += count;
    forward(worker_tokens.size() - 1);
  }
  const auto step = [&](int64_t worker) {
    run_worker(run, workers[worker], worker_tokens[worker], *forwards_[worker], 1);
  };
  begin_step(ones);
  if (workers.size() > 1 && run_workers({std::ssize(workers), step})) return run.steps;
  run_worker(run, all_groups(), tokens, *forwards_[0], threads_for(rows, threads));
  return run.steps;
}

// Returns the groups of each worker: consecutive ones, with about equal numbers of rows.
std::vector<Session::Places> Session::partition(const std::vector<Search*>& searches, int workers) const {
  int64_t all = 0, before = 0;
  for (const Search* search : searches) all += search->peak_rows;
  std::vector<Places> dealt;
  for (size_t i = 0; i < searches.size(); ++i) {
    if (dealt.empty() || before * workers >= all * std::ssize(dealt)) dealt.emplace_back();
    dealt.back().push_back(static_cast<int64_t>(i));
    before += searches[i]->peak_rows;
  }
  return dealt;
}

void Session::run_worker(Run& run, Places groups, Ids tokens, Forward& forward, int threads) try {
  const auto end = Clock::now() + std::chrono::duration<double>(run.limits.seconds);
  for (int64_t steps = 1;; ++steps) {
    Selection selection{1, run.log_probs, {}};
    int64_t first = 0;
    Batch batch = batch_of(groups, {}, tokens);
    std::vector<std::pair<Search*, int64_t>> ruled;  // the search of each row in logit_rows, and the row's place in it
    for (const int64_t place : groups) {
      Search& search = *run.searches[place];
      for (int64_t row = 0; search.rules && row < search.num_rows; ++row) {
        selection.logit_rows.push_back(static_cast<int32_t>(first + row));
        ruled.emplace_back(&search, row);
      }
      selection.k = std::max(selection.k, search.num_candidates);
      const int64_t behind = first + search.num_rows;
      for (const int32_t id : search.suppressed) selection.bans.push_back({id, first, behind, search.keeps_shares});
      if (search.num_tokens < search.min_tokens)
        for (const int32_t id : search.eos()) selection.bans.push_back({id, first, behind, search.keeps_shares});
      first = behind;
    }
    for (const int64_t place : groups) {
      Search& search = *run.searches[place];
      if (search.has_begun() || search.probed.token < 0 || search.probed.position < 0) continue;
      const TokenCache::Group& group = cache_.groups[place];
      selection.logit_rows.push_back(static_cast<int32_t>(batch.count()));
      ruled.emplace_back(&search, -1);
      batch.add(&search.probed.at, 1, search.probed.position, &group, &group.rows[0], false);
      batch.spans.back().stores = false;
    }
    if (!ruled.empty()) {
      forward.logits.reserve(std::ssize(ruled) * model_->vocab_size());
      selection.logits = forward.logits.data();
      selection.choose = [&, vocab = model_->vocab_size()](int64_t row, float* z, int32_t* ids, float* values) {
        const auto at = std::lower_bound(selection.logit_rows.begin(), selection.logit_rows.end(), row);
        const auto [search, place] = ruled[at - selection.logit_rows.begin()];
        if (place >= 0) return search->choose(place, z, vocab, selection.k, ids, values);
        search->probed.probability = std::exp(z[search->probed.token] - log_sum_exp(z, vocab));
      };
    }
    const Candidates& candidates = step_of(groups, {}, std::move(batch), forward, selection, threads);
    Places going;
    int64_t row = 0;
    tokens.clear();
    for (const int64_t place : groups) {
      Search& search = *run.searches[place];
      TokenCache::Group& group = cache_.groups[place];
      const int64_t at = row * candidates.k;
      row += std::ssize(group.rows);
      const Ids& parents = search.advance(candidates.ids.data() + at, candidates.values.data() + at, candidates.k);
      ++run.steps[place];
      if (parents.empty()) {
        run.rows_left -= search.peak_rows;
        continue;
      }
      if (parents.size() != 1 || group.rows.size() != 1) cache_.reorder(group, parents);
      const size_t before = tokens.size();
      tokens.resize(before + parents.size());
      search.last_tokens(tokens.data() + before);
      going.push_back(place);
    }
    groups.swap(going);
    // End the run, so that the next one redistributes the rows and this worker gets some.
    if (groups.empty() || run.rows_left < run.limits.least_rows) run.is_over = true;
    if (run.is_over || steps >= run.limits.max_steps || Clock::now() >= end) return;
    const std::lock_guard lock(run.mutex);
    if (cache_.step_tokens(groups) > cache_.free_tokens()) {
      run.is_over = true;
      return;
    }
    for (const int64_t place : groups) {
      check_length(cache_.groups[place], 1);
      cache_.append(cache_.groups[place], 1);
    }
  }
} catch (...) {
  run.is_over = true;
  throw;
}

void Session::reorder(const std::vector<Ids>& parents) {
  if (parents.size() != cache_.groups.size()) throw std::invalid_argument("expected parents for each group");
  for (size_t i = 0; i < parents.size(); ++i) {
    const int32_t rows = static_cast<int32_t>(cache_.groups[i].rows.size());
    const auto inside = [=](int32_t parent) { return 0 <= parent && parent < rows; };
    if (parents[i].empty() || !std::all_of(parents[i].begin(), parents[i].end(), inside))
      throw std::invalid_argument("expected one or more parents, each of them a row of the group");
  }
  read_pending();
  for (size_t i = 0; i < parents.size(); ++i) cache_.reorder(cache_.groups[i], parents[i]);
}

void Session::release(const Places& groups) {
  read_pending();
  cache_.release(groups);
}

void Session::set_shortlist(const Ids& ids) {
  if (num_groups()) throw std::invalid_argument("expected no rows in the session when the shortlist changes");
  shortlist_ = make_shortlist(*model_, ids);
}

// With a second thread, each stage costs a wait. Only enough work makes up for that.
int Session::threads_for(int64_t rows, int threads) const {
  constexpr int64_t kWork = 4 << 20;  // bytes of weights times number of rows
  return model_->step_bytes() * std::min<int64_t>(rows, 16) < kWork ? 1 : threads;
}

int Session::workers_for(int64_t rows, int threads) const {
  threads = threads_for(rows, threads);
  return threads > 1 && rows >= kRowsPerWorker * threads ? threads : 1;
}

}  // namespace fastformer
