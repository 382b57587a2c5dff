// Attention, forward: blocked online softmax over packed keys and values.
//
//   out = softmax(q k^T * scale + mask) v,   lse = log sum exp of the scores
//
// A task is a block of queries of one head. It walks the key blocks that its rows can see and no others: the loop bound
// is the mask, so causal attention does half the work and a window of r does O(r n). Inside a block a row's visible
// keys are an interval, and nothing outside of it is exponentiated. Keys and values of a head are packed once (O(n d)
// scratch) for all its query blocks and, with grouped heads, for all heads of the group.
//
// Per block of (m, n) scores: 4 m n head_dim FLOPs in two products, about 12 vector instructions per 16 scores for the
// softmax. Scores, statistics and the output accumulate in fp32 (fp64 for fp64); bf16 probabilities are rounded for the
// second product as the inputs are.

#include "attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace fastformer {

Mask::Mask(const OptionalTensor& mask, at::ScalarType acc) {
  if (!mask.has_value()) return;
  on = true;
  TORCH_CHECK(mask->dim() == 4, "attn_mask must be 4-d here, got ", mask->sizes());
  boolean = mask->scalar_type() == at::kBool;
  const bool as_it_is = boolean || (mask->scalar_type() == at::kBFloat16 && acc == at::kFloat);
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
  TORCH_CHECK(cu_q[0] == 0 && cu_k[0] == 0, "cu_seqlens must begin with 0, got ", cu_q[0], " and ", cu_k[0]);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t seqlen_q = cu_q[b + 1] - cu_q[b], seqlen_k = cu_k[b + 1] - cu_k[b];
    TORCH_CHECK(seqlen_q >= 0 && seqlen_k >= 0 && cu_q[b + 1] <= q.size(0) && cu_k[b + 1] <= k.size(0),
                "cu_seqlens must rise from 0 to at most the number of rows; sequence ", b, " breaks that");
    p.sequences.push_back({cu_q[b], cu_k[b], seqlen_q, seqlen_k, seqlen_k - seqlen_q, cu_q[b], 0});
  }
  p.used_q = cu_q[p.batch], p.used_k = cu_k[p.batch];
  return p;
}

namespace {

constexpr int64_t kQueries = 64;  // rows of a task
constexpr int64_t kKeys = 128;    // columns of a block of scores: 64 x 128 floats stay in the first-level cache
constexpr int64_t kKeepStride = kKeys + Dropout::kGroup;  // between the dropout multipliers of two rows
constexpr double kLn2 = 0.6931471805599453;

// K^T and V of every (batch, kv head), packed.
template <typename T>
struct PackedKV {
  Buffer<T> storage;
  std::vector<int64_t> start;  // of each (sequence, kv head)
  int64_t num_kv_heads, head_dim;

  PackedKV(const Problem& p, const Rows<const T>& k, const Rows<const T>& v)
      : num_kv_heads(p.num_kv_heads), head_dim(p.head_dim) {
    int64_t total = 0;
    for (const Sequence& s : p.sequences)
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        start.push_back(total);
        total += packed_size<T>(head_dim, s.keys) + packed_size<T>(s.keys, head_dim);
      }
    storage = Buffer<T>(total);
    for_each_task(p.batch * num_kv_heads, total > 2 * kSerialElements, [&](int64_t task) {
      const int64_t b = task / num_kv_heads, h = task % num_kv_heads;
      const Sequence& s = p.sequences[b];
      T* to = storage.data() + start[task];
      pack<T>(k.at(s.k_batch, s.k_start, h), 1, k.stride, head_dim, s.keys, to);
      pack<T>(v.at(s.k_batch, s.k_start, h), v.stride, 1, s.keys, head_dim, to + packed_size<T>(head_dim, s.keys));
    });
  }
  const T* keys(int64_t b, int64_t h, int64_t j) const {  // j a multiple of kPanel
    return storage.data() + start[b * num_kv_heads + h] + j * round_up(head_dim, kPair<T>);
  }
  const T* values(const Sequence& s, int64_t b, int64_t h, int64_t j) const {
    return storage.data() + start[b * num_kv_heads + h] + packed_size<T>(head_dim, s.keys) + j * kPanel;
  }
};

// The scratch of a thread's task.
template <typename T>
struct Tile {
  using acc = acc_t<T>;
  std::vector<acc> scores, out, keep, row_max, row_sum;
  std::vector<T> probabilities;  // of bf16; other types use `scores` itself

  explicit Tile(int64_t head_dim)
      : scores(kQueries * kKeys),
        out(kQueries * head_dim),
        keep(2 * kKeepStride),
        row_max(kQueries),
        row_sum(kQueries),
        probabilities(std::is_same_v<T, acc> ? 0 : kQueries * kKeys) {}
};

