// Attention of one or a few queries to a KV cache, to which the new keys and values are appended first.
//
//   total = cache_seqlens + seqlen_new;   query i of seqlen_q sees keys [0, total - seqlen_q + i] when causal
//
// Time goes into reading the cache, so nothing is packed: for all query heads of a group, the keys of the kv head are
// read once, in dot products, and the values once, in a weighted sum. Statistics and sums are fp32 (fp64 for fp64).
// From kBlocked queries on, the products dominate, and the blocked kernel of attention.cpp computes them; tokens that a
// slot table scatters are gathered for it, which costs little for this many queries.
//
// All numbers that determine addresses are checked before anything is written.

#include "common/rows.h"
#include "common/softcap.h"
#include "ops/attention.h"
#include "ops/library.h"

namespace fastformer {
namespace {

constexpr int64_t kBlocked = 16;

// The positions of a cache row's tokens in memory: consecutive, or given by the slot table.
struct Places {
  const int32_t* table = nullptr;
  int64_t row_stride = 0, stride = 0;

  explicit Places(const OptionalTensor& slot_table) {
    if (!slot_table) return;
    table = slot_table->const_data_ptr<int32_t>();
    row_stride = slot_table->stride(0), stride = slot_table->stride(1);
  }
  // Calls f with the tokens of a row, in the form of rows.h.
  template <typename F>
  void with(int64_t row, F&& f) const {
    if (table) f(BySlot{table + row * row_stride, stride});
    else f(InOrder{});
  }
};

// The caches as pointers: token t of a row begins at `at(row, head) + t * stride`. Slots are numbered across all
// blocks, so with a table there is a single row.
template <typename T>
struct Cache {
  T* data;
  int64_t row_stride, stride, head_stride;

  Cache(const Tensor& t, const Places& places)
      : data(static_cast<T*>(t.mutable_data_ptr())),
        row_stride(places.table ? 0 : t.stride(0)),
        stride(places.table && t.size(1) == 1 ? t.stride(0) : t.stride(1)),
        head_stride(t.stride(2)) {}
  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// The checked arguments of one call. Each query row is a Sequence whose k_batch is its cache row.
struct Call {
  Problem p;
  Places places;
  int64_t seqlen_q, fresh;
  std::vector<int32_t> seqlens, rows;  // rows: the cache row of each query row; empty if they are the same

  Sequence sequence(int64_t b) const {
    const int64_t row = rows.empty() ? b : rows[b], keys = seqlens[row] + fresh;
    return {0, 0, seqlen_q, keys, keys - seqlen_q, b * p.num_heads * seqlen_q, row};
  }
  // Returns the first position that any query of the sequence sees.
  int64_t first_seen(const Sequence& s) const { return p.keys_of(s, 0).begin; }

