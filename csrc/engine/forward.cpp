#include "engine/forward.h"

#include <algorithm>
#include <cmath>

#include "common/activation.h"
#include "common/rows.h"
#include "engine/int8_head.h"

namespace fastformer {
namespace {

constexpr int64_t kChunk = 256;  // rows; smaller chunks would read the weights too often

// The rows of a product that an adapter changes.
struct Adapted {
  const LowRank* factors;
  const int32_t* rows;
  int64_t count;
};

}  // namespace

void Batch::add(const int32_t* tokens, int64_t count, int64_t first_position, const TokenCache::Group* group,
                const TokenCache::Row* row, bool is_prompt) {
  const int64_t begin = this->count();
  if (tokens) ids.insert(ids.end(), tokens, tokens + count);
  else ids.resize(ids.size() + count);
  for (int64_t i = 0; i < count; ++i) positions.push_back(static_cast<int32_t>(first_position + i));
  spans.push_back({begin, begin + count, first_position, group, row, is_prompt});
}

void Batch::append(const Batch& prompts) {
  const int64_t before = count();
  ids.insert(ids.end(), prompts.ids.begin(), prompts.ids.end());
  positions.insert(positions.end(), prompts.positions.begin(), prompts.positions.end());
  for (Span span : prompts.spans) {
    span.begin += before, span.end += before;
    spans.push_back(span);
  }
}

int64_t Batch::steps() const {
  const auto first_prompt = std::find_if(spans.begin(), spans.end(), [](const Span& span) { return span.is_prompt; });
  return first_prompt - spans.begin();
}

int64_t Batch::step_tokens() const {
  const int64_t count = steps();
  return count ? spans[count - 1].end : 0;
}

// ---- the contents of a batch ----

void Forward::read_sources(const Batch& batch, int threads) {
  add_stack(model_.encoder, batch, true, threads);
  add_stores(batch, threads);
  run_stages(stages_, threads);
}

void Forward::encode(const Batch& batch, int threads, float* states, const Stage& finish) {
  add_stack(model_.encoder, batch, true, threads, states);
  stages_.push_back(finish);
  run_stages(stages_, threads);
}

void Forward::read_features(const float* features, int64_t frames, int threads, float* embeddings) {
  const int64_t mels = model_.num_mels(), dim = model_.options.d_model, wide = padded(dim), half = (frames + 1) / 2;
  // One frame of zeros comes before and after all others, so the operand of a convolution is three consecutive rows.
  hidden_.reserve((frames + 2) * dim), y_.reserve(kChunk * wide), x_.reserve((frames + 2) * mels);
  stages_.clear();
  add_rows(frames + 2, threads, [=, this](int64_t t) {
    for (int64_t m = 0; m < mels; ++m)
      x_.data()[t * mels + m] = t == 0 || t > frames ? 0.f : features[m * frames + t - 1];
    if (t == 0 || t > frames) std::fill_n(hidden_.data() + t * dim, dim, 0.f);
  });
  const auto convolve = [&](int index, const float* from, int64_t step, int64_t rows, float* to, const Table* table) {
    const PackedWeight& weight = model_.front[index];
    frames_[index].resize(kChunk, weight.k, model_.options.precision);
    for (int64_t first = 0; first < rows; first += kChunk) {
      const int64_t count = std::min(kChunk, rows - first);
      add_rows(count, threads, [=, this](int64_t r) { frames_[index].store(r, from + (first + r) * step); });
      add_product(frames_[index], weight, y_.data(), count, threads);
      add_rows(count, threads, [=, this](int64_t r) {
        activate_row(Activation::gelu, y_.data() + r * wide, dim);
        std::copy_n(y_.data() + r * wide, dim, to + (first + r) * dim);
        if (table) table->add_to(first + r, 1, to + (first + r) * dim);
      });
    }
  };
  convolve(0, x_.data(), mels, frames, hidden_.data() + dim, nullptr);
  convolve(1, hidden_.data(), 2 * dim, half, embeddings, &model_.front_positions);
  run_stages(stages_, threads);
}

void Forward::read_prompts(const Batch& batch, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  run_decoder(batch, threads);
}

const Candidates& Forward::step(const Batch& batch, const Selection& selection, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  lm_head_.add_stages(narrow_, batch.step_tokens(), selection, threads, candidates_, stages_);
  run_decoder(batch, threads);
  return candidates_;
}

// ---- the stages ----

void Forward::add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads,
                          FloatRows inputs) {
  const int64_t panels = weight.num_panels, ld = panels * kPanelColumns;
  std::vector<Adapted> adapted;
  int64_t width = 0;
  for (const auto& [adapter, of_adapter] : adapted_) {
    const LowRank* const factors = inputs.x ? adapter->find(weight) : nullptr;
    const int64_t count = std::lower_bound(of_adapter.begin(), of_adapter.end(), rows) - of_adapter.begin();
    if (factors && count > 0) adapted.push_back({factors, of_adapter.data(), count});
    if (factors) width = std::max(width, factors->width());
  }
  if (!adapted.empty()) {
    low_.reserve(rows * width);
    stages_.push_back({threads, [=, this](int64_t task) {
                         for (const auto& [factors, of_adapter, count] : adapted) {
                           const int64_t parts = factors->parts(count), begin = parts * task / threads;
                           factors->shrink(of_adapter, count, begin, parts * (task + 1) / threads, inputs.x, inputs.ld,
                                           low_.data(), width);
                         }
                       }});
  }
  // A task reads consecutive panels and prefetches beyond its last one, so fewer tasks are better.
  const int64_t tasks = std::min<int64_t>(panels, threads);
  stages_.push_back({tasks,
                     [=, this, &in, &weight](int64_t task) {
                       const int64_t begin = panels * task / tasks, end = panels * (task + 1) / tasks;
                       gemm(in, rows, weight, begin, end, out + begin * kPanelColumns, ld);
                       for (const auto& [factors, of_adapter, count] : adapted)
                         factors->expand(of_adapter, count, begin, end, low_.data(), width, out, ld);
                     },
                     gemm_work(in, rows, weight)});
}

