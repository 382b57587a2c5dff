// All layers of an encoder in one call, without gradients: calls the forward passes of the other ops one after the
// other, without Python or the dispatcher in between. For small batches, these would take most of the time.
//
//   post-norm:  x = norm1(x + attention(x)),  x = norm2(x + feed_forward(x))
//   pre-norm:   x = x + attention(norm1(x)),  x = x + feed_forward(norm2(x))
//
// It does no arithmetic of its own: the kernels get the same rows as in separate calls of the ops.

#include <cmath>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/activation_kinds.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/share_out.h"
#include "ops/forward.h"
#include "ops/library.h"

namespace fastformer {
namespace {

// The parts of a layer, from the list that nn/stack.py makes. The list outlives this object.
struct Layer {
  static constexpr size_t kTensors = 12;
  const OptionalTensor &norm1_weight, &norm1_bias, &in_weight, &in_bias, &out_weight, &out_bias;
  const OptionalTensor &norm2_weight, &norm2_bias, &weight1, &bias1, &weight2, &bias2;
  double eps1, eps2;

  Layer(const OptionalTensor* from, const double* eps)
      : norm1_weight(from[0]),
        norm1_bias(from[1]),
        in_weight(from[2]),
        in_bias(from[3]),
        out_weight(from[4]),
        out_bias(from[5]),
        norm2_weight(from[6]),
        norm2_bias(from[7]),
        weight1(from[8]),
        bias1(from[9]),
        weight2(from[10]),
        bias2(from[11]),
        eps1(eps[0]),
        eps2(eps[1]) {}
};

bool is_matrix(const OptionalTensor& t, const Tensor& x, int64_t rows, int64_t columns) {
  return t && t->dim() == 2 && t->size(0) == rows && t->size(1) == columns && t->scalar_type() == x.scalar_type() &&
         t->is_plain();
}

bool is_vector(const OptionalTensor& t, const Tensor& x, int64_t size) {
  return !t || (t->dim() == 1 && t->size(0) == size && t->scalar_type() == x.scalar_type() && t->is_plain());
}

// Returns the sum of contiguous tensors.
Tensor sum_of(const Tensor& a, const Tensor& b) {
  Tensor sum = empty(a.sizes(), a.scalar_type());
  dispatch(a.scalar_type(), "encoder_stack", [&]<typename T>() {
    using acc = acc_t<T>;
    const T *left = a.const_data_ptr<T>(), *right = b.const_data_ptr<T>();
    T* to = sum.mutable_data_ptr<T>();
    for_row_ranges(sum.numel(), 1, [=](int64_t begin, int64_t end) {
      for_each_vec<acc>(end - begin, [=](int64_t i, int64_t n) {
        (Vec<acc>::load(left + begin + i, n) + Vec<acc>::load(right + begin + i, n)).store(to + begin + i, n);
      });
    });
  });
  return sum;
}

struct Stack {
  int64_t num_heads, num_kv_heads;
  std::string_view activation;
  bool norm_first, rms_norm, multiplies_in, multiplies_out;
  OptionalTensor attn_mask, cu_seqlens;
  int64_t max_seqlen;
  std::optional<int64_t> window_left, window_right;

  // Returns whether all tensors have the shapes and the dtype that the kernels expect.
  bool takes(const Layer& layer, const Tensor& x) const {
    const int64_t dim = x.size(-1), kv_dim = dim / num_heads * num_kv_heads;
    if (!layer.weight2 || layer.weight2->dim() != 2) return false;
    const int64_t hidden = layer.weight2->size(1), wide = is_gated(activation_named(activation)) ? 2 * hidden : hidden;
    return is_vector(layer.norm1_weight, x, dim) && is_vector(layer.norm1_bias, x, dim) &&
           is_matrix(layer.in_weight, x, dim + 2 * kv_dim, dim) && is_vector(layer.in_bias, x, dim + 2 * kv_dim) &&
           is_matrix(layer.out_weight, x, dim, dim) && is_vector(layer.out_bias, x, dim) &&
           is_vector(layer.norm2_weight, x, dim) && is_vector(layer.norm2_bias, x, dim) &&
           is_matrix(layer.weight1, x, wide, dim) && is_vector(layer.bias1, x, wide) &&
           is_matrix(layer.weight2, x, dim, hidden) && is_vector(layer.bias2, x, dim);
  }

  static Tensor multiply(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, bool by_ours) {
    return by_ours ? fastformer::linear(x, *weight, bias) : torch_linear(x, *weight, bias);
  }

  Tensor attend(const Tensor& x, const Layer& layer) const {
    const Tensor qkv = multiply(x, layer.in_weight, layer.in_bias, multiplies_in);
    const int64_t dim = x.size(-1), head_dim = dim / num_heads, kv_dim = head_dim * num_kv_heads;
    const auto heads = [&](int64_t start, int64_t count) {
      Dims sizes = qkv.sizes(), strides = qkv.strides();
      sizes.back() = count, sizes.push_back(head_dim);
      strides.back() = head_dim, strides.push_back(1);
      return qkv.view(sizes, strides, start);
    };
    const Tensor q = heads(0, num_heads), k = heads(dim, num_kv_heads), v = heads(dim + kv_dim, num_kv_heads);
    const double scale = std::pow(static_cast<double>(head_dim), -0.5);
    const Tensor attended =
        cu_seqlens ? std::get<0>(varlen_attention_fwd(q, k, v, *cu_seqlens, *cu_seqlens, max_seqlen, max_seqlen, scale,
                                                      window_left, window_right, 0.0, std::nullopt))
                   : std::get<0>(attention_fwd(q, k, v, attn_mask, std::nullopt, scale, window_left, window_right, 0.0,
                                               std::nullopt));
    return multiply(attended.view(x.sizes(), x.sizes().contiguous()), layer.out_weight, layer.out_bias, multiplies_out);
  }

