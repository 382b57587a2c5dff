// Attention, forward: blocked online softmax over packed keys and values.
//
//   out = softmax(q k^T * scale + mask) v,   lse = log sum exp of the scores
//
// A soft cap c makes c tanh(x / c) of the scaled scores before the mask, in the same pass over a row of a block.
//
// A task is a block of queries of one head. It visits only the key blocks that its rows can see: the loop bounds are
// the mask, so causal attention does half the work and a window of r does O(r n). Within a block, the visible keys of a
// row are an interval, and nothing outside of it is exponentiated. Keys and values of a head are packed once (O(n d)
// scratch) for all its query blocks and, with grouped heads, for all heads of the group. The softmax passes over a
// block of scores twice: first for the maxima of all rows and then, after the statistics of the rows are updated, for
// the exponentials, so that no row waits for its own reductions.
//
// Per block of (m, n) scores: 4 m n head_dim FLOPs in two products, and about 12 vector instructions per 16 scores for
// the softmax. Scores, statistics and the output are accumulated in fp32 (fp64 for fp64). For bf16 inputs,
// probabilities are rounded to bf16 for the second product.

#include "ops/attention.h"

#include "common/rows.h"
#include "common/softcap.h"
#include "ops/forward.h"
#include "ops/library.h"

namespace fastformer {

Mask::Mask(const OptionalTensor& mask, ScalarType acc) {
  if (!mask.has_value()) return;
  on = true;
  check(mask->dim() == 4, "attn_mask must be 4-d here, got ", mask->sizes());
  boolean = mask->scalar_type() == kBool;
  const bool as_it_is = boolean || (mask->scalar_type() == kBFloat16 && acc == kFloat);
  values = rows_of(as_it_is ? *mask : mask->to(acc));
  for (int d = 0; d < 4; ++d) strides[d] = values.size(d) == 1 ? 0 : values.stride(d);
}

Problem Problem::dense(const Tensor& q, const Tensor& k, const OptionalTensor& seqlens_k) {
  Problem p;
  p.batch = q.size(0);
  p.num_heads = q.size(2), p.num_kv_heads = k.size(2), p.head_dim = q.size(3);
  p.lse_head_stride = q.size(1);
  p.used_q = q.size(0), p.used_k = k.size(0);
  const std::vector<int32_t> lengths = seqlens_k ? integers<int32_t>(*seqlens_k) : std::vector<int32_t>();
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = seqlens_k ? lengths[b] : k.size(1);
    p.sequences.push_back({0, 0, q.size(1), std::clamp<int64_t>(keys, 0, k.size(1)), k.size(1) - q.size(1),
                           b * p.num_heads * q.size(1), b});
  }
  return p;
}

Problem Problem::packed(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k) {
  Problem p;
  p.batch = cu_seqlens_q.numel() - 1;
  p.num_heads = q.size(1), p.num_kv_heads = k.size(1), p.head_dim = q.size(2);
  p.lse_head_stride = q.size(0);
  const std::vector<int32_t> cu_q = integers<int32_t>(cu_seqlens_q), cu_k = integers<int32_t>(cu_seqlens_k);
  check(cu_q[0] == 0 && cu_k[0] == 0, "cu_seqlens must begin with 0, got ", cu_q[0], " and ", cu_k[0]);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t seqlen_q = cu_q[b + 1] - cu_q[b], seqlen_k = cu_k[b + 1] - cu_k[b];
    check(seqlen_q >= 0 && seqlen_k >= 0 && cu_q[b + 1] <= q.size(0) && cu_k[b + 1] <= k.size(0),
          "cu_seqlens must increase from 0 to at most the number of rows, which sequence ", b, " does not");
    p.sequences.push_back({cu_q[b], cu_k[b], seqlen_q, seqlen_k, seqlen_k - seqlen_q, cu_q[b], 0});
  }
  p.used_q = cu_q[p.batch], p.used_k = cu_k[p.batch];
  return p;
}