// Lists the rows of each adapter.
void Forward::sort_by_adapter(const Batch& batch) {
  adapted_.clear();
  for (const Span& span : batch.spans) {
    const PackedAdapter* const adapter = span.group ? span.group->adapter.get() : nullptr;
    if (!adapter) continue;
    auto it = std::find_if(adapted_.begin(), adapted_.end(), [=](const auto& one) { return one.first == adapter; });
    if (it == adapted_.end()) it = adapted_.emplace(adapted_.end(), adapter, std::vector<int32_t>());
    for (int64_t row = span.begin; row < span.end; ++row) it->second.push_back(static_cast<int32_t>(row));
  }
}

// Adds a stage that calls attend_heads(span, begin, end) for the kv heads of the spans [begin, end), some in each task.
template <typename F>
void Forward::add_heads(const std::vector<Span>& spans, int64_t begin, int64_t end, int64_t heads, int threads,
                        F&& attend_heads) {
  const int64_t all = (end - begin) * heads;
  const int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(all, 2 * threads);
  stages_.push_back({tasks, [=, &spans](int64_t task) {
                       const int64_t last = all * (task + 1) / tasks;
                       for (int64_t i = all * task / tasks, next; i < last; i = next) {
                         next = std::min((i / heads + 1) * heads, last);
                         attend_heads(spans[begin + i / heads], i % heads, i % heads + next - i);
                       }
                     }});
}

void Forward::normalise(const float* x, const Norm& norm, float* out) const {
  const ModelOptions& o = model_.options;
  normalise_row<false, false, float, float, float>(x, nullptr, nullptr, norm.weight.data(), norm.bias.data(), o.eps,
                                                   o.rms_norm, o.d_model, nullptr, out);
}