// Scales the scores of query i, columns [begin, end) of a block that starts at key j, and puts them under the mask, in
// base e: a mask's lowest number times log2(e) would be -inf. What is not allowed is -inf whatever the score is, NaN
// too.
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

// Turns a row's scores into probabilities relative to its running maximum, which is in base e under a mask and in base
// 2 without. Returns the factor for what came before.
template <typename T>
acc_t<T> softmax_row(const Problem& p, const Mask& mask, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j,
                     int64_t width, acc_t<T>* x, T* probability, const acc_t<T>* keep, acc_t<T>& row_max,
                     acc_t<T>& row_sum) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  Interval seen = p.keys_of(s, i);
  const int64_t begin = std::clamp<int64_t>(seen.begin - j, 0, width),
                end = std::clamp<int64_t>(seen.end - j, begin, width);
  const bool masked = mask.on;
  const acc scale = p.scale2<acc>(), log2e = acc(1.4426950408889634);
  acc largest = -std::numeric_limits<acc>::infinity();
  if (masked) apply(mask, b, h, i, j, begin, end, static_cast<acc>(p.softmax_scale), x);
  V most(largest);
  int64_t whole = begin;
  for (; whole + V::size <= end; whole += V::size) most = max(most, V::load(x + whole));
  largest = most.max();
  for (; whole < end; ++whole) largest = std::max(largest, x[whole]);
  // softmax_scale < 0 would pick the minimum; see why_unsupported
  if (!masked && begin < end) largest *= scale;
  const acc before = row_max;
  row_max = std::max(before, largest);
  const acc base = row_max == -std::numeric_limits<acc>::infinity() ? acc(0) : row_max;
  const V factor(masked ? log2e : scale), shift(-base);
  V sum(acc(0));
  for (int64_t c = 0; c < begin; ++c) probability[c] = T(0);
  for (int64_t c = begin; c < end; c += V::size) {
    const int64_t n = std::min<int64_t>(V::size, end - c);
    const V score = V::load(x + c, n);
    V e = exp2(masked ? (score + shift) * factor : fmadd(score, factor, shift)).first_lanes(n);
    sum = sum + e;
    if (p.dropout.on) e = e * V::load(keep + c, n);
    e.store(probability + c, n);
  }
  for (int64_t c = end; c < round_up(width, kPair<T>); ++c) probability[c] = T(0);
  const acc rescale = before == row_max ? acc(1) : std::exp2(masked ? (before - base) * log2e : before - base);
  row_sum = row_sum * rescale + sum.sum();
  return rescale;
}

// One task: queries [first, first + rows) of one head.
template <typename T>
void attend(const Problem& p, const Mask& mask, const Rows<const T>& q, const PackedKV<T>& kv, const Rows<T>& out,
            acc_t<T>* lse, int64_t b, int64_t h, int64_t first, Tile<T>& tile) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const Sequence& s = p.sequences[b];
  const int64_t rows = std::min(kQueries, s.seqlen_q - first), dim = p.head_dim, kv_head = p.kv_head(h);
  std::fill(tile.row_max.begin(), tile.row_max.end(), -std::numeric_limits<acc>::infinity());
  std::fill(tile.row_sum.begin(), tile.row_sum.end(), acc(0));
  std::fill(tile.out.begin(), tile.out.end(), acc(0));
  // What any of the rows sees: from the first row's first key to the last row's last key.
  const Interval seen{p.keys_of(s, first).begin, p.keys_of(s, first + rows - 1).end};
  for (int64_t j = seen.begin / kPanel * kPanel; j < seen.end; j += kKeys) {
    const int64_t width = std::min(kKeys, seen.end - j);
    acc* scores = tile.scores.data();
    gemm<T>(rows, round_up(width, kPanel), dim, q.at(b, s.q_start + first, h), q.stride, kv.keys(b, kv_head, j), scores,
            kKeys, false);
    T* probabilities;
    if constexpr (std::is_same_v<T, acc>) probabilities = scores;
    else probabilities = tile.probabilities.data();
    for (int64_t r = 0; r < rows; ++r) {
      acc* keep = tile.keep.data() + r % 2 * kKeepStride;
      // Two rows at a time, for the vectors' sake.
      if (p.dropout.on && r % 2 == 0)
        p.dropout.multipliers(first + r, std::min<int64_t>(2, rows - r), b * p.num_heads + h, j, width, keep,
                              kKeepStride);
      const acc rescale = softmax_row<T>(p, mask, s, b, h, first + r, j, width, scores + r * kKeys,
                                         probabilities + r * kKeys, keep, tile.row_max[r], tile.row_sum[r]);
      if (rescale != acc(1))
        for_each_vec<acc>(dim, [&](int64_t c, int64_t n) {
          acc* to = tile.out.data() + r * dim + c;
          (V::load(to, n) * V(rescale)).store(to, n);
        });
    }
    gemm<T>(rows, dim, round_up(width, kPair<T>), probabilities, kKeys, kv.values(s, b, kv_head, j), tile.out.data(),
            dim, true, s.keys);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const acc sum = tile.row_sum[r];
    const V inverse(sum == 0 ? acc(0) : acc(1) / sum);  // 0: a row that sees nothing; a NaN stays
    T* to = out.at(b, s.q_start + first + r, h);
    for_each_vec<acc>(
        dim, [&](int64_t c, int64_t n) { (V::load(tile.out.data() + r * dim + c, n) * inverse).store(to + c, n); });
    acc& lse_of_row = lse[s.lse_start + h * p.lse_head_stride + first + r];
    if (sum == 0) lse_of_row = -std::numeric_limits<acc>::infinity();
    else if (mask.on) lse_of_row = tile.row_max[r] + std::log(sum);
    else lse_of_row = (tile.row_max[r] + std::log2(sum)) * static_cast<acc>(kLn2);
  }
}

