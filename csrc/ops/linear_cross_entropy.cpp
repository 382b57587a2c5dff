// The output projection and the cross-entropy, in chunks of rows: only the logits of one chunk exist at any time.
//
// The vocabulary is split into tiles of kTileColumns. For each chunk of rows, all threads compute
//
//   1. tile by tile: logits = x W^T + bias and, for each row of the tile, their maximum, sum of exp and sum
//   2. row by row: the row's maximum, lse and loss from the results of the tiles
//   3. tile by tile: dlogits; dW of the tile += dlogits^T x; the rows' dx += dlogits W
//
// A soft cap c makes z = c tanh(u / c) of the logits u in step 1, and du = (1 - (z / c)^2) dz in step 3.
//
// This takes 6 rows dim vocab_size FLOPs with gradients, and 2 rows dim vocab_size without, when logits are not stored.
// W is packed tile by tile as it is read, so there is no second copy of it. Each group of tiles has its own sums of dx,
// and these are added in order, so the result does not depend on the timing of threads. Sums are fp32 (fp64 for fp64).
// A sum of a bf16 dW is stored as two bf16 numbers, the result and a correction, which together have 16 bits of
// precision.

#include <limits>
#include <optional>

#include "common/dispatch.h"
#include "common/indices.h"
#include "common/rows.h"
#include "common/softcap.h"
#include "ops/library.h"
#include "ops/linear.h"

namespace fastformer {
namespace {

constexpr int64_t kGroups = 16;     // groups of tiles for the sums of dx, or the number of threads if that is larger
constexpr int64_t kRowBlock = 128;  // rows of x that stay in the second-level cache together with a tile of W
constexpr int64_t kSumRows = 16;    // rows per fp32 partial sum of dbias; partial sums are added in fp64
constexpr int64_t kForwardRows = 4096;

// Returns the number of rows of a chunk whose logits are stored: few for a large vocabulary, to save memory, and more
// for a small one, because every chunk packs the weight again, and reads and writes all of dW.
int64_t chunk_rows(int64_t vocab_size) {
  constexpr int64_t kFewest = 512, kMost = 1024, kLogits = kFewest << 15;
  return std::clamp(kLogits / vocab_size / kRowBlock * kRowBlock, kFewest, kMost);
}

struct Options {
  int64_t ignore_index;
  double on_target = 1, on_all = 0;  // the weights of the target's logit and of the sum of all logits
  double z_loss, softcap;

  Options(int64_t ignore_index, double label_smoothing, bool smooth_others, double z_loss, double softcap,
          int64_t vocab_size)
      : ignore_index(ignore_index), z_loss(z_loss), softcap(softcap) {
    if (label_smoothing == 0.0) return;
    on_all = label_smoothing / static_cast<double>(smooth_others ? vocab_size - 1 : vocab_size);
    on_target = smooth_others ? 1.0 - label_smoothing - on_all : 1.0 - label_smoothing;
  }
};

// Statistics of a row in one tile of logits: max, sum of exp(z - max), sum of z - max.
template <typename acc>
struct TileSums {
  acc max, exps, shifted;
};

// Statistics of a row over the whole vocabulary; lse = max + log.
template <typename acc>
struct RowSums {
  acc max, log, inverse;  // log and inverse: those of the sum of exp(z - max)
};

// Adds the bias to the n logits of a row, applies the cap, and returns their statistics.
template <typename T, typename acc = acc_t<T>>
TileSums<acc> sum_up(acc* z, int64_t n, const T* bias, acc softcap) {
  using V = Vec<acc>;
  if (bias)
    for_each_vec<acc>(n, [=](int64_t c, int64_t w) { (V::load(z + c, w) + V::load(bias + c, w)).store(z + c, w); });
  if (softcap > 0) cap_row(z, n, acc(1) / softcap, softcap);
  const acc largest = largest_of(z, n);
  const V shift(largest == -std::numeric_limits<acc>::infinity() ? acc(0) : largest);
  V exps(acc(0)), shifted(acc(0));
  for_each_vec<acc>(n, [&](int64_t c, int64_t w) {
    const V v = V::load(z + c, w) - shift;
    exps = exps + exp(v).first_lanes(w);
    shifted = shifted + v.first_lanes(w);
  });
  return {largest, exps.sum(), shifted.sum()};
}

template <typename T>
struct LinearCrossEntropy {
  using acc = acc_t<T>;
  using V = Vec<acc>;

