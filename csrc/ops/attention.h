// The shared part of attention's forward and backward passes: the sequences of a batch, and the keys that a query sees.

#pragma once

#include <optional>
#include <vector>

#include "common/buffer.h"
#include "common/dispatch.h"
#include "common/gemm.h"
#include "common/indices.h"
#include "common/parallel.h"
#include "common/philox.h"
#include "common/simd.h"
#include "common/tensor.h"

namespace fastformer {

constexpr int64_t kSerialScores = 1 << 14;  // with fewer scores, a second thread costs more than it saves

// One sequence of the batch. Row numbers are in units of the tensor's row stride, from the tensor's start.
struct Sequence {
  int64_t q_start, k_start;  // the first row, among all rows of packed tensors; 0 for dense ones
  int64_t seqlen_q, keys;    // the number of queries, and of keys that any query can see
  int64_t diagonal;          // seqlen_k - seqlen_q; query i is aligned with key i + diagonal
  int64_t lse_start;
  int64_t k_batch;  // the batch index of its keys and values
};

struct Interval {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// A (batch, seqlen, heads, head_dim) or (total, heads, head_dim) tensor as pointers.
template <typename T>
struct Rows {
  T* data;
  int64_t batch_stride, stride, head_stride;

  explicit Rows(const Tensor& t)
      : data(data_of(t)),
        batch_stride(t.dim() == 4 ? t.stride(0) : 0),
        stride(t.stride(-3)),
        head_stride(t.stride(-2)) {}
  T* at(int64_t batch, int64_t row, int64_t head) const {
    return data + batch * batch_stride + row * stride + head * head_stride;
  }

 private:
  static T* data_of(const Tensor& t) {
    if constexpr (std::is_const_v<T>) return static_cast<T*>(t.const_data_ptr());
    else return static_cast<T*>(t.mutable_data_ptr());
  }
};

// Returns a tensor with the shape of t. Kernels write its first `used` rows (first dimension); later rows are zero.
inline Tensor empty_rows(const Tensor& t, int64_t used) {
  Tensor rows = empty(t.sizes(), t.scalar_type());
  if (used < t.size(0)) rows.narrow(0, used, t.size(0) - used).zero();
  return rows;
}

// The mask of a call: visible keys, or values added to the scores. Strides are 0 in broadcast dimensions.
struct Mask {
  Tensor values;  // boolean, bf16 or in the accumulation type; contiguous along the keys
  int64_t strides[4] = {0, 0, 0, 0};
  bool on = false, boolean = false;

  Mask(const OptionalTensor& mask, ScalarType acc);
  bool adds() const { return on && !boolean; }

  // Calls f(load). load(j, n) returns the values of one query for n keys from j on: 1 or 0 for a boolean mask.
  template <typename acc, typename F>
  void with_row(int64_t b, int64_t h, int64_t i, F&& f) const {
    if (boolean) return with_row_of<bool, acc>(b, h, i, f);
    if constexpr (std::is_same_v<acc, float>)
      if (values.scalar_type() == kBFloat16) return with_row_of<bfloat16, acc>(b, h, i, f);
    with_row_of<acc, acc>(b, h, i, f);
  }

 private:
  template <typename E, typename acc, typename F>
  void with_row_of(int64_t b, int64_t h, int64_t i, F&& f) const {
    const E* row = static_cast<const E*>(values.const_data_ptr()) + b * strides[0] + h * strides[1] + i * strides[2];
    if (strides[3] == 0) f([=](int64_t, int64_t) { return Vec<acc>(static_cast<acc>(*row)); });
    else f([=](int64_t j, int64_t n) { return Vec<acc>::load(row + j, n); });
  }
};

struct Problem {
  int64_t batch, num_heads, num_kv_heads, head_dim, lse_head_stride;
  std::vector<Sequence> sequences;
  std::optional<int64_t> window_left, window_right;
  double softmax_scale;
  double softcap = 0;  // the cap of the scaled scores, applied before a mask; 0: none
  Dropout dropout;
  // The rows of packed tensors that belong to sequences; further rows may follow.
  int64_t used_q = 0, used_k = 0;

  static Problem dense(const Tensor& q, const Tensor& k, const OptionalTensor& seqlens_k);
  static Problem packed(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k);

  void set_options(double scale, std::optional<int64_t> left, std::optional<int64_t> right, double dropout_p,
                   const OptionalTensor& dropout_seed, double cap) {
    // Larger than any sequence length, and small enough that sums with positions don't overflow.
    constexpr int64_t kFar = int64_t(1) << 40;
    softmax_scale = scale, softcap = cap, window_left = left, window_right = right;
    if (left) window_left = std::clamp(*left, -kFar, kFar);
    if (right) window_right = std::clamp(*right, -kFar, kFar);
    dropout = Dropout(dropout_p, dropout_seed);
  }

  // The factor from products to exponents of two.
  template <typename acc>
  acc scale2() const {
    return static_cast<acc>(softmax_scale * 1.4426950408889634);
  }
  int64_t kv_head(int64_t head) const { return head / (num_heads / num_kv_heads); }

  // Returns the keys that query i sees.
  Interval keys_of(const Sequence& s, int64_t i) const {
    Interval keys{0, s.keys};
    if (window_left) keys.begin = std::max<int64_t>(0, i + s.diagonal - *window_left);
    if (window_right) keys.end = std::min(s.keys, i + s.diagonal + *window_right + 1);
    return keys;
  }
  // Returns the queries that see key j, which must be less than s.keys.
  Interval queries_of(const Sequence& s, int64_t j) const {
    Interval queries{0, s.seqlen_q};
    if (window_right) queries.begin = std::max<int64_t>(0, j - s.diagonal - *window_right);
    if (window_left) queries.end = std::min(s.seqlen_q, j - s.diagonal + *window_left + 1);
    return queries;
  }
};

// Runs the forward pass of a problem, and writes lse (fp32; fp64 for fp64) and out. Defined in attention.cpp.
void attention_forward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor& out, Tensor& lse);

}  // namespace fastformer