// Processes row `index` of narrow_ and row `first + index` of the residual stream. given: null if there is no sub-layer
// before.
void Forward::join(int64_t first, int64_t index, const float* given, const Join& how) {
  const ModelOptions& o = model_.options;
  const int64_t dim = o.d_model, row = first + index;
  float* x = x_.data() + row * dim;
  static thread_local std::vector<float> scratch;
  scratch.resize(2 * dim);
  float *normed = scratch.data(), *other = normed + dim;
  const auto store = [&](const float* states) {
    if (!adapted_.empty()) std::copy_n(states, dim, adapted_input_.data() + index * dim);
    if (how.states) std::copy_n(states, dim, how.states + row * dim);
    else narrow_.store(index, states);
    if (how.routes && o.precision != Precision::fp32) routed_.store(index, states);
  };
  const auto take_in = [&](const Norm& norm, float* sum, float* out) {
    normalise_row<false, true, float, float, float>(given, x, nullptr, norm.weight.data(), norm.bias.data(), o.eps,
                                                    o.rms_norm, dim, sum, out);
    store(out);
  };
  const auto add = [&] {
    for_each_vec<float>(dim, [=](int64_t c, int64_t n) {
      (Vec<float>::load(given + c, n) + Vec<float>::load(x + c, n)).store(x + c, n);
    });
  };
  if (how.of_sum) return take_in(*how.of_sum, other, x);
  if (how.of_given) {
    normalise(given, *how.of_given, other);
    given = other;
  }
  if (given && how.next && !how.reads_x_before && how.scale == 1) return take_in(*how.next, x, normed);
  if (given && !how.reads_x_before) add();
  if (how.scale != 1)
    for_each_vec<float>(
        dim, [=](int64_t c, int64_t n) { (Vec<float>::load(x + c, n) * Vec<float>(how.scale)).store(x + c, n); });
  if (how.next) normalise(x, *how.next, normed);
  store(how.next ? normed : x);
  if (given && how.reads_x_before) add();
}

void Forward::add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads, float* states) {
  const int64_t rows = batch.count(), spans = std::ssize(batch.spans);
  const Pass pass{.stack = stack,
                  .batch = batch,
                  .is_encoder = is_encoder,
                  .threads = threads,
                  .states = states,
                  .rows = rows,
                  .most = states ? std::min(kChunk, rows) : rows,
                  .spans = spans,
                  .steps = is_encoder ? spans : batch.steps(),
                  .last_rows = is_encoder ? rows : batch.step_tokens(),
                  .last_keys = is_encoder ? stack.layers.size() : static_cast<size_t>(model_.last_keys)};
  sort_by_adapter(batch);
  reserve(pass);
  stages_.clear();
  if (!is_encoder && model_.options.is_bare) join_groups(batch);

  if (pass.is_projected(model_)) add_projection(batch, model_.source_projection[0], threads);
  pass.for_chunks(rows, [&](Chunk chunk) {
    add_input(pass, chunk);
    if (!is_encoder && model_.layer_input_dim) add_layer_embeddings(pass, chunk);
    add_qkv(pass, 0, chunk);
  });
  for (size_t layer = 0; layer < stack.layers.size(); ++layer) {
    // Behind the last keys, a decoder computes only the steps.
    if (stack.layers[layer].norms_all_heads())
      add_head_norms(stack.layers[layer], layer > pass.last_keys ? pass.last_rows : rows, threads);
    add_self_attention(pass, layer);
    pass.for_chunks(pass.rows_after(layer), [&](Chunk chunk) {
      add_attention_output(pass, layer, chunk);
      if (pass.attends_to_source(model_)) add_cross_attention(pass, layer, chunk);
      add_feed_forward(pass, layer, chunk);
      add_qkv(pass, layer + 1, chunk);
    });
  }
  if (model_.options.norm_placement == NormPlacement::sum && states && !stack.final_norm.empty())
    add_rows(rows, threads, [=, this, &stack, dim = model_.options.d_model](int64_t r) {
      normalise(states + r * dim, stack.final_norm[0], states + r * dim);
    });
}

void Forward::reserve(const Pass& pass) {
  const ModelOptions& o = model_.options;
  const int64_t parts = pass.parts(model_);
  int64_t inner = 0, context = o.q_dim(), qkv = o.qkv_dim(), gates = 0;
  for (const PackedLayer& layer : pass.stack.layers) {
    inner = std::max(inner, layer.ff.inner_columns());
    gates = std::max(gates, layer.gates.n), qkv = std::max(qkv, layer.qkv.n), context = std::max(context, layer.out.k);
    heads_[layer.out.k].resize(pass.most, layer.out.k, o.precision, parts);
    if (layer.ff.ff2.k) wide_[layer.ff.ff2.k].resize(pass.most, layer.ff.ff2.k, o.precision, parts);
    if (layer.mixture) inner = std::max(inner, reserve_experts(pass, layer.mixture));
    if (!layer.input.empty()) wide_[layer.input[0].gate.n].resize(pass.most, layer.input[0].gate.n, o.precision, parts);
  }
  if (!pass.is_encoder && model_.layer_input_dim) {
    inner = std::max(inner, padded(model_.layer_input_dim));
    embedded_.resize(pass.most, o.d_model, o.precision);
    inputs_.reserve(pass.rows * padded(model_.layer_projection.n));
  }
  if (!adapted_.empty()) adapted_input_.reserve(pass.most * o.d_model);
  x_.reserve(pass.rows * o.d_model), context_.reserve(pass.rows * context);
  y_.reserve(parts * (model_.source_projection.empty() ? pass.most : pass.rows) * padded(o.d_model));
  hidden_.reserve(parts * pass.most * inner);
  // Storing the keys and values of sources uses this buffer as well.
  qkv_.reserve(parts * pass.rows * padded(qkv)), gates_.reserve(parts * pass.rows * padded(gates));
  narrow_.resize(pass.most, o.d_model, o.precision, parts);
}

