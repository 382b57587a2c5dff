// Functions on single rows, given as pointers. The ops call them in their loops over tensors, and the decoding engine
// calls them between its products without making tensors.
//
// They are functions and not closures: vectors are stored through pointers that may alias anything, so the members of
// a closure would be reloaded after each store. T is the dtype in memory, acc the dtype of the computation.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/cpu_features.h"
#include "common/simd.h"

namespace fastformer {

// Returns the largest of n numbers, or -inf if n is 0. If one is NaN, the result may be NaN or any of them.
template <typename acc>
acc largest_of(const acc* x, int64_t n) {
  using V = Vec<acc>;
  acc most = -std::numeric_limits<acc>::infinity();
  if (n < V::size) {
    for (int64_t c = 0; c < n; ++c) most = std::max(most, x[c]);
    return most;
  }
  V even(most), odd(most);
  int64_t c = 0;
  for (; c + 2 * V::size <= n; c += 2 * V::size)
    even = max(even, V::load(x + c)), odd = max(odd, V::load(x + c + V::size));
  if (c + V::size <= n) even = max(even, V::load(x + c));
  return max(max(odd, V::load(x + n - V::size)), even).max();
}

// Computes s and y of one row from x and the residual, and returns mean and rstd. Each way to read a row is a separate
// instantiation, because a branch in the inner loop costs as much as the arithmetic.
template <bool kDropout, bool kResidual, typename T, typename R, typename acc>
std::pair<acc, acc> normalise_row(const T* x, const R* residual, const acc* keep, const acc* w, const acc* b, acc eps,
                                  bool rms_norm, int64_t dim, R* s, T* y) {
  using V = Vec<acc>;
  constexpr bool kSum = kDropout || kResidual;
  // The values to normalise as they were stored: rounded, and by now in the first-level cache.
  const auto kept = [=](int64_t c, int64_t n) {
    if constexpr (kSum) return V::load(s + c, n);
    else return V::load(x + c, n);
  };
  const V sum = sum_vecs<acc>(dim, [=](int64_t c, int64_t n) {
    // Prefetch the next row during the arithmetic. This pays for outputs, too: a store also waits for its cache line.
    __builtin_prefetch(x + dim + c);
    if constexpr (kResidual) __builtin_prefetch(residual + dim + c);
    V v = V::load(x + c, n);
    if constexpr (kDropout) v = v * V::load(keep + c, n);
    if constexpr (kResidual) v = v + V::load(residual + c, n);
    if constexpr (kSum) v.store(s + c, n);
    if constexpr (kSum && !std::is_same_v<R, acc>) v = kept(c, n);
    return v;
  });
  const acc mean = rms_norm ? acc(0) : sum.sum() / static_cast<acc>(dim);
  const V square = sum_vecs<acc>(dim, [=](int64_t c, int64_t n) {
    if constexpr (kSum) __builtin_prefetch(s + dim + c, 1);
    __builtin_prefetch(y + dim + c, 1);
    const V d = (kept(c, n) - V(mean)).first_lanes(n);
    return d * d;
  });
  const acc rstd = acc(1) / std::sqrt(square.sum() / static_cast<acc>(dim) + eps);
  for_each_vec<acc>(dim, [=](int64_t c, int64_t n) {
    fmadd((kept(c, n) - V(mean)) * V(rstd), V::load(w + c, n), V::load(b + c, n)).store(y + c, n);
  });
  return {mean, rstd};
}

// Computes a row of a token embedding: out = (token * scale + place) * keep. Each of the three rows may be null.
template <typename T, typename P, typename acc = acc_t<T>>
void embed_row(const T* token, const P* place, acc scale, const acc* keep, int64_t dim, T* to) {
  using V = Vec<acc>;
  for_each_vec<acc>(dim, [=](int64_t c, int64_t n) {
    V v = token ? V::load(token + c, n) * V(scale) : V(acc(0));
    if (place) v = v + V::load(place + c, n);
    if (keep) v = v * V::load(keep + c, n);
    v.store(to + c, n);
  });
}

// Writes the cosines and sines of one position in the order in which rotate_halves, or rotate_neighbours, reads them.
// With `inverse`, they rotate back.
template <typename acc>
void lay_out_angles(const acc* cosines, const acc* sines, int64_t half, bool interleaved, bool inverse, acc* cos,
                    acc* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const acc sine = inverse ? -sines[i] : sines[i];
    if (interleaved) {
      cos[2 * i] = cos[2 * i + 1] = cosines[i];
      sin[2 * i] = -sine;
      sin[2 * i + 1] = sine;
    } else {
      cos[i] = cosines[i];
      sin[i] = sine;
    }
  }
}

