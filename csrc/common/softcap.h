// Soft caps of scores and logits, cap * tanh(x / cap) (Gemma 2), on vectors.

#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"

namespace fastformer {

// Computes tanh to a few ulp, also near 0; NaN stays NaN. tanh |x| = -e / (2 + e) with e = exp(-2 |x|) - 1, computed
// without cancellation as e = 2^n p + (2^n - 1), where p = exp(r) - 1, -2 |x| = n ln 2 + r and |r| <= ln(2) / 2. Beyond
// 10 the result is 1.
inline Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const V twice = max(V(-20.f), V(-2.f) * max(x, V(0.f) - x));
  const V n = round(twice * V(log2e)), power = scale_by_power(V(1.f), n);
  const V r = fmadd(n, V(-ln2_low), fmadd(n, V(-ln2_high), twice));
  V p = 1.9841270e-4f;  // Taylor
  for (const float c : {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f}) p = fmadd(p, r, V(c));
  p = fmadd(p * r, r, r);
  const V e = fmadd(power, p, power - V(1.f)), magnitude = (V(0.f) - e) / (V(2.f) + e);
  return where_positive(x, magnitude, V(0.f) - magnitude);
}
inline Vec<double> tanh(Vec<double> x) { return std::tanh(x.v); }

// Applies x = cap * tanh(factor * x) to n elements. factor: 1 / cap, times the scale of the scores, if any.
template <typename acc>
void cap_row(acc* x, int64_t n, acc factor, acc cap) {
  using V = Vec<acc>;
  for_each_vec<acc>(n, [=](int64_t c, int64_t m) { (V(cap) * tanh(V::load(x + c, m) * V(factor))).store(x + c, m); });
}

}  // namespace fastformer
