// Attention of many queries of one head at once, over packed keys and values: for prompts and encoders, in which the
// products dominate. The few queries of a decode step use attend_heads of rows.h.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/cpu_features.h"
#include "common/gemm.h"
#include "common/rows.h"
#include "engine/tiles.h"

namespace fastformer {

// Queries, keys and values in the form that the products read.
template <typename T>
void store_row(const float* from, int64_t n, T* to) {
  using V = Vec<float>;
  int64_t c = 0;
  if constexpr (std::is_same_v<T, bfloat16>)
    if (cpu_features().avx512_bf16)
      for (; c + V::size <= n; c += V::size) store_narrow<true>(V::load(from + c), to + c);
  for_each_vec<float>(n - c, [=](int64_t i, int64_t m) { V::load(from + c + i, m).store(to + c + i, m); });
}

// Computes to = 2 ** ((x - lowered) * scale2) for a row, times the factors if there are any, and returns the sum
// without them.
template <bool kAtOnce, typename T>
float weigh_row(const float* x, int64_t width, float lowered, float scale2, const float* factors, T* to) {
  using V = Vec<float>;
  V total(0.f);
  for (int64_t c = 0; c < width; c += V::size) {
    const V e = exp2((V::load(x + c) - V(lowered)) * V(scale2));
    const V weight = factors ? e * V::load(factors + c) : e;
    if constexpr (std::is_same_v<T, float>) weight.store(to + c);
    else store_narrow<kAtOnce>(weight, to + c);
    total = total + e;
  }
  return total.sum();
}

// Computes rows of results from rows of queries, q_stride apart. Row i sees the keys [first(i), end(i)), both of which
// increase with i; a row that sees nothing gives zeros. scale2: the scale of the scores times log2(e). bias(i, key,
// count, scores) changes the products of row i with `count` visible keys, from `key` on, before the scale, and returns
// the score of a sink (see weigh). `head` has the keys and values: its products cover, for at most kQueryRows rows, the
// keys of `seen` from a multiple of kSlice on.
constexpr int64_t kQueryRows = 64;
struct Seen {
  int64_t from, count, width;  // width: count, and more to fill vectors
};
template <typename Head, typename First, typename End, typename Bias>
void attend_by(Head& head, const float* q, int64_t q_stride, int64_t rows, float scale2, First first, End end,
               Bias bias, float* out, int64_t out_stride) {
  using V = Vec<float>;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (int64_t begin = 0; begin < rows; begin += kQueryRows) {
    const int64_t m = std::min(kQueryRows, rows - begin);
    // Start at a slice with the first visible key, so that the sums don't depend on which rows are computed together.
    const int64_t from = first(begin) / Head::kSlice * Head::kSlice;
    const int64_t count = std::max<int64_t>(0, end(begin + m - 1) - from);
    if (count == 0) {  // there may be no key at `from`
      for (int64_t i = 0; i < m; ++i) std::fill_n(out + (begin + i) * out_stride, head.dim(), 0.f);
      continue;
    }
    const Seen seen{from, count, round_up(count, Head::kWidth)};
    float* const scores = head.multiply_keys(q + begin * q_stride, q_stride, m, seen);
    float inverse[kQueryRows];
    for (int64_t i = 0; i < m; ++i) {
      float* x = scores + i * seen.width;
      const int64_t left = std::clamp<int64_t>(first(begin + i) - from, 0, count);
      const int64_t right = std::clamp<int64_t>(end(begin + i) - from, left, count);
      const float sink2 = bias(begin + i, from + left, right - left, x + left);
      std::fill(x, x + left, kNothing);
      std::fill(x + right, x + seen.width, kNothing);
      V most(kNothing);
      for (int64_t c = 0; c < seen.width; c += V::size) most = max(most, V::load(x + c));
      const float largest = most.max();
      float sum = head.weigh(i, x, largest == kNothing ? 0.f : largest, scale2, seen);
      if (sum != 0 && sink2 != kNoSink<float>) sum += std::exp2(sink2 - largest * scale2);
      inverse[i] = sum == 0 ? 0.f : 1.f / sum;  // NaN stays NaN
    }
    const float* const sums = head.multiply_values(m, seen);
    for (int64_t i = 0; i < m; ++i)
      for_each_vec<float>(head.dim(), [&](int64_t c, int64_t n) {
        (V::load(sums + i * head.sums_stride() + c, n) * V(inverse[i])).store(out + (begin + i) * out_stride + c, n);
      });
  }
  head.release();
}

// K^T and V of one head in T, packed for the products.
template <typename T>
class PackedHead {
 public:
  // Products sum over slices of kDepth keys.
  static constexpr int64_t kSlice = kDepth<T>, kWidth = kPanel;

  // Makes room for the rows of `count` keys and values, which key(i) and value(i) then take.
  void reserve(int64_t count, int64_t dim) {
    dim_ = dim;
    if (std::ssize(key_rows_) < count * dim) key_rows_.resize(count * dim), value_rows_.resize(count * dim);
  }
  T* key(int64_t i) { return key_rows_.data() + i * dim_; }
  T* value(int64_t i) { return value_rows_.data() + i * dim_; }
  void store(int64_t i, const float* k, const float* v) { store_row(k, dim_, key(i)), store_row(v, dim_, value(i)); }

