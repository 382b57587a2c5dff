// The gradient of a linear map's weight, dout^T x: for the maps of fastformer/nn/linear.py, whose other products are
// oneDNN's.

#include "linear.h"

#include <torch/library.h>

#include "dispatch.h"

namespace fastformer {
namespace {

Tensor linear_weight_grad(const Tensor& dout, const Tensor& x) {
  TORCH_CHECK(dout.dim() == 2 && x.dim() == 2 && dout.size(0) == x.size(0) && dout.scalar_type() == x.scalar_type(),
              "linear_weight_grad: expected (rows, out_features) and (rows, in_features) of one dtype, got ",
              dout.sizes(), " of ", dout.scalar_type(), " and ", x.sizes(), " of ", x.scalar_type());
  const auto rows = [](const Tensor& t) { return t.stride(1) == 1 ? t : t.contiguous(); };
  return dispatch(x.scalar_type(), "linear_weight_grad",
                  [&]<typename T>() { return weight_gradient<T>(rows(dout), rows(x)); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastformer_cpp, m) { m.def("linear_weight_grad(Tensor dout, Tensor x) -> Tensor"); }

TORCH_LIBRARY_IMPL(fastformer_cpp, CPU, m) { m.impl("linear_weight_grad", linear_weight_grad); }

}  // namespace fastformer
