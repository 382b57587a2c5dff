// What is done to one row, as functions over pointers: the ops call them in their loops over tensors, and a decoding
// engine can call them between its products without making tensors.
//
// Functions and not closures: vectors are stored through pointers that may alias anything, so what a closure holds
// would be read again after each store. T is the dtype in memory, acc what is computed in.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace fastformer {

// x, residual -> s, y of one row; returns mean and rstd. Compiled once for each way to read a row: a test in the inner
// loop costs as much as the arithmetic there.
template <bool kDropout, bool kResidual, typename T, typename R, typename acc>
std::pair<acc, acc> normalise_row(const T* x, const R* residual, const acc* keep, const acc* w, const acc* b, acc eps,
                                  bool rms_norm, int64_t dim, R* s, T* y) {
  using V = Vec<acc>;
  constexpr bool kSum = kDropout || kResidual;
  // What is normalised, as it is kept: rounded, and in the first-level cache by then.
  const auto kept = [=](int64_t c, int64_t n) {
    if constexpr (kSum) return V::load(s + c, n);
    else return V::load(x + c, n);
  };
  const V sum = sum_vecs<acc>(dim, [=](int64_t c, int64_t n) {
    // The next row, while there is arithmetic to do; a store would wait for its line, too.
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

// A row of a token embedding: out = (token * scale + place) * keep; each of the three rows is null where there is none.
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

// The cosines and sines of one position as turn_halves reads them, or as turn_neighbours does; `inverse` turns back.
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

// Features i and i + half of one head.
template <typename T, typename acc = acc_t<T>>
void turn_halves(const T* x, const acc* cos, const acc* sin, int64_t half, T* out) {
  using V = Vec<acc>;
  for_each_vec<acc>(half, [&](int64_t c, int64_t n) {
    const V a = V::load(x + c, n), b = V::load(x + half + c, n), cosine = V::load(cos + c, n),
            sine = V::load(sin + c, n);
    (a * cosine - b * sine).store(out + c, n);
    (b * cosine + a * sine).store(out + half + c, n);
  });
}

// Features 2i and 2i + 1; every cosine stands there twice, and the sine as -sin, sin.
template <typename T, typename acc = acc_t<T>>
void turn_neighbours(const T* x, const acc* cos, const acc* sin, int64_t half, T* out) {
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

// out += sum_j weight[j] * v[j], a few vectors of columns at a time so that the sums stay in registers.
template <typename T>
void weighted_sum(const acc_t<T>* weight, const T* v, int64_t stride, int64_t keys, int64_t dim, acc_t<T>* out) {
  using V = Vec<acc_t<T>>;
  constexpr int kVecs = 4;
  int64_t c = 0;
  for (; c + kVecs * V::size <= dim; c += kVecs * V::size) {
    V sum[kVecs];
    for (int u = 0; u < kVecs; ++u) sum[u] = V::load(out + c + u * V::size);
    for (int64_t j = 0; j < keys; ++j)
      for (int u = 0; u < kVecs; ++u) sum[u] = fmadd(V(weight[j]), V::load(v + j * stride + c + u * V::size), sum[u]);
    for (int u = 0; u < kVecs; ++u) sum[u].store(out + c + u * V::size);
  }
  for (; c < dim; c += V::size) {
    const int64_t n = std::min<int64_t>(V::size, dim - c);
    V sum = V::load(out + c, n);
    for (int64_t j = 0; j < keys; ++j) sum = fmadd(V(weight[j]), V::load(v + j * stride + c, n), sum);
    sum.store(out + c, n);
  }
}

// One query row against `keys` keys and values of its kv head, k_stride and v_stride elements apart. `scores` has room
// for the keys, `sum_out` for dim. Without keys the result is zeros.
template <typename T>
void attend_row(const T* q, const T* k, const T* v, int64_t k_stride, int64_t v_stride, int64_t keys, int64_t dim,
                acc_t<T> scale2, acc_t<T>* scores, acc_t<T>* sum_out, T* out) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  acc largest = -std::numeric_limits<acc>::infinity();
  for (int64_t j = 0; j < keys; ++j) {
    const T* row = k + j * k_stride;
    V sum(acc(0));
    for_each_vec<acc>(dim, [&](int64_t c, int64_t n) { sum = fmadd(V::load(q + c, n), V::load(row + c, n), sum); });
    scores[j] = sum.sum() * scale2;
    largest = std::max(largest, scores[j]);
  }
  const V shift(largest == -std::numeric_limits<acc>::infinity() ? acc(0) : largest);
  V total(acc(0));
  for_each_vec<acc>(keys, [&](int64_t j, int64_t n) {
    const V e = exp2(V::load(scores + j, n) - shift).first_lanes(n);
    e.store(scores + j, n);
    total = total + e;
  });
  std::fill(sum_out, sum_out + dim, acc(0));
  weighted_sum<T>(scores, v, v_stride, keys, dim, sum_out);
  const acc sum = total.sum();
  const V inverse(sum == 0 ? acc(0) : acc(1) / sum);  // 0: a row that sees nothing; a NaN stays
  for_each_vec<acc>(dim, [&](int64_t c, int64_t n) { (V::load(sum_out + c, n) * inverse).store(out + c, n); });
}

}  // namespace fastformer
