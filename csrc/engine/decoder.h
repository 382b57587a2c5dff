// A decoding session: requests that come and go, stepped together through a packed model, with their searches.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/adapter.h"
#include "engine/forward.h"
#include "engine/packed_model.h"
#include "engine/search.h"
#include "engine/token_cache.h"

namespace fastformer {

// The limits of a run of searches: it ends after max_steps, after the step in which its time runs out, or when fewer
// than least_rows rows continue (counted by the searches' peaks).
struct RunLimits {
  int64_t max_steps = 1;
  double seconds = 0;
  int64_t least_rows = 0;
};

// The tokens of a source in the caller's memory: ids or, for a model without embeddings of sources, states of d_model
// floats each, which another model's encoder returned.
struct Source {
  const int32_t* ids;
  const float* states;
  int64_t count;
};

// Tokens that may follow, and for each of them the index of its chance in the list of chances.
struct Draft {
  Ids ids, parts;
};

using SharedAdapter = std::shared_ptr<const PackedAdapter>;

class Session {
 public:
  using Places = std::vector<int64_t>;  // indices of groups, or a number for each group

  // num_tokens: the capacity of the cache, including sources. type: that of the cache; by default the model's.
  Session(std::shared_ptr<const PackedModel> model, int64_t num_tokens, std::optional<CacheType> type = {});

  // threads: one or more, here and below.
  // Appends a group of one row for each prompt, encodes its source (if the model has an encoder) and prefills its
  // tokens. Some tokens wait for the next step, which reads the weights anyway; their errors are errors of that step.
  // In a model without an encoder, a common prefix of prompts is computed once, in whole blocks, and stays in the cache
  // while there is memory. Returns how many tokens of each prompt were found in the cache.
  // adapters: one for each prompt, or null; empty: none has one.
  std::vector<int64_t> admit(const std::vector<Source>& sources, const std::vector<Ids>& tokens, int threads,
                             const std::vector<SharedAdapter>& adapters = {});
  // Computes the tokens of a group's prompt, which is its only row, once more: writes the probability of each target
  // after its token, in a choice among the ids below `end`, and for pairs of a layer and a head the products of queries
  // with the keys of the source, (pairs, tokens, source).
  void align(int64_t group, const Ids& tokens, const Ids& targets, int32_t end,
             const std::vector<std::pair<int64_t, int64_t>>& pairs, int threads, float* probabilities, float* scores);
  // Appends tokens to the rows, counts[i] to each row of group i, or one to every row if `counts` is empty. Returns the
  // candidates after each token; `selection` counts the tokens. The results are those of as many steps of one token
  // each, bit for bit.
  const Candidates& step(const Ids& tokens, const Places& counts, const Selection& selection, int threads);
  // Appends tokens like `step`, and then the best token after them, again and again: the draft of each group with
  // tokens, which has one row. chances: the logarithm of the chance that a drafted token is right, for equal parts of
  // the range of its probability. A draft ends with the first token that makes the sum of its chances less than
  // least[i][j], where j tokens are before it, or with as many tokens as least[i] has. That last one is not appended.
  std::vector<Draft> draft(const Ids& tokens, const Places& counts, const std::vector<float>& chances,
                           const std::vector<std::vector<float>>& least, int threads);
  // Removes the last tokens of rows, counts[i] of each row of group i. They are tokens that calls of `step` have
  // appended since the group was admitted or reordered, but not the first of them.
  void cut(const Places& counts);
  // Steps each row at least once, until its search is done or the run ends: at its limits, if memory runs out, or when
  // a thread has no more rows. The caller gives the first tokens; the searches choose the rest. Returns the number of
  // steps of each group.
  //
  // With few rows, all threads share each step and wait for each other at each stage. With many rows, each thread is a
  // worker that steps rows of its own: every worker reads all weights, but none waits for another, which also helps if
  // other processes take the cores away now and then. The results are the same, bit for bit.
  std::vector<int64_t> run(const std::vector<Search*>& searches, const Ids& tokens, const RunLimits& limits,
                           bool log_probs, int threads);
  void reorder(const std::vector<Ids>& parents);
  void release(const std::vector<int64_t>& groups);
  // Restricts the choice to these ids, in ascending order; empty: no restriction. Must not be called while there are
  // rows.
  void set_shortlist(const Ids& ids);

  int64_t free_tokens() const { return cache_.free_tokens(); }
  int64_t step_tokens() { return cache_.step_tokens(all_groups()); }
  int64_t shared_tokens() const { return cache_.shared_tokens(); }
  // The part of a prompt that admit() would find in the cache.
  TokenCache::Known known(const Ids& tokens, const SharedAdapter& adapter = {}) const {
    if (cache_.state_bytes()) return {};  // a prefix has no state of its own
    return cache_.known(tokens, adapter ? adapter->root() : PrefixTable::kNoBlock);
  }
  int64_t num_rows() const;
  int64_t source_tokens(int64_t group) const { return cache_.groups.at(group).packed_tokens; }
  int64_t num_groups() const { return std::ssize(cache_.groups); }
  // Whether prompts wait for the next step; see admit.
  bool has_pending() const { return pending_.count() > 0; }
  const PackedModel& model() const { return *model_; }

 private:
  struct Run;  // the data that the workers of one run share

  void check(const std::vector<Source>& sources, const std::vector<Ids>& tokens) const;
  int threads_for(int64_t rows, int threads) const;
  int workers_for(int64_t rows, int threads) const;
  void read_sources(const std::vector<Source>& sources, size_t first, int threads);
  Batch read_prompts(const std::vector<Ids>& tokens, const std::vector<TokenCache::Beginning>& beginnings, size_t first,
                     int threads);
  void read_pending();
  void end_pending();
  // Runs a step of these groups, whose rows have slots for their tokens, together with the pending prompts. If it
  // fails, the rows lose these slots again. counts: see batch_of.
  const Candidates& step_of(const Places& groups, const Places& counts, Batch batch, Forward& forward,
                            const Selection& selection, int threads);
  Places all_groups() const;
  // Throws unless the rows can take these tokens, as many as `counts` says for each group.
  void check_step(const Ids& tokens, const Places& counts);
  // Begins a step: gives the rows slots for so many more tokens.
  void begin_step(const Places& counts);
  void check_length(const TokenCache::Group& group, int64_t tokens) const;
  // Makes a batch of the last tokens of these groups' rows: counts[i] of each row of groups[i], or one if `counts` is
  // empty.
  Batch batch_of(const Places& groups, const Places& counts, const Ids& tokens) const;
  std::vector<Places> partition(const std::vector<Search*>& searches, int workers) const;
  // Runs the steps and searches of these groups, whose rows have slots for their tokens.
  void run_worker(Run& run, Places groups, Ids tokens, Forward& forward, int threads);
  Forward& forward(size_t worker);

  // Prompts that were admitted but not computed yet: the next step reads all weights anyway. Functions that change the
  // groups before that compute them first.
  Batch pending_;
  size_t pending_from_ = 0;  // the index of the first group that may have a pending prompt
  int pending_threads_ = 1;

  std::shared_ptr<const PackedModel> model_;
  TokenCache cache_;
  Shortlist shortlist_;
  std::vector<std::unique_ptr<Forward>> forwards_;
};

}  // namespace fastformer