namespace {

constexpr int64_t kQueries = 64;   // rows of a task
constexpr int64_t kKeys = 128;     // columns of a block of scores; 64 x 128 floats fit into the first-level cache
constexpr int64_t kManyHeads = 8;  // kv heads per thread
constexpr int64_t kKeepStride = kKeys + Dropout::kGroup;  // between the dropout multipliers of two rows

// K^T and V of one kv head of one sequence, packed.
template <typename T>
struct PackedKV {
  const T *keys = nullptr, *values = nullptr;

  PackedKV() = default;
  static int64_t size(const Problem& p, const Sequence& s) {
    return packed_size<T>(p.head_dim, s.keys) + packed_size<T>(s.keys, p.head_dim);
  }
  PackedKV(const Problem& p, const Sequence& s, int64_t kv_head, const Rows<const T>& k, const Rows<const T>& v,
           T* storage)
      : keys(storage), values(storage + packed_size<T>(p.head_dim, s.keys)) {
    pack<T>(k.at(s.k_batch, s.k_start, kv_head), 1, k.stride, p.head_dim, s.keys, storage);
    pack<T>(v.at(s.k_batch, s.k_start, kv_head), v.stride, 1, s.keys, p.head_dim,
            storage + packed_size<T>(p.head_dim, s.keys));
  }
};

// The scratch memory of a thread. The statistics have a value for each row, and are updated for a vector of rows at a
// time.
template <typename T>
struct Tile {
  using acc = acc_t<T>;
  Buffer<acc> scores{kQueries * kKeys}, out, keep{2 * kKeepStride};
  Buffer<T> probabilities{std::is_same_v<T, acc> ? 0 : kQueries * kKeys};  // for bf16; other types reuse `scores`
  acc row_max[kQueries], row_sum[kQueries];
  acc largest[kQueries];  // the largest score of a row in the current block of keys
  acc rescale[kQueries];  // the factor for the sums of earlier blocks

  explicit Tile(int64_t head_dim) : out(kQueries * head_dim) {}
};

// Scales the scores of query i in columns [begin, end) of a block that starts at key j, and applies the mask, in base
// e: the lowest number of a mask times log2(e) would be -inf. The score of a masked key becomes -inf even if it was
// NaN.
template <typename acc>
void apply(const Mask& mask, int64_t b, int64_t h, int64_t i, int64_t j, int64_t begin, int64_t end, acc scale,
           acc* x) {
  using V = Vec<acc>;
  const V factor(scale), hidden(-std::numeric_limits<acc>::infinity());
  const bool boolean = mask.boolean;
  mask.with_row<acc>(b, h, i, [&](auto load) {
    for (int64_t c = begin; c < end; c += V::size) {
      const int64_t n = std::min<int64_t>(V::size, end - c);
      const V score = V::load(x + c, n), of_mask = load(j + c, n);
      const V masked = boolean ? where_positive(of_mask, score * factor, hidden) : fmadd(score, factor, of_mask);
      masked.store(x + c, n);
    }
  });
}

// Updates the running maxima of `rows` rows with the largest scores of a block, and rescales their running sums. `unit`
// converts scores to exponents of two. Returns whether any row has to be rescaled.
template <typename T>
bool advance(acc_t<T> unit, int64_t rows, Tile<T>& tile) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const V lowest(std::numeric_limits<acc>::lowest()), one(acc(1)), factor(unit);
  uint32_t moved = 0;
  for (int64_t r = 0; r < rows; r += V::size) {
    const V before = V::load(tile.row_max + r), now = max(V::load(tile.largest + r), before);
    // The maximum of a row without visible keys so far is -inf, which must not be subtracted from itself.
    const V rescale = exp2((before - max(lowest, now)) * factor);
    now.store(tile.row_max + r);
    rescale.store(tile.rescale + r);
    (V::load(tile.row_sum + r) * rescale).store(tile.row_sum + r);
    moved |= lanes_above(one, rescale);
  }
  return moved != 0;
}

