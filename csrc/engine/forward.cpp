#include "engine/forward.h"

#include <algorithm>
#include <cmath>

#include "common/rows.h"
#include "engine/block_attention.h"

namespace fastformer {
namespace {

int64_t padded(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }

// f.operator()<T>() for what the keys and values are kept as: fp32, and bf16 for what is smaller.
template <typename F>
void with_cache_type(Precision precision, F&& f) {
  if (precision == Precision::fp32) f.template operator()<float>();
  else f.template operator()<bfloat16>();
}

template <typename T>
void store_cache_row(const float* from, int64_t n, T* to) {
  for_each_vec<float>(n, [=](int64_t c, int64_t m) { Vec<float>::load(from + c, m).store(to + c, m); });
}

// hidden = act(hidden); with a gate the first half times what it gates.
void activate_row(Activation activation, float* hidden, int64_t n) {
  for_each_vec<float>(n, [=](int64_t c, int64_t m) {
    const Vec<float> x = Vec<float>::load(hidden + c, m);
    const Vec<float> active = activate<float>(activation, x);
    if (is_gated(activation)) (active * Vec<float>::load(hidden + n + c, m)).store(hidden + c, m);
    else active.store(hidden + c, m);
  });
}

// Queries as the cache has its keys.
template <typename T>
const T* as_cached(const float* q, int64_t n) {
  if constexpr (std::is_same_v<T, float>) return q;
  else {
    static thread_local std::vector<T> row;
    row.resize(n);
    store_cache_row(q, n, row.data());
    return row.data();
  }
}

// Of the scores of a head, in powers of two.
float score_scale(int64_t dim) { return 1.44269504f / std::sqrt(static_cast<float>(dim)); }

// What a thread needs for the queries of one head together.
template <typename T>
struct HeadScratch {
  std::vector<T> keys, values;
  PackedHead<T> packed;
};
template <typename T>
HeadScratch<T>& head_scratch(int64_t elements) {
  static thread_local HeadScratch<T> scratch;
  if (static_cast<int64_t>(scratch.keys.size()) < elements)
    scratch.keys.resize(elements), scratch.values.resize(elements);
  return scratch;
}

}  // namespace

void Batch::add(const int32_t* tokens, int64_t count, int64_t first_position, const TokenCache::Group* group,
                const TokenCache::Row* row, bool is_prompt) {
  const int64_t begin = this->count();
  ids.insert(ids.end(), tokens, tokens + count);
  for (int64_t i = 0; i < count; ++i) positions.push_back(static_cast<int32_t>(first_position + i));
  spans.push_back({begin, begin + count, first_position, group, row, is_prompt});
}

// ---- what it computes ----

void Forward::read_sources(const Batch& batch, int threads) {
  add_stack(model_.encoder, batch, true, threads);
  add_stores(batch, threads);
  run_stages(stages_, threads);
}

void Forward::read_prompts(const Batch& batch, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  run_stages(stages_, threads);
}

const Candidates& Forward::step(const Batch& batch, const Selection& selection, int threads) {
  add_stack(model_.decoder, batch, false, threads);
  lm_head_.add_stages(narrow_, batch.count(), selection, threads, candidates_, stages_);
  run_stages(stages_, threads);
  return candidates_;
}

// ---- the stages ----

void Forward::add_product(const PackedRows& in, const PackedWeight& weight, float* out, int64_t rows, int threads) {
  const int64_t panels = weight.num_panels, ld = panels * kPanelColumns;
  // A task reads neighbouring panels, and fetches beyond its last one: the fewer the better.
  const int64_t tasks = std::min<int64_t>(panels, threads);
  stages_.push_back({tasks, [=, &in, &weight](int64_t task) {
                       const int64_t begin = panels * task / tasks, end = panels * (task + 1) / tasks;
                       gemm(in, rows, weight, begin, end, out + begin * kPanelColumns, ld);
                     }});
}

template <typename F>
void Forward::add_rows(int64_t rows, int threads, F&& row) {
  const int64_t tasks = threads == 1 || rows < 8 ? 1 : std::min<int64_t>(rows, threads);
  stages_.push_back({tasks, [=](int64_t task) {
                       for (int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) row(r);
                     }});
}

// Calls attend_heads(span, begin, end) for the kv heads of each span, a task's share of them at a time.
template <typename F>
void Forward::add_heads(const Batch& batch, int threads, F&& attend_heads) {
  const int64_t heads = model_.options.num_kv_heads, all = static_cast<int64_t>(batch.spans.size()) * heads;
  const int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(all, 2 * threads);
  stages_.push_back({tasks, [=, &batch](int64_t task) {
                       const int64_t last = all * (task + 1) / tasks;
                       for (int64_t i = all * task / tasks, next; i < last; i = next) {
                         next = std::min((i / heads + 1) * heads, last);
                         attend_heads(batch.spans[i / heads], i % heads, i % heads + next - i);
                       }
                     }});
}

// The residual stream takes in what a sub-layer gave, and goes on to the next one: normalised, as it is for pre-norm
// (keep), or as the stream itself for post-norm.
void Forward::normalise(int64_t row, const float* delta, const Norm* norm, bool keep) {
  const ModelOptions& o = model_.options;
  float* x = x_.data() + row * o.d_model;
  static thread_local std::vector<float> scratch;
  scratch.resize(o.d_model);
  if (!norm) return narrow_.store(row, x);
  float* sum = keep ? x : scratch.data();
  float* out = keep ? scratch.data() : x;
  const float *weight = norm->weight.data(), *bias = norm->bias.data();
  if (delta)
    normalise_row<false, true, float, float, float>(delta, x, nullptr, weight, bias, o.eps, o.rms_norm, o.d_model, sum,
                                                    out);
  else
    normalise_row<false, false, float, float, float>(x, nullptr, nullptr, weight, bias, o.eps, o.rms_norm, o.d_model,
                                                     sum, out);
  narrow_.store(row, out);
}

void Forward::add_stack(const PackedStack& stack, const Batch& batch, bool is_encoder, int threads) {
  const ModelOptions& o = model_.options;
  const int64_t rows = batch.count(), dim = o.d_model, wide = padded(dim);
  const int64_t inner = stack.layers.empty() ? 0 : stack.layers[0].ff1.num_panels * kPanelColumns;
  const int64_t d_ff = stack.layers.empty() ? 1 : stack.layers[0].ff2.k;
  x_.reserve(rows * dim), y_.reserve(rows * wide), context_.reserve(rows * dim);
  hidden_.reserve(rows * inner);
  // The stored keys and values of sources go through here as well.
  qkv_.reserve(rows * padded(dim + 2 * o.kv_dim()));
  narrow_.resize(rows, dim, o.precision), wide_.resize(rows, d_ff, o.precision);
  stages_.clear();

  const Norm* final_norm = stack.final_norm.empty() ? nullptr : &stack.final_norm[0];
  const auto first_norm_of = [&](size_t layer) -> const Norm* {
    return layer < stack.layers.size() ? &stack.layers[layer].norm1 : final_norm;
  };
  const Norm* first = o.norm_first ? first_norm_of(0) : nullptr;
  add_rows(rows, threads, [=, this, &batch](int64_t r) {
    model_.embed(is_encoder, batch.ids[r], batch.positions[r], x_.data() + r * dim);
    normalise(r, nullptr, first, true);
  });
  const auto finish = [&](const Norm* own, const Norm* next) {
    const Norm* norm = o.norm_first ? next : own;
    add_rows(rows, threads, [=, this](int64_t r) { normalise(r, y_.data() + r * wide, norm, o.norm_first); });
  };
  const auto project_context = [&](const PackedWeight& out) {
    add_rows(rows, threads, [=, this](int64_t r) { narrow_.store(r, context_.data() + r * dim); });
    add_product(narrow_, out, y_.data(), rows, threads);
  };
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    const PackedLayer& layer = stack.layers[i];
    add_product(narrow_, layer.qkv, qkv_.data(), rows, threads);
    with_cache_type(o.precision, [&]<typename T>() {
      add_heads(batch, threads, [=, this, &stack](const Span& span, int64_t begin, int64_t end) {
        if (!is_encoder) return attend_self<T>(static_cast<int64_t>(i), span, begin, end, stack);
        for (int64_t head = begin; head < end; ++head) attend_own_span<T>(span, head, stack);
      });
    });
    project_context(layer.out);
    finish(&layer.norm1, &layer.norm2);
    if (!is_encoder && o.has_encoder()) {
      add_product(narrow_, layer.cross_q, qkv_.data(), rows, threads);
      with_cache_type(o.precision, [&]<typename T>() {
        add_heads(batch, threads, [=, this](const Span& span, int64_t begin, int64_t end) {
          attend_source<T>(static_cast<int64_t>(i), span, begin, end);
        });
      });
      project_context(layer.cross_out);
      finish(&layer.norm2, &layer.norm3);
    }
    add_product(narrow_, layer.ff1, hidden_.data(), rows, threads);
    add_rows(rows, threads, [=, this](int64_t r) {
      activate_row(o.activation, hidden_.data() + r * inner, d_ff);
      wide_.store(r, hidden_.data() + r * inner);
    });
    add_product(wide_, layer.ff2, y_.data(), rows, threads);
    const bool has_third = !is_encoder && o.has_encoder();
    finish(has_third ? &layer.norm3 : &layer.norm2, first_norm_of(i + 1));
  }
}

