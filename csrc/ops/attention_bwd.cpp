// Attention, backward: five products per tile, with probabilities recomputed from lse. Nothing of size n^2 is stored.
//
//   delta = rowsum(dout * out)
//   P = exp(S - lse)    dV += (P * keep)^T dout    dP = keep * (dout V^T)
//   dS = P * (dP - delta)    dQ += dS K    dK += dS^T Q
//
// With a soft cap c, S is c tanh(x / c) of the scaled products x, and dQ and dK use dS times 1 - tanh^2(x / c); the
// gradient of a mask is dS itself.
//
// A task is one kv head of one sequence with all query heads of its group. It owns its dQ, dK and dV, so sums have a
// fixed order and the result does not depend on the threads. If that gives few tasks, a task is one query head, whose
// dK and dV are added in the order of the heads afterwards. Tasks that add to the same gradient of a mask are split
// into a few chains, each with a copy of the gradient; the tasks of a chain run one after the other. Tiles are kKeys
// keys by one panel of queries, with transposed scores (keys are rows): then P^T and dS^T are row-major left operands
// of dV and dK, and lse and delta run along the vectors. dS is transposed once for dQ. Only tiles that some query sees
// are visited.
//
// 10 FLOPs per visible score and head_dim. Accumulation is fp32 (fp64 for fp64); for bf16, P and dS are rounded for the
// products.

#include "common/softcap.h"
#include "ops/attention.h"
#include "ops/library.h"

namespace fastformer {
namespace {

constexpr int64_t kKeys = 64;
constexpr int64_t kManyTasks = 32;  // from this many kv heads on, a task is a whole group of query heads
constexpr int64_t kChains = 8;      // chains of tasks for one gradient of a mask

template <typename T>
struct Inputs {
  Rows<const T> q, k, v, out, dout;
  Rows<T> dq, dk, dv;
  const acc_t<T>* lse;
};

// If all visible values of an additive mask are so large that they absorb a row's scores, lse can't represent the
// logarithm of the number of equal keys. Returns that logarithm for query i, or 0 in all other cases.
template <typename acc>
acc log_of_alike(const Problem& p, const Mask& mask, const Sequence& s, int64_t b, int64_t h, int64_t i, acc lse) {
  using V = Vec<acc>;
  // From here on, consecutive numbers differ by 32.
  constexpr acc kSwallows = std::is_same_v<acc, float> ? acc(1 << 28) : acc(int64_t(1) << 57);
  if (!(std::abs(lse) >= kSwallows) || std::isinf(lse)) return acc(0);
  const Interval seen = p.keys_of(s, i);
  acc alike = 0;
  mask.with_row<acc>(b, h, i, [&](auto load) {
    for (int64_t j = seen.begin; j < seen.end; j += V::size) {
      const int64_t n = std::min<int64_t>(V::size, seen.end - j);
      const V above = load(j, n) - V(lse);
      alike += exp(where_positive(above, V(acc(0)), above)).first_lanes(n).sum();
    }
  });
  return std::log(std::max(acc(1), alike));
}

// The data of one query head that the tiles read.
template <typename T>
struct QueryHead {
  using acc = acc_t<T>;
  Buffer<T> q_t, dout_t;  // (head_dim, queries), packed: right operands of the scores
  Buffer<T> q, dout;      // (queries, head_dim), packed: right operands of dK and dV
  Buffer<acc> lse, delta, dq;
  Buffer<acc> log_alike;  // for an additive mask; see log_of_alike

