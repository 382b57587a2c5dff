// Token embedding: gather, scale, positions and dropout in one pass.
//
//   out = dropout(weight[id] * scale + position_table[position])        (a padding id counts as a row of zeros)
//
// Forward reads only the rows that it needs, and writes the output. Backward sorts the tokens by row and then writes
// each row of the gradient once: zeros, or the sum over its tokens in order, which doesn't depend on the threads. Sums
// are fp32 (fp64 for fp64), in groups.

#include <optional>
#include <ranges>
#include <vector>

#include "common/dispatch.h"
#include "common/indices.h"
#include "common/parallel.h"
#include "common/philox.h"
#include "common/rows.h"
#include "ops/library.h"

namespace fastformer {
namespace {

constexpr int64_t kGroup = 16;   // tokens per partial sum of a row, because long fp32 sums lose precision
constexpr int64_t kShares = 64;  // parts of a gradient, with about the same work, among which threads choose

// P: the dtype of the position table.
template <typename T, typename P>
void forward(const Tensor& ids, const Tensor& weight, const OptionalTensor& table, const OptionalTensor& positions,
             double scale, int64_t padding_idx, const Dropout& dropout, Tensor& out) {
  using acc = acc_t<T>;
  const int64_t dim = weight.size(1), seqlen = ids.size(-1), stride = weight.stride(0);
  const int64_t table_stride = table ? table->stride(0) : 0;
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const int64_t* position = positions ? positions->const_data_ptr<int64_t>() : nullptr;
  const T* w = weight.const_data_ptr<T>();
  const P* p = table ? table->const_data_ptr<P>() : nullptr;
  T* to = out.mutable_data_ptr<T>();
  const acc factor = static_cast<acc>(scale);
  for_row_ranges(ids.numel(), dim, [&](int64_t begin, int64_t end) {
    std::vector<acc> keep(dropout.on ? dim + Dropout::kGroup : 0);
    for (int64_t i = begin; i < end; ++i) {
      const T* token = id[i] == padding_idx ? nullptr : w + id[i] * stride;
      const P* place = p ? p + (position ? position[i] : i % seqlen) * table_stride : nullptr;
      if (dropout.on) dropout.multipliers(i, 0, 0, dim, keep.data());
      embed_row(token, place, factor, dropout.on ? keep.data() : nullptr, dim, to + i * dim);
    }
  });
}

// The tokens of each row. Those of row r are order[start[r]] .. order[start[r + 1] - 1], ascending.
struct ByRow {
  std::vector<int64_t> start, order;

