// From the dtype of a tensor to the type that a kernel is compiled for.

#pragma once

#include <ATen/core/Tensor.h>

#include "common/simd.h"

namespace fastformer {

// f.operator()<T>() for the T of `dtype`: float, bfloat16, or double for gradcheck.
template <typename F>
auto dispatch(at::ScalarType dtype, const char* op, F&& f) {
  if (dtype == at::kDouble) return f.template operator()<double>();
  if (dtype == at::kFloat) return f.template operator()<float>();
  TORCH_CHECK(dtype == at::kBFloat16, op, ": no C++ code for ", dtype);
  return f.template operator()<bfloat16>();
}

// The dtype of statistics, losses and sums: fp32, and fp64 for fp64.
inline at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensor itself when each row lies dense, as kernels read them, wherever the rows are (in an expanded tensor all in
// one place); else a copy.
inline at::Tensor rows_of(const at::Tensor& t) { return t.stride(-1) == 1 || t.numel() == 0 ? t : t.contiguous(); }

}  // namespace fastformer
