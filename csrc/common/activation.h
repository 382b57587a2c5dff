// The activations of the feed-forward network, on vectors.

#pragma once

#include "common/activation_kinds.h"
#include "common/simd.h"

namespace fastformer {

inline Vec<double> erf(Vec<double> x) { return std::erf(x.v); }

// Computes erf to a few ulp by the rational approximation of XLA and Eigen on [-4, 4]; beyond that, fp32's erf is +-1.
inline Vec<float> erf(Vec<float> x) {
  using V = Vec<float>;
  x = max(V(-4.f), V(0.f) - max(V(-4.f), V(0.f) - x));
  const V s = x * x;
  V p = -2.72614225801306e-10f;
  for (const float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f,
                        -2.95459980854025e-03f, -1.60960333262415e-02f})
    p = fmadd(p, s, V(c));
  V q = -1.45660718464996e-05f;
  for (const float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f})
    q = fmadd(q, s, V(c));
  return x * p / q;
}

template <typename V>
V sigmoid(V x) {
  return V(1) / (V(1) + exp(V(0) - x));
}

// Activations act(x) and their derivatives.
template <typename V>
struct Gelu {
  // 0.5 (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), and the sigmoid's derivative. Both come
  // from exp(-|2 u|), so that nothing overflows and no 1 - sigmoid cancels.
  struct TanhWeight {
    V weight, derivative;
    explicit TanhWeight(V x) : weight(0), derivative(0) {
      const V twice = V(1.5957691216057308) * x * (V(1) + V(0.044715) * x * x);
      const V small = exp(V(0) - max(twice, V(0) - twice)), larger = V(1) / (V(1) + small);
      weight = where_positive(twice, larger, small * larger);
      derivative = small * larger * larger;
    }
  };
  static V value(V x, bool tanh_form) {
    if (tanh_form) return x * TanhWeight(x).weight;
    return V(0.5) * x * (V(1) + erf(x * V(0.7071067811865476)));
  }
  static V derivative(V x, bool tanh_form) {
    if (tanh_form) {
      const TanhWeight w(x);
      return w.weight + x * V(1.5957691216057308) * (V(1) + V(3 * 0.044715) * x * x) * w.derivative;
    }
    const V density = exp(V(-0.5) * x * x) * V(0.3989422804014327);
    return V(0.5) * (V(1) + erf(x * V(0.7071067811865476))) + x * density;
  }
};

// Returns act(pre); for a gated activation, act of the gate's input.
template <typename acc>
Vec<acc> activate(Activation a, Vec<acc> pre) {
  if (a == Activation::relu) return max(Vec<acc>(acc(0)), pre);
  if (a == Activation::silu || a == Activation::swiglu) return pre * sigmoid(pre);
  return Gelu<Vec<acc>>::value(pre, has_tanh(a));
}

// The derivatives of activations whose backward pass needs the input.
template <typename acc>
Vec<acc> activation_derivative(Activation a, Vec<acc> pre) {
  using V = Vec<acc>;
  if (a == Activation::silu || a == Activation::swiglu) {
    const V s = sigmoid(pre);
    return s * (V(acc(1)) + pre * (V(acc(1)) - s));
  }
  return Gelu<V>::derivative(pre, has_tanh(a));
}

}  // namespace fastformer
