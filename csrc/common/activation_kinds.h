// The kinds of activations. The ops have all but clamped_swiglu.

#pragma once

#include <string_view>

#include "common/check.h"

namespace fastformer {

enum class Activation { relu, gelu, gelu_tanh, silu, swiglu, geglu, geglu_tanh, clamped_swiglu };

// Whether an activation has a second input, which the activation of the first one multiplies.
inline bool is_gated(Activation a) {
  return a == Activation::swiglu || a == Activation::geglu || a == Activation::geglu_tanh ||
         a == Activation::clamped_swiglu;
}

// Whether a GELU is the tanh approximation, and not the one with erf.
inline bool has_tanh(Activation a) { return a == Activation::gelu_tanh || a == Activation::geglu_tanh; }

inline Activation activation_named(std::string_view name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  if (name == "swiglu") return Activation::swiglu;
  if (name == "geglu") return Activation::geglu;
  check(name == "geglu_tanh", "unknown activation ", name);
  return Activation::geglu_tanh;
}

}  // namespace fastformer
