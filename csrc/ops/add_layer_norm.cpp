// Dropout, residual add and LayerNorm (or RMSNorm) in one pass over the rows.
//
//   s = dropout(x) + residual,   y = (s - mean) * rstd * weight + bias
//
// A row is read once and stays in the cache for the sum, the two-pass variance and the output. Forward moves x,
// residual, s and y once each; backward reads dy, ds and s once and writes dx and dresidual once. Statistics are fp32
// (fp64 for fp64). dweight and dbias are summed in blocks of rows; the number of blocks does not depend on the number
// of threads, so neither does the result.

#include <optional>
#include <vector>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/philox.h"
#include "common/rows.h"
#include "ops/forward.h"
#include "ops/library.h"

namespace fastformer {
namespace {

constexpr int64_t kGroup = 16;  // rows per partial sum of a block, because long fp32 sums lose precision

// Returns a parameter in the accumulation type, or a vector of `absent` if there is no parameter.
template <typename acc>
std::vector<acc> widened(const OptionalTensor& parameter, int64_t dim, acc absent) {
  if (!parameter.has_value()) return std::vector<acc>(dim, absent);
  const Tensor flat = parameter->to(scalar_type_of<acc>()).contiguous();
  return {flat.const_data_ptr<acc>(), flat.const_data_ptr<acc>() + flat.numel()};
}

// The addresses of the rows of x: rows of a group, such as the heads of a token, are `near` apart, and groups `far`
// apart. So queries and keys can be read directly from a fused projection.
struct RowPlaces {
  int64_t group = 1, near = 0, far = 0;

