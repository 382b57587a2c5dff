// Attention of many queries of one head at once, over packed keys and values: for prompts and encoders, in which the
// products dominate. The few queries of a decode step use attend_heads of rows.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/cpu_features.h"
#include "common/gemm.h"
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

// K^T and V of one head, packed for the products.
template <typename T>
class PackedHead {
 public:
  // keys, values: (count, dim), row-major.
  void pack(const T* keys, const T* values, int64_t count, int64_t dim) {
    const int64_t k_size = packed_size<T>(dim, count), v_size = values_size(count, dim);
    if (std::ssize(keys_) < k_size) keys_.resize(k_size);
    if (std::ssize(values_) < v_size) values_.resize(v_size);
    pack_into(keys, values, count, dim, keys_.data(), values_.data());
    use(keys_.data(), values_.data(), count, dim);
  }
  static void pack_into(const T* keys, const T* values, int64_t count, int64_t dim, T* to_keys, T* to_values) {
    fastformer::pack<T>(keys, 1, dim, dim, count, to_keys);
    const int64_t panel_size = round_up(count, kKeys) * kPanel;
    for (int64_t c = 0; c < dim; c += kPanel, to_values += panel_size) {
      fastformer::pack<T>(values + c, dim, 1, count, std::min(kPanel, dim - c), to_values);
      std::fill(to_values + round_up(count, kPair<T>) * kPanel, to_values + panel_size, T(0));
    }
  }
  // The number of elements of the packed values of a head.
  static int64_t values_size(int64_t count, int64_t dim) { return packed_size<T>(round_up(count, kKeys), dim); }
  // Attends to keys and values that pack_into has written.
  void use(const T* keys, const T* values, int64_t count, int64_t dim) {
    packed_keys_ = keys, packed_values_ = values, count_ = count, dim_ = dim;
  }

  // Computes rows of results from rows of queries, q_stride apart. Row i sees the keys [first(i), end(i)), both of
  // which increase with i; a row that sees nothing gives zeros. scale2: the scale of the scores times log2(e). bias(i,
  // key, count, scores) changes the products of row i with `count` visible keys, from `key` on, before the scale.
  // value_scales: factors of the values, and kPanel more that are finite; null: none. few_rows: the products with keys
  // that don't fill a panel do without AMX, whose calls take longer than the products of few rows.
  //
  // With brgemm, whole tiles of rows and keys are multiplied: those beyond the last row are ignored, and those beyond
  // the last key have weight 0. It sums what is beyond the last whole tile in another order, so bits would depend on
  // how many keys the block sees; and it compiles a kernel for each shape, which each thread keeps (34 KB).
  template <typename First, typename End, typename Bias>
  void attend(const float* q, int64_t q_stride, int64_t rows, float scale2, First first, End end, Bias bias, float* out,
              int64_t out_stride, const float* value_scales = nullptr, bool few_rows = false) {
    using V = Vec<float>;
    constexpr int64_t kRows = 64;
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    queries_.resize(kRows * dim_), sums_.resize(kRows * dim_);
    for (int64_t begin = 0; begin < rows; begin += kRows) {
      const int64_t m = std::min(kRows, rows - begin);
      const bool has_tiles = std::is_same_v<T, bfloat16> && use_brgemm();
      const int64_t tiled = has_tiles && !few_rows ? round_up(m, kTileRows) : m;
      // Start at the slice of kDepth keys with the first visible key, so that the sums don't depend on which rows are
      // computed together.
      const int64_t from = first(begin) / kDepth<T> * kDepth<T>, seen = std::max<int64_t>(0, end(begin + m - 1) - from);
      const int64_t width = round_up(std::max<int64_t>(1, seen), kPanel);
      scores_.resize(kRows * width);
      if constexpr (!std::is_same_v<T, float>) weights_.resize(kRows * width);
      for (int64_t i = 0; i < m; ++i) store_row(q + (begin + i) * q_stride, dim_, queries_.data() + i * dim_);
      // brgemm multiplies by whole panels alone; what is beyond the keys is overwritten.
      gemm<T>(tiled, has_tiles && !few_rows ? round_up(seen, kPanel) : seen, dim_, queries_.data(), dim_,
              packed_keys_ + from * round_up(dim_, kPair<T>), scores_.data(), width, false);
      float inverse[kRows];
      for (int64_t i = 0; i < m; ++i) {
        float* x = scores_.data() + i * width;
        const int64_t left = std::clamp<int64_t>(first(begin + i) - from, 0, seen);
        const int64_t right = std::clamp<int64_t>(end(begin + i) - from, left, seen);
        bias(begin + i, from + left, right - left, x + left);
        std::fill(x, x + left, kNothing);
        std::fill(x + right, x + width, kNothing);
        V most(kNothing);
        for (int64_t c = 0; c < width; c += V::size) most = max(most, V::load(x + c));
        const float largest = most.max();
        const float lowered = largest == kNothing ? 0.f : largest;
        float sum;
        const float* factors = value_scales ? value_scales + from : nullptr;
        if constexpr (std::is_same_v<T, float>) sum = weigh<false>(x, width, lowered, scale2, factors, x);
        else {
          T* to = weights_.data() + i * width;
          sum = cpu_features().avx512_bf16 ? weigh<true>(x, width, lowered, scale2, factors, to)
                                           : weigh<false>(x, width, lowered, scale2, factors, to);
        }
        inverse[i] = sum == 0 ? 0.f : 1.f / sum;  // NaN stays NaN
      }
      const T* weights;
      if constexpr (std::is_same_v<T, float>) weights = scores_.data();
      else weights = weights_.data();
      // An odd last key is paired with a row whose weight is 0, too.
      gemm<T>(tiled, dim_, round_up(seen, has_tiles ? kKeys : kPair<T>), weights, width, packed_values_ + from * kPanel,
              sums_.data(), dim_, false, round_up(count_, kKeys));
      for (int64_t i = 0; i < m; ++i)
        for_each_vec<float>(dim_, [&](int64_t c, int64_t n) {
          (V::load(sums_.data() + i * dim_ + c, n) * V(inverse[i])).store(out + (begin + i) * out_stride + c, n);
        });
    }
    // The packed products, which come next, configure the tiles themselves; brgemm would not notice.
    if constexpr (!std::is_same_v<T, float>) gemm_release();
  }

 private:
  // The keys of a tile, to which values are padded: a step of bf16 has two.
  static constexpr int64_t kKeys = std::is_same_v<T, bfloat16> ? 2 * kTileSteps : 1;

  // Computes to = 2 ** ((x - lowered) * scale2) for a row, times the factors if there are any, and returns the sum
  // without them.
  template <bool kAtOnce>
  static float weigh(const float* x, int64_t width, float lowered, float scale2, const float* factors, T* to) {
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

  const T *packed_keys_ = nullptr, *packed_values_ = nullptr;
  int64_t count_ = 0, dim_ = 0;
  std::vector<T> keys_, values_, queries_, weights_;
  std::vector<float> scores_, sums_;
};

}  // namespace fastformer