// Returns the norm before a layer or, after the last layer, the final norm; null: there is none.
const Norm* Forward::first_norm(const Pass& pass, size_t layer) const {
  const ModelOptions& o = model_.options;
  if (layer == 0 && pass.is_encoder && o.skips_first_norm) return nullptr;
  if (layer < pass.stack.layers.size()) return o.has_norms_in_front() ? &pass.stack.layers[layer].norm1 : nullptr;
  return o.norm_placement == NormPlacement::sum || pass.stack.final_norm.empty() ? nullptr : &pass.stack.final_norm[0];
}

// Embeds the tokens, if no projection has, and normalises them for the first layer.
void Forward::add_input(const Pass& pass, Chunk chunk) {
  const Join how{.next = first_norm(pass, 0), .states = pass.stack.layers.empty() ? pass.states : nullptr};
  const bool embeds = !pass.is_projected(model_), is_encoder = pass.is_encoder;
  add_rows(chunk.count, pass.threads, [=, this, &batch = pass.batch](int64_t r) {
    float* const x = x_.data() + (chunk.first + r) * model_.options.d_model;
    if (embeds) embed(batch, is_encoder, chunk.first + r, x);
    if (!is_encoder && model_.layer_input_dim) embedded_.store(r, x);
    join(chunk.first, r, nullptr, how);
  });
}

// Projects the rows of narrow_ to a layer's queries, keys and values; after the last layer there is nothing to do.
void Forward::add_qkv(const Pass& pass, size_t layer, Chunk chunk) {
  if (layer == pass.stack.layers.size()) return;
  const PackedLayer& weights = pass.stack.layers[layer];
  const auto multiply = [&](const PackedWeight& weight, const FloatBuffer& out) {
    add_product(narrow_, weight, out.data() + chunk.first * padded(weight.n), chunk.count, pass.threads,
                {adapted_input_.data(), model_.options.d_model});
  };
  multiply(weights.qkv, qkv_);
  if (weights.gates.n) multiply(weights.gates, gates_);
}

void Forward::add_self_attention(const Pass& pass, size_t layer) {
  if (!pass.stack.layers[layer].attends()) return add_states(pass, layer);
  const auto index = static_cast<int64_t>(layer);
  const int64_t heads = pass.stack.layers[layer].num_kv_heads;
  const bool is_last = layer == pass.last_keys;
  if (pass.is_encoder) {
    const auto attend = [=, this, &o = model_.options](const Span& span, int64_t begin, int64_t end) {
      // The bits of a causal text don't depend on what follows, so its length chooses nothing.
      const int64_t keys = o.causal_encoder ? 0 : span.end - span.begin - span.unseen;
      with_head(o.precision, keys, [&]<typename Head>() {
        for (int64_t head = begin; head < end; ++head) attend_own_span<Head>(index, span, head);
      });
    };
    return add_heads(pass.batch.spans, 0, pass.spans, heads, pass.threads, attend);
  }
  with_cached_type([&]<typename T>() {
    const auto attend = [=, this](const Span& span, int64_t begin, int64_t end) {
      attend_self<T>(index, span, begin, end, is_last && span.is_prompt);
    };
    // Prompts come first, because steps may attend to their keys.
    if (pass.steps < pass.spans && layer <= pass.last_keys)
      add_heads(pass.batch.spans, pass.steps, pass.spans, heads, pass.threads, attend);
    if (pass.steps > 0) add_heads(pass.batch.spans, 0, pass.steps, heads, pass.threads, attend);
  });
}

