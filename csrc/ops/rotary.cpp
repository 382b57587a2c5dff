// Rotary position embedding: each pair of features is rotated by the angle of its position.
//
//   out_a = a cos - b sin,   out_b = b cos + a sin       a, b = features i and i + rotary_dim / 2, or 2i and 2i + 1
//
// In one pass, x is read in place (any strides but the last), rotated in fp32 (fp64 for fp64) and rounded once. The
// gradient is the inverse rotation, `inverse`.

#include <optional>
#include <vector>

#include "common/dispatch.h"
#include "common/indices.h"
#include "common/parallel.h"
#include "common/rows.h"
#include "ops/library.h"

namespace fastformer {
namespace {

// x: (batch, seqlen, num_heads, head_dim), the last dimension dense; out: the same, contiguous.
template <typename T>
void turn(const Tensor& x, const Tensor& cos_table, const Tensor& sin_table, const int64_t* positions, bool interleaved,
          bool inverse, Tensor& out) {
  using acc = acc_t<T>;
  const int64_t seqlen = x.size(1), heads = x.size(2), dim = x.size(3), half = cos_table.size(1), rest = dim - 2 * half;
  const T* from = x.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t cos_stride = cos_table.stride(0), sin_stride = sin_table.stride(0);
  const int64_t tokens = x.size(0) * seqlen, head_stride = x.stride(2), token_stride[] = {x.stride(0), x.stride(1)};
  for_row_ranges(tokens, heads * dim, [&](int64_t begin, int64_t end) {
    std::vector<acc> cos(2 * half), sin(2 * half);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t position = positions ? positions[token] : token % seqlen;
      lay_out_angles(cos_table.const_data_ptr<acc>() + position * cos_stride,
                     sin_table.const_data_ptr<acc>() + position * sin_stride, half, interleaved, inverse, cos.data(),
                     sin.data());
      const T* features = from + token / seqlen * token_stride[0] + token % seqlen * token_stride[1];
      T* turned = to + token * heads * dim;
      for (int64_t head = 0; head < heads; ++head, features += head_stride, turned += dim) {
        if (interleaved) rotate_neighbours<T>(features, cos.data(), sin.data(), half, turned);
        else rotate_halves<T>(features, cos.data(), sin.data(), half, turned);
        if (rest > 0) std::copy_n(features + 2 * half, rest, turned + 2 * half);
      }
    }
  });
}

Tensor rotary_fwd(const Tensor& x, const Tensor& cos, const Tensor& sin, const OptionalTensor& positions,
                  bool interleaved, bool inverse) {
  Tensor out = empty(x.sizes(), x.scalar_type());
  const Tensor rows = positions ? checked_indices(*positions, cos.size(0), "positions") : Tensor();
  if (x.numel() == 0) return out;
  const int64_t seqlen = x.size(-3), tabled = positions ? cos.size(0) : seqlen;
  Tensor view = x.dim() == 4 ? x : x.flattened(3);
  if (view.stride(3) != 1) view = view.contiguous();
  const ScalarType wide = accumulation_dtype(x.scalar_type());
  const Tensor cosines = rows_of(cos.narrow(0, 0, tabled).to(wide)), sines = rows_of(sin.narrow(0, 0, tabled).to(wide));
  dispatch(x.scalar_type(), "rotary", [&]<typename T>() {
    turn<T>(view, cosines, sines, positions ? rows.const_data_ptr<int64_t>() : nullptr, interleaved, inverse, out);
  });
  return out;
}

}  // namespace

FASTFORMER_OP(rotary_fwd)

}  // namespace fastformer
