// Whole matrices on all threads: packing, tiles of X * W^T handed to an epilogue while they are in the cache, and the
// gradient of a weight.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "buffer.h"
#include "gemm.h"
#include "parallel.h"

namespace fastformer {

using at::Tensor;

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 256;
// pack() of gemm.h, panels shared out among the threads.
template <typename T>
Buffer<T> packed(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n) {
  Buffer<T> to(packed_size<T>(k, n));
  const int64_t panel = packed_size<T>(k, kPanel);
  for_each_task((n + kPanel - 1) / kPanel, k * n * 16 >= kSerialFlops, [&](int64_t i) {
    pack<T>(b + i * kPanel * stride_n, stride_k, stride_n, k, std::min(kPanel, n - i * kPanel), to.data() + i * panel);
  });
  return to;
}

// The weight (out_features, in_features) of a linear layer as the right operand of x * weight^T.
template <typename T>
Buffer<T> packed_transposed(const Tensor& weight) {
  return packed<T>(weight.const_data_ptr<T>(), 1, weight.size(1), weight.size(1), weight.size(0));
}

// The same weight as the right operand of dy * weight.
template <typename T>
Buffer<T> packed_as_is(const Tensor& matrix) {
  return packed<T>(matrix.const_data_ptr<T>(), matrix.size(1), 1, matrix.size(0), matrix.size(1));
}

struct TileOf {
  int64_t row, rows, column, columns;  // columns is a multiple of kPanel except at the end
};

// Runs f(tile) over the tiles of an (m, n) result, 2 * m * n * k FLOPs in all.
template <typename F>
void for_each_tile(int64_t m, int64_t n, int64_t k, F&& f) {
  const int64_t down = (m + kTileRows - 1) / kTileRows, across = (n + kTileColumns - 1) / kTileColumns;
  for_each_task(down * across, 2 * m * n * k >= kSerialFlops, [&](int64_t i) {
    const int64_t row = i / across * kTileRows, column = i % across * kTileColumns;
    f(TileOf{row, std::min(kTileRows, m - row), column, std::min(kTileColumns, n - column)});
  });
}

// The result of a tile: x[rows] * B[:, columns] with B packed with k rows, into `to` with kTileColumns a row.
template <typename T>
void multiply_tile(const TileOf& t, int64_t k, const T* x, int64_t ldx, const Buffer<T>& b, int64_t first_column,
                   acc_t<T>* to) {
  gemm<T>(t.rows, t.columns, k, x + t.row * ldx, ldx,
          b.data() + (first_column + t.column) / kPanel * packed_size<T>(k, kPanel), to, kTileColumns, false);
}

// A tile of results (+ bias), rounded into its place in y, which has ldy elements a row.
template <typename T>
void store_tile(const TileOf& t, const acc_t<T>* result, const T* bias, T* y, int64_t ldy) {
  using V = Vec<acc_t<T>>;
  for (int64_t r = 0; r < t.rows; ++r)
    for_each_vec<acc_t<T>>(t.columns, [&](int64_t c, int64_t w) {
      V v = V::load(result + r * kTileColumns + c, w);
      if (bias) v = v + V::load(bias + t.column + c, w);
      v.store(y + (t.row + r) * ldy + t.column + c, w);
    });
}

// y (m, n) = x (m, k) * B (+ bias), rounded once.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const T* x, const Buffer<T>& b, const T* bias, T* y) {
  for_each_tile(m, n, k, [&](const TileOf& t) {
    acc_t<T> result[kTileRows * kTileColumns];
    multiply_tile<T>(t, k, x, k, b, 0, result);
    store_tile<T>(t, result, bias, y, n);
  });
}

// dweight (n, k) = dy (m, n)^T * x (m, k).
template <typename T>
Tensor weight_gradient(const Tensor& dy, const Tensor& x) {
  if (std::is_same_v<T, bfloat16> && use_brgemm()) return at::mm(dy.t(), x);  // AMX there, FMA here
  const int64_t m = dy.size(0), n = dy.size(1), k = x.size(1);
  Tensor dweight = at::empty({n, k}, x.options());
  const Buffer<T> left = packed_as_is<T>(dy), right = packed_as_is<T>(x);
  T* to = dweight.mutable_data_ptr<T>();
  for_each_tile(n, k, m, [&](const TileOf& t) {
    acc_t<T> result[kTileRows * kTileColumns] = {};
    const int64_t panel = packed_size<T>(m, kPanel);
    gemm_transposed<T>(t.rows, t.columns, m, left.data() + t.row / kPanel * panel,
                       right.data() + t.column / kPanel * panel, result, kTileColumns);
    store_tile<T>(t, result, nullptr, to, k);
  });
  return dweight;
}

// The sums of the columns of y (m, n), a block of rows at a time: rounding grows with the number of blocks and the
// length of one, not with the number of rows.
template <typename T>
Tensor column_sums(const Tensor& y) {
  using V = Vec<acc_t<T>>;
  const int64_t m = y.size(0), n = y.size(1);
  Tensor sums = at::empty({n}, y.options());
  const T* from = y.const_data_ptr<T>();
  T* to = sums.mutable_data_ptr<T>();
  constexpr int64_t kColumns = 4 * V::size, kBlock = 32;
  for_each_task((n + kColumns - 1) / kColumns, m * n * 8 >= kSerialFlops, [&](int64_t i) {
    for (int64_t c = i * kColumns; c < std::min(n, (i + 1) * kColumns); c += V::size) {
      const int64_t w = std::min<int64_t>(V::size, n - c);
      V sum(acc_t<T>(0));
      for (int64_t first = 0; first < m; first += kBlock) {
        V block(acc_t<T>(0));
        for (int64_t r = first; r < std::min(m, first + kBlock); ++r) block = block + V::load(from + r * n + c, w);
        sum = sum + block;
      }
      sum.store(to + c, w);
    }
  });
  return sums;
}

}  // namespace fastformer