// Projects the outputs of all heads of self-attention, after their gates, or of cross-attention; the result is in y_.
void Forward::add_context_product(const Pass& pass, const PackedLayer& layer, const PackedWeight& out, Chunk chunk) {
  const int64_t dim = out.k, gates_ld = padded(layer.gates.n);
  PackedRows& heads = heads_.at(dim);
  const bool is_gated = &out == &layer.out && layer.attends() && layer.gates.n > 0;
  add_rows(chunk.count, pass.threads, [=, this, &heads](int64_t r) {
    float* const context = context_.data() + (chunk.first + r) * dim;
    const float* const gates = gates_.data() + (chunk.first + r) * gates_ld;
    if (is_gated)
      for_each_vec<float>(dim, [=](int64_t c, int64_t n) {
        (Vec<float>::load(context + c, n) * sigmoid(Vec<float>::load(gates + c, n))).store(context + c, n);
      });
    heads.store(r, context);
  });
  add_product(heads, out, y_.data(), chunk.count, pass.threads, {context_.data() + chunk.first * dim, dim});
}

// Adds the output of a sub-layer, in y_, to the residual stream. `own` is the sub-layer's norm, `post` its second norm
// in models that have one on both sides, `next` the norm before the next sub-layer.
void Forward::add_join(const Pass& pass, Chunk chunk, const Norm& own, const Norm& post, Join how) {
  const ModelOptions& o = model_.options;
  if (o.norm_placement == NormPlacement::sum)
    how = {.of_sum = &own, .states = how.states, .routes = how.routes, .combines = how.combines};
  else if (o.has_norms_behind() && !how.of_given) how.of_given = &post;
  add_rows(chunk.count, pass.threads, [=, this, wide = padded(o.d_model)](int64_t r) {
    if (how.combines) combine_experts(*how.combines, r);
    join(chunk.first, r, y_.data() + r * wide, how);
  });
}

void Forward::add_attention_output(const Pass& pass, size_t layer, Chunk chunk) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = pass.stack.layers[layer];
  add_context_product(pass, weights, weights.out, chunk);
  const Norm* next = o.has_norms_in_front() ? &weights.norm2 : nullptr;
  add_join(pass, chunk, weights.norm1, weights.post_norm1,
           {.next = next, .reads_x_before = o.parallel_residual, .routes = bool(weights.mixture)});
}

void Forward::add_cross_attention(const Pass& pass, size_t layer, Chunk chunk) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = pass.stack.layers[layer];
  const auto index = static_cast<int64_t>(layer);
  add_product(narrow_, weights.cross_q, qkv_.data(), chunk.count, pass.threads);
  if (o.is_bare)
    add_heads(joined_, 0, pass.is_last(layer) ? joined_steps_ : std::ssize(joined_), o.num_kv_heads, pass.threads,
              [=, this](const Span& span, int64_t begin, int64_t end) {
                with_head(model_.options.precision, span.group->packed_tokens, [&]<typename Head>() {
                  for (int64_t head = begin; head < end; ++head) attend_packed_source<Head>(index, span, head);
                });
              });
  else
    with_cached_type([&]<typename T>() {
      add_heads(pass.batch.spans, 0, pass.is_last(layer) ? pass.steps : pass.spans, o.num_kv_heads, pass.threads,
                [=, this](const Span& span, int64_t begin, int64_t end) { attend_source<T>(index, span, begin, end); });
    });
  add_context_product(pass, weights, weights.cross_out, chunk);
  add_join(pass, chunk, weights.norm2, weights.post_norm2,
           {.next = o.has_norms_in_front() ? &weights.norm3 : nullptr, .routes = bool(weights.mixture)});
}

void Forward::add_feed_forward(const Pass& pass, size_t layer, Chunk chunk) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = pass.stack.layers[layer];
  if (weights.mixture) {
    add_experts(weights.mixture, chunk, pass.threads);
  } else {
    const int64_t inner = weights.ff.inner_columns(), d_ff = weights.ff.ff2.k;
    add_product(narrow_, weights.ff.ff1, hidden_.data(), chunk.count, pass.threads, {adapted_input_.data(), o.d_model});
    PackedRows& wide = wide_.at(d_ff);
    add_rows(chunk.count, pass.threads, [=, this, &wide, activation = o.activation](int64_t r) {
      activate_row(activation, hidden_.data() + r * inner, d_ff);
      wide.store(r, hidden_.data() + r * inner);
    });
    add_product(wide, weights.ff.ff2, y_.data(), chunk.count, pass.threads, {hidden_.data(), inner});
  }
  const Norm& own = pass.attends_to_source(model_) ? weights.norm3 : weights.norm2;
  const Mixture* combines = weights.mixture ? &weights.mixture : nullptr;
  if (!weights.input.empty()) {
    add_join(pass, chunk, own, weights.post_norm2, {.combines = combines});
    return add_layer_input(pass, layer, chunk);
  }
  float* states = pass.is_last(layer) ? pass.states : nullptr;
  add_join(pass, chunk, own, weights.post_norm2,
           {.next = first_norm(pass, layer + 1), .states = states, .combines = combines, .scale = weights.scale});
}

