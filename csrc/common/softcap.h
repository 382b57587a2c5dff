// Soft caps of scores and logits, cap * tanh(x / cap) (Gemma 2), on vectors.

#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"

namespace fastformer {

// Computes tanh to 1.2 ulp; NaN stays NaN. Scores are cap * tanh, so an error here is one of the exponents of softmax.
// Below 0.625 it is an odd polynomial (a least-squares fit of the relative error, 0.07 ulp). Above, it is 1 - 2 / (1 +
// exp(2 |x|)): the quotient is small where the result is near 1, and so is its error. Beyond 10 the result is 1.
inline Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const V size = max(x, V(0.f) - x), square = size * size;
  V near = -5.7170391e-3f;
  for (const float c : {2.0650583e-2f, -5.3743497e-2f, 1.3331491e-1f, -3.3333284e-1f}) near = fmadd(near, square, V(c));
  near = fmadd(near * square, size, size);
  // exp(2 |x|) = 2^n exp(r), 2 |x| = n ln 2 + r and |r| <= ln(2) / 2.
  const V twice = V(0.f) - max(V(-20.f), V(-2.f) * size), n = round(twice * V(log2e)),
          power = scale_by_power(V(1.f), n);
  const V r = fmadd(n, V(-ln2_low), fmadd(n, V(-ln2_high), twice));
  V p = 1.9841270e-4f;  // Taylor, of exp(r) - 1
  for (const float c : {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f}) p = fmadd(p, r, V(c));
  p = fmadd(p * r, r, r);
  const V beyond = V(1.f) - V(2.f) / fmadd(power, p, power + V(1.f));
  const V magnitude = where_positive(size - V(0.625f), beyond, near);
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