  QueryHead(const Problem& p, const Mask& mask, const Sequence& s, const Inputs<T>& in, int64_t b, int64_t h) {
    const int64_t n = s.seqlen_q, dim = p.head_dim, padded = round_up(n, kPanel);
    q_t = Buffer<T>(packed_size<T>(dim, n)), dout_t = Buffer<T>(packed_size<T>(dim, n));
    q = Buffer<T>(packed_size<T>(n, dim)), dout = Buffer<T>(packed_size<T>(n, dim));
    const T* qp = in.q.at(b, s.q_start, h);
    const T* dop = in.dout.at(b, s.q_start, h);
    pack<T>(qp, 1, in.q.stride, dim, n, q_t.data());
    pack<T>(dop, 1, in.dout.stride, dim, n, dout_t.data());
    pack<T>(qp, in.q.stride, 1, n, dim, q.data());
    pack<T>(dop, in.dout.stride, 1, n, dim, dout.data());
    dq = filled(n * dim, acc(0));
    // An infinite lse makes all probabilities of a row 0, for rows that see nothing and for padding of the last panel.
    lse = filled(padded, std::numeric_limits<acc>::infinity()), delta = filled(padded, acc(0));
    for (int64_t i = 0; i < n; ++i) {
      const acc row_lse = in.lse[s.lse_start + h * p.lse_head_stride + i];
      if (row_lse != -std::numeric_limits<acc>::infinity()) lse.data()[i] = row_lse;
      const T *o = in.out.at(b, s.q_start + i, h), *d = dop + i * in.dout.stride;
      Vec<acc> sum(acc(0));
      for_each_vec<acc>(
          dim, [&](int64_t c, int64_t m) { sum = fmadd(Vec<acc>::load(o + c, m), Vec<acc>::load(d + c, m), sum); });
      delta.data()[i] = sum.sum();
    }
    if (!mask.adds()) return;
    log_alike = filled(padded, acc(0));
    for (int64_t i = 0; i < n; ++i) log_alike.data()[i] = log_of_alike(p, mask, s, b, h, i, lse.data()[i]);
  }
};

// The scratch memory of a thread.
template <typename T>
struct Tile {
  using acc = acc_t<T>;
  acc scores[kKeys * kPanel], dprobabilities[kKeys * kPanel], keep[kKeys * kPanel], dscores[kKeys * kPanel],
      turned[kKeys * kPanel], mask[kKeys * kPanel], slope[kKeys * kPanel];
  acc keep_rows[kPanel * (kKeys + Dropout::kGroup)], mask_rows[kPanel * kKeys];
  T left[kKeys * kPanel], right[kKeys * kPanel];  // P^T and dS^T, then dS, as operands