  Tensor feed_forward(const Tensor& x, const Layer& layer) const {
    return std::get<0>(feed_forward_fwd(x, *layer.weight1, layer.bias1, *layer.weight2, layer.bias2, activation, 0.0,
                                        std::nullopt, false));
  }

  // Returns (the norm of the sum, the sum). Without a residual, the sum is x.
  std::tuple<Tensor, Tensor> normalise(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                       const OptionalTensor& bias, double eps, bool rms) const {
    auto [y, sum, mean, rstd] = add_layer_norm_fwd(x, residual, weight, bias, eps, 0.0, std::nullopt, rms);
    return {y, residual ? sum : x};
  }
};

OptionalTensor encoder_stack(const Tensor& x, const std::vector<OptionalTensor>& given, const std::vector<double>& eps,
                             int64_t num_heads, int64_t num_kv_heads, std::string_view activation, bool norm_first,
                             bool rms_norm, std::optional<bool> final_rms_norm, const std::vector<bool>& multiplies,
                             const OptionalTensor& attn_mask, const OptionalTensor& cu_seqlens, int64_t max_seqlen,
                             std::optional<int64_t> window_left, std::optional<int64_t> window_right) {
  const bool has_final_norm = final_rms_norm.has_value();
  const size_t num_layers = (given.size() - 2 * has_final_norm) / Layer::kTensors;
  check(given.size() == num_layers * Layer::kTensors + 2 * has_final_norm &&
            eps.size() == 2 * num_layers + has_final_norm && num_heads > 0,
        "encoder_stack: expected 12 tensors and 2 eps a layer, got ", given.size(), " and ", eps.size());
  const auto dtype = x.scalar_type();
  if (dtype != kFloat && dtype != kBFloat16 && dtype != kDouble) return std::nullopt;
  if (x.dim() != (cu_seqlens ? 2 : 3) || !x.is_plain() || x.numel() == 0 || x.size(-1) % num_heads != 0)
    return std::nullopt;
  const Stack stack{num_heads,     num_kv_heads, activation, norm_first, rms_norm,    multiplies[0],
                    multiplies[1], attn_mask,    cu_seqlens, max_seqlen, window_left, window_right};
  std::vector<Layer> layers;
  for (size_t i = 0; i < num_layers; ++i) layers.emplace_back(given.data() + i * Layer::kTensors, eps.data() + 2 * i);
  for (const Layer& layer : layers)
    if (!stack.takes(layer, x)) return std::nullopt;
  const OptionalTensor final_weight = has_final_norm ? given[given.size() - 2] : std::nullopt;
  const OptionalTensor final_bias = has_final_norm ? given.back() : std::nullopt;
  if (!is_vector(final_weight, x, x.size(-1)) || !is_vector(final_bias, x, x.size(-1))) return std::nullopt;

  std::optional<OpsAlone> ops_alone;
  if (multiplies[0] && multiplies[1]) ops_alone.emplace();
  const auto end = [&](const Tensor& y, const OptionalTensor& residual) {
    return std::get<0>(stack.normalise(y, residual, final_weight, final_bias, eps.back(), *final_rms_norm));
  };
  if (!norm_first) {
    Tensor y = x;
    for (const Layer& layer : layers) {
      std::tie(y, std::ignore) =
          stack.normalise(stack.attend(y, layer), y, layer.norm1_weight, layer.norm1_bias, layer.eps1, rms_norm);
      std::tie(y, std::ignore) =
          stack.normalise(stack.feed_forward(y, layer), y, layer.norm2_weight, layer.norm2_bias, layer.eps2, rms_norm);
    }
    return has_final_norm ? end(y, std::nullopt) : y;
  }
  // The last addition of a layer is fused with the first norm of the next one.
  Tensor residual = x, y;
  OptionalTensor delta;
  for (const Layer& layer : layers) {
    if (delta)
      std::tie(y, residual) =
          stack.normalise(*delta, residual, layer.norm1_weight, layer.norm1_bias, layer.eps1, rms_norm);
    else
      std::tie(y, residual) =
          stack.normalise(residual, std::nullopt, layer.norm1_weight, layer.norm1_bias, layer.eps1, rms_norm);
    std::tie(y, residual) =
        stack.normalise(stack.attend(y, layer), residual, layer.norm2_weight, layer.norm2_bias, layer.eps2, rms_norm);
    delta = stack.feed_forward(y, layer);
  }
  if (!delta) return has_final_norm ? end(residual, std::nullopt) : residual;
  return has_final_norm ? end(*delta, residual) : sum_of(residual, *delta);
}

}  // namespace

FASTFORMER_OP(encoder_stack)

}  // namespace fastformer