// Turns the scores of a row in columns [begin, end) of a block into probabilities relative to the running maximum, sets
// the other columns to zero, and returns the sum of the probabilities, lane by lane. `unit`: see advance. `keep`: the
// dropout multipliers.
template <typename T>
Vec<acc_t<T>> exponentiate(const Problem& p, acc_t<T> unit, int64_t begin, int64_t end, int64_t width, acc_t<T> row_max,
                           const acc_t<T>* x, const acc_t<T>* keep, T* probability) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const V factor(unit), lowered(std::max(std::numeric_limits<acc>::lowest(), row_max));
  const bool drops = p.dropout.on;
  std::fill(probability, probability + begin, T(0));
  V sum(acc(0));
  for_each_vec<acc>(end - begin, [=, &sum](int64_t c, int64_t n) {
    const V score = V::load(x + begin + c, n);
    // Not score * factor - round(max * factor), which for large scores isn't 0 at the maximum but a large number.
    V e = exp2((score - lowered) * factor).first_lanes(n);
    sum = sum + e;
    if (drops) e = e * V::load(keep + begin + c, n);
    e.store(probability + begin + c, n);
  });
  std::fill(probability + end, probability + round_up(width, kPair<T>), T(0));
  return sum;
}

// Runs one task: queries [first, first + rows) of one head.
template <typename T>
void attend(const Problem& p, const Mask& mask, const Rows<const T>& q, const PackedKV<T>& kv, const Rows<T>& out,
            acc_t<T>* lse, int64_t b, int64_t h, int64_t first, Tile<T>& tile) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const Sequence& s = p.sequences[b];
  const int64_t rows = std::min(kQueries, s.seqlen_q - first), dim = p.head_dim;
  // Rows beyond the last one keep a maximum that needs no rescaling.
  std::fill(std::fill_n(tile.row_max, rows, -std::numeric_limits<acc>::infinity()), tile.row_max + kQueries, acc(0));
  std::fill_n(tile.row_sum, kQueries, acc(0));
  std::fill_n(tile.largest, kQueries, -std::numeric_limits<acc>::infinity());
  acc *const scores = tile.scores.data(), *const sums = tile.out.data();
  T* probabilities;
  if constexpr (std::is_same_v<T, acc>) probabilities = scores;
  else probabilities = tile.probabilities.data();
  // With a mask or a cap, the scores are scaled first. The scale isn't negative: see cpp_unsupported in
  // ops/attention.py.
  const bool capped = p.softcap > 0, scaled = mask.on || capped;
  const acc unit = scaled ? acc(1.4426950408889634) : p.scale2<acc>();
  const acc cap = static_cast<acc>(p.softcap), cap_factor = static_cast<acc>(p.softmax_scale / p.softcap);
  const acc mask_factor = capped ? acc(1) : static_cast<acc>(p.softmax_scale);
  // All keys that any of the rows sees, from the first row's first key to the last row's last key.
  const Interval seen{p.keys_of(s, first).begin, p.keys_of(s, first + rows - 1).end};
  const int64_t start = seen.begin / kPanel * kPanel;
  if (seen.empty()) std::fill_n(sums, rows * dim, acc(0));
  for (int64_t j = start; j < seen.end; j += kKeys) {
    const int64_t width = std::min(kKeys, seen.end - j);
    gemm<T>(rows, round_up(width, kPanel), dim, q.at(b, s.q_start + first, h), q.stride,
            kv.keys + j * round_up(dim, kPair<T>), scores, kKeys, false);
    const auto columns_of = [&](int64_t r) {
      const Interval keys = p.keys_of(s, first + r);
      const int64_t begin = std::clamp<int64_t>(keys.begin - j, 0, width);
      return Interval{begin, std::clamp<int64_t>(keys.end - j, begin, width)};
    };
    for (int64_t r = 0; r < rows; ++r) {
      const auto [begin, end] = columns_of(r);
      acc* x = scores + r * kKeys;
      if (capped) cap_row(x + begin, end - begin, cap_factor, cap);
      if (mask.on) apply(mask, b, h, first + r, j, begin, end, mask_factor, x);
      tile.largest[r] = largest_of(x + begin, end - begin);
    }
    const bool moved = advance(unit, rows, tile);
    for (int64_t r = 0; r < rows; r += 4) {
      V of_row[4] = {V(acc(0)), V(acc(0)), V(acc(0)), V(acc(0))};
      for (int64_t i = r; i < std::min(r + 4, rows); ++i) {
        acc* keep = tile.keep.data() + i % 2 * kKeepStride;
        // Two rows at a time, to fill the vectors.
        if (p.dropout.on && i % 2 == 0)
          p.dropout.multipliers(first + i, std::min<int64_t>(2, rows - i), b * p.num_heads + h, j, width, keep,
                                kKeepStride);
        const auto [begin, end] = columns_of(i);
        of_row[i - r] = exponentiate<T>(p, unit, begin, end, width, tile.row_max[i], scores + i * kKeys, keep,
                                        probabilities + i * kKeys);
      }
      acc sum[4];
      store_sums(of_row[0], of_row[1], of_row[2], of_row[3], sum);
      for (int i = 0; i < 4; ++i) tile.row_sum[r + i] += sum[i];
    }
    if (moved && j > start)
      for (int64_t r = 0; r < rows; ++r)
        for_each_vec<acc>(dim, [&, factor = V(tile.rescale[r])](int64_t c, int64_t n) {
          acc* to = sums + r * dim + c;
          (V::load(to, n) * factor).store(to, n);
        });
    gemm<T>(rows, dim, round_up(width, kPair<T>), probabilities, kKeys, kv.values + j * kPanel, sums, dim, j > start,
            s.keys);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const acc sum = tile.row_sum[r];
    const V inverse(sum == 0 ? acc(0) : acc(1) / sum);  // 0 for a row that sees nothing; NaN stays NaN
    T* to = out.at(b, s.q_start + first + r, h);
    for_each_vec<acc>(dim, [&](int64_t c, int64_t n) { (V::load(sums + r * dim + c, n) * inverse).store(to + c, n); });
    acc& lse_of_row = lse[s.lse_start + h * p.lse_head_stride + first + r];
    if (sum == 0) lse_of_row = -std::numeric_limits<acc>::infinity();
    else lse_of_row = tile.row_max[r] * (scaled ? acc(1) : static_cast<acc>(p.softmax_scale)) + std::log(sum);
  }
}