// Rotates features i and i + half of one head.
template <typename T, typename acc = acc_t<T>>
void rotate_halves(const T* x, const acc* cos, const acc* sin, int64_t half, T* out) {
  using V = Vec<acc>;
  for_each_vec<acc>(half, [&](int64_t c, int64_t n) {
    const V a = V::load(x + c, n), b = V::load(x + half + c, n), cosine = V::load(cos + c, n),
            sine = V::load(sin + c, n);
    (a * cosine - b * sine).store(out + c, n);
    (b * cosine + a * sine).store(out + half + c, n);
  });
}

// Rotates features 2i and 2i + 1. The table holds each cosine twice, and each sine as -sin, sin.
template <typename T, typename acc = acc_t<T>>
void rotate_neighbours(const T* x, const acc* cos, const acc* sin, int64_t half, T* out) {
  if constexpr (std::is_same_v<T, double>) {
    for (int64_t c = 0; c < 2 * half; ++c) out[c] = x[c] * cos[c] + x[c ^ 1] * sin[c];
  } else {
    using V = Vec<acc>;
    for_each_vec<acc>(2 * half, [&](int64_t c, int64_t n) {
      const V v = V::load(x + c, n);
      (v * V::load(cos + c, n) + swap_neighbours(v) * V::load(sin + c, n)).store(out + c, n);
    });
  }
}

// The positions of a row's tokens in the cache, in units of tokens: consecutive, or given by a table.
struct InOrder {
  int64_t first = 0;
  int64_t operator()(int64_t j) const { return first + j; }
  InOrder from(int64_t j) const { return {first + j}; }
};
struct BySlot {
  const int32_t* slots;
  int64_t stride;
  int64_t operator()(int64_t j) const { return slots[j * stride]; }
  BySlot from(int64_t j) const { return {slots + j * stride, stride}; }
};

// Computes out = factor * sum_j weight[j] * v[tokens(j)], a few vectors of columns at a time so that the sums stay in
// registers. Even and odd keys have separate sums, which shortens the dependency chains.
template <int kVecs, typename T, typename Q, typename Tokens>
void weighted_columns(const acc_t<T>* weight, const T* v, int64_t stride, Tokens tokens, int64_t keys, int64_t n,
                      acc_t<T> factor, Q* out) {
  using V = Vec<acc_t<T>>;
  V even[kVecs], odd[kVecs];
  for (int u = 0; u < kVecs; ++u) even[u] = odd[u] = V(acc_t<T>(0));
  const auto add = [=](int64_t j, V* sum) {
    const T* row = v + tokens(j) * stride;
    for (int u = 0; u < kVecs; ++u) sum[u] = fmadd(V(weight[j]), V::load(row + u * V::size, n), sum[u]);
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) add(j, even), add(j + 1, odd);
  if (j < keys) add(j, even);
  for (int u = 0; u < kVecs; ++u) ((even[u] + odd[u]) * V(factor)).store(out + u * V::size, n);
}

#if defined(CPU_CAPABILITY_AVX512)

// Does the same for 32 columns of bf16. One load is widened to the even and the odd columns, whose sums are interleaved
// at the end.
template <typename Q, typename Tokens>
void weighted_pairs(const float* weight, const bfloat16* v, int64_t stride, Tokens tokens, int64_t keys, float factor,
                    Q* out) {
  using V = Vec<float>;
  V sum[2][2] = {{V(0.f), V(0.f)}, {V(0.f), V(0.f)}};  // [even or odd keys][even or odd columns]
  const auto add = [=](int64_t j, V* s) {
    const Lanes row = load_lanes(v + tokens(j) * stride);
    const V w(weight[j]);
    s[0] = fmadd(w, lower_halves(row), s[0]);
    s[1] = fmadd(w, upper_halves(row), s[1]);
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) add(j, sum[0]), add(j + 1, sum[1]);
  if (j < keys) add(j, sum[0]);
  const V even = (sum[0][0] + sum[1][0]) * V(factor), odd = (sum[0][1] + sum[1][1]) * V(factor);
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i up = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  V(_mm512_permutex2var_ps(even.v, low, odd.v)).store(out);
  V(_mm512_permutex2var_ps(even.v, up, odd.v)).store(out + 16);
}