// The keys and values of sources for all layers of the decoder.
void Forward::add_stores(const Batch& batch, int threads) {
  const ModelOptions& o = model_.options;
  const int64_t rows = batch.count(), dim = o.head_dim(), kv_dim = o.kv_dim(), ld = padded(2 * kv_dim);
  for (size_t i = 0; i < model_.decoder.layers.size(); ++i) {
    add_product(narrow_, model_.decoder.layers[i].cross_kv, qkv_.data(), rows, threads);
    with_cache_type(o.precision, [&]<typename T>() {
      add_heads(batch, threads, [=, this](const Span& span, int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head)
          for (int64_t t = span.begin; t < span.end; ++t) {
            const float* from = qkv_.data() + t * ld + head * dim;
            const int64_t slot = span.group->source[t - span.begin];
            store_cache_row(from, dim, keys_of<T>(i, head) + slot * dim);
            store_cache_row(from + kv_dim, dim, values_of<T>(i, head) + slot * dim);
          }
      });
    });
  }
}

// ---- attention: the tokens of a span, the query heads of the kv heads [begin, end) ----

template <typename T>
T* Forward::keys_of(int64_t layer, int64_t head) const {
  return reinterpret_cast<T*>(cache_.keys(layer, head));
}

template <typename T>
T* Forward::values_of(int64_t layer, int64_t head) const {
  return reinterpret_cast<T*>(cache_.keys(layer, head) + cache_.values_offset());
}