template <typename T>
void forward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q, const Tensor& k, const Tensor& v,
             Tensor& out, Tensor& lse) {
  const Mask mask(attn_mask, lse.scalar_type());
  const Rows<const T> q_rows(q), k_rows(k), v_rows(v);
  const Rows<T> out_rows(out);
  acc_t<T>* lse_data = lse.mutable_data_ptr<acc_t<T>>();
  if (p.used_q < q.size(0))  // there are packed rows after the last sequence
    for (int64_t h = 0; h < p.num_heads; ++h)
      std::fill(lse_data + h * p.lse_head_stride + p.used_q, lse_data + (h + 1) * p.lse_head_stride,
                -std::numeric_limits<acc_t<T>>::infinity());
  const int64_t kv_heads = p.batch * p.num_kv_heads, group = p.num_heads / p.num_kv_heads;
  int64_t scores = 0;
  for (const Sequence& s : p.sequences) scores += s.seqlen_q * s.keys * p.num_heads;
  const bool parallel = scores > kSerialScores;
  // If there are enough heads for the threads, the thread that packs a head also computes all of its queries.
  if (!parallel || kv_heads >= kManyHeads * num_threads()) {
    int64_t largest = 0;
    for (const Sequence& s : p.sequences) largest = std::max(largest, PackedKV<T>::size(p, s));
    for_each_worker(kv_heads, parallel, [&](auto next) {
      Tile<T> tile(p.head_dim);
      Buffer<T> storage(largest);
      for (int64_t i = next(); i < kv_heads; i = next()) {
        const int64_t b = i / p.num_kv_heads, kv_head = i % p.num_kv_heads;
        const Sequence& s = p.sequences[b];
        if (s.seqlen_q == 0) continue;
        const PackedKV<T> kv(p, s, kv_head, k_rows, v_rows, storage.data());
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
          for (int64_t first = 0; first < s.seqlen_q; first += kQueries)
            attend<T>(p, mask, q_rows, kv, out_rows, lse_data, b, h, first, tile);
      }
    });
    return;
  }
  std::vector<Buffer<T>> storage(kv_heads);
  std::vector<PackedKV<T>> packed(kv_heads);
  for_each_task(kv_heads, parallel, [&](int64_t i) {
    const Sequence& s = p.sequences[i / p.num_kv_heads];
    storage[i] = Buffer<T>(PackedKV<T>::size(p, s));
    packed[i] = PackedKV<T>(p, s, i % p.num_kv_heads, k_rows, v_rows, storage[i].data());
  });
  struct Task {
    int64_t batch, head, first;
  };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.num_heads; ++h)
      // The last queries come first, because they have the most work under a causal mask.
      for (int64_t n = (p.sequences[b].seqlen_q + kQueries - 1) / kQueries; n > 0; --n)
        tasks.push_back({b, h, (n - 1) * kQueries});
  for_each_worker(std::ssize(tasks), parallel, [&](auto next) {
    Tile<T> tile(p.head_dim);
    for (int64_t i = next(); i < std::ssize(tasks); i = next()) {
      const auto [b, h, first] = tasks[i];
      attend<T>(p, mask, q_rows, packed[b * p.num_kv_heads + p.kv_head(h)], out_rows, lse_data, b, h, first, tile);
    }
  });
}

}  // namespace

