// Products of whole matrices on all threads: packing, tiles of X * W^T that an epilogue reads while they are in the
// cache, and the gradient of a weight.

#pragma once

#include <memory>

#include "common/buffer.h"
#include "common/gemm.h"
#include "common/parallel.h"
#include "common/tensor.h"

namespace fastformer {

// A tile is wide if there are many rows, and tall, with up to kTallRows, if there are few.
constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 256;
constexpr int64_t kTileSize = kTileRows * kTileColumns;
constexpr int64_t kTallRows = 256;
constexpr int64_t kTallColumns = kTileSize / kTallRows;
// Up to this many rows, slices of B are packed for each tall tile as they pass through the cache. With more rows, all
// of B is packed once, which costs a write and a read of memory. With AMX, packing takes as long as a product, so the
// limit is lower.
inline int64_t most_tall_rows() { return use_brgemm() ? kTallRows : 3 * kTallRows; }

// pack() of gemm.h, with the panels distributed among the threads.
template <typename T>
Buffer<T> packed(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n) {
  Buffer<T> to(packed_size<T>(k, n));
  const int64_t panel = packed_size<T>(k, kPanel);
  for_each_task((n + kPanel - 1) / kPanel, k * n * 16 >= kSerialFlops, [&](int64_t i) {
    pack<T>(b + i * kPanel * stride_n, stride_k, stride_n, k, std::min(kPanel, n - i * kPanel), to.data() + i * panel);
  });
  return to;
}

// Scratch rows (rows, columns) for a product to read, with a stride for which gemm() copies none of them.
template <typename T>
Tensor scratch_rows(int64_t rows, int64_t columns) {
  const int64_t stride = row_stride<T>(columns);
  const auto memory = std::make_shared<Buffer<T>>(rows * stride);
  return {memory->data(), scalar_type_of<T>(), {rows, columns}, {stride, 1}, memory};
}

// Returns x (rows, columns), or a copy of it if gemm() would otherwise copy the rows of each tile.
template <typename T>
Tensor readable_rows(const Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1), apart = x.stride(0);
  if (!evict_one_another<T>(rows, apart)) return x;
  const Tensor copy = scratch_rows<T>(rows, columns);
  const T* from = x.const_data_ptr<T>();
  T* to = copy.mutable_data_ptr<T>();
  for_row_ranges(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + i * apart, columns, to + i * copy.stride(0));
  });
  return copy;
}

struct TileOf {
  int64_t row, rows, column, columns;  // `columns` is a multiple of kPanel except in the last tile
  int64_t ld;                          // the row stride of its results, which have kTileSize elements in all
};

// Runs f(tile) over the tiles of an (m, n) result that takes 2 * m * n * k FLOPs in all. Tiles go down the rows first,
// so that the columns of the right operand, of which there are more, stay in the cache.
template <typename F>
void for_each_tile(int64_t m, int64_t n, int64_t k, F&& f) {
  const bool tall = m <= most_tall_rows();
  const int64_t most = tall ? kTallRows : kTileRows, width = tall ? kTallColumns : kTileColumns;
  const int64_t down = (m + most - 1) / most, across = (n + width - 1) / width;
  const int64_t height = tall ? (m + down - 1) / std::max<int64_t>(down, 1) : most;
  for_each_task(down * across, 2 * m * n * k >= kSerialFlops, [&](int64_t i) {
    const int64_t row = i % down * height, column = i / down * width;
    f(TileOf{row, std::min(height, m - row), column, std::min(width, n - column), width});
  });
}

// Whether gemm_unpacked() can read a B with this stride in k.
template <typename T>
bool reads_unpacked(int64_t stride_k) {
  return stride_k == 1 && !std::is_same_v<T, double> && !(std::is_same_v<T, bfloat16> && use_brgemm());
}

// Returns x (rows, columns) itself if its rows are dense and don't overlap, which oneDNN doesn't support, else a copy.
inline Tensor separate_rows(const Tensor& x) {
  return x.stride(1) == 1 && x.stride(0) >= x.size(1) ? x : x.contiguous();
}

