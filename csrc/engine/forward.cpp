#include "engine/forward.h"

#include <algorithm>
#include <cmath>

#include "common/activation.h"
#include "common/rows.h"

namespace fastformer {
namespace {

constexpr int64_t kChunk = 256;  // rows; smaller chunks would read the weights too often

// Computes hidden = act(hidden) or, with a gate, act(first half) * second half.
void activate_row(Activation activation, float* hidden, int64_t n) {
  for_each_vec<float>(n, [=](int64_t c, int64_t m) {
    const Vec<float> x = Vec<float>::load(hidden + c, m);
    const Vec<float> active = activate<float>(activation, x);
    if (is_gated(activation)) (active * Vec<float>::load(hidden + n + c, m)).store(hidden + c, m);
    else active.store(hidden + c, m);
  });
}

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

void Forward::read_prompts(const Batch& batch, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  run_stages(stages_, threads);
}

const Candidates& Forward::step(const Batch& batch, const Selection& selection, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  lm_head_.add_stages(narrow_, batch.steps(), selection, threads, candidates_, stages_);
  run_stages(stages_, threads);
  return candidates_;
}

// ---- the stages ----

void Forward::add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads) {
  const int64_t panels = weight.num_panels, ld = panels * kPanelColumns;
  // A task reads consecutive panels and prefetches beyond its last one, so fewer tasks are better.
  const int64_t tasks = std::min<int64_t>(panels, threads);
  stages_.push_back({tasks,
                     [=, &in, &weight](int64_t task) {
                       const int64_t begin = panels * task / tasks, end = panels * (task + 1) / tasks;
                       gemm(in, rows, weight, begin, end, out + begin * kPanelColumns, ld);
                     },
                     gemm_work(in, rows, weight)});
}

template <typename F>
void Forward::add_rows(int64_t rows, int threads, F&& row) {
  const int64_t tasks = threads == 1 || rows < 8 ? 1 : std::min<int64_t>(rows, threads);
  stages_.push_back({tasks, [=](int64_t task) {
                       for (int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) row(r);
                     }});
}

// Adds a stage that calls attend_heads(span, begin, end) for the kv heads of the spans [begin, end), some in each task.
template <typename F>
void Forward::add_heads(const Batch& batch, int64_t begin, int64_t end, int threads, F&& attend_heads) {
  const int64_t heads = model_.options.num_kv_heads, all = (end - begin) * heads;
  const int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(all, 2 * threads);
  stages_.push_back({tasks, [=, &batch](int64_t task) {
                       const int64_t last = all * (task + 1) / tasks;
                       for (int64_t i = all * task / tasks, next; i < last; i = next) {
                         next = std::min((i / heads + 1) * heads, last);
                         attend_heads(batch.spans[begin + i / heads], i % heads, i % heads + next - i);
                       }
                     }});
}

void Forward::normalise(const float* x, const Norm& norm, float* out) const {
  const ModelOptions& o = model_.options;
  normalise_row<false, false, float, float, float>(x, nullptr, nullptr, norm.weight.data(), norm.bias.data(), o.eps,
                                                   o.rms_norm, o.d_model, nullptr, out);
}

// Processes row `place` of narrow_ and row `first + place` of the residual stream. given: null if there is no sub-layer
// before.
void Forward::join(int64_t first, int64_t place, const float* given, const Join& how) {
  const ModelOptions& o = model_.options;
  const int64_t dim = o.d_model, row = first + place;
  float* x = x_.data() + row * dim;
  static thread_local std::vector<float> scratch;
  scratch.resize(2 * dim);
  float *normed = scratch.data(), *other = normed + dim;
  const auto store = [&](const float* states) {
    if (how.states) std::copy_n(states, dim, how.states + row * dim);
    else narrow_.store(place, states);
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
  if (given && how.next && !how.reads_x_before) return take_in(*how.next, x, normed);
  if (given && !how.reads_x_before) add();
  if (how.next) normalise(x, *how.next, normed);
  store(how.next ? normed : x);
  if (given && how.reads_x_before) add();
}

void Forward::add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads, float* states) {
  const ModelOptions& o = model_.options;
  const int64_t rows = batch.count(), dim = o.d_model, wide = padded(dim), q_dim = o.q_dim();
  const int64_t inner = stack.layers.empty() ? 0 : stack.layers[0].ff1.num_panels * kPanelColumns;
  const int64_t d_ff = stack.layers.empty() ? 1 : stack.layers[0].ff2.k;
  // All sub-layers but attention process the rows in chunks, whose activations stay in the cache. If narrow_ is read
  // afterwards, they process all rows at once.
  const int64_t most = states ? std::min(kChunk, rows) : rows;
  x_.reserve(rows * dim), context_.reserve(rows * q_dim);
  y_.reserve((model_.source_projection.empty() ? most : rows) * wide), hidden_.reserve(most * inner);
  // Storing the keys and values of sources uses this buffer as well.
  qkv_.reserve(rows * padded(o.qkv_dim()));
  narrow_.resize(most, dim, o.precision), heads_.resize(most, q_dim, o.precision);
  wide_.resize(most, d_ff, o.precision);
  stages_.clear();

  const auto spans = static_cast<int64_t>(batch.spans.size());
  const int64_t steps = is_encoder ? spans : batch.steps();
  const bool sums = o.norm_placement == NormPlacement::sum, in_front = o.has_norms_in_front();
  const auto first_norm_of = [&](size_t layer) -> const Norm* {
    if (layer == 0 && is_encoder && o.skips_first_norm) return nullptr;
    if (layer < stack.layers.size()) return in_front ? &stack.layers[layer].norm1 : nullptr;
    return sums || stack.final_norm.empty() ? nullptr : &stack.final_norm[0];
  };
  // Projects the rows of narrow_ from `first` on to the layer's queries, keys and values.
  const auto project_states = [&](size_t layer, int64_t first, int64_t count) {
    if (layer < stack.layers.size())
      add_product(narrow_, stack.layers[layer].qkv, qkv_.data() + first * padded(o.qkv_dim()), count, threads);
  };
  const auto project_context = [&](const PackedWeight& out, int64_t first, int64_t count) {
    add_rows(count, threads, [=, this](int64_t r) { heads_.store(r, context_.data() + (first + r) * q_dim); });
    add_product(heads_, out, y_.data(), count, threads);
  };
  const bool is_projected = is_encoder && !model_.source_projection.empty();
  if (is_projected) add_projection(batch, model_.source_projection[0], threads);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    const Join how{.next = first_norm_of(0), .states = stack.layers.empty() ? states : nullptr};
    add_rows(count, threads, [=, this, &batch](int64_t r) {
      if (!is_projected) embed(batch, is_encoder, first + r, x_.data() + (first + r) * dim);
      join(first, r, nullptr, how);
    });
    project_states(0, first, count);
  }
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    const PackedLayer& layer = stack.layers[i];
    const auto place = static_cast<int64_t>(i);
    const bool is_last = i + 1 == stack.layers.size();
    if (layer.norms_all_heads(o)) add_head_norms(layer, rows, threads);
    with_cache_type(o.precision, [&]<typename T>() {
      if (is_encoder)
        return add_heads(batch, 0, spans, threads, [=, this](const Span& span, int64_t begin, int64_t end) {
          for (int64_t head = begin; head < end; ++head) attend_own_span<T>(place, span, head);
        });
      // Prompts come first, because steps may attend to their keys.
      for (const auto& [from, to] : {std::pair(steps, spans), std::pair<int64_t, int64_t>(0, steps)})
        if (from < to)
          add_heads(batch, from, to, threads, [=, this](const Span& span, int64_t begin, int64_t end) {
            attend_self<T>(place, span, begin, end, is_last && span.is_prompt);
          });
    });
    const int64_t going = is_last && !is_encoder ? steps : rows;  // each step has one row
    for (int64_t first = 0; first < going; first += most) {
      const int64_t count = std::min(most, going - first);
      const auto finish = [&](const Norm& own, const Norm& post, const Norm* next, bool reads_x_before = false,
                              float* last = nullptr) {
        const Join how = sums ? Join{.of_sum = &own, .states = last}
                              : Join{nullptr, o.has_norms_behind() ? &post : nullptr, next, reads_x_before, last};
        add_rows(count, threads, [=, this](int64_t r) { join(first, r, y_.data() + r * wide, how); });
      };
      project_context(layer.out, first, count);
      finish(layer.norm1, layer.post_norm1, in_front ? &layer.norm2 : nullptr, o.parallel_residual);
      if (!is_encoder && o.has_encoder()) {
        add_product(narrow_, layer.cross_q, qkv_.data(), count, threads);
        with_cache_type(o.precision, [&]<typename T>() {
          add_heads(
              batch, 0, is_last ? steps : spans, threads,
              [=, this](const Span& span, int64_t begin, int64_t end) { attend_source<T>(place, span, begin, end); });
        });
        project_context(layer.cross_out, first, count);
        finish(layer.norm2, layer.post_norm2, in_front ? &layer.norm3 : nullptr);
      }
      add_product(narrow_, layer.ff1, hidden_.data(), count, threads);
      add_rows(count, threads, [=, this](int64_t r) {
        activate_row(o.activation, hidden_.data() + r * inner, d_ff);
        wide_.store(r, hidden_.data() + r * inner);
      });
      add_product(wide_, layer.ff2, y_.data(), count, threads);
      const bool has_third = !is_encoder && o.has_encoder();
      finish(has_third ? layer.norm3 : layer.norm2, layer.post_norm2, first_norm_of(i + 1), false,
             is_last ? states : nullptr);
      project_states(i + 1, first, count);
    }
  }
  if (sums && states && !stack.final_norm.empty())
    add_rows(rows, threads,
             [=, this, &stack](int64_t r) { normalise(states + r * dim, stack.final_norm[0], states + r * dim); });
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
    float* q = qkv_.data() + r * padded(o.qkv_dim());
    normalise_heads(layer.q_norm[0], o.eps, 1, q);
    normalise_heads(layer.k_norm[0], o.eps, 1, q + o.q_dim());
  });
}

// Computes the keys and values of sources for all layers of the decoder.
void Forward::add_stores(const Batch& batch, int threads) {
  const ModelOptions& o = model_.options;
  const int64_t rows = batch.count(), dim = o.head_dim, kv_dim = o.kv_dim(), ld = padded(2 * kv_dim);
  for (size_t i = 0; i < model_.decoder.layers.size(); ++i) {
    add_product(narrow_, model_.decoder.layers[i].cross_kv, qkv_.data(), rows, threads);
    with_cache_type(o.precision, [&]<typename T>() {
      add_heads(batch, 0, batch.spans.size(), threads, [=, this](const Span& span, int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head)
          for (int64_t t = span.begin; t < span.end; ++t) {
            const float* from = qkv_.data() + t * ld + head * dim;
            store_cache<T>(static_cast<int64_t>(i), head, span.group->source[t - span.begin], from, from + kv_dim);
          }
      });
    });
  }
}

}  // namespace fastformer
