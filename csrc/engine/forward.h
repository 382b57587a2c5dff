// Runs tokens through the stacks of a packed model: sources, prompts, and the tokens of a decode step.
//
// A pass is a list of stages (thread_team.h). Each task writes its own output from complete sums, so the bits of a row
// depend neither on other rows nor on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "common/activation.h"
#include "common/thread_team.h"
#include "engine/adapter.h"
#include "engine/lm_head.h"
#include "engine/packed_model.h"
#include "engine/token_cache.h"

namespace fastformer {

// Consecutive tokens of one sequence.
struct Span {
  int64_t begin, end, first_position;
  const TokenCache::Group* group;  // null: tokens of an encoder, which attend to their own span
  const TokenCache::Row* row;
  bool is_prompt;      // false: the tokens of a decode step, each of which is computed as a step of its own would be
  bool stores = true;  // false: a token of a prompt that is computed again, for its logits
  // For an encoder's text from which padding was omitted:
  const int32_t* places = nullptr;  // the original indices of its tokens, ascending; null: 0, 1, 2 ...
  int64_t unseen = 0;               // tokens at its beginning that attend but that no token attends to
};

// The rows of a product's input before they were rounded, which adapters read. x: null: no adapter changes the product.
struct FloatRows {
  const float* x = nullptr;
  int64_t ld = 0;
};

// The product of consecutive rows with a weight.
struct Product {
  const PackedRows* in;
  int64_t first, count;
  const PackedWeight* weight;
  float* out;  // ld: the width of whole panels
};

struct Batch {
  Ids ids, positions, types;           // types: for encoder tokens; empty: all are 0
  std::vector<const float*> embedded;  // embeddings of encoder tokens, d_model floats each; or empty
  std::vector<Span> spans;
  int64_t count() const { return std::ssize(ids); }
  // The number of spans that are decode steps, which come first, and of tokens in them.
  int64_t steps() const;
  int64_t step_tokens() const;
  // tokens: null if they are embedded already.
  void add(const int32_t* tokens, int64_t count, int64_t first_position, const TokenCache::Group* group,
           const TokenCache::Row* row, bool is_prompt);
  void append(const Batch& prompts);
};

// Runs one batch at a time, and owns the buffers for its activations. Several instances may run concurrently on one
// model and one cache, as long as their batches belong to different groups.
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
  // Runs the front of an encoder of speech: features (num_mels, frames) -> embeddings ((frames + 1) / 2, d_model).
  void read_features(const float* features, int64_t frames, int threads, float* embeddings);
  // Where attention to the source writes the products of queries and keys, without their scale: (pairs, rows, keys),
  // for pairs of a layer and a head. null: nowhere.
  struct Probe {
    const std::vector<std::pair<int64_t, int64_t>>& pairs;
    int64_t rows;
    float* scores;
  };
  const Probe* probe = nullptr;
  FloatBuffer logits;  // for a caller that selects tokens itself
  // The bytes of a packed source's keys and values in all layers.
  static int64_t packed_source_bytes(const PackedModel& model, int64_t tokens);
  // Runs prompts, or chunks of them, through the decoder.
  void read_prompts(const Batch& batch, int threads);
  // Runs the tokens of decode steps and returns the candidates after each of them. Prompts that follow in the batch go
  // through in the same pass over the weights; a step may belong to a row whose prompt is among them.
  const Candidates& step(const Batch& batch, const Selection& selection, int threads);

