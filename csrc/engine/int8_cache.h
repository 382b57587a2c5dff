// Cached keys and values of 8 bits: a scale for each token and head, and head_dim whole numbers from -127 to 127, which
// times the scale are a key or a value.
//
// In a block, the keys (or values) of a head are the numbers of all tokens, one token after another, and then their
// scales. So rows are aligned as the memory is, and a token takes head_dim + 4 bytes.
//
// Attention of a decode step never unpacks them to memory. It reads half as many bytes as from bf16, and spends about
// as many instructions per byte. A product with a key is one of integers: the query becomes 16-bit numbers with a
// scale, or, for exact fp32, 16 more bits in a second row, and a multiplication adds 32 (AVX2: 16) of its products with
// a key's widened bytes. Values are widened to floats in registers. The query heads of a kv head read keys and values
// together.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/cpu_features.h"
#include "common/rows.h"
#include "engine/prefix_table.h"

namespace fastformer {

// Widen `n` bytes, at most a vector of them, to floats; and round floats to bytes, ties to even.
#if defined(CPU_CAPABILITY_AVX512)
inline Vec<float> load_bytes(const int8_t* p, int64_t n) {
  const __m128i bytes =
      n >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)) : _mm_maskz_loadu_epi8(Vec<float>::first(n), p);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline void store_bytes(Vec<float> x, int8_t* p, int64_t n) {
  _mm_mask_storeu_epi8(p, Vec<float>::first(n), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline Vec<float> sums_to_floats(Lanes x) { return _mm512_cvtepi32_ps(x); }
#else
inline Vec<float> load_bytes(const int8_t* p, int64_t n) {
  int64_t bytes = 0;
  std::memcpy(&bytes, p, n >= 8 ? 8 : n);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
}
inline void store_bytes(Vec<float> x, int8_t* p, int64_t n) {
  const __m256i whole = _mm256_cvtps_epi32(x.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
  std::memcpy(p, &bytes, n >= 8 ? 8 : n);
}
inline Vec<float> sums_to_floats(Lanes x) { return _mm256_cvtepi32_ps(x); }
#endif

// Rounds x to whole numbers times a scale, which it returns. If an x isn't finite, the scale is NaN.
inline float round_to_bytes(const float* x, int64_t dim, int8_t* to) {
  using V = Vec<float>;
  V most(0.f), poison(0.f);
  for_each_vec<float>(dim, [&](int64_t c, int64_t n) {
    const V v = V::load(x + c, n);
    most = max(most, max(v, V(0.f) - v));
    poison = fmadd(v, V(0.f), poison);  // NaN after a NaN or an infinity
  });
  constexpr float kSteps = 127, kLeast = 0x1p-120f;  // kSteps / kLeast is finite
  const bool is_finite = poison.sum() == 0;
  const float largest = is_finite ? most.max() : 0.f, inverse = largest < kLeast ? 0.f : kSteps / largest;
  for_each_vec<float>(
      dim, [=](int64_t c, int64_t n) { store_bytes(is_finite ? V::load(x + c, n) * V(inverse) : V(0.f), to + c, n); });
  return !is_finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0.f : largest / kSteps;
}

// The keys, or the values, of a layer and head.
class Int8Rows {
 public:
  // memory: that of slot 0; see TokenCache::keys.
  Int8Rows(char* memory, int64_t dim) : memory_(memory), dim_(dim) {}

  static int64_t token_bytes(int64_t dim) { return dim + kScaleBytes; }
  int8_t* numbers(int64_t slot) const { return reinterpret_cast<int8_t*>(block(slot) + offset(slot) * dim_); }
  float* scale(int64_t slot) const {
    return reinterpret_cast<float*>(block(slot) + kBlockTokens * dim_ + offset(slot) * kScaleBytes);
  }
  // Rounds x (dim floats) to the numbers of a token.
  void store(int64_t slot, const float* x) const { *scale(slot) = round_to_bytes(x, dim_, numbers(slot)); }
  // Writes the numbers of a token without their scale, which T represents exactly.
  template <typename T>
  void load(int64_t slot, T* to) const {
    const int8_t* from = numbers(slot);
    for_each_vec<float>(dim_, [=](int64_t c, int64_t n) { load_bytes(from + c, n).store(to + c, n); });
  }
  void prefetch(int64_t slot, int64_t first, int64_t count) const {
    for (int64_t c = first; c < first + count; c += 64) __builtin_prefetch(numbers(slot) + c);
  }

 private:
  static constexpr int64_t kScaleBytes = sizeof(float);
  static int64_t offset(int64_t slot) { return slot & (kBlockTokens - 1); }
  char* block(int64_t slot) const { return memory_ + (slot - offset(slot)) * token_bytes(dim_); }

  char* memory_;
  int64_t dim_;
};

namespace int8_attention {

// 16-bit numbers: a vector of them holds as many as kWords.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kWords = 32;
constexpr int64_t kMostRows = 4;  // rows of queries whose sums with four keys fit in the registers
inline Lanes widen(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i_u*)p)); }
inline Lanes widen(const int8_t* p, int64_t n) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t(1) << n) - 1), p));
}
template <bool kDot>
void add_products(Lanes a, Lanes b, Lanes& sum) {
  if constexpr (kDot) dot_words(sum, a, b);
  else sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
inline bool has_dot() { return cpu_features().avx512_vnni; }
#else
constexpr int64_t kWords = 16;
constexpr int64_t kMostRows = 2;
inline Lanes widen(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i_u*)p)); }
inline Lanes widen(const int8_t* p, int64_t n) {
  alignas(16) int8_t bytes[16] = {};
  std::memcpy(bytes, p, n);
  return widen(bytes);
}
template <bool kDot>
void add_products(Lanes a, Lanes b, Lanes& sum) {
  if constexpr (kDot) dot_words(sum, a, b);
  else sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
inline bool has_dot() { return cpu_features().avx_vnni; }
#endif

constexpr int64_t kTokens = 64;  // tokens whose numbers stay in the first-level cache for all rows of queries

// Queries as 16-bit numbers: `parts` rows for each head, of which the second has the next bits.
struct Queries {
  std::vector<int16_t> rows;
  std::vector<float> scales;
  int64_t width = 0;
};
constexpr float kSteps = 32767, kFinerSteps = 2 * kSteps;

inline void round_queries(const float* q, int64_t heads, int64_t dim, int parts, Queries& to) {
  to.width = (dim + kWords - 1) / kWords * kWords;
  to.rows.assign(heads * parts * to.width, 0), to.scales.resize(heads);
  for (int64_t h = 0; h < heads; ++h, q += dim) {
    float largest = 0, poison = 0;
    for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, std::abs(q[c])), poison += q[c] * 0;
    constexpr float kLeast = 0x1p-110f;  // kSteps / kLeast is finite
    const float inverse = poison == 0 && largest >= kLeast ? kSteps / largest : 0.f;
    to.scales[h] = poison == 0 ? largest / kSteps : std::numeric_limits<float>::quiet_NaN();
    int16_t* row = to.rows.data() + h * parts * to.width;
    for (int64_t c = 0; inverse > 0 && c < dim; ++c) {
      const float x = q[c] * inverse, whole = std::nearbyint(x);
      row[c] = static_cast<int16_t>(whole);
      if (parts == 2) row[to.width + c] = static_cast<int16_t>(std::nearbyint((x - whole) * kFinerSteps));
    }
  }
}

