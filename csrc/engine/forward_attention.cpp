// The attention of Forward. A call handles the tokens of a span and the query heads of the kv heads [begin, end).

#include <algorithm>
#include <cmath>

#include "common/rows.h"
#include "common/softcap.h"
#include "engine/block_attention.h"
#include "engine/forward.h"
#include "engine/int8_cache.h"
#include "engine/int8_head.h"

namespace fastformer {
namespace {

constexpr float kLog2e = 1.44269504f;

// Converts queries to the type of the cached keys.
template <typename T>
const T* as_cached(const float* q, int64_t n) {
  if constexpr (std::is_same_v<T, float>) return q;
  else {
    static thread_local std::vector<T> row;
    row.resize(n);
    store_row(q, n, row.data());
    return row.data();
  }
}

template <typename T>
constexpr bool kIsInt8 = false;
template <typename T>
constexpr bool kIsInt8<Int8<T>> = true;
// How prompts attend to cached keys and values, if not in bytes.
template <typename T>
struct HeadOf {
  using type = PackedHead<T>;
};
template <typename T>
struct HeadOf<Int8<T>> : HeadOf<T> {};

// A thread's memory for attention of all queries of one head at once.
template <typename Head>
Head& this_threads() {
  static thread_local Head head;
  return head;
}

// Stores `count` keys, `stride` apart, and their values, to_value behind them.
template <typename Head>
void store_rows(Head& packed, int64_t count, int64_t dim, const float* keys, int64_t stride, int64_t to_value,
                bool depends_on_size) {
  packed.reserve(count, dim);
  if constexpr (std::is_same_v<Head, Int8Head>)
    if (!depends_on_size) packed.centre(keys, stride, count);
  for (int64_t i = 0; i < count; ++i) packed.store(i, keys + i * stride, keys + i * stride + to_value);
}

// Changes the products of a query with its keys before the softmax, and returns the score of the head's sink.
struct Scores {
  const PositionBias* bias;
  const std::vector<float>& sinks;
  float factor, cap, scale2;  // scale2: the remaining scale of the scores, times log2(e)

