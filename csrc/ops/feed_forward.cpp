// The feed-forward network: two products. Bias, activation and dropout are applied to each tile of the first one while
// it is in the cache.
//
//   pre = x W1^T + b1,   hidden = dropout(act(pre)),   out = hidden W2^T + b2
//
// If a backward pass will follow, ReLU saves only the hidden state (an element was kept and positive if hidden > 0).
// The other activations save only the pre-activation and recompute the hidden state in backward. Forward takes 4 rows
// dim hidden FLOPs, backward twice that. Sums are fp32 (fp64 for fp64) and rounded once, after the bias. The result of
// a row does not depend on the number of rows.

#include <optional>
#include <string_view>

#include "common/activation.h"
#include "common/dispatch.h"
#include "common/philox.h"
#include "ops/forward.h"
#include "ops/library.h"
#include "ops/linear.h"

namespace fastformer {
namespace {

// Rounds x to type T.
template <typename T>
Vec<acc_t<T>> rounded(Vec<acc_t<T>> x) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return x;
  } else {
    T lanes[Vec<acc_t<T>>::size];
    x.store(lanes);
    return Vec<acc_t<T>>::load(lanes);
  }
}

template <typename T>
struct Forward {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  Activation activation;
  Dropout dropout;
  int64_t hidden;
  const T* bias1;
  T* pre;          // (rows, hidden) or, with a gate, (rows, 2 * hidden); null if it isn't saved
  T* hidden_rows;  // (rows, hidden), with row stride hidden_stride
  int64_t hidden_stride;

  // Finishes columns [column, column + columns) of a row whose products are in `gate` (and `up`).
  void row(int64_t r, int64_t column, int64_t columns, const acc* gate, const acc* up) const {
    acc keep[kTileColumns + Dropout::kGroup];
    if (dropout.on) dropout.multipliers(r, 0, column, columns, keep);
    const bool gated = is_gated(activation);
    T* pre_to = pre ? pre + r * (gated ? 2 * hidden : hidden) + column : nullptr;
    T* hidden_to = hidden_rows + r * hidden_stride + column;
    // Local copies: members would be reloaded after every store, because stores may alias anything.
    const Activation a = activation;
    const bool drops = dropout.on;
    const int64_t width = hidden;
    const T* bias = bias1 ? bias1 + column : nullptr;
    for_each_vec<acc>(columns, [=, &keep](int64_t c, int64_t n) {
      V x = V::load(gate + c, n);
      if (bias) x = x + V::load(bias + c, n);
      V h;
      if (a == Activation::relu) {
        h = activate<acc>(a, x);
      } else {
        x = rounded<T>(x);  // as backward reads it
        if (pre_to) x.store(pre_to + c, n);
        if (gated) {
          V y = V::load(up + c, n);
          if (bias) y = y + V::load(bias + width + c, n);
          y = rounded<T>(y);
          if (pre_to) y.store(pre_to + width + c, n);
          h = activate<acc>(a, x) * y;
        } else {
          h = activate<acc>(a, x);
        }
      }
      if (drops) h = h * V::load(keep + c, n);
      h.store(hidden_to + c, n);
    });
  }
};

template <typename T>
void forward(const Tensor& x, const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2,
             const OptionalTensor& bias2, Activation activation, const Dropout& dropout, bool needs_saved, Tensor& out,
             Tensor& saved) {
  using acc = acc_t<T>;
  const int64_t rows = x.size(0), dim = x.size(1), hidden = weight2.size(1);
  const bool gated = is_gated(activation);
  const bool keeps_hidden = needs_saved && activation == Activation::relu;
  const Tensor hidden_rows = keeps_hidden ? saved : scratch_rows<T>(rows, hidden);
  const Forward<T> epilogue{activation,
                            dropout,
                            hidden,
                            bias1 ? bias1->const_data_ptr<T>() : nullptr,
                            needs_saved && !keeps_hidden ? saved.mutable_data_ptr<T>() : nullptr,
                            hidden_rows.mutable_data_ptr<T>(),
                            hidden_rows.stride(0)};
  const Tensor left = readable_rows<T>(x);
  const T* xp = left.const_data_ptr<T>();
  const auto w1 = Right<T>::transposed(weight1.narrow(0, 0, hidden), rows);
  const auto w1_up = Right<T>::transposed(weight1.narrow(0, hidden, gated ? hidden : 0), rows);
  for_each_tile(rows, hidden, gated ? 2 * dim : dim, [&](const TileOf& t) {
    acc gate[kTileSize], up[kTileSize];
    w1.multiply_tile(t, xp, left.stride(0), gate);
    if (gated) w1_up.multiply_tile(t, xp, left.stride(0), up);
    for (int64_t r = 0; r < t.rows; ++r) epilogue.row(t.row + r, t.column, t.columns, gate + r * t.ld, up + r * t.ld);
  });
  multiply<T>(hidden_rows, Right<T>::transposed(weight2, rows), bias2 ? bias2->const_data_ptr<T>() : nullptr,
              out.mutable_data_ptr<T>());
}