 private:
  // Adds the stages that run a batch through a stack. Afterwards narrow_, or `states` if it is not null, holds the
  // normalised states. In the decoder these are the states of steps only: prompts only need keys and values.
  void add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads, float* states = nullptr);
  struct Chunk {
    int64_t first, count;  // rows of the batch, which are the first rows of narrow_
  };
  // The data that all parts of add_stack share.
  struct Pass {
    const PackedStack& stack;
    const Batch& batch;
    bool is_encoder;
    int threads;
    float* states;  // see add_stack
    int64_t rows;
    // The largest chunk. All sub-layers but attention process the rows in chunks, whose activations stay in the cache.
    // If narrow_ is read afterwards, they process all rows at once.
    int64_t most;
    int64_t spans, steps;  // steps: of an encoder, all spans
    int64_t last_rows;     // the rows that go through the last layers to their ends
    size_t last_keys;      // from this layer on, prompts need no states: it is the last one that makes keys

    bool is_last(size_t layer) const { return layer + 1 == stack.layers.size(); }
    int64_t rows_after(size_t layer) const { return layer >= last_keys ? last_rows : rows; }
    bool is_projected(const PackedModel& model) const { return is_encoder && !model.source_projection.empty(); }
    int64_t parts(const PackedModel& model) const { return is_encoder ? 1 : model.options.decoder_parts(); }
    bool attends_to_source(const PackedModel& model) const { return !is_encoder && model.options.has_encoder(); }
    template <typename F>
    void for_chunks(int64_t count, F&& add) const {
      for (int64_t first = 0; first < count; first += most) add(Chunk{first, std::min(most, count - first)});
    }
  };
  void reserve(const Pass& pass);
  int64_t reserve_experts(const Pass& pass, const Mixture& mixture);
  const Norm* first_norm(const Pass& pass, size_t layer) const;
  void add_input(const Pass& pass, Chunk chunk);
  void add_layer_embeddings(const Pass& pass, Chunk chunk);
  void add_layer_input(const Pass& pass, size_t layer, Chunk chunk);
  void add_qkv(const Pass& pass, size_t layer, Chunk chunk);
  void add_self_attention(const Pass& pass, size_t layer);
  void add_states(const Pass& pass, size_t layer);
  void mix_span(const PackedLayer& weights, const Span& span, int64_t key_head);
  void convolve_span(const PackedLayer& weights, const Span& span, int64_t begin, int64_t end);
  void filter_span(const PackedLayer& weights, const Span& span, int64_t begin, int64_t end);
  void scan_span(const PackedLayer& weights, const Span& span, int64_t head);
  void run_decoder(const Batch& batch, int threads);
  void add_attention_output(const Pass& pass, size_t layer, Chunk chunk);
  void add_cross_attention(const Pass& pass, size_t layer, Chunk chunk);
  void add_feed_forward(const Pass& pass, size_t layer, Chunk chunk);
  void add_experts(const Mixture& mixture, Chunk chunk, int threads);
  void choose_experts(const Mixture& mixture, int64_t row);
  void sort_by_expert(const Mixture& mixture, int64_t rows);
  void combine_experts(const Mixture& mixture, int64_t row);
  void add_products(const std::vector<Product>& products, double work, int threads);
  void add_context_product(const Pass& pass, const PackedLayer& layer, const PackedWeight& out, Chunk chunk);
  void add_projection(const Batch& batch, const PackedWeight& projection, int threads);
  void embed(const Batch& batch, bool is_encoder, int64_t row, float* to) const;
  void add_stores(const Batch& batch, int threads);
  void add_head_norms(const PackedLayer& layer, int64_t rows, int threads);

  void add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads,
                   FloatRows inputs = {});
  void sort_by_adapter(const Batch& batch);
  template <typename F>
  void add_rows(int64_t rows, int threads, F&& row);
  template <typename F>
  void add_heads(const std::vector<Span>& spans, int64_t begin, int64_t end, int64_t heads, int threads,
                 F&& attend_heads);
  // Describes how a sub-layer's output is added to the residual stream x, and what the next sub-layer reads; see join.
  struct Join {
    const Norm* of_sum = nullptr;  // x = of_sum(x + given), which the next sub-layer reads; the others are then null
    const Norm* of_given = nullptr;
    const Norm* next = nullptr;         // the norm before the next sub-layer; null: it reads x unchanged
    bool reads_x_before = false;        // the next sub-layer reads x before `given` is added: a parallel residual
    float* states = nullptr;            // fp32 rows to write instead of narrow_
    bool routes = false;                // the next sub-layer is a mixture, whose router reads fp32
    const Mixture* combines = nullptr;  // `given` is what these experts give
    float scale = 1;                    // the factor for x, with `given` added
  };
  void add_join(const Pass& pass, Chunk chunk, const Norm& own, const Norm& post, Join how);
  void join(int64_t first, int64_t index, const float* given, const Join& how);
  void normalise(const float* x, const Norm& norm, float* out) const;

  // Calls f.operator()<T>() with the type of the keys and values in the cache: float, bfloat16, or Int8 of the type in
  // which prompts attend.
  template <typename F>
  void with_cached_type(F&& f) const;
  // The keys, or values, of a head: T*, or Int8Rows.
  template <typename T>
  auto keys_of(int64_t layer, int64_t head) const;
  template <typename T>
  auto values_of(int64_t layer, int64_t head) const;
  template <typename T>
  void store_cache(int64_t layer, int64_t head, int64_t slot, const float* k, const float* v);
  void place_queries(const PackedLayer& weights, int64_t row, int64_t position, int64_t begin, int64_t end);
  float* values_at(const PackedLayer& weights, int64_t row, int64_t begin, int64_t end);
  template <typename T, typename Change>
  void attend_token(int64_t layer, const float* q, int64_t begin, int64_t end, const int32_t* slots, int64_t count,
                    float* context, float scale2, Change change);
  template <typename T>
  void attend_self(int64_t layer, const Span& span, int64_t begin, int64_t end, bool only_keys);
  template <typename T, typename Head>
  void attend_prompt(int64_t layer, const Span& span, int64_t kv_head);
  template <typename Head>
  void attend_own_span(int64_t layer, const Span& span, int64_t kv_head);
  template <typename T>
  void attend_source(int64_t layer, const Span& span, int64_t begin, int64_t end);
  template <typename Head>
  char* source_head(const TokenCache::Group& group, int64_t layer, int64_t head) const;
  template <typename Head>
  void pack_source(int64_t layer, const Span& span, int64_t head);
  template <typename Head>
  void attend_packed_source(int64_t layer, const Span& span, int64_t head);
  void join_groups(const Batch& batch);

  const PackedModel& model_;
  TokenCache* cache_;  // null: an encoder alone
  Shortlist none_;
  LmHead lm_head_;
  Candidates candidates_;

  std::vector<Stage> stages_;
  // The spans of a batch, those of consecutive rows of a group joined, and how many of them are steps.
  std::vector<Span> joined_;
  int64_t joined_steps_ = 0;
  // For all tokens of a batch: the residual stream, Q, K and V, and the output of attention. For a chunk of them: the
  // output of a product, and the hidden rows of the feed-forward network. Rows that products write are `padded`.
  FloatBuffer x_, qkv_, context_, y_, hidden_;
  FloatBuffer gates_;   // of a layer's input, for all tokens; see PackedLayer
  FloatBuffer inputs_;  // the embeddings of tokens for all layers
  // Of a batch with adapters: the input of a sub-layer, A x, and the rows of each adapter in ascending order.
  FloatBuffer adapted_input_, low_;
  std::vector<std::pair<const PackedAdapter*, std::vector<int32_t>>> adapted_;
  // The operands of products: the input of a sub-layer, and embeddings to be projected. By their size, the outputs of
  // all heads, and the hidden rows of the feed-forward network and of a layer's own input.
  PackedRows narrow_, embedded_, frames_[2];
  std::map<int64_t, PackedRows> heads_, wide_;

  // The experts of a chunk of tokens. A pair is a token and one of its experts; pairs are sorted by expert.
  struct Choice {
    int64_t expert, place;  // place: the index of the pair
    float weight;
  };
  std::vector<Choice> choices_;       // (tokens, experts_per_token)
  std::vector<int64_t> tokens_;       // of pairs
  std::vector<Product> products_[2];  // with both linear maps of experts that have tokens
  FloatBuffer scores_, pair_out_;     // of the router; of pairs
  PackedRows routed_, pairs_, pair_wide_, shared_wide_;
};