// Writes the products of kRows queries, `width` apart, with four keys; those of a query are `stride` after the last's.
template <bool kDot, int kRows, typename Dim>
void multiply(const int16_t* queries, int64_t width, const int8_t* const* keys, Dim dim, float* products,
              int64_t stride) {
  Lanes sum[kRows][4] = {};
  const auto add = [&](int64_t c, auto&& load) {
    Lanes key[4];
    for (int u = 0; u < 4; ++u) key[u] = load(keys[u] + c);
    for (int r = 0; r < kRows; ++r) {
      const Lanes query = load_lanes(queries + r * width + c);
      for (int u = 0; u < 4; ++u) add_products<kDot>(query, key[u], sum[r][u]);
    }
  };
  int64_t c = 0;
  for (; c + kWords <= dim; c += kWords) add(c, [](const int8_t* p) { return widen(p); });
  if (c < dim) add(c, [n = dim - c](const int8_t* p) { return widen(p, n); });
  for (int r = 0; r < kRows; ++r)
    store_sums(sums_to_floats(sum[r][0]), sums_to_floats(sum[r][1]), sums_to_floats(sum[r][2]),
               sums_to_floats(sum[r][3]), products + r * stride);
}

// Computes the scores of all heads' queries with the keys of `slots`, heads `stride` apart, before they are scaled.
// next: rows to prefetch when the keys have been read.
template <bool kDot, int kParts, typename Dim>
void score(const Queries& q, int64_t heads, Int8Rows keys, Int8Rows next, const int32_t* slots, int64_t count, Dim dim,
           float* scores, int64_t stride) {
  static thread_local std::vector<float> memory;
  memory.resize(heads * kParts * kTokens);
  float* products = memory.data();
  for (int64_t first = 0; first < count; first += kTokens) {
    const int64_t tokens = std::min(kTokens, count - first);
    const int8_t* rows[kTokens];
    float scales[kTokens];
    for (int64_t j = 0; j < tokens; ++j) {
      rows[j] = keys.numbers(slots[first + j]), scales[j] = *keys.scale(slots[first + j]);
      const bool is_last = first + kTokens + j >= count;
      (is_last ? next : keys).prefetch(slots[is_last ? j : first + kTokens + j], 0, dim);
    }
    for (int64_t j = tokens; j % 4 != 0; ++j) rows[j] = rows[tokens - 1], scales[j] = 0;
    for (int64_t row = 0, rows_left; (rows_left = heads * kParts - row) > 0;) {
      const int16_t* queries = q.rows.data() + row * q.width;
      const auto run = [&]<int kRows>() {
        for (int64_t j = 0; j < tokens; j += 4)
          multiply<kDot, kRows>(queries, q.width, rows + j, dim, products + row * kTokens + j, kTokens);
        row += kRows;
      };
      if (kMostRows >= 4 && rows_left >= 4) run.template operator()<kMostRows>();
      else if (rows_left >= 2) run.template operator()<2>();
      else run.template operator()<1>();
    }
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t j = 0; j < tokens; ++j) {
        const float* product = products + h * kParts * kTokens + j;
        const float sum = kParts == 1 ? product[0] : product[0] + product[(kParts - 1) * kTokens] / kFinerSteps;
        scores[h * stride + first + j] = sum * (q.scales[h] * scales[j]);
      }
  }
}