  const T *x, *weight, *bias;
  const int64_t* target;
  int64_t rows, dim, vocab_size;
  Options options;

  int64_t tiles() const { return (vocab_size + kTileColumns - 1) / kTileColumns; }
  int64_t columns(int64_t tile) const { return std::min(kTileColumns, vocab_size - tile * kTileColumns); }
  acc softcap() const { return static_cast<acc>(options.softcap); }
  bool counts(int64_t row) const { return target[row] != options.ignore_index; }

  // The results for the rows of one chunk.
  struct Chunk {
    int64_t first, rows;
    Buffer<TileSums<acc>> of_tile;  // (tiles, rows)
    Buffer<acc> target_logit;
    Buffer<RowSums<acc>> of_row;
  };

  // Runs steps 1 and 2. Unless `logits` is null, stores the tiles there, (tiles, rows, kTileColumns).
  Chunk forward(int64_t first, int64_t count, acc* logits, acc* losses, acc* lse) const {
    Chunk chunk{first, count, Buffer<TileSums<acc>>(tiles() * count), Buffer<acc>(count), Buffer<RowSums<acc>>(count)};
    const int64_t flops = 2 * count * vocab_size * dim;
    for_each_worker(tiles(), flops >= kSerialFlops, [&](auto next) {
      Buffer<T> right(packed_size<T>(dim, kTileColumns));
      Buffer<acc> scratch(logits ? 0 : kRowBlock * kTileColumns);
      for (int64_t tile = next(); tile < tiles(); tile = next()) {
        const int64_t column = tile * kTileColumns, n = columns(tile);
        pack<T>(weight + column * dim, 1, dim, dim, n, right.data());
        for (int64_t block = 0; block < count; block += kRowBlock) {
          const int64_t m = std::min(kRowBlock, count - block);
          acc* z = logits ? logits + (tile * count + block) * kTileColumns : scratch.data();
          gemm<T>(m, n, dim, x + (first + block) * dim, dim, right.data(), z, kTileColumns, false);
          for (int64_t r = 0; r < m; ++r) {
            acc* row = z + r * kTileColumns;
            chunk.of_tile.data()[tile * count + block + r] =
                sum_up<T>(row, n, bias ? bias + column : nullptr, softcap());
            const int64_t y = target[first + block + r] - column;
            if (y >= 0 && y < n) chunk.target_logit.data()[block + r] = row[y];
          }
        }
      }
    });
    for_row_ranges(count, 2 * kTileColumns + tiles() * 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) finish_row(chunk, r, losses, lse);
    });
    return chunk;
  }

