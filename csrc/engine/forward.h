// Tokens through the stacks of a packed model: sources, prompts, and the tokens of a step.
//
// It is a list of stages (thread_team.h) in which each task writes its own output from whole sums: the bits of a row
// depend neither on its neighbours nor on the number of threads.

#pragma once

#include <cstdint>
#include <vector>

#include "common/thread_team.h"
#include "engine/lm_head.h"
#include "engine/packed_model.h"
#include "engine/token_cache.h"

namespace fastformer {

// Neighbouring tokens of one sequence, in their order.
struct Span {
  int64_t begin, end, first_position;
  const TokenCache::Group* group;  // null: an encoder's, which attend to their own span
  const TokenCache::Row* row;
  bool is_prompt;  // else a step's one token
  // For an encoder's text from which padding was omitted:
  const int32_t* places = nullptr;  // the positions of its tokens, rising; null: 0, 1, 2 ...
  int64_t unseen = 0;               // tokens at its beginning that attend, and that no token attends to
};

struct Batch {
  Ids ids, positions, types;           // types: of an encoder's tokens; empty: all are 0
  std::vector<const float*> embedded;  // of an encoder's tokens: d_model numbers each, which are read; or empty
  std::vector<Span> spans;
  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  // The steps, which are the first spans, of a token each.
  int64_t steps() const;
  // tokens: null if they are embedded already.
  void add(const int32_t* tokens, int64_t count, int64_t first_position, const TokenCache::Group* group,
           const TokenCache::Row* row, bool is_prompt);
  void append(const Batch& prompts);
};

// Runs one batch at a time, with the buffers between its products. Several instances may run at once with one model and
// one cache, as long as their batches belong to different groups.
class Forward {
 public:
  Forward(const PackedModel& model, const Shortlist& shortlist, TokenCache& cache)
      : model_(model), cache_(&cache), lm_head_(model, shortlist) {}
  // For an encoder alone.
  explicit Forward(const PackedModel& model) : model_(model), cache_(nullptr), lm_head_(model, none_) {}
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

  // Runs sources through the encoder; stores their keys and values for all layers of the decoder.
  void read_sources(const Batch& batch, int threads);
  // Runs texts through the encoder and writes their normalised states to `states`, (tokens, d_model); then runs
  // `finish`.
  void encode(const Batch& batch, int threads, float* states, const Stage& finish);
  // Runs prompts, or pieces of them, through the decoder.
  void read_prompts(const Batch& batch, int threads);
  // Runs a token of each row, and returns the candidates for the next one. Prompts that follow in the batch are read
  // in the same pass over the weights; the steps may be of rows whose prompts they are.
  const Candidates& step(const Batch& batch, const Selection& selection, int threads);

 private:
  // Adds the stages that run a batch through a stack; after them narrow_ holds the normalised states, or `states` if
  // that is not null. In the decoder these are the steps': of a prompt, only keys and values are needed.
  void add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads, float* states = nullptr);
  void add_projection(const Batch& batch, const PackedWeight& projection, int threads);
  void embed(const Batch& batch, bool is_encoder, int64_t row, float* to) const;
  void add_stores(const Batch& batch, int threads);
  void add_head_norms(const PackedLayer& layer, int64_t rows, int threads);

  void add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads);
  template <typename F>
  void add_rows(int64_t rows, int threads, F&& row);
  template <typename F>
  void add_heads(const Batch& batch, int64_t begin, int64_t end, int threads, F&& attend_heads);
  // How a sub-layer's output enters the residual stream x, and what the next sub-layer reads: see join.
  struct Join {
    const Norm* of_sum = nullptr;  // x = of_sum(x + given), and the next one reads that; the others are null then
    const Norm* of_given = nullptr;
    const Norm* next = nullptr;   // in front of the next one; null: it reads x as it is
    bool reads_x_before = false;  // before x takes in what was given: a parallel residual
    float* states = nullptr;      // rows of fp32 that the next one reads instead of narrow_
  };
  void join(int64_t first, int64_t place, const float* given, const Join& how);
  void normalise(const float* x, const Norm& norm, float* out) const;

  template <typename T>
  T* keys_of(int64_t layer, int64_t head) const;
  template <typename T>
  T* values_of(int64_t layer, int64_t head) const;
  template <typename T>
  void store_cache(int64_t layer, int64_t head, int64_t slot, const float* k, const float* v);
  void place_queries(const PackedLayer& weights, int64_t row, int64_t position, int64_t begin, int64_t end);
  template <typename T, typename Change>
  void attend_token(int64_t layer, const float* q, int64_t begin, int64_t end, const int32_t* slots, int64_t count,
                    float* context, float scale2, Change change);
  template <typename T>
  void attend_self(int64_t layer, const Span& span, int64_t begin, int64_t end, bool only_keys);
  template <typename T>
  void attend_prompt(int64_t layer, const Span& span, int64_t kv_head);
  template <typename T>
  void attend_own_span(int64_t layer, const Span& span, int64_t kv_head);
  template <typename T>
  void attend_source(int64_t layer, const Span& span, int64_t begin, int64_t end);

  const PackedModel& model_;
  TokenCache* cache_;  // null: an encoder alone
  Shortlist none_;
  LmHead lm_head_;
  Candidates candidates_;

  std::vector<Stage> stages_;
  // For the tokens of a batch: the residual stream, queries with keys and values, the output of attention. For some of
  // them: the output of a product, and the inner rows of the feed-forward network. Rows of products are `padded`.
  FloatBuffer x_, qkv_, context_, y_, hidden_;
  // The operands of products: a sub-layer's input, all heads' results, the inner rows, and embeddings to be projected.
  PackedRows narrow_, heads_, wide_, embedded_;
};

// Calls f.operator()<T>() for the type of the stored keys and values: fp32, or bf16 for smaller precisions.
template <typename F>
void with_cache_type(Precision precision, F&& f) {
  if (precision == Precision::fp32) f.template operator()<float>();
  else f.template operator()<bfloat16>();
}

// Normalises `heads` neighbouring vectors of a norm's size by their root mean square.
void normalise_heads(const Norm& norm, float eps, int64_t heads, float* x);

// The width of rows that a product writes.
inline int64_t padded(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }

}  // namespace fastformer