// Computes out = factors[h] * sum_j weights[h][j] * value[j] for the columns of kVecs vectors, the last of which has n.
template <int kHeads, int kVecs>
void sum_columns(const float* weights, int64_t stride, Int8Rows values, Int8Rows next, const int32_t* slots,
                 int64_t count, int64_t column, int64_t n, const float* factors, float* out, int64_t out_stride) {
  using V = Vec<float>;
  // Few sums would wait for each other: even and odd tokens then have separate ones.
  constexpr int kChains = kHeads * kVecs < 8 ? 2 : 1;
  V sum[kChains][kHeads][kVecs];
  for (auto& chain : sum)
    for (auto& head : chain)
      for (V& one : head) one = V(0.f);
  const auto add = [&](int64_t j, auto& chain) {
    const bool is_last = j + kTokens >= count;
    (is_last ? next : values).prefetch(slots[is_last ? j % kTokens : j + kTokens], column, kVecs * V::size);
    const int8_t* row = values.numbers(slots[j]) + column;
    V weight[kHeads];
    for (int h = 0; h < kHeads; ++h) weight[h] = V(weights[h * stride + j]);
    for (int u = 0; u < kVecs; ++u) {
      const V value = load_bytes(row + u * V::size, u + 1 < kVecs ? V::size : n);
      for (int h = 0; h < kHeads; ++h) chain[h][u] = fmadd(weight[h], value, chain[h][u]);
    }
  };
  int64_t j = 0;
  for (; j + kChains <= count; j += kChains)
    for (int chain = 0; chain < kChains; ++chain) add(j + chain, sum[chain]);
  if (j < count) add(j, sum[0]);
  for (int h = 0; h < kHeads; ++h)
    for (int u = 0; u < kVecs; ++u) {
      const V all = kChains == 1 ? sum[0][h][u] : sum[0][h][u] + sum[kChains - 1][h][u];
      (all * V(factors[h])).store(out + h * out_stride + column + u * V::size, u + 1 < kVecs ? V::size : n);
    }
}

