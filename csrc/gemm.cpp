// Packing and micro-kernels behind gemm.h.

#include "gemm.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "buffer.h"
#include "transpose.h"

namespace fastformer {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kMaxRows = 14;  // 28 accumulators, two vectors of B, the broadcasts come from memory

// Rows a and b of 2 * kBlock 16-bit elements, side by side: (a0, b0), (a1, b1), ...
inline void interleave(const bfloat16* a, const bfloat16* b, bfloat16* to) {
  const __m512i x = load_lanes(a), y = load_lanes(b);
  const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  store_lanes(to, _mm512_permutex2var_epi64(low, first, high));
  store_lanes(to + 32, _mm512_permutex2var_epi64(low, second, high));
}
#else
constexpr int kMaxRows = 6;  // 12 accumulators of 16

inline void interleave(const bfloat16* a, const bfloat16* b, bfloat16* to) {
  const __m256i x = load_lanes(a), y = load_lanes(b);
  const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
  store_lanes(to, _mm256_permute2x128_si256(low, high, 0x20));
  store_lanes(to + 16, _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

// One panel, whatever the strides.
template <typename T>
void pack_panel_slowly(const T* b, int64_t stride_k, int64_t stride_n, int64_t k_first, int64_t k, int64_t columns,
                       T* panel) {
  constexpr int64_t P = kPair<T>;
  for (int64_t i = k_first; i < round_up(k, P); ++i)
    for (int64_t j = 0; j < kPanel; ++j)
      panel[(i / P * kPanel + j) * P + i % P] = i < k && j < columns ? b[i * stride_k + j * stride_n] : T(0);
}

template <typename T>
void pack_panel(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t columns, T* panel) {
  constexpr int64_t P = kPair<T>;
  int64_t done = 0;
  if constexpr (!std::is_same_v<T, double>) {
    if (columns == kPanel && stride_n == 1) {
      if constexpr (P == 1) {
        for (; done < k; ++done)
          for (int64_t j = 0; j < kPanel; j += kBlock)
            store_lanes(panel + done * kPanel + j, load_lanes(b + done * stride_k + j));
      } else {
        for (; done + 2 <= k; done += 2)
          interleave(b + done * stride_k, b + (done + 1) * stride_k, panel + done * kPanel);
      }
    } else if (columns == kPanel && stride_k == 1 && stride_n % P == 0) {
      // 32-bit units: one float, or the two neighbours in k that bf16 keeps together.
      const auto* from = reinterpret_cast<const uint32_t*>(b);
      auto* to = reinterpret_cast<uint32_t*>(panel);
      for (; done + kBlock * P <= k; done += kBlock * P)
        for (int64_t j = 0; j < kPanel; j += kBlock)
          transpose_block(from + done / P + j * (stride_n / P), stride_n / P, to + done / P * kPanel + j, kPanel);
    }
  }
  pack_panel_slowly(b, stride_k, stride_n, done, k, columns, panel);
}

// Where a micro-kernel finds A: element (i, p) at data[i * row + p / kPair * step + p % kPair].
template <typename T>
struct Left {
  const T* data;
  int64_t row, step;

  // What step p of k should ask the caches for: the rows are more streams than a hardware prefetcher follows. A line
  // of a row lasts for kLine steps, in which each row has its turn; where a step moves on by a line, so does this.
  const T* ahead(int64_t p) const {
    constexpr int64_t kLine = 64 / sizeof(T) / kPair<T>, kAhead = 2 * kLine;
    return data + p % kLine * row + (p + kAhead) * step;
  }
};

// Walks down the rows of A with a pointer for every fourth: x86 adds up to three times a stride in the address itself,
// so that a step in k moves few pointers and computes no others.
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

// Sums of kRows rows, stored or added where they belong; `columns` of them exist.
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

template <int kRows>
void rows_times_panel(Left<float> a, const float* b, int64_t k, float* c, int64_t ldc, int64_t columns,
                      bool accumulate) {
  using V = Vec<float>;
  constexpr int kVecs = kPanel / V::size;
  V sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sum[i][j] = V(0.f);
  Rows<float, kRows> rows(a);
  for (int64_t p = 0; p < k; ++p, b += kPanel, rows.advance()) {
    V right[kVecs];
    for (int j = 0; j < kVecs; ++j) right[j] = V::load(b + j * V::size);
    __builtin_prefetch(a.ahead(p));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const V left(*rows[i]);
      for (int j = 0; j < kVecs; ++j) sum[i][j] = fmadd(left, right[j], sum[i][j]);
    }
  }
  store_sums(sum, c, ldc, columns, accumulate);
}

#if defined(CPU_CAPABILITY_AVX512)
// Two neighbours in k at once; beyond an odd k the second one is zero.
template <int kRows, bool kWhole>
__attribute__((target("avx512bf16"), always_inline)) inline void add_pair(const Rows<bfloat16, kRows>& rows,
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
__attribute__((target("avx512bf16"))) void rows_times_panel_bf16(Left<bfloat16> a, const bfloat16* b, int64_t k,
                                                                 float* c, int64_t ldc, int64_t columns,
                                                                 bool accumulate) {
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

// bf16 by widening: the low half of a 32-bit unit is the even row of k, the high half the odd one.
template <int kRows>
void rows_times_panel_widened(Left<bfloat16> a, const bfloat16* b, int64_t k, float* c, int64_t ldc, int64_t columns,
                              bool accumulate) {
  using V = Vec<float>;
  constexpr int kVecs = kPanel / V::size;
  V sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sum[i][j] = V(0.f);
  for (int64_t p = 0; p < k; p += 2, b += 2 * kPanel) {
    const bool whole = p + 2 <= k;
    // The even rows of k, then the odd ones: both at once would not fit the registers of AVX2.
    for (int odd = 0; odd < (whole ? 2 : 1); ++odd) {
      V right[kVecs];
      for (int j = 0; j < kVecs; ++j) {
        const Lanes x = load_lanes(b + j * 2 * V::size);
        right[j] = odd ? upper_halves(x) : lower_halves(x);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const V left(static_cast<float>(a.data[i * a.row + p / 2 * a.step + odd]));
        for (int j = 0; j < kVecs; ++j) sum[i][j] = fmadd(left, right[j], sum[i][j]);
      }
    }
  }
  store_sums(sum, c, ldc, columns, accumulate);
}

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

template <int... i>
Kernels<float> float_kernels(std::integer_sequence<int, i...>) {
  return {rows_times_panel<i + 1>...};
}
template <int... i>
Kernels<double> double_kernels(std::integer_sequence<int, i...>) {
  return {rows_times_panel_double<i + 1>...};
}
template <int... i>
Kernels<bfloat16> bfloat16_kernels(std::integer_sequence<int, i...>) {
#if defined(CPU_CAPABILITY_AVX512)
  if (__builtin_cpu_supports("avx512bf16")) return {rows_times_panel_bf16<i + 1>...};
#endif
  return {rows_times_panel_widened<i + 1>...};
}

template <typename T>
const Kernels<T>& kernels() {
  constexpr auto rows = std::make_integer_sequence<int, kMaxRows>{};
  static const Kernels<T> table = [&] {
    if constexpr (std::is_same_v<T, float>) return float_kernels(rows);
    else if constexpr (std::is_same_v<T, double>) return double_kernels(rows);
    else return bfloat16_kernels(rows);
  }();
  return table;
}

}  // namespace

// brgemm runs on AVX512_BF16 too: FASTFORMER_BRGEMM=1 takes it there for tests.
bool use_brgemm() {
#if defined(CPU_CAPABILITY_AVX512)
  static const bool wanted = [] {
    const char* asked = std::getenv("FASTFORMER_BRGEMM");
    const bool amx = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-tile");
    const bool on = asked ? asked[0] == '1' : amx;
    return on && at::native::cpublas::could_pack(at::kBFloat16);
  }();
  return wanted;
#else
  return false;
#endif
}

namespace {

// How rows of A are shared out among calls of the micro-kernels: groups of nearly the same number of rows, the first
// `few` of which have one row less than the others.
struct Groups {
  int64_t count, few, rows;

  explicit Groups(int64_t m) : count((m + kMaxRows - 1) / kMaxRows), few(count - m % count), rows(m / count) {}
};

// All rows of A against one panel.
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

template <typename T>
void pack(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, T* packed) {
  const int64_t panel_size = round_up(k, kPair<T>) * kPanel;
  for (int64_t j = 0; j < n; j += kPanel, packed += panel_size)
    pack_panel(b + j * stride_n, stride_k, stride_n, k, std::min(kPanel, n - j), packed);
}

template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* packed, acc_t<T>* c, int64_t ldc,
          bool accumulate, int64_t packed_k) {
  if (m <= 0 || n <= 0) return;
  const int64_t panel_size = round_up(packed_k, kPair<T>) * kPanel;
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (use_brgemm() && k % 2 == 0 && n % kPanel == 0) {
      for (int64_t j = 0; j < n; j += kPanel, packed += panel_size)
        at::native::cpublas::brgemm(m, kPanel, k, lda, kPanel, ldc, accumulate, a, packed, c + j, true);
      return;
    }
  }
  // Long products are cut so that a panel's slice and the rows' slice stay in the second-level cache.
  constexpr int64_t kApart = kDepth + 64 / static_cast<int64_t>(sizeof(T));  // elements between copied rows
  constexpr int64_t kWays = 8;                                               // of a set of a first-level cache
  const bool copies = n > kPanel && m > kWays && row_stride<T>(lda) != lda;
  const int64_t block = copies ? std::min<int64_t>(m, 64) : m;
  Buffer<T> copied;
  if (copies) copied = Buffer<T>(block * kApart);
  for (int64_t p = 0; p < k; p += kDepth) {
    const int64_t depth = std::min(kDepth, k - p);
    for (int64_t first = 0; first < m; first += block) {
      const int64_t rows = std::min(block, m - first);
      Left<T> left{a + first * lda + p, lda, kPair<T>};
      if (copies) {
        for (int64_t i = 0; i < rows; ++i) std::copy_n(left.data + i * lda, depth, copied.data() + i * kApart);
        left = {copied.data(), kApart, kPair<T>};
      }
      const Groups groups(rows);
      const T* panel = packed + p * kPanel;
      for (int64_t j = 0; j < n; j += kPanel, panel += panel_size)
        rows_of_panel<T>(groups, left, panel, depth, c + first * ldc + j, ldc, std::min(kPanel, n - j),
                         accumulate || p > 0);
    }
  }
}

template <typename T>
void gemm_transposed(int64_t m, int64_t n, int64_t k, const T* packed_a, const T* packed_b, acc_t<T>* c, int64_t ldc) {
  const int64_t panel_size = round_up(k, kPair<T>) * kPanel;
  for (int64_t p = 0; p < k; p += kDepth)
    for (int64_t i = 0; i < m; i += kPanel) {
      const Groups groups(std::min(kPanel, m - i));
      for (int64_t j = 0; j < n; j += kPanel)
        rows_of_panel<T>(groups, {packed_a + i / kPanel * panel_size + p * kPanel, kPair<T>, kPanel * kPair<T>},
                         packed_b + j / kPanel * panel_size + p * kPanel, std::min(kDepth, k - p), c + i * ldc + j, ldc,
                         std::min(kPanel, n - j), p > 0);
    }
}

void gemm_release() {
  if (use_brgemm()) at::native::cpublas::brgemm_release();
}

#define FASTFORMER_INSTANTIATE(T)                                                                                   \
  template void pack<T>(const T*, int64_t, int64_t, int64_t, int64_t, T*);                                          \
  template void gemm<T>(int64_t, int64_t, int64_t, const T*, int64_t, const T*, acc_t<T>*, int64_t, bool, int64_t); \
  template void gemm_transposed<T>(int64_t, int64_t, int64_t, const T*, const T*, acc_t<T>*, int64_t);
FASTFORMER_INSTANTIATE(float)
FASTFORMER_INSTANTIATE(double)
FASTFORMER_INSTANTIATE(bfloat16)
#undef FASTFORMER_INSTANTIATE

}  // namespace fastformer