// One token's queries, the row q of them all, against those of its keys and values that `slots` says.
template <typename T, typename Bias>
void Forward::attend_token(int64_t layer, const float* q, int64_t begin, int64_t end, const int32_t* slots,
                           int64_t count, float* context, Bias bias) {
  const int64_t dim = model_.options.head_dim(), group = model_.options.num_heads / model_.options.num_kv_heads;
  const int64_t first = begin * group, heads = (end - begin) * group;
  const int64_t next_head = cache_.head_stride() / static_cast<int64_t>(sizeof(T));
  const T* queries = as_cached<T>(q + first * dim, heads * dim);
  attend_heads<T, float>({queries, dim}, {keys_of<T>(layer, begin), next_head, dim},
                         {values_of<T>(layer, begin), next_head, dim}, heads, group, BySlot{slots, 1}, count, dim,
                         score_scale(dim), {context + first * dim, dim},
                         [=](int64_t h, float* scores) { bias(first + h, scores); });
}

template <typename T>
void Forward::attend_self(int64_t layer, const Span& span, int64_t begin, int64_t end, const PackedStack& stack) {
  const ModelOptions& o = model_.options;
  const int64_t dim = o.head_dim(), ld = padded(o.d_model + 2 * o.kv_dim()), group = o.num_heads / o.num_kv_heads;
  for (int64_t t = span.begin; t < span.end; ++t) {
    const int64_t position = span.first_position + t - span.begin, slot = span.row->slots[position];
    float *q = qkv_.data() + t * ld, *k = q + o.d_model, *v = k + o.kv_dim();
    if (model_.is_rotary()) {
      const float *cos = model_.cos(position), *sin = model_.sin(position);
      const auto turn = [&](float* x) {
        if (o.rotary_interleaved) rotate_neighbours<float>(x, cos, sin, dim / 2, x);
        else rotate_halves<float>(x, cos, sin, dim / 2, x);
      };
      for (int64_t h = begin * group; h < end * group; ++h) turn(q + h * dim);
      for (int64_t head = begin; head < end; ++head) turn(k + head * dim);
    }
    for (int64_t head = begin; head < end; ++head) {
      store_cache_row(k + head * dim, dim, keys_of<T>(layer, head) + slot * dim);
      store_cache_row(v + head * dim, dim, values_of<T>(layer, head) + slot * dim);
    }
  }
  if (span.is_prompt) {
    for (int64_t head = begin; head < end; ++head) attend_prompt<T>(layer, span, head, stack);
    return;
  }
  const int64_t position = span.first_position;
  const int64_t first = stack.window < 0 ? 0 : std::max<int64_t>(0, position - stack.window);
  const int64_t count = position + 1 - first;
  const PositionBias* bias = stack.position_bias ? &stack.position_bias : nullptr;
  attend_token<T>(layer, qkv_.data() + span.begin * ld, begin, end, span.row->slots.data() + first, count,
                  context_.data() + span.begin * o.d_model, [=](int64_t h, float* scores) {
                    if (bias) bias->add_to(h, position, first, count, scores);
                  });
}