template <typename T>
void forward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q, const Tensor& k, const Tensor& v,
             Tensor& out, Tensor& lse) {
  const Mask mask(attn_mask, lse.scalar_type());
  const Rows<const T> q_rows(q);
  const Rows<T> out_rows(out);
  acc_t<T>* lse_data = static_cast<acc_t<T>*>(lse.data_ptr());
  const PackedKV<T> kv(p, Rows<const T>(k), Rows<const T>(v));

  struct Task {
    int64_t batch, head, first;
  };
  std::vector<Task> tasks;
  int64_t scores = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const Sequence& s = p.sequences[b];
      scores += s.seqlen_q * s.keys;
      // The last queries first: under a causal mask they have the most to do.
      for (int64_t first = (s.seqlen_q - 1) / kQueries * kQueries; first >= 0 && s.seqlen_q > 0; first -= kQueries)
        tasks.push_back({b, h, first});
    }
  for_each_task(static_cast<int64_t>(tasks.size()), scores > kSerialScores, [&](int64_t task) {
    thread_local std::optional<Tile<T>> tile;
    if (!tile || static_cast<int64_t>(tile->out.size()) != kQueries * p.head_dim) tile.emplace(p.head_dim);
    const auto [b, h, first] = tasks[task];
    attend<T>(p, mask, q_rows, kv, out_rows, lse_data, b, h, first, *tile);
  });
}

}  // namespace

void attention_forward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor& out, Tensor& lse) {
  dispatch(q.scalar_type(), "attention", [&]<typename T>() { forward<T>(p, attn_mask, q, k, v, out, lse); });
}

namespace {

std::tuple<Tensor, Tensor> run(const Problem& p, const OptionalTensor& attn_mask, const Tensor& q_in,
                               const Tensor& k_in, const Tensor& v_in, at::IntArrayRef lse_shape) {
  const Tensor q = rows_of(q_in), k = rows_of(k_in), v = rows_of(v_in);
  const auto statistics = q.options().dtype(accumulation_dtype(q.scalar_type()));
  Tensor out = empty_rows(q, p.used_q), lse = at::empty(lse_shape, statistics);
  if (p.used_q < q.size(0))
    lse.narrow(-1, p.used_q, q.size(0) - p.used_q).fill_(-std::numeric_limits<double>::infinity());
  attention_forward(p, attn_mask, q, k, v, out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const OptionalTensor& attn_mask, const OptionalTensor& seqlens_k,
                                         double softmax_scale, std::optional<int64_t> window_left,
                                         std::optional<int64_t> window_right, double dropout_p,
                                         const OptionalTensor& dropout_seed) {
  Problem p = Problem::dense(q, k, seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed);
  return run(p, attn_mask, q, k, v, {q.size(0), q.size(2), q.size(1)});
}

std::tuple<Tensor, Tensor> varlen_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t,
                                                int64_t, double softmax_scale, std::optional<int64_t> window_left,
                                                std::optional<int64_t> window_right, double dropout_p,
                                                const OptionalTensor& dropout_seed) {
  Problem p = Problem::packed(q, k, cu_seqlens_q, cu_seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed);
  return run(p, std::nullopt, q, k, v, {q.size(1), q.size(0)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastformer_cpp, m) {
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? seqlens_k, float softmax_scale, "
      "int? window_left, int? window_right, float dropout_p, Tensor? dropout_seed) -> (Tensor, Tensor)");
  m.def(
      "varlen_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
      "int max_seqlen_k, float softmax_scale, int? window_left, int? window_right, float dropout_p, Tensor? "
      "dropout_seed) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fastformer_cpp, CPU, m) {
  m.impl("attention_fwd", attention_fwd);
  m.impl("varlen_attention_fwd", varlen_attention_fwd);
}

}  // namespace fastformer