void attention_forward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor& out, Tensor& lse) {
  dispatch(q.scalar_type(), "attention", [&]<typename T>() { forward<T>(p, attn_mask, q, k, v, out, lse); });
}

namespace {

std::tuple<Tensor, Tensor> run(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q_in,
                               const Tensor& k_in, const Tensor& v_in, const Dims& lse_shape) {
  const Tensor q = rows_of(q_in), k = rows_of(k_in), v = rows_of(v_in);
  Tensor out = empty_rows(q, p.used_q), lse = empty(lse_shape, accumulation_dtype(q.scalar_type()));
  attention_forward(p, attn_mask, q, k, v, out, lse);
  return {out, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const OptionalTensor& attn_mask, const OptionalTensor& seqlens_k,
                                         double softmax_scale, std::optional<int64_t> window_left,
                                         std::optional<int64_t> window_right, double dropout_p,
                                         const OptionalTensor& dropout_seed, double softcap) {
  Problem p = Problem::dense(q, k, seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed, softcap);
  return run(p, attn_mask, q, k, v, {q.size(0), q.size(2), q.size(1)});
}

std::tuple<Tensor, Tensor> varlen_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t,
                                                int64_t, double softmax_scale, std::optional<int64_t> window_left,
                                                std::optional<int64_t> window_right, double dropout_p,
                                                const OptionalTensor& dropout_seed, double softcap) {
  Problem p = Problem::packed(q, k, cu_seqlens_q, cu_seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed, softcap);
  return run(p, std::nullopt, q, k, v, {q.size(1), q.size(0)});
}

FASTFORMER_OP(attention_fwd)
FASTFORMER_OP(varlen_attention_fwd)

}  // namespace fastformer