  Scores(const ModelOptions& o, const PackedStack& stack, int64_t layer)
      : bias(stack.position_bias ? &stack.position_bias : nullptr),
        sinks(stack.layers[layer].sinks),
        factor(stack.layers[layer].attention_scale / o.attention_softcap),
        cap(o.attention_softcap),
        scale2(kLog2e * (cap > 0 ? 1 : stack.layers[layer].attention_scale)) {}
  float sink2(int64_t head) const { return sinks.empty() ? kNoSink<float> : kLog2e * sinks[head]; }
  // Whether the softmax changes if all of a query's products grow by the same number.
  bool depends_on_size() const { return cap > 0 || !sinks.empty(); }
  // Changes the products of a head's query with `count` keys from `key` on.
  float operator()(int64_t head, int64_t query, int64_t key, int64_t count, float* scores) const {
    if (bias) bias->add_to(head, query, key, count, scores);
    if (cap > 0) cap_row(scores, count, factor, cap);
    return sink2(head);
  }
  // Does the same for keys with gaps between them, given the original indices of the keys and of the query.
  float operator()(int64_t head, int64_t query, const int32_t* places, int64_t count, float* scores) const {
    for (int64_t i = 0, next; bias && i < count; i = next) {
      next = i + 1;
      while (next < count && places[next] == places[next - 1] + 1) ++next;
      bias->add_to(head, query, places[i], next - i, scores + i);
    }
    if (cap > 0) cap_row(scores, count, factor, cap);
    return sink2(head);
  }
};

}  // namespace

void normalise_heads(const Norm& norm, float eps, int64_t heads, float* x) {
  const auto size = std::ssize(norm.weight);
  for (int64_t h = 0; h < heads; ++h, x += size)
    normalise_row<false, false, float, float, float>(x, nullptr, nullptr, norm.weight.data(), norm.bias.data(), eps,
                                                     true, size, nullptr, x);
}

template <typename T>
auto Forward::keys_of(int64_t layer, int64_t head) const {
  const PackedLayer& weights = model_.decoder.layers[layer];
  char* const memory = cache_->keys(weights.place, head);
  if constexpr (kIsInt8<T>) return Int8Rows(memory, weights.head_dim);
  else return reinterpret_cast<T*>(memory);
}

template <typename T>
auto Forward::values_of(int64_t layer, int64_t head) const {
  const PackedLayer& weights = model_.decoder.layers[layer];
  char* const memory = cache_->keys(weights.place, head) + cache_->values_offset(weights.place);
  if constexpr (kIsInt8<T>) return Int8Rows(memory, weights.head_dim);
  else return reinterpret_cast<T*>(memory);
}

template <typename T>
void Forward::store_cache(int64_t layer, int64_t head, int64_t slot, const float* k, const float* v) {
  const int64_t dim = model_.decoder.layers[layer].head_dim;
  if constexpr (kIsInt8<T>) {
    keys_of<T>(layer, head).store(slot, k);
    values_of<T>(layer, head).store(slot, v);
  } else {
    store_row(k, dim, keys_of<T>(layer, head) + slot * dim);
    store_row(v, dim, values_of<T>(layer, head) + slot * dim);
  }
}

// Attends from the queries of one token, row q, to the keys and values that `slots` lists.
template <typename T, typename Change>
void Forward::attend_token(int64_t layer, const float* q, int64_t begin, int64_t end, const int32_t* slots,
                           int64_t count, float* context, float scale2, Change change) {
  const PackedLayer& weights = model_.decoder.layers[layer];
  const int64_t dim = weights.head_dim, group = model_.options.num_heads / weights.num_kv_heads, place = weights.place;
  const int64_t first = begin * group, heads = (end - begin) * group;
  const auto change_head = [=](int64_t h, float* scores) { return change(first + h, scores); };
  if constexpr (kIsInt8<T>) {
    constexpr int kParts = std::is_same_v<T, Int8<float>> ? 2 : 1;
    char* const keys = cache_->keys(place, begin);
    attend_int8<kParts>(q + first * dim, keys, keys + cache_->values_offset(place), cache_->head_stride(place),
                        end - begin, group, slots, count, dim, scale2, context + first * dim, change_head);
  } else {
    const int64_t next_head = cache_->head_stride(place) / static_cast<int64_t>(sizeof(T));
    const T* queries = as_cached<T>(q + first * dim, heads * dim);
    attend_heads<T, float>({queries, dim}, {keys_of<T>(layer, begin), next_head, dim},
                           {values_of<T>(layer, begin), next_head, dim}, heads, group, BySlot{slots, 1}, count, dim,
                           scale2, {context + first * dim, dim}, change_head);
  }
}

// Normalises and rotates the queries and keys of a token.
void Forward::place_queries(const PackedLayer& weights, int64_t row, int64_t position, int64_t begin, int64_t end) {
  const ModelOptions& o = model_.options;
  const int64_t dim = weights.head_dim, group = o.num_heads / weights.num_kv_heads, q_heads = (end - begin) * group;
  const int64_t k_heads = weights.has_keys ? end - begin : 0;
  float* const all = qkv_.data() + row * padded(weights.qkv.n);
  float *q = all + begin * group * dim, *k = all + weights.q_dim() + begin * dim;
  const auto normalise = [&] {
    if (weights.q_norm.empty() || weights.norms_all_heads()) return;
    normalise_heads(weights.q_norm[0], o.eps, q_heads, q);
    if (k_heads) normalise_heads(weights.k_norm[0], o.eps, k_heads, k);
  };
  if (!o.rotates_before_norms) normalise();
  if (const RotaryTable* rotary = model_.rotary(weights)) {
    for (int64_t h = 0; h < q_heads; ++h) rotary->turn(position, q + h * dim);
    for (int64_t h = 0; h < k_heads; ++h) rotary->turn(position, k + h * dim);
    if (o.query_growth != 0 && position >= o.query_growth_length) {
      const float steps = static_cast<float>(position / o.query_growth_length);
      const float factor = 1 + o.query_growth * std::log(1 + steps);
      for (int64_t i = 0; i < q_heads * dim; ++i) q[i] *= factor;
    }
  }
  if (o.rotates_before_norms) normalise();
}

// Returns the values of all kv heads of a token, and normalises those of some of them. They may be the keys as they are
// before place_queries.
float* Forward::values_at(const PackedLayer& weights, int64_t row, int64_t begin, int64_t end) {
  const int64_t dim = weights.head_dim, kv_dim = weights.kv_dim();
  float* const keys = qkv_.data() + row * padded(weights.qkv.n) + weights.q_dim();
  float* values = keys + kv_dim;
  if (weights.keys_as_values) {
    static thread_local std::vector<float> copied;
    copied.resize(kv_dim);
    values = copied.data();
    std::copy(keys + begin * dim, keys + end * dim, values + begin * dim);
  }
  for (const Norm& norm : weights.v_norm) normalise_heads(norm, model_.options.eps, end - begin, values + begin * dim);
  return values;
}

template <typename T>
void Forward::attend_self(int64_t layer, const Span& span, int64_t begin, int64_t end, bool only_keys) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = model_.decoder.layers[layer];
  const int64_t dim = weights.head_dim, ld = padded(weights.qkv.n), window = weights.window;
  static thread_local std::vector<int32_t> converted;
  for (int64_t t = span.begin; t < span.end; ++t) {
    const int64_t position = span.first_position + t - span.begin;
    const bool stores = span.stores && weights.has_keys;
    const float* const v = stores ? values_at(weights, t, begin, end) : nullptr;
    place_queries(weights, t, position, begin, end);
    if (!stores) continue;
    const float* const k = qkv_.data() + t * ld + weights.q_dim();
    const int64_t slot = *cache_->slots(weights.place, span.row->slots.data() + position, 1, converted);
    for (int64_t head = begin; head < end; ++head) store_cache<T>(layer, head, slot, k + head * dim, v + head * dim);
  }
  if (only_keys) return;
  if (span.is_prompt) {
    // Whole numbers that are cached are multiplied as such, in the models whose sources are.
    constexpr bool is_int8 = std::is_same_v<T, Int8<bfloat16>>;
    const bool in_bytes = is_int8 && o.precision != Precision::bf16 && Int8Head::is_fast();
    for (int64_t head = begin; head < end; ++head) {
      if (!in_bytes) attend_prompt<T, typename HeadOf<T>::type>(layer, span, head);
      else if constexpr (is_int8) attend_prompt<T, Int8Head>(layer, span, head);
    }
    return;
  }
  const Scores change(o, model_.decoder, layer);
  // With several tokens, one head after another, whose keys and values then stay in the cache.
  for (int64_t head = begin, next; head < end; head = next) {
    next = span.end - span.begin > 1 ? head + 1 : end;
    for (int64_t t = span.begin; t < span.end; ++t) {
      const int64_t position = span.first_position + t - span.begin;
      const int64_t first = window < 0 ? 0 : std::max<int64_t>(0, position - window);
      const int64_t count = position + 1 - first;
      const int32_t* slots = cache_->slots(weights.place, span.row->slots.data() + first, count, converted);
      attend_token<T>(layer, qkv_.data() + t * ld, head, next, slots, count, context_.data() + t * weights.q_dim(),
                      change.scale2,
                      [&](int64_t h, float* scores) { return change(h, position, first, count, scores); });
    }
  }
}