  void finish_row(Chunk& chunk, int64_t r, acc* losses, acc* lse) const {
    const TileSums<acc>* part = chunk.of_tile.data() + r;
    acc largest = part->max;
    for (int64_t tile = 1; tile < tiles(); ++tile) largest = std::max(largest, part[tile * chunk.rows].max);
    double exps = 0, shifted = 0;
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      const TileSums<acc>& p = part[tile * chunk.rows];
      const acc down = p.max - largest;
      if (p.exps != 0) exps += p.exps * std::exp(down);  // 0 if a tile has only -inf; NaN is added
      shifted += p.shifted + static_cast<double>(columns(tile)) * down;
    }
    const double log = std::log(exps);
    chunk.of_row.data()[r] = {largest, static_cast<acc>(log), static_cast<acc>(1 / exps)};
    const double row_lse = largest + log;
    if (lse) lse[chunk.first + r] = static_cast<acc>(row_lse);
    if (!losses) return;
    double loss = 0;
    if (counts(chunk.first + r)) {
      // Computed from differences to the maximum, because lse - z_y would cancel for large logits.
      loss = options.on_target * (log - static_cast<double>(chunk.target_logit.data()[r] - largest));
      if (options.on_all != 0) loss += options.on_all * (static_cast<double>(vocab_size) * log - shifted);
      if (options.z_loss != 0) loss += options.z_loss * row_lse * row_lse;
    }
    losses[chunk.first + r] = static_cast<acc>(loss);
  }

  // Computes dlogits of a row of a tile from the logits z, in `to`.
  void dlogits_row(const Chunk& chunk, int64_t r, int64_t column, int64_t n, acc row_scale, const acc* z,
                   acc* to) const {
    const RowSums<acc>& sums = chunk.of_row.data()[r];
    const double lse = static_cast<double>(sums.max) + sums.log;
    const V shift(sums.max), scale(row_scale), on_all(static_cast<acc>(options.on_all));
    const V weight_of_exp(static_cast<acc>((1 + 2 * options.z_loss * lse) * sums.inverse));
    for_each_vec<acc>(n, [&](int64_t c, int64_t w) {
      ((exp(V::load(z + c, w) - shift) * weight_of_exp - on_all) * scale).store(to + c, w);
    });
    const int64_t y = target[chunk.first + r] - column;
    if (y >= 0 && y < n) to[y] -= static_cast<acc>(options.on_target) * row_scale;
    if (softcap() > 0)
      for_each_vec<acc>(n, [&, inverse = V(acc(1) / softcap())](int64_t c, int64_t w) {
        const V bent = V::load(z + c, w) * inverse;
        (V::load(to + c, w) * (V(acc(1)) - bent * bent)).store(to + c, w);
      });
  }

  // Adds n sums to a row of dW, or, if `begins`, stores them. If `ends`, rounds the row to the result.
  void add_to_dweight(const acc* from, int64_t n, bool begins, bool ends, T* to, T* correction) const {
    for_each_vec<acc>(n, [&](int64_t c, int64_t w) {
      V v = V::load(from + c, w);
      if constexpr (std::is_same_v<T, acc>) {
        if (!begins) v = v + V::load(to + c, w);
        v.store(to + c, w);
      } else {
        if (!begins) v = v + V::load(correction + c, w) + V::load(to + c, w);
        v.store(to + c, w);
        if (!ends) (v - V::load(to + c, w)).store(correction + c, w);
      }
    });
  }

  // Computes the loss and the gradients or, if `losses` is null, only the gradients. row_scale: (rows,), 0 for ignored
  // rows.
  void with_gradients(const acc* row_scale, acc* losses, Tensor& dx, Tensor& dweight, Tensor& dbias) const {
    const int64_t largest = chunk_rows(vocab_size), chunks = std::max<int64_t>(1, (rows + largest - 1) / largest);
    const int64_t most = (rows + chunks - 1) / chunks;
    const int64_t groups = std::min(tiles(), std::max<int64_t>(kGroups, num_threads()));
    Buffer<acc> logits(tiles() * most * kTileColumns), dx_sums(groups * most * dim);
    Buffer<double> dbias_sums(bias ? vocab_size : 0);
    Buffer<T> correction(std::is_same_v<T, acc> || chunks == 1 ? 0 : vocab_size * dim),
        x_packed(packed_size<T>(most, dim));
    T *dxp = dx.mutable_data_ptr<T>(), *dweightp = dweight.mutable_data_ptr<T>();
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = i * most, count = std::min(most, rows - first);
      if (count <= 0) break;
      const bool begins = i == 0, ends = first + count == rows;
      const Chunk chunk = forward(first, count, logits.data(), losses, nullptr);
      const int64_t panel = packed_size<T>(count, kPanel), flops = 4 * count * vocab_size * dim;
      for_each_task((dim + kPanel - 1) / kPanel, flops >= kSerialFlops, [&](int64_t j) {
        pack<T>(x + first * dim + j * kPanel, dim, 1, count, std::min(kPanel, dim - j * kPanel),
                x_packed.data() + j * panel);
      });
      for_each_worker(groups, flops >= kSerialFlops, [&](auto next) {
        Buffer<T> right(packed_size<T>(kTileColumns, dim)), left(packed_size<T>(count, kTileColumns));
        Buffer<T> dlogits(count * kTileColumns);
        for (int64_t group = next(); group < groups; group = next()) {
          const int64_t from = group * tiles() / groups, to = (group + 1) * tiles() / groups;
          acc* sums = dx_sums.data() + group * count * dim;
          for (int64_t tile = from; tile < to; ++tile) {
            const int64_t column = tile * kTileColumns, n = columns(tile);
            make_dlogits(chunk, column, n, row_scale, logits.data() + tile * count * kTileColumns, dlogits.data(),
                         bias ? dbias_sums.data() + column : nullptr, begins);
            pack<T>(dlogits.data(), kTileColumns, 1, count, n, left.data());
            for (int64_t j = 0; j < dim; j += kPanel) {
              const int64_t wide = std::min(kPanel, dim - j);
              acc product[kTileColumns * kPanel];
              gemm_transposed<T>(n, wide, count, left.data(), x_packed.data() + j / kPanel * panel, product, kPanel);
              for (int64_t c = 0; c < n; ++c) {
                const int64_t at = (column + c) * dim + j;
                add_to_dweight(product + c * kPanel, wide, begins, ends, dweightp + at, correction.data() + at);
              }
            }
            pack<T>(weight + column * dim, dim, 1, n, dim, right.data());
            for (int64_t block = 0; block < count; block += kRowBlock)
              gemm<T>(std::min(kRowBlock, count - block), dim, n, dlogits.data() + block * kTileColumns, kTileColumns,
                      right.data(), sums + block * dim, dim, tile > from);
          }
        }
      });
      for_row_ranges(count, dim * groups, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          for_each_vec<acc>(dim, [&](int64_t c, int64_t w) {
            V sum(acc(0));
            for (int64_t group = 0; group < groups; ++group)
              sum = sum + V::load(dx_sums.data() + (group * count + r) * dim + c, w);
            sum.store(dxp + (first + r) * dim + c, w);
          });
      });
    }
    if (bias) std::copy_n(dbias_sums.data(), vocab_size, dbias.mutable_data_ptr<T>());
  }

  // Computes a tile of dlogits (rows of the chunk, kTileColumns), rounded for the products, and its column sums, which
  // are not rounded.
  void make_dlogits(const Chunk& chunk, int64_t column, int64_t n, const acc* row_scale, const acc* z, T* to,
                    double* dbias, bool begins) const {
    acc group[kTileColumns] = {};
    if (dbias && begins) std::fill_n(dbias, n, 0.0);
    for (int64_t r = 0; r < chunk.rows; ++r) {
      acc row[kTileColumns];
      const acc scale = row_scale[chunk.first + r];
      if (scale == acc(0)) std::fill_n(row, n, acc(0));
      else dlogits_row(chunk, r, column, n, scale, z + r * kTileColumns, row);
      for_each_vec<acc>(n, [&](int64_t c, int64_t w) {
        const V v = V::load(row + c, w);
        v.store(to + r * kTileColumns + c, w);
        if (dbias) (v + V::load(group + c, w)).store(group + c, w);
      });
      if (dbias && (r % kSumRows == kSumRows - 1 || r == chunk.rows - 1))
        for (int64_t c = 0; c < n; ++c) {
          dbias[c] += static_cast<double>(group[c]);
          group[c] = acc(0);
        }
    }
  }
};