  // Returns a buffer in the accumulation type as an operand of type T: itself, or rounded into `to`.
  static const T* operand(const acc* from, T* to, int64_t n) {
    if constexpr (std::is_same_v<T, acc>) return from;
    else {
      for (int64_t c = 0; c < n; c += Vec<acc>::size) Vec<acc>::load(from + c).store(to + c);
      return to;
    }
  }
};

// Fills tile.keep, (keys, kPanel): the dropout multipliers of queries [i, i + kPanel) and keys [j, j + keys),
// transposed.
template <typename T>
void transposed_keep(const Problem& p, int64_t plane, int64_t i, int64_t j, int64_t keys, Tile<T>& tile) {
  using acc = acc_t<T>;
  constexpr int64_t stride = kKeys + Dropout::kGroup;
  p.dropout.multipliers(i, kPanel, plane, j, keys, tile.keep_rows, stride);
  pack<acc>(tile.keep_rows, 1, stride, keys, kPanel, tile.keep);
}

// Fills tile.mask, (keys, kPanel): the mask's values for queries [i, i + queries) and keys [j, j + keys), transposed.
template <typename T>
void transposed_mask(const Mask& mask, int64_t b, int64_t h, int64_t i, int64_t j, int64_t queries, int64_t keys,
                     Tile<T>& tile) {
  using acc = acc_t<T>;
  for (int64_t c = 0; c < queries; ++c)
    mask.with_row<acc>(b, h, i + c, [&](auto load) {
      for_each_vec<acc>(keys, [&](int64_t r, int64_t n) { load(j + r, n).store(tile.mask_rows + c * kKeys + r, n); });
    });
  std::fill(tile.mask_rows + queries * kKeys, tile.mask_rows + kPanel * kKeys, acc(0));
  pack<acc>(tile.mask_rows, 1, kKeys, keys, kPanel, tile.mask);
}

// Turns S^T and dP^T into (P * keep)^T in tile.scores and dS^T in tile.dscores. With a cap, also stores its derivative
// in tile.slope.
template <typename T>
void tile_gradients(const Problem& p, const Mask& mask, const Sequence& s, const QueryHead<T>& head, int64_t i,
                    int64_t j, int64_t keys, Tile<T>& tile) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  // In base e, because multiplying by log2(e) would round the exponent once more, which lse doesn't compensate.
  const bool capped = p.softcap > 0;
  const V scale(capped ? acc(1) : static_cast<acc>(p.softmax_scale)), hidden(-std::numeric_limits<acc>::infinity()),
      far(acc(int64_t(1) << 32)), cap(static_cast<acc>(p.softcap)),
      cap_factor(static_cast<acc>(p.softmax_scale / p.softcap));
  const bool adds = mask.adds();
  const acc* lse = head.lse.data() + i;
  const acc* delta = head.delta.data() + i;
  for (int64_t r = 0; r < keys; ++r) {
    acc* x = tile.scores + r * kPanel;
    acc* ds = tile.dscores + r * kPanel;
    const acc* dp = tile.dprobabilities + r * kPanel;
    const acc* keep = tile.keep + r * kPanel;
    acc* slope = tile.slope + r * kPanel;
    const Interval seen = p.queries_of(s, j + r);
    const int64_t begin = std::clamp<int64_t>(seen.begin - i, 0, kPanel),
                  end = std::clamp<int64_t>(seen.end - i, begin, kPanel);
    for (int64_t c = 0; c < kPanel; c += V::size) {
      V score = V::load(x + c), of_mask(acc(0));
      const V of_lse = V::load(lse + c);
      if (mask.on) of_mask = V::load(tile.mask + r * kPanel + c);
      if (capped) {
        // Scores that a boolean mask hides may be NaN, which would make the derivative NaN.
        if (mask.boolean) score = where_positive(of_mask, score, V(acc(0)));
        const V bent = tanh(score * cap_factor);
        (V(acc(1)) - bent * bent).store(slope + c);
        score = bent * cap;
      }
      if (mask.boolean) score = where_positive(of_mask, score, hidden), of_mask = V(acc(0));
      V exponent = fmadd(score, scale, of_mask - of_lse);
      if (adds) {
        // If a mask value is large, the forward pass lost the score to rounding, so it must not reappear here as a
        // difference.
        const V lost = fmadd(score, scale, of_mask) - of_lse - V::load(head.log_alike.data() + i + c);
        exponent = where_positive(of_lse * of_lse - far, lost, exponent);
      }
      // For large scores, lse is inexact. An exponent above 0, which comes from its rounding, must not give a large
      // number.
      const V probability = exp(where_positive(V(acc(0)) - exponent, exponent, V(acc(0))));
      V gradient = V::load(dp + c);
      V dropped = probability;
      if (p.dropout.on) {
        const V multiplier = V::load(keep + c);
        dropped = dropped * multiplier;
        gradient = gradient * multiplier;
      }
      dropped.store(x + c);
      (probability * (gradient - V::load(delta + c))).store(ds + c);
    }
    // Positions that a query does not see may have any value, including NaN, so they are overwritten, not multiplied.
    std::fill(x, x + begin, acc(0)), std::fill(x + end, x + kPanel, acc(0));
    std::fill(ds, ds + begin, acc(0)), std::fill(ds + end, ds + kPanel, acc(0));
    if (capped) std::fill(slope, slope + begin, acc(0)), std::fill(slope + end, slope + kPanel, acc(0));
  }
}

template <typename T>
void add_mask_gradient(const Tensor& dmask, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j, int64_t keys,
                       const acc_t<T>* dscores) {
  auto* to = dmask.mutable_data_ptr<acc_t<T>>();
  const auto stride = [&](int d) { return dmask.size(d) == 1 ? 0 : dmask.stride(d); };
  const int64_t base = b * stride(0) + h * stride(1), stride_q = stride(2), stride_k = stride(3);
  for (int64_t r = 0; r < keys; ++r)
    for (int64_t c = 0; c < std::min(kPanel, s.seqlen_q - i); ++c)
      to[base + (i + c) * stride_q + (j + r) * stride_k] += dscores[r * kPanel + c];
}

// dK and dV of one kv head, (keys, head_dim), before scaling: sums over all query heads of its group, or over some.
template <typename acc>
struct KeyGradients {
  Buffer<acc> dk, dv;
};

// Runs a task: query heads [first_head, end_head) of sequence b, which share a kv head.
template <typename T>
KeyGradients<acc_t<T>> attend_backward(const Problem& p, const Mask& mask, const Inputs<T>& in, const Tensor& dmask,
                                       int64_t b, int64_t first_head, int64_t end_head) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const Sequence& s = p.sequences[b];
  const int64_t dim = p.head_dim, kv_head = p.kv_head(first_head);
  KeyGradients<acc> gradients{filled(s.keys * dim, acc(0)), filled(s.keys * dim, acc(0))};
  auto& [dk, dv] = gradients;
  Buffer<T> keys_packed(packed_size<T>(s.keys, dim));
  pack<T>(in.k.at(s.k_batch, s.k_start, kv_head), in.k.stride, 1, s.keys, dim, keys_packed.data());
  static thread_local Tile<T> tile;