// Attends from all queries of one kv head at once. Its keys are already in the cache.
template <typename T, typename Head>
void Forward::attend_prompt(int64_t layer, const Span& span, int64_t kv_head) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = model_.decoder.layers[layer];
  const int64_t window = weights.window;
  const Scores change(o, model_.decoder, layer);
  const int64_t dim = weights.head_dim, ld = padded(weights.qkv.n), group = o.num_heads / weights.num_kv_heads;
  constexpr bool in_bytes = std::is_same_v<Head, Int8Head>, has_scales = kIsInt8<T> && !in_bytes;
  const auto keys = keys_of<T>(layer, kv_head), values = values_of<T>(layer, kv_head);
  const int64_t rows = span.end - span.begin, end = span.first_position + rows;
  // Starting at a slice makes the sums of products independent of how the prompt was split.
  constexpr int64_t kSlice = Head::kSlice;
  const int64_t begin = window < 0 ? 0 : std::max<int64_t>(0, span.first_position - window) / kSlice * kSlice;
  static thread_local std::vector<int32_t> converted;
  const int32_t* slots = cache_->slots(weights.place, span.row->slots.data() + begin, end - begin, converted);
  Head& packed = this_threads<Head>();
  packed.reserve(end - begin, dim);
  static thread_local std::vector<float> of_keys, of_values;  // the scales of int8
  if constexpr (has_scales)  // with a vector of zeros after the last, as the weights have
    for (auto* scales : {&of_keys, &of_values}) scales->assign(end - begin + kPanel, 0.f);
  for (int64_t position = begin; position < end; ++position) {
    const int64_t i = position - begin, slot = slots[i];
    if constexpr (in_bytes) {
      packed.store_bytes(i, keys.numbers(slot), *keys.scale(slot), values.numbers(slot), *values.scale(slot));
    } else if constexpr (kIsInt8<T>) {
      keys.load(slot, packed.key(i)), values.load(slot, packed.value(i));
      of_keys[i] = *keys.scale(slot), of_values[i] = *values.scale(slot);
    } else {
      std::copy_n(keys + slot * dim, dim, packed.key(i)), std::copy_n(values + slot * dim, dim, packed.value(i));
    }
  }
  const float* key_scales = has_scales ? of_keys.data() : nullptr;
  const float* value_scales = has_scales ? of_values.data() : nullptr;
  packed.pack(end - begin);
  const auto place = [=](int64_t i) { return span.first_position + i - begin; };
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
    packed.attend(
        qkv_.data() + span.begin * ld + h * dim, ld, rows, change.scale2,
        [=](int64_t i) { return window < 0 ? 0 : std::max<int64_t>(0, place(i) - window); },
        [=](int64_t i) { return place(i) + 1; },
        [=](int64_t i, int64_t key, int64_t count, float* x) {
          for (int64_t c = 0; key_scales && c < count; ++c) x[c] *= key_scales[key + c];
          return change(h, place(i), key, count, x);
        },
        context_.data() + span.begin * weights.q_dim() + h * dim, weights.q_dim(), false, value_scales);
}