// Contiguous inputs, which outlive the pointers into them.
struct Inputs {
  Tensor x, weight, target;
  OptionalTensor bias;
  Options options;

  Inputs(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
         const Options& options)
      : x(x.contiguous()),
        weight(weight.contiguous()),
        target(checked_indices(target, weight.size(0), "targets", options.ignore_index)),
        bias(contiguous(bias)),
        options(options) {}

  template <typename T>
  LinearCrossEntropy<T> of() const {
    return {x.const_data_ptr<T>(),
            weight.const_data_ptr<T>(),
            bias ? bias->const_data_ptr<T>() : nullptr,
            target.const_data_ptr<int64_t>(),
            x.size(0),
            x.size(1),
            weight.size(0),
            options};
  }
  ScalarType wide() const { return accumulation_dtype(x.scalar_type()); }
};

struct Gradients {
  Tensor dx, dweight, dbias;
  explicit Gradients(const Inputs& in)
      : dx(empty(in.x.sizes(), in.x.scalar_type())),
        dweight(empty(in.weight.sizes(), in.x.scalar_type())),
        dbias(empty({in.bias ? in.weight.size(0) : 0}, in.x.scalar_type())) {
    if (in.x.size(0) > 0) return;
    dweight.zero();
    dbias.zero();
  }
};