  void check_places(int64_t cache_rows, int64_t max_seqlen, int64_t num_tokens) const {
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t row = rows.empty() ? b : rows[b];
      check<std::invalid_argument>(row >= 0 && row < cache_rows, "expected cache_batch_idx in [0, ", cache_rows,
                                   "), got ", row);
      check<std::invalid_argument>(seqlens[row] >= 0 && seqlens[row] + fresh <= max_seqlen,
                                   "expected cache_seqlens in [0, ", max_seqlen - fresh + 1, "), got ", seqlens[row]);
      if (!places.table) continue;
      const Sequence s = sequence(b);
      const int32_t* slots = places.table + row * places.row_stride;
      for (int64_t j = std::min(first_seen(s), s.keys - fresh); j < s.keys; ++j) {
        const int64_t slot = slots[j * places.stride];
        check<std::invalid_argument>(slot >= 0 && slot < num_tokens,
                                     "expected the slots that are written or read in [0, ", num_tokens, "), got ",
                                     slot);
      }
    }
  }
};

// Writes the new tokens of a sequence to heads [first, last) of a cache.
template <typename T, typename Tokens>
void append(const Call& call, const Sequence& s, Tokens tokens, const Rows<const T>& fresh, const Cache<T>& cache,
            int64_t first, int64_t last) {
  for (int64_t head = first; head < last; ++head)
    for (int64_t i = 0; i < call.fresh; ++i)
      std::memcpy(static_cast<void*>(cache.at(s.k_batch, head) + tokens(s.keys - call.fresh + i) * cache.stride),
                  fresh.at(s.k_batch, i, head), call.p.head_dim * sizeof(T));
}

template <typename T>
void decode(const Call& call, const Tensor& q, const Cache<T>& k_cache, const Cache<T>& v_cache, const Tensor& k,
            const Tensor& v, Tensor& out) {
  using acc = acc_t<T>;
  const Problem& p = call.p;
  const Rows<const T> q_rows(q), k_rows(k), v_rows(v);
  const Rows<T> out_rows(out);
  const int64_t group = p.num_heads / p.num_kv_heads;
  const acc factor = static_cast<acc>(p.softmax_scale / p.softcap), cap = static_cast<acc>(p.softcap);
  int64_t elements = 0;
  for (int64_t b = 0; b < p.batch; ++b) elements += call.sequence(b).keys * p.num_kv_heads * p.head_dim;
  // If there are enough rows, each task computes whole rows, because the tokens of a row are close together, and
  // consecutive rows often share tokens.
  const int64_t heads = p.batch >= 4 * num_threads() ? p.num_kv_heads : 1, parts = p.num_kv_heads / heads;
  for_each_task(p.batch * parts, elements > kSerialElements, [&](int64_t task) {
    const int64_t b = task / parts, first = task % parts * heads;
    const Sequence s = call.sequence(b);
    const int64_t row = s.k_batch;
    call.places.with(row, [&](auto tokens) {
      append<T>(call, s, tokens, k_rows, k_cache, first, first + heads);
      append<T>(call, s, tokens, v_rows, v_cache, first, first + heads);
      // Several queries read the keys of a head in turn, so their heads are computed one at a time.
      const int64_t together = s.seqlen_q == 1 ? heads : 1;
      for (int64_t kv_head = first; kv_head < first + heads; kv_head += together) {
        const Heads<const T> keys{k_cache.at(row, kv_head), k_cache.head_stride, k_cache.stride};
        const Heads<const T> values{v_cache.at(row, kv_head), v_cache.head_stride, v_cache.stride};
        for (int64_t i = 0; i < s.seqlen_q; ++i) {
          const Interval seen = p.keys_of(s, i);
          const int64_t count = std::max<int64_t>(0, seen.end - seen.begin);
          const auto attend = [&](acc scale2, auto bias) {
            attend_heads<T, T>({q_rows.at(b, i, kv_head * group), q_rows.head_stride}, keys, values, together * group,
                               group, tokens.from(seen.begin), count, p.head_dim, scale2,
                               {out_rows.at(b, i, kv_head * group), out_rows.head_stride}, bias);
          };
          const auto capped = [=](int64_t, acc* scores) {
            cap_row(scores, count, factor, cap);
            return kNoSink<acc>;
          };
          if (p.softcap > 0) attend(acc(1.4426950408889634), capped);
          else attend(p.scale2<acc>(), NoBias());
        }
      }
    });
  });
}

// Gathers the visible tokens of one cache, sequence after sequence: (1, tokens, num_kv_heads, head_dim). Each sequence
// begins at a panel of the blocked kernel, with zeros before the first visible token, so that the sums are the same as
// for a contiguous cache.
template <typename T>
Tensor gathered(const Call& call, const Tensor& cache, const std::vector<Sequence>& sequences, int64_t tokens) {
  const Problem& p = call.p;
  Tensor dense = empty({1, tokens, p.num_kv_heads, p.head_dim}, cache.scalar_type());
  const Cache<T> from(cache, call.places);
  T* to = dense.mutable_data_ptr<T>();
  const int64_t token_size = p.num_kv_heads * p.head_dim;
  for_each_task(p.batch, tokens * token_size > kSerialElements, [&](int64_t b) {
    const Sequence whole = call.sequence(b);
    const int64_t begin = whole.keys - sequences[b].keys, seen = std::min(call.first_seen(whole), whole.keys);
    T* row = to + sequences[b].k_start * token_size;
    std::fill(row, row + (seen - begin) * token_size, T(0));
    call.places.with(whole.k_batch, [&](auto place) {
      for (int64_t j = seen; j < whole.keys; ++j)
        for (int64_t h = 0; h < p.num_kv_heads; ++h)
          std::memcpy(static_cast<void*>(row + (j - begin) * token_size + h * p.head_dim),
                      from.at(whole.k_batch, h) + place(j) * from.stride, p.head_dim * sizeof(T));
    });
  });
  return dense;
}

template <typename T>
void decode_blocked(Call& call, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                    const Tensor& v, Tensor& out) {
  Problem& p = call.p;
  const Cache<T> k_to(k_cache, call.places), v_to(v_cache, call.places);
  const Rows<const T> k_rows(k), v_rows(v);
  int64_t tokens = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence s = call.sequence(b);
    call.places.with(s.k_batch, [&](auto tokens) {
      append<T>(call, s, tokens, k_rows, k_to, 0, p.num_kv_heads);
      append<T>(call, s, tokens, v_rows, v_to, 0, p.num_kv_heads);
    });
    if (call.places.table) {
      const int64_t unseen = std::min(call.first_seen(s), s.keys) / kPanel * kPanel;
      s.k_batch = 0, s.k_start = tokens;
      s.keys -= unseen, s.diagonal -= unseen;
      tokens += s.keys;
    }
    p.sequences.push_back(s);
  }
  Tensor lse = empty({p.batch, p.num_heads, q.size(1)}, scalar_type_of<acc_t<T>>());
  if (!call.places.table) return attention_forward(p, std::nullopt, q, k_cache, v_cache, out, lse);
  const Tensor keys = gathered<T>(call, k_cache, p.sequences, tokens);
  const Tensor values = gathered<T>(call, v_cache, p.sequences, tokens);
  attention_forward(p, std::nullopt, q, keys, values, out, lse);
}

Tensor decode_attention(const Tensor& q_in, Tensor& k_cache, Tensor& v_cache, const Tensor& cache_seqlens,
                        const OptionalTensor& k_in, const OptionalTensor& v_in, const OptionalTensor& cache_batch_idx,
                        const OptionalTensor& slot_table, double softmax_scale, bool is_causal,
                        std::optional<int64_t> window_left, double softcap) {
  const Tensor q = rows_of(q_in);
  for (const Tensor& cache : {k_cache, v_cache}) {
    check(cache.stride(3) == 1, "the caches must be contiguous in head_dim");
    check(!slot_table || cache.size(0) <= 1 || cache.size(1) <= 1 || cache.stride(0) == cache.size(1) * cache.stride(1),
          "the blocks of the caches must be contiguous");
  }
  // Without new tokens, the cache is a placeholder for them, which is not read.
  const Tensor k = k_in ? rows_of(*k_in) : k_cache, v = v_in ? rows_of(*v_in) : v_cache;
  Call call{{},
            Places(slot_table),
            q.size(1),
            k_in ? k.size(1) : 0,
            integers<int32_t>(cache_seqlens),
            cache_batch_idx ? integers<int32_t>(*cache_batch_idx) : std::vector<int32_t>()};
  Problem& p = call.p;
  p.batch = q.size(0);
  p.num_heads = q.size(2), p.num_kv_heads = k_cache.size(2), p.head_dim = q.size(3);
  p.lse_head_stride = q.size(1);
  p.used_q = q.size(0), p.used_k = k_cache.size(0);
  p.set_options(softmax_scale, window_left, is_causal ? std::make_optional<int64_t>(0) : std::nullopt, 0.0,
                std::nullopt, softcap);
  const Tensor& rows = slot_table ? *slot_table : k_cache;
  call.check_places(rows.size(0), rows.size(1), k_cache.size(0) * k_cache.size(1));
  Tensor out = empty(q.sizes(), q.scalar_type());
  dispatch(q.scalar_type(), "decode_attention", [&]<typename T>() {
    if (q.size(1) >= kBlocked) return decode_blocked<T>(call, q, k_cache, v_cache, k, v, out);
    decode<T>(call, q, {k_cache, call.places}, {v_cache, call.places}, k, v, out);
  });
  return out;
}

}  // namespace

FASTFORMER_OP(decode_attention)

}  // namespace fastformer