template <typename Head>
void Forward::attend_own_span(int64_t layer, const Span& span, int64_t kv_head) {
  const ModelOptions& o = model_.options;
  const PackedLayer& weights = model_.encoder.layers[layer];
  const int64_t window = weights.window, last = o.causal_encoder ? 0 : window;  // how far a token sees; -1: to the end
  const Scores change(o, model_.encoder, layer);
  const int64_t dim = o.head_dim, ld = padded(o.qkv_dim()), group = o.num_heads / o.num_kv_heads;
  const int64_t length = span.end - span.begin, num_keys = length - span.unseen;
  const int32_t *places = span.places, *keys = places ? places + span.unseen : nullptr;
  Head& packed = this_threads<Head>();
  for (int64_t t = 0; t < length; ++t)
    place_queries(weights, span.begin + t, places ? places[t] : t, kv_head, kv_head + 1);
  const float* first_key = qkv_.data() + (span.begin + span.unseen) * ld + o.q_dim() + kv_head * dim;
  store_rows(packed, num_keys, dim, first_key, ld, o.kv_dim(), change.depends_on_size());
  packed.pack(num_keys);
  const auto attend_rows = [&](int64_t row, int64_t rows, auto first, auto end, auto change_row) {
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
      packed.attend(
          qkv_.data() + (span.begin + row) * ld + h * dim, ld, rows, change.scale2,
          [=](int64_t i) { return first(row + i); }, [=](int64_t i) { return end(row + i); },
          [&](int64_t i, int64_t key, int64_t count, float* x) { return change_row(h, row + i, key, count, x); },
          context_.data() + (span.begin + row) * o.q_dim() + h * dim, o.q_dim());
  };
  // attend() expects rows in the order of their keys, and unseen tokens may have places behind those of the others.
  const auto attend = [&](auto first, auto end, auto change_row) {
    attend_rows(0, span.unseen, first, end, change_row);
    attend_rows(span.unseen, num_keys, first, end, change_row);
  };
  if (!places)
    return attend([=](int64_t i) { return window < 0 ? 0 : std::max<int64_t>(0, i - window); },
                  [=](int64_t i) { return last < 0 ? length : std::min(length, i + last + 1); }, change);
  const auto keys_before = [=](int64_t place) { return std::lower_bound(keys, keys + num_keys, place) - keys; };
  attend([=](int64_t i) { return window < 0 ? 0 : keys_before(places[i] - window); },
         [=](int64_t i) { return last < 0 ? num_keys : keys_before(places[i] + last + 1); },
         [&](int64_t h, int64_t i, int64_t key, int64_t count, float* x) {
           return change(h, places[i], keys + key, count, x);
         });
}