// Returns the weight itself if one of its strides is 1 (it may be a transposed view), else a contiguous copy.
inline Tensor strided(const Tensor& weight) {
  return weight.stride(0) == 1 || weight.stride(1) == 1 ? weight : weight.contiguous();
}

// B (k, n) for products x * B with a given number of rows: packed as a whole, or slice by slice for tall tiles, or not
// at all for a few rows. The sums are bit-identical, so the result of a row does not depend on the others.
template <typename T>
class Right {
 public:
  // B is the matrix whose element (i, j) is b[i * stride_k + j * stride_n].
  Right(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, int64_t rows)
      : b_(b), stride_k_(stride_k), stride_n_(stride_n), k_(k), n_(n), packed_(rows > most_tall_rows()) {
    unpacked_ = rows <= kFewRows / 2 && reads_unpacked<T>(stride_k);
    if (packed_) panels_ = packed<T>(b, stride_k, stride_n, k, n);
  }
  // The weight (out_features, in_features) of a linear layer for x * weight^T, and for dy * weight. One of its strides
  // should be 1.
  static Right transposed(const Tensor& weight, int64_t rows) {
    return {weight.const_data_ptr<T>(), weight.stride(1), weight.stride(0), weight.size(1), weight.size(0), rows};
  }
  static Right as_is(const Tensor& weight, int64_t rows) {
    return {weight.const_data_ptr<T>(), weight.stride(0), weight.stride(1), weight.size(0), weight.size(1), rows};
  }
  int64_t k() const { return k_; }
  int64_t n() const { return n_; }

  // Writes x[rows] * B[:, columns] of a tile to `to`, in whole panels, with row stride t.ld. x has row stride ldx.
  void multiply_tile(const TileOf& t, const T* x, int64_t ldx, acc_t<T>* to) const {
    const T* left = x + t.row * ldx;
    const T* columns = b_ + t.column * stride_n_;
    const int64_t wide = round_up(t.columns, kPanel);
    if (packed_)
      return gemm<T>(t.rows, wide, k_, left, ldx, panels_.data() + t.column / kPanel * packed_size<T>(k_, kPanel), to,
                     t.ld, false);
    if constexpr (!std::is_same_v<T, double>)
      if (unpacked_) return gemm_unpacked<T>(t.rows, t.columns, k_, left, ldx, columns, stride_n_, to, t.ld);
    // Split k like gemm(). brgemm splits k itself.
    const int64_t most = std::is_same_v<T, bfloat16> && use_brgemm() ? k_ : std::min(k_, kDepth<T>);
    Buffer<T> slice(packed_size<T>(most, wide));
    int64_t p = 0;
    do {
      const int64_t depth = std::min(most, k_ - p);
      pack<T>(columns + p * stride_k_, stride_k_, stride_n_, depth, t.columns, slice.data());
      gemm<T>(t.rows, wide, depth, left + p, ldx, slice.data(), to, t.ld, p > 0);
      p += most;
    } while (p < k_);
  }

 private:
  const T* b_;
  int64_t stride_k_, stride_n_, k_, n_;
  bool packed_, unpacked_;
  Buffer<T> panels_;
};

// Rounds a tile of results (+ bias) and writes it to y, which has row stride ldy.
template <typename T>
void store_tile(const TileOf& t, const acc_t<T>* result, const T* bias, T* y, int64_t ldy) {
  using V = Vec<acc_t<T>>;
  for (int64_t r = 0; r < t.rows; ++r)
    for_each_vec<acc_t<T>>(t.columns, [&](int64_t c, int64_t w) {
      V v = V::load(result + r * t.ld + c, w);
      if (bias) v = v + V::load(bias + t.column + c, w);
      v.store(y + (t.row + r) * ldy + t.column + c, w);
    });
}