std::tuple<Tensor, Tensor> linear_cross_entropy_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                                    const Tensor& target, int64_t ignore_index, double label_smoothing,
                                                    bool smooth_others, double z_loss, double softcap) {
  const Inputs in(x, weight, bias, target,
                  {ignore_index, label_smoothing, smooth_others, z_loss, softcap, weight.size(0)});
  Tensor losses = empty({x.size(0)}, in.wide()), lse = empty({x.size(0)}, in.wide());
  dispatch(x.scalar_type(), "linear_cross_entropy", [&]<typename T>() {
    using acc = acc_t<T>;
    const LinearCrossEntropy<T> op = in.of<T>();
    for (int64_t first = 0; first < op.rows; first += kForwardRows)
      op.forward(first, std::min(kForwardRows, op.rows - first), nullptr, losses.mutable_data_ptr<acc>(),
                 lse.mutable_data_ptr<acc>());
  });
  return {losses, lse};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_bwd(const Tensor& dlosses, const Tensor& x,
                                                            const Tensor& weight, const OptionalTensor& bias,
                                                            const Tensor& target, const Tensor& /* lse */,
                                                            int64_t ignore_index, double label_smoothing,
                                                            bool smooth_others, double z_loss, double softcap) {
  const Inputs in(x, weight, bias, target,
                  {ignore_index, label_smoothing, smooth_others, z_loss, softcap, weight.size(0)});
  Gradients gradients(in);
  const Tensor of_losses = dlosses.to(in.wide());
  if (x.size(0) > 0)
    dispatch(x.scalar_type(), "linear_cross_entropy", [&]<typename T>() {
      using acc = acc_t<T>;
      const LinearCrossEntropy<T> op = in.of<T>();
      const acc* each = of_losses.const_data_ptr<acc>();
      std::vector<acc> scale(op.rows);
      for (int64_t r = 0; r < op.rows; ++r) scale[r] = op.counts(r) ? each[r * of_losses.stride(0)] : acc(0);
      op.with_gradients(scale.data(), nullptr, gradients.dx, gradients.dweight, gradients.dbias);
    });
  return {gradients.dx, gradients.dweight, gradients.dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_fwd_bwd(const Tensor& x, const Tensor& weight,
                                                                        const OptionalTensor& bias,
                                                                        const Tensor& target, int64_t ignore_index,
                                                                        double label_smoothing, bool smooth_others,
                                                                        double z_loss, bool mean, double softcap) {
  const Inputs in(x, weight, bias, target,
                  {ignore_index, label_smoothing, smooth_others, z_loss, softcap, weight.size(0)});
  Gradients gradients(in);
  Tensor loss = empty({}, in.wide()), losses = empty({x.size(0)}, in.wide()), scale = empty({x.size(0)}, in.wide());
  dispatch(x.scalar_type(), "linear_cross_entropy", [&]<typename T>() {
    using acc = acc_t<T>;
    const LinearCrossEntropy<T> op = in.of<T>();
    int64_t counted = 0;
    for (int64_t r = 0; r < op.rows; ++r) counted += op.counts(r);
    const double share = mean ? 1.0 / static_cast<double>(std::max<int64_t>(counted, 1)) : 1.0;
    acc *scales = scale.mutable_data_ptr<acc>(), *each = losses.mutable_data_ptr<acc>();
    for (int64_t r = 0; r < op.rows; ++r) scales[r] = op.counts(r) ? static_cast<acc>(share) : acc(0);
    if (op.rows > 0) op.with_gradients(scales, each, gradients.dx, gradients.dweight, gradients.dbias);
    double sum = 0;
    for (int64_t r = 0; r < op.rows; ++r) sum += each[r];
    *loss.mutable_data_ptr<acc>() = static_cast<acc>(sum * share);
  });
  return {loss, gradients.dx, gradients.dweight, gradients.dbias};
}

}  // namespace

FASTFORMER_OP(linear_cross_entropy_fwd)
FASTFORMER_OP(linear_cross_entropy_bwd)
FASTFORMER_OP(linear_cross_entropy_fwd_bwd)

}  // namespace fastformer