#endif

template <typename T, typename Q, typename Tokens>
void weighted_sum(const acc_t<T>* weight, const T* v, int64_t stride, Tokens tokens, int64_t keys, int64_t dim,
                  acc_t<T> factor, Q* out) {
  constexpr int kVecs = 4;
  constexpr int64_t W = Vec<acc_t<T>>::size;
  int64_t c = 0;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, bfloat16>)
    for (; c + 32 <= dim; c += 32) weighted_pairs(weight, v + c, stride, tokens, keys, factor, out + c);
#endif
  for (; dim - c >= kVecs * W; c += kVecs * W)
    weighted_columns<kVecs>(weight, v + c, stride, tokens, keys, W, factor, out + c);
  for (; c < dim; c += W)
    weighted_columns<1>(weight, v + c, stride, tokens, keys, std::min<int64_t>(W, dim - c), factor, out + c);
}

// Prefetches the n elements at p into the second-level cache; data that are used much later would be evicted from the
// first level.
template <typename T>
void prefetch(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

// Computes the dot products of a query with four keys. kPairs: uses vdpbf16ps, for bf16 rows of whole vectors.
template <bool kPairs, typename T, typename Dim>
void four_scores(const T* q, const T* const* row, Dim dim, acc_t<T>* scores) {
  using V = Vec<acc_t<T>>;
  V sum[4] = {V(acc_t<T>(0)), V(acc_t<T>(0)), V(acc_t<T>(0)), V(acc_t<T>(0))};
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kPairs) {
    for (int64_t c = 0; c < dim; c += 32) {
      const __m512i x = _mm512_loadu_si512(q + c);
      for (int u = 0; u < 4; ++u) dot_bf16(sum[u].v, x, row[u] + c);
    }
    return store_sums(sum[0], sum[1], sum[2], sum[3], scores);
  }
#endif
  for_each_vec<acc_t<T>>(dim, [&](int64_t c, int64_t n) {
    const V x = V::load(q + c, n);
    for (int u = 0; u < 4; ++u) sum[u] = fmadd(x, V::load(row[u] + c, n), sum[u]);
  });
  store_sums(sum[0], sum[1], sum[2], sum[3], scores);
}

// Queries, keys, values or results of a row's heads; token t of keys and values begins t * stride after its head.
template <typename T>
struct Heads {
  T* data;
  int64_t head_stride, stride = 0;
  T* at(int64_t head) const { return data + head * head_stride; }
};

constexpr int64_t kScoreRoom = 16;  // the number of elements after a row's last score that may be overwritten

// Writes the products of a query with the first `keys` of `tokens` to scores, followed by kScoreRoom. A table scatters
// the tokens, so the hardware can't predict the addresses: this prefetches the values at v meanwhile, and then the keys
// of the same tokens at next_k, if given.
template <bool kPairs, typename T, typename Tokens, typename Dim>
void score_keys(const T* q, const T* k, int64_t k_stride, const T* v, int64_t v_stride, const T* next_k, Tokens tokens,
                int64_t keys, Dim dim, acc_t<T>* scores) {
  for (int64_t j = 0; j < keys; j += 4) {
    const T* row[4];
    for (int64_t u = 0; u < 4; ++u) {
      const int64_t token = tokens(std::min(j + u, keys - 1));
      row[u] = k + token * k_stride;
      prefetch(v + token * v_stride, dim);
    }
    four_scores<kPairs>(q, row, dim, scores + j);
  }
  if (next_k)
    for (int64_t j = 0; j < keys; ++j) prefetch(next_k + tokens(j) * k_stride, dim);
}

