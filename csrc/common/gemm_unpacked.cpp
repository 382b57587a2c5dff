// Multiplies a few rows by a matrix that is read once. Its blocks are transposed in registers, so that sums are formed
// as in gemm(), with one lane per column. Dot products would need no transposition but round differently, and the bits
// of a row would depend on the number of rows.

#include <array>
#include <utility>

#include "common/gemm.h"
#include "common/transpose.h"

namespace fastformer {
namespace {

template <typename T>
constexpr int64_t kStep = kBlock * kPair<T>;  // in k

// At most kBlock columns of B, each of which is a row in memory.
template <typename T>
struct Columns {
  const T* data;
  int64_t stride, count;
  const T* next;  // the next columns, which are contiguous in memory

  // Writes elements [p, p + depth) of k as a slice of a packed panel: unit j of column c goes to to[j * kBlock + c].
  void transpose(int64_t p, int64_t depth, uint32_t* to) const {
    // A hardware prefetcher does not follow this many streams.
    for (int64_t line = 0; line < kBlock; ++line) __builtin_prefetch(next + p * kBlock + line * kStep<T>);
    if (depth == kStep<T> && count == kBlock && stride % kPair<T> == 0) {
      transpose_block(reinterpret_cast<const uint32_t*>(data + p), stride / kPair<T>, to, kBlock);
      return;
    }
    alignas(64) T part[kBlock * kStep<T>] = {};
    for (int64_t c = 0; c < count; ++c) std::copy_n(data + c * stride + p, depth, part + c * kStep<T>);
    transpose_block(reinterpret_cast<const uint32_t*>(part), kBlock, to, kBlock);
  }
};

// The rows of A, with one pointer for every fourth row, as in gemm_kernels.h.
template <typename T, int kRows>
struct Rows {
  const T* base[(kRows + 3) / 4];
  int64_t stride;

  Rows(const T* a, int64_t lda) : stride(lda) {
    for (int g = 0; g < (kRows + 3) / 4; ++g) base[g] = a + 4 * g * lda;
  }
  const T* at(int i, int64_t p) const { return base[i / 4] + i % 4 * stride + p; }
};

// Computes sums (kRows, kBlock) = A (kRows, elements [first, last) of k) * B. Widens bf16.
template <typename T, int kRows>
void multiply_columns(const T* a, int64_t lda, const Columns<T>& b, int64_t first, int64_t last, float* sums) {
  using V = Vec<float>;
  const Rows<T, kRows> rows(a, lda);
  V sum[kRows];
  for (int i = 0; i < kRows; ++i) sum[i] = V(0.f);
  alignas(64) uint32_t slice[kBlock * kBlock];
  for (int64_t p = first; p < last; p += kStep<T>) {
    const int64_t depth = std::min(kStep<T>, last - p);
    b.transpose(p, depth, slice);
    for (int64_t j = 0; j < depth; ++j) {
      const V right = load_row<T>(slice + j / kPair<T> * kBlock, j % kPair<T>);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum[i] = fmadd(V(static_cast<float>(*rows.at(i, p + j))), right, sum[i]);
    }
  }
  for (int i = 0; i < kRows; ++i) sum[i].store(sums + i * kBlock);
}

#if defined(CPU_CAPABILITY_AVX512)
template <int kRows>
FASTFORMER_WITH_BF16 void multiply_columns_bf16(const bfloat16* a, int64_t lda, const Columns<bfloat16>& b,
                                                int64_t first, int64_t last, float* sums) {
  const Rows<bfloat16, kRows> rows(a, lda);
  __m512 sum[kRows];
  for (int i = 0; i < kRows; ++i) sum[i] = _mm512_setzero_ps();
  alignas(64) uint32_t slice[kBlock * kBlock];
  for (int64_t p = first; p < last; p += 2 * kBlock) {
    const int64_t depth = std::min(2 * kBlock, last - p);
    b.transpose(p, depth, slice);
    for (int64_t j = 0; j + 2 <= depth; j += 2) {
      const __m512bh right = (__m512bh)load_lanes(slice + j / 2 * kBlock);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        uint32_t both;
        std::memcpy(&both, rows.at(i, p + j), 4);
        sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(static_cast<int>(both)), right);
      }
    }
    if (depth % 2) {
      const __m512bh right = (__m512bh)load_lanes(slice + depth / 2 * kBlock);
      for (int i = 0; i < kRows; ++i)
        sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(rows.at(i, p + depth - 1)->x), right);
    }
  }
  for (int i = 0; i < kRows; ++i) _mm512_storeu_ps(sums + i * kBlock, sum[i]);
}
#endif

template <typename T>
using Kernel = void (*)(const T*, int64_t, const Columns<T>&, int64_t, int64_t, float*);

template <typename T, int... i>
std::array<Kernel<T>, kFewRows> kernels(std::integer_sequence<int, i...>) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, bfloat16>)
    if (has_bf16_dot()) return {multiply_columns_bf16<i + 1>...};
#endif
  return {multiply_columns<T, i + 1>...};
}

}  // namespace

template <typename T>
void gemm_unpacked(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                   int64_t ldc) {
  using V = Vec<float>;
  static const auto table = kernels<T>(std::make_integer_sequence<int, kFewRows>{});
  if (m <= 0) return;
  alignas(64) float sums[kFewRows * kBlock];
  for (int64_t j = 0; j < n; j += kBlock) {
    const Columns<T> columns{b + j * ldb, ldb, std::min(kBlock, n - j), b + (j + kBlock) * ldb};
    for (int64_t first = 0; first == 0 || first < k; first += kDepth<T>) {  // once for k = 0, whose sums are 0
      table[m - 1](a, lda, columns, first, std::min(first + kDepth<T>, k), sums);
      for (int64_t i = 0; i < m; ++i) {
        float* to = c + i * ldc + j;
        const V sum = V::load(sums + i * kBlock);
        (first > 0 ? sum + V::load(to, columns.count) : sum).store(to, columns.count);
      }
    }
  }
}

template void gemm_unpacked<float>(int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*,
                                   int64_t);
template void gemm_unpacked<bfloat16>(int64_t, int64_t, int64_t, const bfloat16*, int64_t, const bfloat16*, int64_t,
                                      float*, int64_t);

}  // namespace fastformer