  for (int64_t h = first_head; h < end_head; ++h) {
    QueryHead<T> head(p, mask, s, in, b, h);
    for (int64_t j = 0; j < s.keys; j += kKeys) {
      const int64_t keys = std::min(kKeys, s.keys - j);
      const Interval seen{p.queries_of(s, j).begin, p.queries_of(s, j + keys - 1).end};
      for (int64_t i = seen.begin / kPanel * kPanel; i < seen.end; i += kPanel) {
        const int64_t queries = std::min(kPanel, s.seqlen_q - i), column = i * round_up(dim, kPair<T>);
        gemm<T>(keys, kPanel, dim, in.k.at(s.k_batch, s.k_start + j, kv_head), in.k.stride, head.q_t.data() + column,
                tile.scores, kPanel, false);
        gemm<T>(keys, kPanel, dim, in.v.at(s.k_batch, s.k_start + j, kv_head), in.v.stride, head.dout_t.data() + column,
                tile.dprobabilities, kPanel, false);
        if (p.dropout.on) transposed_keep<T>(p, b * p.num_heads + h, i, j, keys, tile);
        if (mask.on) transposed_mask<T>(mask, b, h, i, j, queries, keys, tile);
        tile_gradients<T>(p, mask, s, head, i, j, keys, tile);
        if (dmask.defined()) add_mask_gradient<T>(dmask, s, b, h, i, j, keys, tile.dscores);
        if (p.softcap > 0)  // from the gradient of capped scores to that of the products
          for (int64_t c = 0; c < keys * kPanel; c += V::size)
            (V::load(tile.dscores + c) * V::load(tile.slope + c)).store(tile.dscores + c);
        const T* probabilities = tile.operand(tile.scores, tile.left, keys * kPanel);
        gemm<T>(keys, dim, round_up(queries, kPair<T>), probabilities, kPanel, head.dout.data() + i * kPanel,
                dv.data() + j * dim, dim, true, s.seqlen_q);
        const T* dscores_t = tile.operand(tile.dscores, tile.left, keys * kPanel);
        gemm<T>(keys, dim, round_up(queries, kPair<T>), dscores_t, kPanel, head.q.data() + i * kPanel,
                dk.data() + j * dim, dim, true, s.seqlen_q);
        // dS, a panel of keys at a time: (kPanel queries, kPanel keys) row-major is the packing of its transpose.
        pack<acc>(tile.dscores, 1, kPanel, kPanel, keys, tile.turned);
        const T* dscores = tile.operand(tile.turned, tile.right, round_up(keys, kPanel) * kPanel);
        for (int64_t c = 0; c < keys; c += kPanel)
          gemm<T>(queries, dim, round_up(std::min(kPanel, keys - c), kPair<T>), dscores + c * kPanel, kPanel,
                  keys_packed.data() + (j + c) * kPanel, head.dq.data() + i * dim, dim, true, s.keys);
      }
    }
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      T* to = in.dq.at(b, s.q_start + i, h);
      for_each_vec<acc>(dim, [&](int64_t c, int64_t n) {
        (V::load(head.dq.data() + i * dim + c, n) * V(static_cast<acc>(p.softmax_scale))).store(to + c, n);
      });
    }
  }
  return gradients;
}