  template <typename F>
  ByRow(int64_t tokens, int64_t rows, F&& row_of) : start(rows + 1, 0), order(tokens) {
    for (int64_t i = 0; i < tokens; ++i) ++start[row_of(i) + 1];
    for (int64_t r = 0; r < rows; ++r) start[r + 1] += start[r];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t i = 0; i < tokens; ++i) order[next[row_of(i)]++] = i;
  }
};

// Computes to = scale * (keep * from + group + total) for one row. All inputs but `from` may be null, which omits them.
template <typename T, typename O, typename acc>
void add_row(const T* from, const acc* keep, const acc* group, const acc* total, acc scale, int64_t dim, O* to) {
  using V = Vec<acc>;
  for_each_vec<acc>(dim, [=](int64_t c, int64_t n) {
    V v = V::load(from + c, n);
    if (keep) v = v * V::load(keep + c, n);
    if (group) v = v + V::load(group + c, n);
    if (total) v = v + V::load(total + c, n);
    (v * V(scale)).store(to + c, n);
  });
}

// Writes to (rows, dim): for each row, scale times the sum of dropout(dout) over its tokens. Row `skipped` is zero.
template <typename T>
void sum_rows(const T* dout, int64_t dim, const ByRow& tokens, int64_t skipped, double scale, const Dropout& dropout,
              T* to) {
  using acc = acc_t<T>;
  const int64_t rows = std::ssize(tokens.start) - 1, all = std::ssize(tokens.order);
  const acc factor = static_cast<acc>(scale);
  // Each part covers an equal number of tokens + rows, so that no thread gets all the frequent tokens.
  const auto first_row = [&](int64_t share) {
    const int64_t work = share * (all + rows) / kShares;
    return *std::ranges::partition_point(std::views::iota(int64_t{0}, rows),
                                         [&](int64_t r) { return tokens.start[r] + r < work; });
  };
  for_each_worker(kShares, (all + rows) * dim >= kSerialElements, [&](auto next) {
    std::vector<acc> total(dim), group(dim), keep(dropout.on ? dim + Dropout::kGroup : 0);
    const auto sum_row = [&](int64_t r) {
      const int64_t from = tokens.start[r], count = r == skipped ? 0 : tokens.start[r + 1] - from;
      if (count == 0) {
        std::fill_n(to + r * dim, dim, T(0));
        return;
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = tokens.order[from + i];
        const bool starts = i % kGroup == 0, finishes = i % kGroup == kGroup - 1 || i == count - 1;
        if (dropout.on) dropout.multipliers(token, 0, 0, dim, keep.data());
        const acc *mask = dropout.on ? keep.data() : nullptr, *of_group = starts ? nullptr : group.data();
        const acc* of_row = finishes && i >= kGroup ? total.data() : nullptr;
        if (i == count - 1) add_row(dout + token * dim, mask, of_group, of_row, factor, dim, to + r * dim);
        else add_row(dout + token * dim, mask, of_group, of_row, acc(1), dim, (finishes ? total : group).data());
      }
    };
    for (int64_t share = next(); share < kShares; share = next()) {
      const int64_t end = share + 1 == kShares ? rows : first_row(share + 1);
      for (int64_t r = first_row(share); r < end; ++r) sum_row(r);
    }
  });
}

Tensor embedding_fwd(const Tensor& ids_in, const Tensor& weight_in, const OptionalTensor& table_in,
                     const OptionalTensor& positions_in, double scale, int64_t padding_idx, double dropout_p,
                     const OptionalTensor& dropout_seed, bool /* atomics */) {
  const Tensor ids = checked_indices(ids_in, weight_in.size(0), "token ids"), weight = rows_of(weight_in);
  OptionalTensor table, positions;
  if (positions_in) positions = checked_indices(*positions_in, table_in->size(0), "positions");
  Dims shape = ids.sizes();
  shape.push_back(weight.size(1));
  Tensor out = empty(shape, weight.scalar_type());
  const Dropout dropout(dropout_p, dropout_seed);
  dispatch(weight.scalar_type(), "embedding", [&]<typename T>() {
    using acc = acc_t<T>;
    // A position table whose dtype is not the weight's is read in the accumulation type.
    const bool same = !table_in || table_in->scalar_type() == weight.scalar_type();
    if (table_in) table = rows_of(table_in->to(same ? weight.scalar_type() : scalar_type_of<acc>()));
    if (same) forward<T, T>(ids, weight, table, positions, scale, padding_idx, dropout, out);
    else forward<T, acc>(ids, weight, table, positions, scale, padding_idx, dropout, out);
  });
  return out;
}

std::tuple<Tensor, Tensor> embedding_bwd(const Tensor& dout_in, const Tensor& ids_in,
                                         const OptionalTensor& positions_in, int64_t num_embeddings,
                                         int64_t num_positions, double scale, int64_t padding_idx, double dropout_p,
                                         const OptionalTensor& dropout_seed, ScalarType dtype,
                                         bool /* atomics: these sums need none to be fast */) {
  const Tensor dout = dout_in.contiguous(), ids = checked_indices(ids_in, num_embeddings, "token ids");
  const int64_t dim = dout.size(-1), seqlen = ids.size(-1), tokens = ids.numel();
  Tensor dweight = empty({num_embeddings, dim}, dtype);
  Tensor dtable =
      num_positions ? empty({num_positions, dim}, dweight.scalar_type()) : empty({0}, dweight.scalar_type());
  const Dropout dropout(dropout_p, dropout_seed);
  dispatch(dtype, "embedding", [&]<typename T>() {
    const int64_t* id = ids.const_data_ptr<int64_t>();
    const T* from = dout.const_data_ptr<T>();
    sum_rows<T>(from, dim, ByRow(tokens, num_embeddings, [&](int64_t i) { return id[i]; }), padding_idx, scale, dropout,
                dweight.mutable_data_ptr<T>());
    if (num_positions == 0) return;
    const Tensor positions = positions_in ? checked_indices(*positions_in, num_positions, "positions") : Tensor();
    const int64_t* position = positions_in ? positions.const_data_ptr<int64_t>() : nullptr;
    const ByRow by_position(tokens, num_positions, [&](int64_t i) { return position ? position[i] : i % seqlen; });
    sum_rows<T>(from, dim, by_position, -1, 1.0, dropout, dtable.mutable_data_ptr<T>());
  });
  return {dweight, dtable};
}

}  // namespace

FASTFORMER_OP(embedding_fwd)
FASTFORMER_OP(embedding_bwd)

}  // namespace fastformer