// Returns dy^T x: a contiguous matrix if the weight is contiguous, else a transposed view of one.
template <typename T>
Tensor gradient_like(const Tensor& weight, const Tensor& dy, const Tensor& x) {
  return weight.is_contiguous() ? weight_gradient<T>(dy, x) : weight_gradient<T>(x, dy).t();
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Computes dpre and, if it was not saved (else hidden_row is null), the hidden state, from a tile of dhidden = dout W2,
// for the columns of a row from `column` on.
template <typename T>
void backward_row(Activation activation, const Dropout& dropout, int64_t hidden, int64_t r, int64_t column,
                  int64_t columns, const acc_t<T>* dhidden, const T* saved, T* dpre, T* hidden_row) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const bool gated = is_gated(activation);
  acc keep[kTileColumns + Dropout::kGroup];
  if (dropout.on && activation != Activation::relu) dropout.multipliers(r, 0, column, columns, keep);
  const V scale(static_cast<acc>(dropout.scale));
  const bool drops = dropout.on;
  for_each_vec<acc>(columns, [=, &keep](int64_t c, int64_t n) {
    V dh = V::load(dhidden + c, n);
    const V x = V::load(saved + c, n);
    if (activation == Activation::relu) {
      where_positive(x, dh * scale, V(acc(0))).store(dpre + c, n);
      return;
    }
    V multiplier(acc(1));
    if (drops) multiplier = V::load(keep + c, n);
    dh = dh * multiplier;
    V h = activate<acc>(activation, x);
    if (gated) {
      const V up = V::load(saved + hidden + c, n);
      (dh * h).store(dpre + hidden + c, n);
      h = h * up, dh = dh * up;
    }
    (dh * activation_derivative<acc>(activation, x)).store(dpre + c, n);
    (h * multiplier).store(hidden_row + c, n);
  });
}

template <typename T>
Gradients backward(const Tensor& dout, const Tensor& x, const Tensor& weight1, bool has_bias1, const Tensor& weight2,
                   const Tensor& saved, Activation activation, const Dropout& dropout, bool has_bias2) {
  using acc = acc_t<T>;
  const int64_t rows = x.size(0), dim_out = weight2.size(0), hidden = weight2.size(1), wide = weight1.size(0);
  const Tensor dpre = scratch_rows<T>(rows, wide);
  const Tensor hidden_rows = activation == Activation::relu ? saved : empty({rows, hidden}, x.scalar_type());
  const Tensor left = readable_rows<T>(dout);
  const T* doutp = left.const_data_ptr<T>();
  const Tensor strided1 = strided(weight1), strided2 = strided(weight2);
  const auto w2 = Right<T>::as_is(strided2, rows);
  const T* savedp = saved.const_data_ptr<T>();
  T *dprep = dpre.mutable_data_ptr<T>(),
    *hiddenp = activation == Activation::relu ? nullptr : hidden_rows.mutable_data_ptr<T>();
  for_each_tile(rows, hidden, dim_out, [&](const TileOf& t) {
    acc dhidden[kTileSize];
    w2.multiply_tile(t, doutp, left.stride(0), dhidden);
    for (int64_t r = 0; r < t.rows; ++r) {
      const int64_t row = t.row + r;
      backward_row<T>(activation, dropout, hidden, row, t.column, t.columns, dhidden + r * t.ld,
                      savedp + row * wide + t.column, dprep + row * dpre.stride(0) + t.column,
                      hiddenp ? hiddenp + row * hidden + t.column : nullptr);
    }
  });
  Tensor dx = empty(x.sizes(), x.scalar_type());
  multiply<T>(dpre, Right<T>::as_is(strided1, rows), nullptr, dx.mutable_data_ptr<T>());
  // A missing bias has an empty gradient; no two results of an op may share memory.
  const auto sums = [&](bool exists, const Tensor& d) {
    return exists ? column_sums<T>(d) : empty({0}, x.scalar_type());
  };
  return {dx, gradient_like<T>(weight1, dpre, x), sums(has_bias1, dpre), gradient_like<T>(weight2, dout, hidden_rows),
          sums(has_bias2, dout)};
}

Tensor as_rows(const Tensor& t) { return t.flattened(1).contiguous(); }

}  // namespace

std::tuple<Tensor, Tensor> feed_forward_fwd(const Tensor& x, const Tensor& weight1, const OptionalTensor& bias1,
                                            const Tensor& weight2, const OptionalTensor& bias2,
                                            std::string_view activation, double dropout_p,
                                            const OptionalTensor& dropout_seed, bool needs_saved) {
  const Tensor rows = as_rows(x);
  Dims shape = x.sizes();
  shape.back() = weight2.size(0);
  Tensor out = empty(shape, x.scalar_type());
  Tensor saved = needs_saved ? empty({rows.size(0), weight1.size(0)}, x.scalar_type()) : empty({0}, x.scalar_type());
  dispatch(x.scalar_type(), "feed_forward", [&]<typename T>() {
    forward<T>(rows, strided(weight1), contiguous(bias1), strided(weight2), contiguous(bias2),
               activation_named(activation), Dropout(dropout_p, dropout_seed), needs_saved, out, saved);
  });
  return {out, saved};
}

namespace {

Gradients feed_forward_bwd(const Tensor& dout, const Tensor& x, const Tensor& weight1, const OptionalTensor& bias1,
                           const Tensor& weight2, const Tensor& saved, std::string_view activation, double dropout_p,
                           const OptionalTensor& dropout_seed, bool has_bias2) {
  Gradients gradients = dispatch(x.scalar_type(), "feed_forward", [&]<typename T>() {
    return backward<T>(as_rows(dout), as_rows(x), weight1, bias1.has_value(), weight2, saved.contiguous(),
                       activation_named(activation), Dropout(dropout_p, dropout_seed), has_bias2);
  });
  std::get<0>(gradients) = std::get<0>(gradients).view(x.sizes(), x.sizes().contiguous());
  return gradients;
}

}  // namespace

FASTFORMER_OP(feed_forward_fwd)
FASTFORMER_OP(feed_forward_bwd)

}  // namespace fastformer