// The queries of one kv head together, which the cache holds by now.
template <typename T>
void Forward::attend_prompt(int64_t layer, const Span& span, int64_t kv_head, const PackedStack& stack) {
  const ModelOptions& o = model_.options;
  const int64_t window = stack.window;
  const PositionBias* bias = stack.position_bias ? &stack.position_bias : nullptr;
  const int64_t dim = o.head_dim(), ld = padded(o.d_model + 2 * o.kv_dim()), group = o.num_heads / o.num_kv_heads;
  const T *keys = keys_of<T>(layer, kv_head), *values = values_of<T>(layer, kv_head);
  const int32_t* slots = span.row->slots.data();
  const int64_t rows = span.end - span.begin, end = span.first_position + rows;
  // The products sum keys in slices of kDepth, which lie alike wherever the prompt was cut.
  const int64_t begin = window < 0 ? 0 : std::max<int64_t>(0, span.first_position - window) / kDepth<T> * kDepth<T>;
  HeadScratch<T>& scratch = head_scratch<T>((end - begin) * dim);
  for (int64_t position = begin; position < end; ++position) {
    std::copy_n(keys + slots[position] * dim, dim, scratch.keys.data() + (position - begin) * dim);
    std::copy_n(values + slots[position] * dim, dim, scratch.values.data() + (position - begin) * dim);
  }
  scratch.packed.pack(scratch.keys.data(), scratch.values.data(), end - begin, dim);
  const auto place = [=](int64_t i) { return span.first_position + i - begin; };
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
    scratch.packed.attend(
        qkv_.data() + span.begin * ld + h * dim, ld, rows, score_scale(dim),
        [=](int64_t i) { return window < 0 ? 0 : std::max<int64_t>(0, place(i) - window); },
        [=](int64_t i) { return place(i) + 1; },
        [=](int64_t i, int64_t key, int64_t count, float* x) {
          if (bias) bias->add_to(h, place(i), key, count, x);
        },
        context_.data() + span.begin * o.d_model + h * dim, o.d_model);
}

template <typename T>
void Forward::attend_own_span(const Span& span, int64_t kv_head, const PackedStack& stack) {
  const ModelOptions& o = model_.options;
  const int64_t window = stack.window;
  const PositionBias* bias = stack.position_bias ? &stack.position_bias : nullptr;
  const int64_t dim = o.head_dim(), ld = padded(o.d_model + 2 * o.kv_dim()), group = o.num_heads / o.num_kv_heads;
  const int64_t length = span.end - span.begin;
  HeadScratch<T>& scratch = head_scratch<T>(length * dim);
  for (int64_t t = 0; t < length; ++t) {
    const float* k = qkv_.data() + (span.begin + t) * ld + o.d_model + kv_head * dim;
    store_cache_row(k, dim, scratch.keys.data() + t * dim);
    store_cache_row(k + o.kv_dim(), dim, scratch.values.data() + t * dim);
  }
  scratch.packed.pack(scratch.keys.data(), scratch.values.data(), length, dim);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
    scratch.packed.attend(
        qkv_.data() + span.begin * ld + h * dim, ld, length, score_scale(dim),
        [=](int64_t i) { return window < 0 ? 0 : std::max<int64_t>(0, i - window); },
        [=](int64_t i) { return window < 0 || window >= length ? length : std::min(length, i + window + 1); },
        [=](int64_t i, int64_t key, int64_t count, float* x) {
          if (bias) bias->add_to(h, i, key, count, x);
        },
        context_.data() + span.begin * o.d_model + h * dim, o.d_model);
}

template <typename T>
void Forward::attend_source(int64_t layer, const Span& span, int64_t begin, int64_t end) {
  const ModelOptions& o = model_.options;
  const std::vector<int32_t>& source = span.group->source;
  for (int64_t t = span.begin; t < span.end; ++t)
    attend_token<T>(layer, qkv_.data() + t * padded(o.d_model), begin, end, source.data(),
                    static_cast<int64_t>(source.size()), context_.data() + t * o.d_model, NoBias());
}

}  // namespace fastformer
