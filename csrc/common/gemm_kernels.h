// The micro-kernels of gemm.h, for gemm.cpp only: a few rows of A, read in place, times one panel of B.

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "common/gemm.h"
#include "common/transpose.h"

namespace fastformer {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kMaxRows = 14;  // 28 accumulators and two vectors of B; broadcasts read memory
#else
constexpr int kMaxRows = 6;  // 12 of 16 registers are accumulators
#endif

// A as a micro-kernel reads it: element (i, p) is data[i * row + p / kPair * step + p % kPair].
template <typename T>
struct Left {
  const T* data;
  int64_t row, step;

  // The address to prefetch in step p of k, because there are more rows than a hardware prefetcher has streams. A cache
  // line of a row lasts for kLine steps, during which each row is prefetched once. If a step advances by a whole line,
  // so does this address.
  const T* ahead(int64_t p) const {
    constexpr int64_t kLine = 64 / sizeof(T) / kPair<T>, kAhead = 2 * kLine;
    return data + p % kLine * row + (p + kAhead) * step;
  }
};

// Walks along the rows of A with one pointer for every fourth row. x86 addressing covers the rows between (the pointer
// plus up to three strides), so a step in k advances few pointers.
template <typename T, int kRows>
struct Rows {
  const T* base[(kRows + 3) / 4];
  int64_t row, step;

  explicit Rows(Left<T> a) : row(a.row), step(a.step) {
    for (int g = 0; g < (kRows + 3) / 4; ++g) base[g] = a.data + 4 * g * a.row;
  }
  const T* operator[](int i) const { return base[i / 4] + i % 4 * row; }
  void advance() {
    for (auto& pointer : base) pointer += step;
  }
};

// Stores the sums of kRows rows to C, or adds them to it. Only the first `columns` columns exist.
template <int kRows, int kVecs>
inline void store_sums(const Vec<float> (&sum)[kRows][kVecs], float* c, int64_t ldc, int64_t columns, bool accumulate) {
  using V = Vec<float>;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) {
      const int64_t n = columns - j * V::size;
      if (n <= 0) continue;
      float* to = c + i * ldc + j * V::size;
      (accumulate ? sum[i][j] + V::load(to, n) : sum[i][j]).store(to, n);
    }
}

// The micro-kernels: kRows rows of A against one panel. `columns` of the result are written.

// Widens a bf16 panel on the fly: for a single group of rows, a widened copy of the panel would not pay off.
template <typename T, int kRows>
void rows_times_panel(Left<float> a, const T* b, int64_t k, float* c, int64_t ldc, int64_t columns, bool accumulate) {
  using V = Vec<float>;
  constexpr int kVecs = kPanel / V::size;
  V sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sum[i][j] = V(0.f);
  Rows<float, kRows> rows(a);
  for (int64_t p = 0; p < k; p += kPair<T>, b += kPair<T> * kPanel) {
    const int64_t depth = std::min(kPair<T>, k - p);
    // The rows of a pair one after the other, because both at once need more registers than AVX2 has.
    for (int64_t odd = 0; odd < depth; ++odd, rows.advance()) {
      V right[kVecs];
      for (int j = 0; j < kVecs; ++j) right[j] = load_row<T>(b + j * V::size * kPair<T>, odd);
      if constexpr (std::is_same_v<T, float>) __builtin_prefetch(a.ahead(p));
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const V left(*rows[i]);
        for (int j = 0; j < kVecs; ++j) sum[i][j] = fmadd(left, right[j], sum[i][j]);
      }
    }
  }
  store_sums(sum, c, ldc, columns, accumulate);
}

#if defined(CPU_CAPABILITY_AVX512)
// Multiplies two adjacent elements of k at once. If k is odd, the second element of the last pair is zero.
template <int kRows, bool kWhole>
FASTFORMER_WITH_BF16 __attribute__((always_inline)) inline void add_pair(const Rows<bfloat16, kRows>& rows,
                                                                         const bfloat16* b, __m512 (&sum)[kRows][2]) {
  const __m512bh right0 = (__m512bh)load_lanes(b), right1 = (__m512bh)load_lanes(b + kPanel);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    uint32_t both;
    if (kWhole) std::memcpy(&both, rows[i], 4);
    else both = rows[i]->x;
    const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(both));
    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, right0);
    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], left, right1);
  }
}

template <int kRows>
FASTFORMER_WITH_BF16 void rows_times_panel_bf16(Left<bfloat16> a, const bfloat16* b, int64_t k, float* c, int64_t ldc,
                                                int64_t columns, bool accumulate) {
  __m512 sum[kRows][2];
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  Rows<bfloat16, kRows> rows(a);
  for (int64_t p = 0; p + 2 <= k; p += 2, b += 2 * kPanel, rows.advance()) add_pair<kRows, true>(rows, b, sum);
  if (k % 2) add_pair<kRows, false>(rows, b, sum);
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < 2; ++j) {
      const int64_t n = columns - j * 16;
      if (n <= 0) continue;
      const __mmask16 mask = Vec<float>::first(n);
      float* to = c + i * ldc + j * 16;
      const __m512 old = accumulate ? _mm512_maskz_loadu_ps(mask, to) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(sum[i][j], old));
    }
}
#endif

template <int kRows>
void rows_times_panel_double(Left<double> a, const double* b, int64_t k, double* c, int64_t ldc, int64_t columns,
                             bool accumulate) {
  for (int i = 0; i < kRows; ++i) {
    double sum[kPanel] = {};
    for (int64_t p = 0; p < k; ++p)
      for (int64_t j = 0; j < kPanel; ++j) sum[j] += a.data[i * a.row + p * a.step] * b[p * kPanel + j];
    for (int64_t j = 0; j < columns; ++j) c[i * ldc + j] = accumulate ? c[i * ldc + j] + sum[j] : sum[j];
  }
}

template <typename T>
using Kernel = void (*)(Left<T>, const T*, int64_t, acc_t<T>*, int64_t, int64_t, bool);

template <typename T>
using Kernels = std::array<Kernel<T>, kMaxRows>;

constexpr auto kRowNumbers = std::make_integer_sequence<int, kMaxRows>{};

template <typename T>
const Kernels<T>& kernels() {
  static const Kernels<T> table = []<int... i>(std::integer_sequence<int, i...>) -> Kernels<T> {
    if constexpr (std::is_same_v<T, double>) return {rows_times_panel_double<i + 1>...};
    else if constexpr (std::is_same_v<T, float>) return {rows_times_panel<float, i + 1>...};
#if defined(CPU_CAPABILITY_AVX512)
    else return {rows_times_panel_bf16<i + 1>...};
#else
    else return {};  // never called: see has_bf16_dot
#endif
  }(kRowNumbers);
  return table;
}

// Splits the rows of A among calls of the micro-kernels: into groups of nearly equal size, of which the first `few`
// have one row fewer than the others.
struct Groups {
  int64_t count, few, rows;

  explicit Groups(int64_t m) : count((m + kMaxRows - 1) / kMaxRows), few(count - m % count), rows(m / count) {}
};

// Multiplies all rows of A by one panel.
template <typename T>
void rows_of_panel(Groups groups, Left<T> a, const T* panel, int64_t k, acc_t<T>* c, int64_t ldc, int64_t columns,
                   bool accumulate) {
  const Kernels<T>& table = kernels<T>();
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t rows = groups.rows + (g >= groups.few);
    table[rows - 1](a, panel, k, c, ldc, columns, accumulate);
    a.data += rows * a.row, c += rows * ldc;
  }
}

}  // namespace
}  // namespace fastformer