// Does the same for all columns. weights: those of the values, which this multiplies by their scales.
inline void sum_values(float* weights, int64_t stride, int64_t heads, Int8Rows values, Int8Rows next,
                       const int32_t* slots, int64_t count, int64_t dim, const float* factors, float* out) {
  constexpr int64_t W = Vec<float>::size;
  for (int64_t j = 0; j < count; ++j) {
    const float scale = *values.scale(slots[j]);
    for (int64_t h = 0; h < heads; ++h) weights[h * stride + j] *= scale;
  }
  for (int64_t c = 0, vecs; c < dim; c += vecs * W) {
    vecs = dim - c >= 4 * W ? 4 : 1;
    for (int64_t h = 0, left; (left = heads - h) > 0;) {
      const auto run = [&]<int kHeads, int kVecs>() {
        sum_columns<kHeads, kVecs>(weights + h * stride, stride, values, next, slots, count, c,
                                   std::min(W, dim - c - (kVecs - 1) * W), factors + h, out + h * dim, dim);
        h += kHeads;
      };
      const auto run_heads = [&]<int kHeads>() {
        vecs == 4 ? run.template operator()<kHeads, 4>() : run.template operator()<kHeads, 1>();
      };
      if (kMostRows >= 4 && left >= 4) run_heads.template operator()<kMostRows>();
      else if (left >= 2) run_heads.template operator()<2>();
      else run_heads.template operator()<1>();
    }
  }
}

}  // namespace int8_attention

// Attends from the queries of one token to the keys and values of `slots`, for kv_heads heads that begin head_stride
// bytes after each other, with `group` query heads each. bias: see attend_heads. kParts: 1 rounds queries to 16 bits, 2
// to those of fp32.
template <int kParts, typename Bias>
void attend_int8(const float* q, char* keys, char* values, int64_t head_stride, int64_t kv_heads, int64_t group,
                 const int32_t* slots, int64_t count, int64_t dim, float scale2, float* out, Bias bias) {
  using namespace int8_attention;
  static thread_local Queries queries;
  static thread_local std::vector<float> memory, factors;
  const int64_t stride = count + kScoreRoom;
  memory.resize(std::max<int64_t>(memory.size(), group * stride)), factors.resize(group);
  float* scores = memory.data();
  for (int64_t head = 0; head < kv_heads; ++head, keys += head_stride, values += head_stride) {
    const Int8Rows of_keys(keys, dim), of_values(values, dim),
        next(head + 1 < kv_heads ? keys + head_stride : keys, dim);
    round_queries(q + head * group * dim, group, dim, kParts, queries);
    const auto run = [&]<bool kDot>(auto size) {
      score<kDot, kParts>(queries, group, of_keys, of_values, slots, count, size, scores, stride);
    };
    const auto run_dim = [&]<bool kDot>() {
      if (dim == 64) run.template operator()<kDot>(std::integral_constant<int64_t, 64>());
      else if (dim == 128) run.template operator()<kDot>(std::integral_constant<int64_t, 128>());
      else run.template operator()<kDot>(dim);
    };
    static const bool dots = has_dot();
    dots ? run_dim.template operator()<true>() : run_dim.template operator()<false>();
    for (int64_t h = 0; h < group; ++h) {
      const float sink2 = bias(head * group + h, scores + h * stride);
      factors[h] = weigh(scale2, count, scores + h * stride, sink2);
    }
    sum_values(scores, stride, group, of_values, next, slots, count, dim, factors.data(), out + head * group * dim);
  }
}

}  // namespace fastformer
