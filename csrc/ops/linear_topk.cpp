// The output projection and the selection of its best outputs: computes x W^T tile by tile, and each row keeps its k
// best.
//
// The vocabulary is split into tiles of kColumns, which the threads take in order. A tile of W is packed (for few rows
// it is read in place), and all rows are multiplied by it while it is in the cache. Of a row's logits,
//
//   - those above the k-th best that this thread has seen for the row enter a heap of size k. Few do, so most logits
//     only cost a comparison per vector. A thread's indices ascend, so a value equal to the k-th best never enters.
//   - with log_probs, the maximum and the sum of exp(z - maximum) are stored per tile
//
// At the end, the threads' heaps are merged, and the sums of the tiles are added in order. This takes 2 rows dim
// vocab_size FLOPs and reads W once per chunk of rows. The products of gemm.h form each sum in the same order for any
// number of rows (oneDNN's, for bf16 on AMX, seem to), and ties are broken by index, so the bits of a row depend
// neither on the threads nor on the other rows. Logits and sums are fp32 (fp64 for fp64).

#include <atomic>
#include <limits>
#include <vector>

#include "common/dispatch.h"
#include "common/rows.h"
#include "common/softcap.h"
#include "ops/library.h"
#include "ops/linear.h"

namespace fastformer {
namespace {

constexpr int64_t kColumns = 128;   // columns of a tile, which fits into the second-level cache with a block of rows
constexpr int64_t kRowBlock = 128;  // rows whose logits of a tile exist at the same time
constexpr int64_t kChunk = 2048;    // rows for which W is read once

template <typename acc>
struct Candidate {
  acc value;
  int64_t index;
};

// The order of the result. As the "less" of a heap, it puts the worst candidate on top.
template <typename acc>
bool better(const Candidate<acc>& a, const Candidate<acc>& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// One thread's k best of each row of a chunk, as a heap.
template <typename acc>
class Best {
 public:
  Best() = default;
  Best(int64_t rows, int64_t k) : k_(k), heaps_(rows * k), rows_(rows) {}

  bool broken(int64_t row) const { return rows_[row].broken; }
  const Candidate<acc>* begin(int64_t row) const { return heaps_.data() + row * k_; }
  const Candidate<acc>* end(int64_t row) const { return begin(row) + rows_[row].count; }
  bool used() const { return !rows_.empty(); }

  // Adds n logits of a row, those of the classes from `first` on.
  void add(int64_t row, const acc* z, int64_t n, int64_t first) {
    using V = Vec<acc>;
    Row& r = rows_[row];
    int64_t c = 0;
    for (; r.count < k_ && c < n; ++c) offer(r, row, z[c], first + c);
    for (; c < n; c += V::size) {
      const int64_t w = std::min<int64_t>(V::size, n - c);
      uint32_t above = lanes_above(V::load(z + c, w), V(r.worst));
      if (w < V::size) above &= (1u << w) - 1;
      for (; above; above &= above - 1) {
        const int64_t lane = __builtin_ctz(above);
        // The bound may have risen since. NaN counts as larger than everything.
        if (!(z[c + lane] <= r.worst)) offer(r, row, z[c + lane], first + c + lane);
      }
    }
  }

 private:
  struct Row {
    acc worst = -std::numeric_limits<acc>::infinity();  // the worst value in the heap, once the heap is full
    int64_t count = 0;
    bool broken = false;  // there was a NaN or +inf
  };

  void offer(Row& r, int64_t row, acc value, int64_t index) {
    if (!(value < std::numeric_limits<acc>::infinity())) {
      r.broken = true;
      return;
    }
    Candidate<acc>* heap = heaps_.data() + row * k_;
    if (r.count == k_) std::pop_heap(heap, heap + k_, better<acc>);
    else ++r.count;
    heap[r.count - 1] = {value, index};
    std::push_heap(heap, heap + r.count, better<acc>);
    if (r.count == k_) r.worst = heap[0].value;
  }

  int64_t k_ = 0;
  Buffer<Candidate<acc>> heaps_;
  std::vector<Row> rows_;
};

template <typename T>
struct LinearTopK {
  using acc = acc_t<T>;
  using V = Vec<acc>;

  const T *x, *weight;
  int64_t ldx, stride_dim, stride_class;
  int64_t rows, dim, vocab_size, k;
  bool log_probs;
  acc softcap;

  int64_t tiles() const { return (vocab_size + kColumns - 1) / kColumns; }

  // Rows [first, first + count): values and indices are those of the chunk, (count, k).
  void chunk(int64_t first, int64_t count, acc* values, int64_t* indices) const {
    Buffer<acc> maxima(log_probs ? tiles() * count : 0), sums(log_probs ? tiles() * count : 0);  // (tiles, count)
    const bool few = count <= kFewRows && reads_unpacked<T>(stride_dim);
    std::vector<Best<acc>> best(num_threads());
    std::atomic<int64_t> workers{0};
    for_each_worker(tiles(), 2 * count * vocab_size * dim >= kSerialFlops, [&](auto next) {
      Best<acc>& mine = best[workers++];
      mine = Best<acc>(count, k);
      Buffer<T> right(few ? 0 : packed_size<T>(dim, kColumns));
      Buffer<acc> z(std::min(count, kRowBlock) * kColumns);
      for (int64_t tile = next(); tile < tiles(); tile = next()) {
        const int64_t column = tile * kColumns, n = std::min(kColumns, vocab_size - column);
        const T* classes = weight + column * stride_class;
        if (!few) pack_tile(classes, n, right.data());
        for (int64_t block = 0; block < count; block += kRowBlock) {
          const int64_t m = std::min(kRowBlock, count - block);
          const T* left = x + (first + block) * ldx;
          if (!few) gemm<T>(m, n, dim, left, ldx, right.data(), z.data(), kColumns, false);
          else if constexpr (!std::is_same_v<T, double>)
            gemm_unpacked<T>(m, n, dim, left, ldx, classes, stride_class, z.data(), kColumns);
          for (int64_t r = 0; r < m; ++r) {
            acc* row = z.data() + r * kColumns;
            if (softcap > 0) cap_row(row, n, acc(1) / softcap, softcap);
            mine.add(block + r, row, n, column);
            if (log_probs)
              sum_up(row, n, maxima.data()[tile * count + block + r], sums.data()[tile * count + block + r]);
          }
        }
      }
    });
    for_row_ranges(count, 4 * tiles() + 16 * k, [&](int64_t begin, int64_t end) {
      std::vector<Candidate<acc>> merged;
      for_each_vec<acc>(end - begin, [&](int64_t r, int64_t w) {
        acc largest[V::size];
        double log[V::size];
        if (log_probs) finish(maxima.data() + begin + r, sums.data() + begin + r, count, w, largest, log);
        for (int64_t lane = 0; lane < w; ++lane) {
          const int64_t row = begin + r + lane;
          acc* to = values + row * k;
          if (!merge(best, row, merged)) {
            std::fill_n(to, k, std::numeric_limits<acc>::quiet_NaN());
            for (int64_t i = 0; i < k; ++i) indices[row * k + i] = i;
            continue;
          }
          for (int64_t i = 0; i < k; ++i) {
            const acc z = merged[i].value;
            // Not z - lse, because a large lse has few fractional bits.
            to[i] = log_probs ? static_cast<acc>(static_cast<double>(z - largest[lane]) - log[lane]) : z;
            indices[row * k + i] = merged[i].index;
          }
        }
      });
    });
  }

  // pack() that prefetches the panel after the one being packed, which a hardware prefetcher does not do for long rows.
  // (If W has gaps between its rows, this also fetches memory that is not needed.)
  void pack_tile(const T* classes, int64_t n, T* to) const {
    constexpr int64_t kSlice = 64, kLine = 64 / sizeof(T);
    for (int64_t j = 0; j < n; j += kPanel, classes += kPanel * stride_class, to += packed_size<T>(dim, kPanel))
      for (int64_t p = 0; p < dim; p += kSlice) {
        const T* next = classes + kPanel * stride_class + p * kPanel;
        for (int64_t i = 0; i < kSlice * kPanel; i += kLine) __builtin_prefetch(next + i, 0, 2);
        pack<T>(classes + p * stride_dim, stride_dim, stride_class, std::min(kSlice, dim - p), std::min(kPanel, n - j),
                to + p * kPanel);
      }
  }

  // Computes the maximum of n logits and the sum of exp(z - maximum).
  static void sum_up(const acc* z, int64_t n, acc& maximum, acc& sum) {
    maximum = largest_of(z, n);
    const V shift(maximum == -std::numeric_limits<acc>::infinity() ? acc(0) : maximum);
    sum = sum_vecs<acc>(n, [&](int64_t c, int64_t w) { return exp(V::load(z + c, w) - shift).first_lanes(w); }).sum();
  }

  // Computes the maxima of w consecutive rows over all tiles, and the logarithms of their sums of exp(z - maximum).
  void finish(const acc* maxima, const acc* sums, int64_t count, int64_t w, acc* largest, double* log) const {
    V top = V::load(maxima, w);
    for (int64_t tile = 1; tile < tiles(); ++tile) top = max(top, V::load(maxima + tile * count, w));
    double total[V::size] = {};
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      acc share[V::size];
      (V::load(sums + tile * count, w) * exp(V::load(maxima + tile * count, w) - top)).store(share);
      for (int64_t lane = 0; lane < V::size; ++lane) total[lane] += share[lane];
    }
    top.store(largest);
    for (int64_t lane = 0; lane < w; ++lane) log[lane] = std::log(total[lane]);
  }

  // Writes the k best of a row, in order. Returns false if the row is broken.
  bool merge(const std::vector<Best<acc>>& best, int64_t row, std::vector<Candidate<acc>>& merged) const {
    merged.clear();
    for (const Best<acc>& part : best) {
      if (!part.used()) continue;
      if (part.broken(row)) return false;
      merged.insert(merged.end(), part.begin(row), part.end(row));
    }
    std::partial_sort(merged.begin(), merged.begin() + k, merged.end(), better<acc>);
    return true;
  }
};

std::tuple<Tensor, Tensor> linear_topk(const Tensor& x_in, const Tensor& weight_in, int64_t k, bool log_probs,
                                       double softcap) {
  const Tensor x = separate_rows(x_in), weight = strided(weight_in);
  const int64_t rows = x.size(0);
  Tensor values = empty({rows, k}, accumulation_dtype(x.scalar_type()));
  Tensor indices = empty({rows, k}, kLong);
  dispatch(x.scalar_type(), "linear_topk", [&]<typename T>() {
    const LinearTopK<T> op{x.const_data_ptr<T>(),
                           weight.const_data_ptr<T>(),
                           x.stride(0),
                           weight.stride(1),
                           weight.stride(0),
                           rows,
                           x.size(1),
                           weight.size(0),
                           k,
                           log_probs,
                           static_cast<acc_t<T>>(softcap)};
    for (int64_t first = 0; first < rows; first += kChunk)
      op.chunk(first, std::min(kChunk, rows - first), values.mutable_data_ptr<acc_t<T>>() + first * k,
               indices.mutable_data_ptr<int64_t>() + first * k);
  });
  return {values, indices};
}

}  // namespace

FASTFORMER_OP(linear_topk)

}  // namespace fastformer
