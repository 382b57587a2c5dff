// Attention of one or a few queries against a key-value cache, which the new keys and values enter first.
//
//   total = cache_seqlens + seqlen_new;   query i of seqlen_q sees keys [0, total - seqlen_q + i] when causal
//
// Reading the cache is the cost, so nothing is packed: the keys of a kv head stream through once for all query heads of
// its group, as dot products, and the values once as a weighted sum. Statistics and sums are fp32 (fp64 for fp64). From
// kBlocked queries on the products decide, and the blocked kernel of attention.cpp does the work.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention.h"
#include "rows.h"

namespace fastformer {
namespace {

constexpr int64_t kBlocked = 16;

template <typename T>
void append(const Tensor& cache, const Tensor& fresh, const std::vector<int32_t>& seqlens) {
  const Rows<T> to(cache);
  const Rows<const T> from(fresh);
  for (int64_t b = 0; b < fresh.size(0); ++b)
    for (int64_t i = 0; i < fresh.size(1); ++i)
      for (int64_t h = 0; h < fresh.size(2); ++h)
        std::memcpy(static_cast<void*>(to.at(b, seqlens[b] + i, h)), from.at(b, i, h), fresh.size(3) * sizeof(T));
}

template <typename T>
void decode(const Problem& p, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Tensor& out) {
  using acc = acc_t<T>;
  const Rows<const T> q_rows(q), k_rows(k_cache), v_rows(v_cache);
  const Rows<T> out_rows(out);
  const int64_t group = p.num_heads / p.num_kv_heads;
  int64_t elements = 0;
  for (const Sequence& s : p.sequences) elements += s.keys * p.num_kv_heads * p.head_dim;
  for_each_task(p.batch * p.num_kv_heads, elements > kSerialElements, [&](int64_t task) {
    static thread_local std::vector<acc> scores, sum;
    const int64_t b = task / p.num_kv_heads, kv_head = task % p.num_kv_heads;
    const Sequence& s = p.sequences[b];
    scores.resize(s.keys), sum.resize(p.head_dim);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        const Interval seen = p.keys_of(s, i);
        attend_row<T>(q_rows.at(b, i, h), k_rows.at(s.k_batch, seen.begin, kv_head),
                      v_rows.at(s.k_batch, seen.begin, kv_head), k_rows.stride, v_rows.stride,
                      std::max<int64_t>(0, seen.end - seen.begin), p.head_dim, p.scale2<acc>(), scores.data(),
                      sum.data(), out_rows.at(b, i, h));
      }
  });
}

Tensor decode_attention(const Tensor& q_in, Tensor k_cache, Tensor v_cache, const Tensor& cache_seqlens,
                        const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& cache_batch_idx,
                        double softmax_scale, bool is_causal, std::optional<int64_t> window_left) {
  const Tensor q = rows_of(q_in);
  TORCH_CHECK(k_cache.stride(-1) == 1 && v_cache.stride(-1) == 1, "the caches must be contiguous in head_dim");
  const std::vector<int32_t> seqlens = integers<int32_t>(cache_seqlens);
  const std::vector<int32_t> rows = cache_batch_idx ? integers<int32_t>(*cache_batch_idx) : std::vector<int32_t>();
  const int64_t fresh = k ? k->size(1) : 0;
  Problem p;
  p.batch = q.size(0);
  p.num_heads = q.size(2), p.num_kv_heads = k_cache.size(2), p.head_dim = q.size(3);
  p.lse_head_stride = q.size(1);
  p.used_q = q.size(0), p.used_k = k_cache.size(0);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t row = cache_batch_idx ? rows[b] : b;
    TORCH_CHECK(row >= 0 && row < k_cache.size(0), "cache_batch_idx ", row, " is outside of a cache of ",
                k_cache.size(0), " rows");
    const int64_t keys = seqlens[row] + fresh;
    TORCH_CHECK(seqlens[row] >= 0 && keys <= k_cache.size(1), "a cache of ", k_cache.size(1), " positions can't hold ",
                keys);
    p.sequences.push_back({0, 0, q.size(1), keys, keys - q.size(1), b * p.num_heads * q.size(1), row});
  }
  p.set_options(softmax_scale, window_left, is_causal ? std::make_optional<int64_t>(0) : std::nullopt, 0.0,
                std::nullopt);
  Tensor out = at::empty(q.sizes(), q.options());
  const auto run = [&]<typename T>() {
    if (k) append<T>(k_cache, rows_of(*k), seqlens), append<T>(v_cache, rows_of(*v), seqlens);
    if (q.size(1) < kBlocked) return decode<T>(p, q, k_cache, v_cache, out);
    Tensor lse =
        at::empty({p.batch, p.num_heads, q.size(1)}, q.options().dtype(c10::CppTypeToScalarType<acc_t<T>>::value));
    attention_forward(p, std::nullopt, q, k_cache, v_cache, out, lse);
  };
  dispatch(q.scalar_type(), "decode_attention", run);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastformer_cpp, m) {
  m.def(
      "decode_attention(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? k, Tensor? v, "
      "Tensor? cache_batch_idx, float softmax_scale, bool is_causal, int? window_left) -> Tensor");
}

TORCH_LIBRARY_IMPL(fastformer_cpp, CPU, m) { m.impl("decode_attention", decode_attention); }

}  // namespace fastformer