template <typename T>
void Forward::attend_source(int64_t layer, const Span& span, int64_t begin, int64_t end) {
  const ModelOptions& o = model_.options;
  const std::vector<int32_t>& source = span.group->source;
  for (int64_t t = span.begin; t < span.end; ++t)
    attend_token<T>(layer, qkv_.data() + t * padded(o.q_dim()), begin, end, source.data(), std::ssize(source),
                    context_.data() + t * o.q_dim(), kLog2e * o.attention_scale, NoBias());
}

int64_t Forward::packed_source_bytes(const PackedModel& model, int64_t tokens) {
  const ModelOptions& o = model.options;
  int64_t bytes = 0;
  with_head(o.precision, tokens, [&]<typename Head>() { bytes = Head::bytes(tokens, o.head_dim); });
  return round_up(bytes, 64) * o.num_decoder_layers * o.num_kv_heads;
}

// Returns the packed keys and values of a source for a layer and a head.
template <typename Head>
char* Forward::source_head(const TokenCache::Group& group, int64_t layer, int64_t head) const {
  const ModelOptions& o = model_.options;
  return group.packed_source.data() +
         (layer * o.num_kv_heads + head) * round_up(Head::bytes(group.packed_tokens, o.head_dim), 64);
}

template <typename Head>
void Forward::pack_source(int64_t layer, const Span& span, int64_t head) {
  const ModelOptions& o = model_.options;
  const int64_t dim = o.head_dim, ld = padded(2 * o.kv_dim()), count = span.end - span.begin;
  Head& packed = this_threads<Head>();
  store_rows(packed, count, dim, qkv_.data() + span.begin * ld + head * dim, ld, o.kv_dim(), false);
  packed.pack_into(count, source_head<Head>(*span.group, layer, head));
}

// Attends from all rows of a group at once, which read the keys and values together.
template <typename Head>
void Forward::attend_packed_source(int64_t layer, const Span& span, int64_t kv_head) {
  const ModelOptions& o = model_.options;
  const int64_t dim = o.head_dim, ld = padded(o.q_dim()), group = o.num_heads / o.num_kv_heads;
  const int64_t tokens = span.group->packed_tokens;
  Head& packed = this_threads<Head>();
  packed.use(source_head<Head>(*span.group, layer, kv_head), tokens, dim);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
    packed.attend(
        qkv_.data() + span.begin * ld + h * dim, ld, span.end - span.begin, kLog2e * o.attention_scale,
        [](int64_t) { return 0; }, [=](int64_t) { return tokens; },
        [=, this](int64_t row, int64_t, int64_t, const float* scores) {
          for (size_t i = 0; probe && !span.is_prompt && i < probe->pairs.size(); ++i)
            if (probe->pairs[i] == std::pair(layer, h))
              std::copy_n(scores, tokens,
                          probe->scores + (static_cast<int64_t>(i) * probe->rows + span.begin + row) * tokens);
          return kNoSink<float>;
        },
        context_.data() + span.begin * o.q_dim() + h * dim, o.q_dim(), true);
}

#define FOR_HEAD(Head)                                                         \
  template void Forward::attend_own_span<Head>(int64_t, const Span&, int64_t); \
  template void Forward::pack_source<Head>(int64_t, const Span&, int64_t);     \
  template void Forward::attend_packed_source<Head>(int64_t, const Span&, int64_t);
FOR_HEAD(PackedHead<float>)
FOR_HEAD(PackedHead<bfloat16>)
FOR_HEAD(Int8Head)
#undef FOR_HEAD
#define FOR_CACHED_TYPE(T)                                                                      \
  template void Forward::store_cache<T>(int64_t, int64_t, int64_t, const float*, const float*); \
  template void Forward::attend_self<T>(int64_t, const Span&, int64_t, int64_t, bool);          \
  template void Forward::attend_source<T>(int64_t, const Span&, int64_t, int64_t);
FOR_CACHED_TYPE(float)
FOR_CACHED_TYPE(bfloat16)
FOR_CACHED_TYPE(Int8<float>)
FOR_CACHED_TYPE(Int8<bfloat16>)
#undef FOR_CACHED_TYPE

}  // namespace fastformer
