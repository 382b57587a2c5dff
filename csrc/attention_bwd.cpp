// Attention, backward: five products a tile, probabilities recomputed from lse, nothing of size n^2 kept.
//
//   delta = rowsum(dout * out)
//   P = exp(S - lse)    dV += (P * keep)^T dout    dP = keep * (dout V^T)
//   dS = P * (dP - delta)    dQ += dS K    dK += dS^T Q
//
// A task is one kv head of one sequence with all query heads of its group: it owns its dQ, dK and dV, so sums have one
// order and the result does not depend on the threads. Tiles are kKeys keys by one panel of queries, scores transposed
// (keys are rows): then P^T and dS^T are row-major left operands of dV and dK as they come, and lse and delta lie along
// the vectors. dS is turned once for dQ. Only tiles that some query sees are visited.
//
// 10 FLOPs per visible score and head_dim. Accumulation is fp32 (fp64 for fp64); bf16 rounds P and dS for the products.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "attention.h"

namespace fastformer {
namespace {

constexpr int64_t kKeys = 64;

template <typename T>
struct Inputs {
  Rows<const T> q, k, v, out, dout;
  Rows<T> dq, dk, dv;
  const acc_t<T>* lse;
  Tensor dmask;  // in the accumulation type, shaped as the mask; empty when nobody wants it
};

// Everything of one query head that the tiles read.
template <typename T>
struct QueryHead {
  using acc = acc_t<T>;
  Buffer<T> q_t, dout_t;  // (head_dim, queries), packed: right operands of the scores
  Buffer<T> q, dout;      // (queries, head_dim), packed: right operands of dK and dV
  std::vector<acc> lse, delta, dq;

  QueryHead(const Problem& p, const Sequence& s, const Inputs<T>& in, int64_t b, int64_t h) {
    const int64_t n = s.seqlen_q, dim = p.head_dim, padded = round_up(n, kPanel);
    q_t = Buffer<T>(packed_size<T>(dim, n)), dout_t = Buffer<T>(packed_size<T>(dim, n));
    q = Buffer<T>(packed_size<T>(n, dim)), dout = Buffer<T>(packed_size<T>(n, dim));
    const T* qp = in.q.at(b, s.q_start, h);
    const T* dop = in.dout.at(b, s.q_start, h);
    pack<T>(qp, 1, in.q.stride, dim, n, q_t.data());
    pack<T>(dop, 1, in.dout.stride, dim, n, dout_t.data());
    pack<T>(qp, in.q.stride, 1, n, dim, q.data());
    pack<T>(dop, in.dout.stride, 1, n, dim, dout.data());
    dq.assign(n * dim, acc(0));
    // An infinite lse makes every probability of the row 0: rows that see nothing, and the padding of the last panel.
    lse.assign(padded, std::numeric_limits<acc>::infinity()), delta.assign(padded, acc(0));
    for (int64_t i = 0; i < n; ++i) {
      const acc given = in.lse[s.lse_start + h * p.lse_head_stride + i];
      if (given != -std::numeric_limits<acc>::infinity()) lse[i] = given;
      const T *o = in.out.at(b, s.q_start + i, h), *d = dop + i * in.dout.stride;
      Vec<acc> sum(acc(0));
      for_each_vec<acc>(
          dim, [&](int64_t c, int64_t m) { sum = fmadd(Vec<acc>::load(o + c, m), Vec<acc>::load(d + c, m), sum); });
      delta[i] = sum.sum();
    }
  }
};

// The scratch of a thread.
template <typename T>
struct Tile {
  using acc = acc_t<T>;
  acc scores[kKeys * kPanel], dprobabilities[kKeys * kPanel], keep[kKeys * kPanel], dscores[kKeys * kPanel],
      turned[kKeys * kPanel];
  acc keep_rows[kPanel * (kKeys + Dropout::kDecisions)];
  T left[kKeys * kPanel], right[kKeys * kPanel];  // P^T and dS^T, then dS, as operands