// Stands for cached keys and values of 8 bits, with which prompts attend in T.
template <typename T>
struct Int8 {
  using type = T;
};

template <typename F>
void Forward::with_cached_type(F&& f) const {
  if (cache_->type == CacheType::fp32) f.template operator()<float>();
  else if (cache_->type == CacheType::bf16) f.template operator()<bfloat16>();
  else if (model_.options.precision == Precision::fp32) f.template operator()<Int8<float>>();
  else f.template operator()<Int8<bfloat16>>();
}

// Applies an RMS norm to each of `heads` consecutive vectors of the norm's size.
void normalise_heads(const Norm& norm, float eps, int64_t heads, float* x);

// Computes hidden = act(hidden) or, with a gate, act(first half) * second half.
inline void activate_row(Activation activation, float* hidden, int64_t n) {
  using V = Vec<float>;
  if (activation == Activation::clamped_swiglu)  // (clamp(up) + 1) * gate * sigmoid(1.702 * gate), of a gate up to 7
    return for_each_vec<float>(n, [=](int64_t c, int64_t m) {
      const V least(-7.f), zero(0.f);
      const auto below_limit = [=](V x) { return zero - max(least, zero - x); };  // NaN stays NaN
      const V gate = below_limit(V::load(hidden + c, m)), up = max(least, below_limit(V::load(hidden + n + c, m)));
      ((up + V(1.f)) * gate * sigmoid(V(1.702f) * gate)).store(hidden + c, m);
    });
  for_each_vec<float>(n, [=](int64_t c, int64_t m) {
    const Vec<float> x = Vec<float>::load(hidden + c, m);
    const Vec<float> active = activate<float>(activation, x);
    if (is_gated(activation)) (active * Vec<float>::load(hidden + n + c, m)).store(hidden + c, m);
    else active.store(hidden + c, m);
  });
}

// The width of rows that a product writes.
inline int64_t padded(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }

template <typename F>
void Forward::add_rows(int64_t rows, int threads, F&& row) {
  const int64_t tasks = threads == 1 || rows < 8 ? 1 : std::min<int64_t>(rows, threads);
  stages_.push_back({tasks, [=](int64_t task) {
                       for (int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) row(r);
                     }});
}

}  // namespace fastformer
