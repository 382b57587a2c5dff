// Maps the dtype of a tensor to the type that a kernel is compiled for.

#pragma once

#include "common/tensor.h"

namespace fastformer {

// Calls f.operator()<T>() with the type for `dtype`: float, bfloat16, or double (for gradcheck).
template <typename F>
auto dispatch(ScalarType dtype, const char* op, F&& f) {
  if (dtype == kDouble) return f.template operator()<double>();
  if (dtype == kFloat) return f.template operator()<float>();
  check(dtype == kBFloat16, op, ": no C++ code for ", dtype);
  return f.template operator()<bfloat16>();
}

// Calls f.operator()<a, b>() with both flags as constants.
template <typename F>
auto with_constants(bool a, bool b, F&& f) {
  if (a) return b ? f.template operator()<true, true>() : f.template operator()<true, false>();
  return b ? f.template operator()<false, true>() : f.template operator()<false, false>();
}

// The dtype of statistics, losses and sums: fp64 for fp64 inputs, else fp32.
inline ScalarType accumulation_dtype(ScalarType dtype) { return dtype == kDouble ? kDouble : kFloat; }

}  // namespace fastformer
