// A decoding session: requests that come and go, stepped together through a packed model, with their searches.
//
// A step is a list of phases (phases.h) whose tasks each write outputs of their own from whole sums: the bits of a row
// depend neither on its neighbours nor on the number of threads.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "packed_model.h"
#include "phases.h"
#include "search.h"
#include "token_cache.h"
#include "vocabulary.h"

namespace fastformer {

class Session {
 public:
  // num_tokens: what the cache has room for, sources included.
  Session(std::shared_ptr<const PackedModel> model, int64_t num_tokens);

  // Appends a group of one row for each prompt: reads its source (for a model with an encoder) and its tokens.
  void admit(const std::vector<Ids>& sources, const std::vector<Ids>& tokens, int threads);
  // Appends a token to each row.
  const Chosen& step(const Ids& tokens, const Choice& choice, int threads);
  // Steps until a search is done, or max_steps, or so many seconds are over, or memory for another step is lacking; at
  // least once. The first tokens are given, the others the searches choose. Returns how many steps were taken.
  int64_t run(const std::vector<Search*>& searches, Ids tokens, int64_t max_steps, double seconds, bool log_probs,
              int threads);
  void reorder(const std::vector<Ids>& parents);
  void release(const std::vector<int64_t>& groups) { cache_.release(groups); }
  // Only these ids may be said, sorted upward; none: all. Not while there are rows.
  void set_shortlist(const Ids& ids);

  int64_t free_tokens() const { return cache_.free_tokens(); }
  int64_t step_tokens() { return cache_.step_tokens(); }
  int64_t num_rows() const;
  int64_t num_groups() const { return static_cast<int64_t>(cache_.groups.size()); }
  const PackedModel& model() const { return *model_; }

 private:
  // Neighbouring tokens of one sequence, in their order.
  struct Span {
    int64_t begin, end, first_position;
    const TokenCache::Group* group;  // null: an encoder's, which attend to their own span
    const TokenCache::Row* row;
    bool is_prompt;  // else a step's one token
  };
  struct Batch {
    Ids ids, positions;
    std::vector<Span> spans;
    int64_t count() const { return static_cast<int64_t>(ids.size()); }
    void add(const int32_t* tokens, int64_t count, int64_t first_position, const TokenCache::Group* group,
             const TokenCache::Row* row, bool is_prompt);
  };
  void check(const std::vector<Ids>& sources, const std::vector<Ids>& tokens) const;
  int threads_for(int64_t rows, int threads) const;
  void read(const std::vector<Ids>& sources, const std::vector<Ids>& tokens, size_t first, int threads);

  // Adds the phases of a batch's way through a stack, behind which narrow_ holds its normalised states.
  void add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads);
  void store_sources(const Batch& batch, int threads);

  void add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads);
  template <typename F>
  void add_rows(int64_t rows, int threads, F&& row);
  template <typename F>
  void add_heads(const Batch& batch, int threads, F&& head);
  void normalise(int64_t row, const float* delta, const Norm* norm, bool keep);

  template <typename T>
  void attend_self(int64_t layer, const Span& span, int64_t kv_head, int64_t window);
  template <typename T>
  void attend_own_span(const Span& span, int64_t kv_head, int64_t window);
  template <typename T>
  void attend_source(int64_t layer, const Span& span, int64_t kv_head);

  std::shared_ptr<const PackedModel> model_;
  TokenCache cache_;
  Vocabulary vocabulary_;
  Chosen chosen_;

  std::vector<Phase> phases_;
  // Of the tokens of a batch: the residual stream, what a product gives, queries with keys and values, what attention
  // gives, the inside of the feed-forward network; each row ld_ of that apart.
  Floats x_, y_, qkv_, context_, hidden_;
  PackedRows narrow_, wide_;
};

}  // namespace fastformer