// Computes y (m, n) = x (m, k) * B (+ bias), rounded once. The rows of x may have any stride.
template <typename T>
void multiply(const Tensor& x, const Right<T>& b, const T* bias, T* y) {
  const Tensor rows = b.n() > kPanel ? readable_rows<T>(x) : x;
  const T* from = rows.const_data_ptr<T>();
  for_each_tile(x.size(0), b.n(), b.k(), [&](const TileOf& t) {
    acc_t<T> result[kTileSize];
    b.multiply_tile(t, from, rows.stride(0), result);
    store_tile<T>(t, result, bias, y, b.n());
  });
}

// Computes dweight (n, k) = dy (m, n)^T * x (m, k); the rows of both may have any stride. The wider one is packed slice
// by slice as it passes through the cache, the other one once.
template <typename T>
Tensor weight_gradient(const Tensor& dy, const Tensor& x) {
  if (std::is_same_v<T, bfloat16> && use_brgemm()) return torch_mm(dy.t(), x);  // AMX there, FMA here
  constexpr int64_t kWidest = 128;
  static_assert(kWidest * kWidest <= kTileSize && kWidest % kPanel == 0);
  const int64_t m = dy.size(0), n = dy.size(1), k = x.size(1);
  if (m == 0) return zeros({n, k}, x.scalar_type());
  const Tensor dweight = empty({n, k}, x.scalar_type());
  const bool cuts_dy = n >= k;
  const Tensor &wide = cuts_dy ? dy : x, &narrow = cuts_dy ? x : dy;
  const int64_t columns = wide.size(1), panel = packed_size<T>(m, kPanel),
                width = std::min(kWidest, round_up(columns / (4 * num_threads()) + 1, kPanel)),
                slices = (columns + width - 1) / width;
  const Buffer<T> whole = packed<T>(narrow.const_data_ptr<T>(), narrow.stride(0), 1, m, narrow.size(1));
  const T* from = wide.const_data_ptr<T>();
  T* to = dweight.mutable_data_ptr<T>();
  for_each_worker(slices, 2 * m * n * k >= kSerialFlops, [&](auto next) {
    Buffer<T> slice(packed_size<T>(m, width));
    for (int64_t i = next(); i < slices; i = next()) {
      const int64_t first = i * width, count = std::min(width, columns - first);
      pack<T>(from + first, wide.stride(0), 1, m, count, slice.data());
      for (int64_t j = 0; j < narrow.size(1); j += kWidest) {
        const int64_t others = std::min(kWidest, narrow.size(1) - j);
        const T* part = whole.data() + j / kPanel * panel;
        const TileOf t = cuts_dy ? TileOf{first, count, j, others, kWidest} : TileOf{j, others, first, count, kWidest};
        acc_t<T> result[kTileSize];
        gemm_transposed<T>(t.rows, t.columns, m, cuts_dy ? slice.data() : part, cuts_dy ? part : slice.data(), result,
                           t.ld);
        store_tile<T>(t, result, nullptr, to, k);
      }
    }
  });
  return dweight;
}

// Computes the sums of the columns of y (m, n), whose rows may have any stride, one block of rows at a time: the
// rounding error grows with the number of blocks and the length of a block, not with the number of rows.
template <typename T>
Tensor column_sums(const Tensor& y) {
  using V = Vec<acc_t<T>>;
  const int64_t m = y.size(0), n = y.size(1), ld = y.stride(0);
  Tensor sums = empty({n}, y.scalar_type());
  const T* from = y.const_data_ptr<T>();
  T* to = sums.mutable_data_ptr<T>();
  constexpr int64_t kColumns = 4 * V::size, kBlock = 32;
  for_each_task((n + kColumns - 1) / kColumns, m * n * 8 >= kSerialFlops, [&](int64_t i) {
    for (int64_t c = i * kColumns; c < std::min(n, (i + 1) * kColumns); c += V::size) {
      const int64_t w = std::min<int64_t>(V::size, n - c);
      V sum(acc_t<T>(0));
      for (int64_t first = 0; first < m; first += kBlock) {
        V block(acc_t<T>(0));
        for (int64_t r = first; r < std::min(m, first + kBlock); ++r) block = block + V::load(from + r * ld + c, w);
        sum = sum + block;
      }
      sum.store(to + c, w);
    }
  });
  return sums;
}

}  // namespace fastformer
