// A linear map, x W^T + b, and the gradient of its weight, dout^T x. fastformer/ops/linear.py calls them if PyTorch's
// functions are slower.

#include "ops/linear.h"

#include <optional>

#include "common/dispatch.h"
#include "ops/forward.h"
#include "ops/library.h"

namespace fastformer {
namespace {

// A weight with more elements isn't packed as a whole, but block by block.
constexpr int64_t kMostPacked = int64_t{1} << 22;

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check(x.dim() > 0 && weight.dim() == 2 && x.size(-1) == weight.size(1) && x.scalar_type() == weight.scalar_type() &&
            (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->scalar_type() == x.scalar_type())),
        "linear: expected (..., in_features), (out_features, in_features) and (out_features,) of one dtype, got ",
        x.sizes(), " of ", x.scalar_type(), " and ", weight.sizes(), " of ", weight.scalar_type());
  Dims shape = x.sizes();
  shape.back() = weight.size(0);
  Tensor out = empty(shape, x.scalar_type());
  const Tensor from = separate_rows(x.flattened(1)), read = strided(weight);
  const OptionalTensor added = contiguous(bias);
  const int64_t n = weight.size(0), m = from.size(0), most = weight.numel() > kMostPacked ? most_tall_rows() : m;
  dispatch(x.scalar_type(), "linear", [&]<typename T>() {
    const T* bias_data = added ? added->const_data_ptr<T>() : nullptr;
    for (int64_t first = 0; first < m; first += most) {
      const int64_t count = std::min(most, m - first);
      multiply<T>(from.narrow(0, first, count), Right<T>::transposed(read, count), bias_data,
                  out.mutable_data_ptr<T>() + first * n);
    }
  });
  return out;
}

namespace {

Tensor linear_weight_grad(const Tensor& dout, const Tensor& x) {
  check(dout.dim() == 2 && x.dim() == 2 && dout.size(0) == x.size(0) && dout.scalar_type() == x.scalar_type(),
        "linear_weight_grad: expected (rows, out_features) and (rows, in_features) of one dtype, got ", dout.sizes(),
        " of ", dout.scalar_type(), " and ", x.sizes(), " of ", x.scalar_type());
  return dispatch(x.scalar_type(), "linear_weight_grad",
                  [&]<typename T>() { return weight_gradient<T>(rows_of(dout), rows_of(x)); });
}

}  // namespace

FASTFORMER_OP(linear)
FASTFORMER_OP(linear_weight_grad)

}  // namespace fastformer