  // The bytes that `count` packed keys and values take.
  static int64_t bytes(int64_t count, int64_t dim) {
    return (packed_size<T>(dim, count) + values_size(count, dim)) * static_cast<int64_t>(sizeof(T));
  }
  // Packs the first `count` rows.
  void pack_into(int64_t count, char* memory) const {
    T *to_keys = reinterpret_cast<T*>(memory), *to_values = to_keys + packed_size<T>(dim_, count);
    fastformer::pack<T>(key_rows_.data(), 1, dim_, dim_, count, to_keys);
    const int64_t panel_size = round_up(count, kKeys) * kPanel;
    for (int64_t c = 0; c < dim_; c += kPanel, to_values += panel_size) {
      fastformer::pack<T>(value_rows_.data() + c, dim_, 1, count, std::min(kPanel, dim_ - c), to_values);
      std::fill(to_values + round_up(count, kPair<T>) * kPanel, to_values + panel_size, T(0));
    }
  }
  // Attends to what pack_into has written.
  void use(const char* memory, int64_t count, int64_t dim) {
    packed_keys_ = reinterpret_cast<const T*>(memory), packed_values_ = packed_keys_ + packed_size<T>(dim, count);
    count_ = count, dim_ = dim;
  }
  // Does both, in memory of its own.
  void pack(int64_t count) {
    if (std::ssize(memory_) < bytes(count, dim_)) memory_.resize(bytes(count, dim_));
    pack_into(count, memory_.data());
    use(memory_.data(), count, dim_);
  }

  // value_scales: factors of the values, and kPanel more that are finite; null: none. few_rows: the products with keys
  // that don't fill a panel do without AMX, whose calls take longer than the products of few rows. See attend_by.
  //
  // With brgemm, whole tiles of rows and keys are multiplied: those beyond the last row are ignored, and those beyond
  // the last key have weight 0. It sums what is beyond the last whole tile in another order, so bits would depend on
  // how many keys the block sees; and it compiles a kernel for each shape, which each thread keeps (34 KB).
  template <typename First, typename End, typename Bias>
  void attend(const float* q, int64_t q_stride, int64_t rows, float scale2, First first, End end, Bias bias, float* out,
              int64_t out_stride, bool few_rows = false, const float* value_scales = nullptr) {
    value_scales_ = value_scales, has_tiles_ = std::is_same_v<T, bfloat16> && use_brgemm();
    multiplies_tiles_ = has_tiles_ && !few_rows;
    attend_by(*this, q, q_stride, rows, scale2, first, end, bias, out, out_stride);
  }

  // What attend_by needs.
  int64_t dim() const { return dim_; }
  int64_t sums_stride() const { return dim_; }
  float* multiply_keys(const float* q, int64_t q_stride, int64_t rows, const Seen& seen) {
    queries_.resize(kQueryRows * dim_), sums_.resize(kQueryRows * dim_), scores_.resize(kQueryRows * seen.width);
    if constexpr (!std::is_same_v<T, float>) weights_.resize(kQueryRows * seen.width);
    for (int64_t i = 0; i < rows; ++i) store_row(q + i * q_stride, dim_, queries_.data() + i * dim_);
    // brgemm multiplies by whole panels alone; what is beyond the keys is overwritten.
    gemm<T>(tiled(rows), multiplies_tiles_ ? round_up(seen.count, kPanel) : seen.count, dim_, queries_.data(), dim_,
            packed_keys_ + seen.from * round_up(dim_, kPair<T>), scores_.data(), seen.width, false);
    return scores_.data();
  }
  float weigh(int64_t row, const float* x, float lowered, float scale2, const Seen& seen) {
    const float* factors = value_scales_ ? value_scales_ + seen.from : nullptr;
    T* to = weights() + row * seen.width;
    if (std::is_same_v<T, bfloat16> && cpu_features().avx512_bf16)
      return weigh_row<true>(x, seen.width, lowered, scale2, factors, to);
    return weigh_row<false>(x, seen.width, lowered, scale2, factors, to);
  }
  const float* multiply_values(int64_t rows, const Seen& seen) {
    // An odd last key is paired with a row whose weight is 0, too.
    gemm<T>(tiled(rows), dim_, round_up(seen.count, has_tiles_ ? kKeys : kPair<T>), weights(), seen.width,
            packed_values_ + seen.from * kPanel, sums_.data(), dim_, false, round_up(count_, kKeys));
    return sums_.data();
  }
  // The packed products, which come next, configure the tiles themselves; brgemm would not notice.
  void release() {
    if constexpr (!std::is_same_v<T, float>) gemm_release();
  }

 private:
  // The keys of a tile, to which values are padded: a step of bf16 has two.
  static constexpr int64_t kKeys = std::is_same_v<T, bfloat16> ? 2 * kTileSteps : 1;

  static int64_t values_size(int64_t count, int64_t dim) { return packed_size<T>(round_up(count, kKeys), dim); }
  int64_t tiled(int64_t rows) const { return multiplies_tiles_ ? round_up(rows, kTileRows) : rows; }
  T* weights() {
    if constexpr (std::is_same_v<T, float>) return scores_.data();
    else return weights_.data();
  }

  const T *packed_keys_ = nullptr, *packed_values_ = nullptr;
  const float* value_scales_ = nullptr;
  int64_t count_ = 0, dim_ = 0;
  bool has_tiles_ = false, multiplies_tiles_ = false;
  std::vector<char> memory_;
  std::vector<T> key_rows_, value_rows_, queries_, weights_;
  std::vector<float> scores_, sums_;
};

}  // namespace fastformer