// The score of a sink that isn't there: a softmax has no share for it.
template <typename acc>
constexpr acc kNoSink = -std::numeric_limits<acc>::infinity();

// Turns scores (followed by kScoreRoom) into the unnormalised softmax weights 2^(scale2 * (score - maximum)). Returns
// 1 / sum, or 0 if nothing is visible. NaN stays NaN. sink2: the score, times log2(e), of a key without a value, whose
// weight counts in the sum (an attention sink).
template <typename acc>
acc weigh(acc scale2, int64_t keys, acc* scores, acc sink2 = kNoSink<acc>) {
  using V = Vec<acc>;
  constexpr acc kNothing = -std::numeric_limits<acc>::infinity();
  // Pads the last vector with scores of weight 0, so that no loop below has a remainder.
  V(kNothing).store(scores + keys);
  V most(kNothing), total(acc(0));
  for (int64_t j = 0; j < keys; j += V::size) {
    const V x = V::load(scores + j) * V(scale2);
    x.store(scores + j);
    most = max(most, x);
  }
  const acc largest = most.max();
  const V shift(largest == kNothing ? acc(0) : largest);
  for (int64_t j = 0; j < keys; j += V::size) {
    const V e = exp2(V::load(scores + j) - shift);
    e.store(scores + j);
    total = total + e;
  }
  const acc sum = total.sum();
  if (sum == 0) return acc(0);
  return acc(1) / (sink2 == kNothing ? sum : sum + std::exp2(sink2 - largest));
}

struct NoBias {
  template <typename acc>
  acc operator()(int64_t, acc*) const {
    return kNoSink<acc>;
  }
};

// Implements attend_heads. `dim` is a number, or a std::integral_constant for which loops are unrolled.
template <bool kPairs, typename T, typename Q, typename Tokens, typename Dim, typename Bias>
void attend_heads_of(Heads<const T> q, Heads<const T> k, Heads<const T> v, int64_t heads, int64_t group, Tokens tokens,
                     int64_t keys, Dim dim, acc_t<T> scale2, Heads<Q> out, Bias bias) {
  using acc = acc_t<T>;
  static thread_local std::vector<acc> memory;
  if (std::ssize(memory) < keys + kScoreRoom) memory.resize(2 * keys + kScoreRoom);
  acc* scores = memory.data();
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t kv_head = h / group;
    const bool has_next = h % group == 0 && h + group < heads;
    score_keys<kPairs>(q.at(h), k.at(kv_head), k.stride, v.at(kv_head), v.stride,
                       has_next ? k.at(kv_head + 1) : nullptr, tokens, keys, dim, scores);
    const acc factor = weigh(scale2, keys, scores, bias(h, scores));
    weighted_sum<T>(scores, v.at(kv_head), v.stride, tokens, keys, dim, factor, out.at(h));
  }
}

// Attends from the queries of one row to the first `keys` of `tokens` in a cache, where `group` query heads share a
// head of k and v. Without keys the result is zero. bias(head, scores), with heads counted from q's first, changes the
// products before they are scaled, and returns the score of the head's sink (see weigh).
//
// T: the dtype of the cache and the queries; Q: the dtype of the result.
template <typename T, typename Q, typename Tokens, typename Bias = NoBias>
void attend_heads(Heads<const T> q, Heads<const T> k, Heads<const T> v, int64_t heads, int64_t group, Tokens tokens,
                  int64_t keys, int64_t dim, acc_t<T> scale2, Heads<Q> out, Bias bias = {}) {
  const auto run = [=](auto size) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<T, bfloat16>) {
      static const bool has_pairs = cpu_features().avx512_bf16;
      if (has_pairs && size % 32 == 0)
        return attend_heads_of<true>(q, k, v, heads, group, tokens, keys, size, scale2, out, bias);
    }
#endif
    attend_heads_of<false>(q, k, v, heads, group, tokens, keys, size, scale2, out, bias);
  };
  if (dim == 32) return run(std::integral_constant<int64_t, 32>());
  if (dim == 64) return run(std::integral_constant<int64_t, 64>());
  if (dim == 128) return run(std::integral_constant<int64_t, 128>());
  run(dim);
}

}  // namespace fastformer