  // The accumulation type's buffer as an operand of type T: itself, or rounded into `to`.
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
  constexpr int64_t stride = kKeys + Dropout::kDecisions;
  for (int64_t r = 0; r < kPanel; ++r) p.dropout.multipliers(i + r, plane, j, keys, tile.keep_rows + r * stride);
  pack<acc>(tile.keep_rows, 1, stride, keys, kPanel, tile.keep);
}

// From S^T and dP^T to (P * keep)^T in tile.scores and dS^T in tile.dscores.
template <typename T>
void tile_gradients(const Problem& p, const Mask& mask, const Sequence& s, const QueryHead<T>& head, int64_t b,
                    int64_t h, int64_t i, int64_t j, int64_t keys, Tile<T>& tile) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  // In base e: a factor of log2(e) would round the exponent once more, and nothing cancels that here.
  const V scale(static_cast<acc>(p.softmax_scale));
  const acc* lse = head.lse.data() + i;
  const acc* delta = head.delta.data() + i;
  for (int64_t r = 0; r < keys; ++r) {
    acc* x = tile.scores + r * kPanel;
    acc* ds = tile.dscores + r * kPanel;
    const acc* dp = tile.dprobabilities + r * kPanel;
    const acc* keep = tile.keep + r * kPanel;
    const Interval seen = p.queries_of(s, j + r);
    const int64_t begin = std::clamp<int64_t>(seen.begin - i, 0, kPanel),
                  end = std::clamp<int64_t>(seen.end - i, begin, kPanel);
    if (mask.on) {  // added before the scale is applied below
      const acc unit = static_cast<acc>(1.0 / p.softmax_scale);
      for (int64_t c = begin; c < end; ++c) x[c] = mask.applied(x[c], acc(1), unit, mask.offset(b, h, i + c, j + r));
    }
    for (int64_t c = 0; c < kPanel; c += V::size) {
      V probability = exp(fmadd(V::load(x + c), scale, V(acc(0)) - V::load(lse + c)));
      V gradient = V::load(dp + c);
      V kept = probability;
      if (p.dropout.on) {
        const V multiplier = V::load(keep + c);
        kept = kept * multiplier;
        gradient = gradient * multiplier;
      }
      kept.store(x + c);
      (probability * (gradient - V::load(delta + c))).store(ds + c);
    }
    // What a query does not see may hold anything, NaN included: it is overwritten, never multiplied.
    std::fill(x, x + begin, acc(0)), std::fill(x + end, x + kPanel, acc(0));
    std::fill(ds, ds + begin, acc(0)), std::fill(ds + end, ds + kPanel, acc(0));
  }
}

template <typename T>
void add_mask_gradient(const Mask& mask, const Tensor& dmask, const Sequence& s, int64_t b, int64_t h, int64_t i,
                       int64_t j, int64_t keys, const acc_t<T>* dscores) {
  auto* to = static_cast<acc_t<T>*>(dmask.data_ptr());
  const auto stride = [&](int d) { return mask.strides[d] == 0 && dmask.size(d) == 1 ? 0 : dmask.stride(d); };
  const int64_t base = b * stride(0) + h * stride(1), stride_q = stride(2), stride_k = stride(3);
  for (int64_t r = 0; r < keys; ++r)
    for (int64_t c = 0; c < std::min(kPanel, s.seqlen_q - i); ++c)
      to[base + (i + c) * stride_q + (j + r) * stride_k] += dscores[r * kPanel + c];
}

template <typename T>
void attend_backward(const Problem& p, const Mask& mask, const Inputs<T>& in, int64_t b, int64_t kv_head) {
  using acc = acc_t<T>;
  using V = Vec<acc>;
  const Sequence& s = p.sequences[b];
  const int64_t dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  std::vector<acc> dk(s.keys * dim, acc(0)), dv(s.keys * dim, acc(0));
  Buffer<T> keys_packed(packed_size<T>(s.keys, dim));
  pack<T>(in.k.at(s.k_batch, s.k_start, kv_head), in.k.stride, 1, s.keys, dim, keys_packed.data());
  static thread_local Tile<T> tile;

  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    QueryHead<T> head(p, s, in, b, h);
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
        tile_gradients<T>(p, mask, s, head, b, h, i, j, keys, tile);
        if (in.dmask.defined()) add_mask_gradient<T>(mask, in.dmask, s, b, h, i, j, keys, tile.dscores);
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
  const int64_t seqlen_k = s.seqlen_q + s.diagonal;
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

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename T>
void backward(const Problem& p, const OptionalTensor& attn_mask, const Tensor& dout, const Tensor& q, const Tensor& k,
              const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& dmask, Gradients& gradients) {
  const Mask mask(attn_mask, lse.scalar_type());
  const auto& [dq, dk, dv, dmask_out] = gradients;
  const Inputs<T> in{Rows<const T>(q),
                     Rows<const T>(k),
                     Rows<const T>(v),
                     Rows<const T>(out),
                     Rows<const T>(dout),
                     Rows<T>(dq),
                     Rows<T>(dk),
                     Rows<T>(dv),
                     static_cast<const acc_t<T>*>(lse.const_data_ptr()),
                     dmask};
  int64_t scores = 0;
  for (const Sequence& s : p.sequences) scores += s.seqlen_q * s.keys * p.num_heads;
  // A mask shared by several tasks has one gradient, which they would race for.
  const bool shared = dmask.defined() && (dmask.size(0) != p.batch || dmask.size(1) != p.num_heads);
  for_each_task(p.batch * p.num_kv_heads, scores > kSerialScores && !shared,
                [&](int64_t task) { attend_backward<T>(p, mask, in, task / p.num_kv_heads, task % p.num_kv_heads); });
}

Gradients run(const Problem& p, const OptionalTensor& attn_mask, bool needs_mask_grad, const Tensor& dout,
              const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& out, const Tensor& lse) {
  const Tensor q = rows_of(q_in), k = rows_of(k_in), v = rows_of(v_in);
  Tensor dmask, dmask_out = at::empty({0}, attn_mask ? attn_mask->options() : q.options());
  if (needs_mask_grad) dmask = at::zeros(attn_mask->sizes(), lse.options());
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
                        double dropout_p, const OptionalTensor& dropout_seed, bool needs_mask_grad) {
  Problem p = Problem::dense(q, k, seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed);
  return run(p, attn_mask, needs_mask_grad, dout, q, k, v, out, lse);
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& out, const Tensor& lse,
                                                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t,
                                                        int64_t, double softmax_scale,
                                                        std::optional<int64_t> window_left,
                                                        std::optional<int64_t> window_right, double dropout_p,
                                                        const OptionalTensor& dropout_seed) {
  Problem p = Problem::packed(q, k, cu_seqlens_q, cu_seqlens_k);
  p.set_options(softmax_scale, window_left, window_right, dropout_p, dropout_seed);
  auto [dq, dk, dv, unused] = run(p, std::nullopt, false, dout, q, k, v, out, lse);
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastformer_cpp, m) {
  m.def(
      "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? attn_mask, Tensor? "
      "seqlens_k, "
      "float softmax_scale, int? window_left, int? window_right, float dropout_p, Tensor? dropout_seed, bool "
      "needs_mask_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "varlen_attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float softmax_scale, int? window_left, int? "
      "window_right, "
      "float dropout_p, Tensor? dropout_seed) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fastformer_cpp, CPU, m) {
  m.impl("attention_bwd", attention_bwd);
  m.impl("varlen_attention_bwd", varlen_attention_bwd);
}

}  // namespace fastformer