  // Returns the addresses in x, or nullopt if x has to be copied first.
  static std::optional<RowPlaces> of(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    if (x.numel() == 0 || x.stride(last) != 1) return std::nullopt;
    int64_t sizes[2] = {1, 1}, strides[2] = {0, 0}, levels = 0;
    for (int64_t d = last - 1; d >= 0; --d) {
      if (x.size(d) == 1) continue;  // the stride has no meaning
      if (levels > 0 && x.stride(d) == sizes[levels - 1] * strides[levels - 1]) {
        sizes[levels - 1] *= x.size(d);
        continue;
      }
      if (levels == 2) return std::nullopt;
      sizes[levels] = x.size(d), strides[levels] = x.stride(d), ++levels;
    }
    return RowPlaces{sizes[0], strides[0], strides[1]};
  }
  int64_t at(int64_t row) const { return row / group * far + row % group * near; }
};

template <typename T, typename R>
void forward(const Tensor& x, const RowPlaces& places, const OptionalTensor& residual, const OptionalTensor& weight,
             const OptionalTensor& bias, double eps, const Dropout& dropout, bool rms_norm, Tensor& y, Tensor& s,
             Tensor& mean, Tensor& rstd) {
  using acc = acc_t<T>;
  const int64_t dim = x.size(-1), rows = dim == 0 ? 0 : x.numel() / dim;
  const std::vector<acc> w = widened<acc>(weight, dim, 1), b = widened<acc>(bias, dim, 0);
  const T* xp = x.const_data_ptr<T>();
  const R* rp = residual.has_value() ? residual->const_data_ptr<R>() : nullptr;
  R* sp = s.numel() ? s.mutable_data_ptr<R>() : nullptr;
  T* yp = y.mutable_data_ptr<T>();
  acc* mp = rms_norm ? nullptr : mean.mutable_data_ptr<acc>();
  acc* rstdp = rstd.mutable_data_ptr<acc>();

  for_row_ranges(rows, dim, [&](int64_t begin, int64_t end) {
    with_constants(dropout.on, rp != nullptr, [&]<bool kDropout, bool kResidual>() {
      std::vector<acc> keep(kDropout ? dim + Dropout::kGroup : 0);
      for (int64_t r = begin; r < end; ++r) {
        if constexpr (kDropout) dropout.multipliers(r, 0, 0, dim, keep.data());
        const auto [mu, inverse] = normalise_row<kDropout, kResidual>(
            xp + places.at(r), rp + (kResidual ? r * dim : 0), keep.data(), w.data(), b.data(), static_cast<acc>(eps),
            rms_norm, dim, sp + (kDropout || kResidual ? r * dim : 0), yp + r * dim);
        if (mp) mp[r] = mu;
        rstdp[r] = inverse;
      }
    });
  });
}

// Computes dx of one row from dy, ds and s (and dresidual, if it differs from dx), and adds the row to dw and db.
// `keep` and ds may be null.
template <bool kDropout, bool kStream, typename T, typename R, typename acc>
void backward_row(const T* dy, const R* ds, const R* s, const acc* keep, const acc* w, acc mean, acc rstd,
                  bool rms_norm, int64_t dim, acc* dw, acc* db, T* dx, R* dresidual) {
  using V = Vec<acc>;
  const V mu(mean), inverse(rstd);
  V sum(acc(0)), dot(acc(0));
  for_each_vec<acc>(dim, [=, &sum, &dot](int64_t c, int64_t n) {
    const V d = V::load(dy + c, n);
    const V xhat = (V::load(s + c, n) - mu) * inverse;
    const V g = d * V::load(w + c, n);
    fmadd(d, xhat, V::load(dw + c, n)).store(dw + c, n);
    (d + V::load(db + c, n)).store(db + c, n);
    sum = sum + g;  // lanes beyond the row are zero, because dy and w read as zero there
    dot = fmadd(g, xhat, dot);
  });
  const V mean_g(rms_norm ? acc(0) : sum.sum() / static_cast<acc>(dim)), mean_dot(dot.sum() / static_cast<acc>(dim));
  for_each_vec<acc>(dim, [=](int64_t c, int64_t n) {
    // Recomputed from data in the first-level cache: three loads and no store.
    const V g = V::load(dy + c, n) * V::load(w + c, n);
    const V xhat = (V::load(s + c, n) - mu) * inverse;
    V d = (g - mean_g - xhat * mean_dot) * inverse;
    if constexpr (kStream) d = d + V::load(ds + c, n);
    if (dresidual) d.store(dresidual + c, n);
    if constexpr (kDropout) d = d * V::load(keep + c, n);
    d.store(dx + c, n);
  });
}

template <typename T, typename R>
void backward(const Tensor& dy, const OptionalTensor& dresidual_out, const Tensor& s, const OptionalTensor& weight,
              const Tensor& mean, const Tensor& rstd, const Dropout& dropout, bool rms_norm, Tensor& dx,
              Tensor& dresidual, Tensor& dweight, Tensor& dbias) {
  using acc = acc_t<T>;
  const int64_t dim = s.size(-1), rows = dim == 0 ? 0 : s.numel() / dim;
  const std::vector<acc> w = widened<acc>(weight, dim, 1);
  const T* dyp = dy.const_data_ptr<T>();
  const R* dsp = dresidual_out.has_value() ? dresidual_out->const_data_ptr<R>() : nullptr;
  const R* sp = s.const_data_ptr<R>();
  const acc* mp = rms_norm ? nullptr : mean.const_data_ptr<acc>();
  const acc* rstdp = rstd.const_data_ptr<acc>();
  T* dxp = dx.mutable_data_ptr<T>();
  R* drp = dresidual.numel() ? dresidual.mutable_data_ptr<R>() : nullptr;

  // The number of blocks of rows doesn't depend on the threads. Their partial sums are added in order below.
  const int64_t block = std::max<int64_t>(64, (rows + 63) / 64), blocks = (rows + block - 1) / block;
  std::vector<acc> partial(blocks * 2 * dim, acc(0));
  for_each_worker(blocks, rows * dim > kSerialElements, [&](auto next) {
    with_constants(dropout.on, dsp != nullptr, [&]<bool kDropout, bool kStream>() {
      std::vector<acc> keep(kDropout ? dim + Dropout::kGroup : 0), group(2 * dim, acc(0));
      for (int64_t i = next(); i < blocks; i = next()) {
        acc* sums = partial.data() + i * 2 * dim;
        const int64_t first = i * block, last = std::min(rows, first + block);
        for (int64_t r = first; r < last; ++r) {
          if constexpr (kDropout) dropout.multipliers(r, 0, 0, dim, keep.data());
          backward_row<kDropout, kStream>(dyp + r * dim, dsp + (kStream ? r * dim : 0), sp + r * dim, keep.data(),
                                          w.data(), mp ? mp[r] : acc(0), rstdp[r], rms_norm, dim, group.data(),
                                          group.data() + dim, dxp + r * dim, drp ? drp + r * dim : nullptr);
          if ((r - first) % kGroup == kGroup - 1 || r == last - 1) {
            for (int64_t c = 0; c < 2 * dim; ++c) {
              sums[c] += group[c];
              group[c] = acc(0);
            }
          }
        }
      }
    });
  });
  for (int64_t i = 1; i < blocks; ++i)
    for (int64_t c = 0; c < 2 * dim; ++c) partial[c] += partial[i * 2 * dim + c];
  const auto finish = [&](Tensor& to, int64_t from) {
    if (to.numel() == 0) return;
    const bool is_wide = to.scalar_type() == scalar_type_of<acc>();
    const Tensor sum = is_wide ? to : empty({dim}, scalar_type_of<acc>());
    acc* each = sum.mutable_data_ptr<acc>();
    for (int64_t c = 0; c < dim; ++c) each[c] = blocks ? partial[from + c] : acc(0);
    if (!is_wide) to.copy_from(sum);
  };
  finish(dweight, 0);
  finish(dbias, dim);
}

// Calls f.operator()<T, R>() with the types of x and of the residual stream: the same type, or bf16 with an fp32
// stream.
template <typename F>
void dispatch_with_stream(ScalarType x, ScalarType stream, F&& f) {
  if (x == kBFloat16 && stream == kFloat) return f.template operator()<bfloat16, float>();
  check(x == stream, "add_layer_norm: the C++ kernel doesn't support x ", x, " with residual ", stream);
  dispatch(x, "add_layer_norm", [&]<typename T>() { f.template operator()<T, T>(); });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& x_in, const OptionalTensor& residual_in,
                                                              const OptionalTensor& weight, const OptionalTensor& bias,
                                                              double eps, double dropout_p,
                                                              const OptionalTensor& dropout_seed, bool rms_norm) {
  std::optional<RowPlaces> places = RowPlaces::of(x_in);
  const Tensor x = places ? x_in : x_in.contiguous();
  if (!places) places = RowPlaces{1, 0, x.size(-1)};
  const OptionalTensor residual = contiguous(residual_in);
  check(!residual || residual->sizes() == x.sizes(), "residual and x must have the same shape");
  const Dropout dropout(dropout_p, dropout_seed);
  const ScalarType stream = residual ? residual->scalar_type() : x.scalar_type();
  const ScalarType statistics = accumulation_dtype(x.scalar_type());
  const int64_t rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  Tensor y = empty(x.sizes(), x.scalar_type());
  Tensor s = residual || dropout.on ? empty(x.sizes(), stream) : empty({0}, x.scalar_type());
  Tensor mean = empty({rms_norm ? 0 : rows}, statistics), rstd = empty({rows}, statistics);
  dispatch_with_stream(x.scalar_type(), stream, [&]<typename T, typename R>() {
    forward<T, R>(x, *places, residual, weight, bias, eps, dropout, rms_norm, y, s, mean, rstd);
  });
  return {y, s, mean, rstd};
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd(const Tensor& dy_in,
                                                              const OptionalTensor& dresidual_out_in,
                                                              const Tensor& s_in, const OptionalTensor& weight,
                                                              const Tensor& mean, const Tensor& rstd, double dropout_p,
                                                              const OptionalTensor& dropout_seed, bool rms_norm,
                                                              bool has_bias, ScalarType x_dtype) {
  const Tensor dy = dy_in.contiguous(), s = s_in.contiguous();
  const OptionalTensor dresidual_out = contiguous(dresidual_out_in);
  check(dy.sizes() == s.sizes(), "dy and s must have the same shape");
  const Dropout dropout(dropout_p, dropout_seed);
  const bool same = !dropout.on && x_dtype == s.scalar_type();
  const int64_t dim = s.size(-1);
  const ScalarType parameter = weight.has_value() ? weight->scalar_type() : s.scalar_type();
  Tensor dx = empty(s.sizes(), x_dtype);
  Tensor dresidual = same ? empty({0}, s.scalar_type()) : empty(s.sizes(), s.scalar_type());
  Tensor dweight = empty({weight.has_value() ? dim : 0}, parameter), dbias = empty({has_bias ? dim : 0}, parameter);
  dispatch_with_stream(x_dtype, s.scalar_type(), [&]<typename T, typename R>() {
    backward<T, R>(dy, dresidual_out, s, weight, mean, rstd, dropout, rms_norm, dx, dresidual, dweight, dbias);
  });
  return {dx, dresidual, dweight, dbias};
}

}  // namespace

FASTFORMER_OP(add_layer_norm_fwd)
FASTFORMER_OP(add_layer_norm_bwd)

}  // namespace fastformer