// Writes the sum of the parts of one kv head to dk and dv, with zeros after the last key that any query sees.
template <typename T>
void store_key_gradients(const Problem& p, const Inputs<T>& in, int64_t b, int64_t kv_head,
                         KeyGradients<acc_t<T>>* parts, int64_t num_parts) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const Sequence& s = p.sequences[b];
  const int64_t dim = p.head_dim, seqlen_k = s.seqlen_q + s.diagonal;
  auto& [dk, dv] = parts[0];
  for (int64_t part = 1; part < num_parts; ++part)
    for_each_vec<acc>(s.keys * dim, [&](int64_t c, int64_t n) {
      (V::load(dk.data() + c, n) + V::load(parts[part].dk.data() + c, n)).store(dk.data() + c, n);
      (V::load(dv.data() + c, n) + V::load(parts[part].dv.data() + c, n)).store(dv.data() + c, n);
    });
  for (int64_t j = 0; j < seqlen_k; ++j) {
    T *dk_to = in.dk.at(s.k_batch, s.k_start + j, kv_head), *dv_to = in.dv.at(s.k_batch, s.k_start + j, kv_head);
    if (j >= s.keys) {  // padding
      std::fill(dk_to, dk_to + dim, T(0)), std::fill(dv_to, dv_to + dim, T(0));
      continue;
    }
    for_each_vec<acc>(dim, [&](int64_t c, int64_t n) {
      (V::load(dk.data() + j * dim + c, n) * V(static_cast<acc>(p.softmax_scale))).store(dk_to + c, n);
      V::load(dv.data() + j * dim + c, n).store(dv_to + c, n);
    });
  }
}