void Forward::join_groups(const Batch& batch) {
  joined_.clear();
  joined_steps_ = 0;
  const Span* before = nullptr;
  for (const Span& span : batch.spans) {
    if (before && !span.is_prompt && !before->is_prompt && before->group == span.group) joined_.back().end = span.end;
    else joined_.push_back(span), joined_steps_ += !span.is_prompt;
    before = &span;
  }
}

// Writes the initial residual stream of a token.
void Forward::embed(const Batch& batch, bool is_encoder, int64_t row, float* to) const {
  if (!batch.embedded.empty()) std::copy_n(batch.embedded[row], model_.options.d_model, to);
  else model_.embed(is_encoder, batch.ids[row], batch.types.empty() ? 0 : batch.types[row], batch.positions[row], to);
}

// Does the same for all tokens, if the embeddings are projected.
void Forward::add_projection(const Batch& batch, const PackedWeight& projection, int threads) {
  const int64_t rows = batch.count(), dim = model_.options.d_model;
  embedded_.resize(rows, projection.k, model_.options.precision);
  add_rows(rows, threads, [=, this, &batch, &projection](int64_t r) {
    static thread_local std::vector<float> embedding;
    embedding.resize(projection.k);
    embed(batch, true, r, embedding.data());
    embedded_.store(r, embedding.data());
  });
  add_product(embedded_, projection, y_.data(), rows, threads);
  add_rows(rows, threads, [=, this](int64_t r) { std::copy_n(y_.data() + r * padded(dim), dim, x_.data() + r * dim); });
}

// Normalises queries and keys over all heads together.
void Forward::add_head_norms(const PackedLayer& layer, int64_t rows, int threads) {
  const ModelOptions& o = model_.options;
  add_rows(rows, threads, [=, this, &o, &layer](int64_t r) {
    float* q = qkv_.data() + r * padded(layer.qkv.n);
    normalise_heads(layer.q_norm[0], o.eps, 1, q);
    if (layer.has_keys) normalise_heads(layer.k_norm[0], o.eps, 1, q + layer.q_dim());
  });
}

// Computes the keys and values of sources for all layers of the decoder.
void Forward::add_stores(const Batch& batch, int threads) {
  const ModelOptions& o = model_.options;
  const int64_t rows = batch.count(), dim = o.head_dim, kv_dim = o.kv_dim(), ld = padded(2 * kv_dim);
  for (size_t i = 0; i < model_.decoder.layers.size(); ++i) {
    add_product(narrow_, model_.decoder.layers[i].cross_kv, qkv_.data(), rows, threads);
    if (o.is_bare) {
      add_heads(batch.spans, 0, batch.spans.size(), o.num_kv_heads, threads,
                [=, this](const Span& span, int64_t begin, int64_t end) {
                  with_head(model_.options.precision, span.group->packed_tokens, [&]<typename Head>() {
                    for (int64_t head = begin; head < end; ++head)
                      pack_source<Head>(static_cast<int64_t>(i), span, head);
                  });
                });
      continue;
    }
    with_cached_type([&]<typename T>() {
      add_heads(batch.spans, 0, batch.spans.size(), o.num_kv_heads, threads,
                [=, this](const Span& span, int64_t begin, int64_t end) {
                  for (int64_t head = begin; head < end; ++head)
                    for (int64_t t = span.begin; t < span.end; ++t) {
                      const float* from = qkv_.data() + t * ld + head * dim;
                      store_cache<T>(static_cast<int64_t>(i), head, span.group->source[t - span.begin], from,
                                     from + kv_dim);
                    }
                });
    });
  }
}

}  // namespace fastformer