// Computes to += from; both are contiguous.
template <typename acc>
void add(const Tensor& from, const Tensor& to) {
  const acc* part = from.const_data_ptr<acc>();
  acc* sum = to.mutable_data_ptr<acc>();
  for_row_ranges(to.numel(), 1, [&](int64_t begin, int64_t end) {
    for_each_vec<acc>(end - begin, [&](int64_t i, int64_t n) {
      (Vec<acc>::load(sum + begin + i, n) + Vec<acc>::load(part + begin + i, n)).store(sum + begin + i, n);
    });
  });
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename T>
void backward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& dout, const Tensor& q, const Tensor& k,
              const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& dmask, Gradients& gradients) {
  const Mask mask(attn_mask, lse.scalar_type());
  const auto& [dq, dk, dv, dmask_out] = gradients;
  using acc = acc_t<T>;
  const Inputs<T> in{Rows<const T>(q),   Rows<const T>(k),    Rows<const T>(v),
                     Rows<const T>(out), Rows<const T>(dout), Rows<T>(dq),
                     Rows<T>(dk),        Rows<T>(dv),         lse.const_data_ptr<acc>()};
  int64_t scores = 0;
  for (const Sequence& s : p.sequences) scores += s.seqlen_q * s.keys * p.num_heads;
  // Tasks and chains determine the order of the sums, so neither depends on the number of threads.
  const int64_t group = p.num_heads / p.num_kv_heads, kv_heads = p.batch * p.num_kv_heads;
  const int64_t parts = kv_heads < kManyTasks ? group : 1, tasks = kv_heads * parts, heads = group / parts;
  const bool shared = dmask.defined() && (dmask.size(0) != p.batch || dmask.size(1) != p.num_heads);
  const int64_t chains = shared ? std::min(tasks, kChains) : tasks;
  std::vector<Tensor> copies;  // copies of dmask for all chains but the first
  if (shared)
    for (int64_t chain = 1; chain < chains; ++chain) copies.push_back(zeros(dmask.sizes(), dmask.scalar_type()));
  std::vector<KeyGradients<acc>> partial(parts == 1 ? 0 : tasks);
  for_each_task(chains, scores > kSerialScores, [&](int64_t chain) {
    const Tensor& sum = shared && chain > 0 ? copies[chain - 1] : dmask;
    for (int64_t task = chain; task < tasks; task += chains) {
      const int64_t kv_head = task / parts, b = kv_head / p.num_kv_heads, h = task * heads % p.num_heads;
      KeyGradients<acc> of_task = attend_backward<T>(p, mask, in, sum, b, h, h + heads);
      if (parts == 1) store_key_gradients<T>(p, in, b, kv_head % p.num_kv_heads, &of_task, 1);
      else partial[task] = std::move(of_task);
    }
  });
  for (const Tensor& copy : copies) add<acc>(copy, dmask);
  if (parts == 1) return;
  for_each_task(kv_heads, scores > kSerialScores, [&](int64_t i) {
    store_key_gradients<T>(p, in, i / p.num_kv_heads, i % p.num_kv_heads, partial.data() + i * parts, parts);
  });
}

Gradients run(const Problem& p, const OptionalTensor& attn_mask, bool needs_mask_grad, const Tensor& dout,
              const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& out, const Tensor& lse) {
  const Tensor q = rows_of(q_in), k = rows_of(k_in), v = rows_of(v_in);
  Tensor dmask, dmask_out = empty({0}, attn_mask ? attn_mask->scalar_type() : q.scalar_type());
  if (needs_mask_grad) dmask = zeros(attn_mask->sizes(), lse.scalar_type());
  Gradients gradients{empty_rows(q, p.used_q), empty_rows(k, p.used_k), empty_rows(v, p.used_k), dmask_out};
  dispatch(q.scalar_type(), "attention", [&]<typename T>() {
    backward<T>(p, attn_mask, rows_of(dout), q, k, v, rows_of(out), lse.contiguous(), dmask, gradients);
  });
  if (needs_mask_grad) std::get<3>(gradients) = dmask.to(attn_mask->scalar_type());
  return gradients;
}

Gradients attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, const OptionalTensor& attn_mask, const OptionalTensor& seqlens_k,
                        double softmax_scale, std::optional<int64_t> window_left, std::optional<int64_t> window_right,
                        double dropout_p, const OptionalTensor& dropout_seed, bool needs_mask_grad, double softcap) {
  Problem p = Problem::dense(q, k, seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed, softcap);
  return run(p, attn_mask, needs_mask_grad, dout, q, k, v, out, lse);
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& out, const Tensor& lse,
                                                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t,
                                                        int64_t, double softmax_scale,
                                                        std::optional<int64_t> window_left,
                                                        std::optional<int64_t> window_right, double dropout_p,
                                                        const OptionalTensor& dropout_seed, double softcap) {
  Problem p = Problem::packed(q, k, cu_seqlens_q, cu_seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed, softcap);
  auto [dq, dk, dv, unused] = run(p, std::nullopt, false, dout, q, k, v, out, lse);
  return {dq, dk, dv};
}

}  // namespace

FASTFORMER_OP(attention_bwd)
FASTFORMER_OP(varlen_attention_bwd)

}  // namespace fastformer
