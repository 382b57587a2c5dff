// Packing for gemm.h, and the loops over panels and rows.

#include "common/gemm.h"

#include <algorithm>

#include "common/brgemm.h"
#include "common/buffer.h"
#include "common/cpu_features.h"
#include "common/gemm_kernels.h"
#include "common/transpose.h"

namespace fastformer {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
// Interleaves rows a and b, of 2 * kBlock 16-bit elements each: (a0, b0), (a1, b1), ...
inline void interleave(const bfloat16* a, const bfloat16* b, bfloat16* to) {
  const __m512i x = load_lanes(a), y = load_lanes(b);
  const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  store_lanes(to, _mm512_permutex2var_epi64(low, first, high));
  store_lanes(to + 32, _mm512_permutex2var_epi64(low, second, high));
}
#else
inline void interleave(const bfloat16* a, const bfloat16* b, bfloat16* to) {
  const __m256i x = load_lanes(a), y = load_lanes(b);
  const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
  store_lanes(to, _mm256_permute2x128_si256(low, high, 0x20));
  store_lanes(to + 16, _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

// Packs one panel of a matrix with any strides.
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
      // A 32-bit unit is one float, or two bf16 values that are adjacent in k.
      const auto* from = reinterpret_cast<const uint32_t*>(b);
      auto* to = reinterpret_cast<uint32_t*>(panel);
      for (; done + kBlock * P <= k; done += kBlock * P)
        for (int64_t j = 0; j < kPanel; j += kBlock)
          transpose_block(from + done / P + j * (stride_n / P), stride_n / P, to + done / P * kPanel + j, kPanel);
    }
  }
  pack_panel_slowly(b, stride_k, stride_n, done, k, columns, panel);
}

}  // namespace

bool has_bf16_dot() {
#if defined(CPU_CAPABILITY_AVX512)
  static const bool has = has_fast_bf16_dot();
  return has;
#else
  return false;
#endif
}

bool use_brgemm() {
#if defined(CPU_CAPABILITY_AVX512)
  return can_brgemm_bf16();
#else
  return false;
#endif
}

namespace {

// Products of bf16 on CPUs without bf16 instructions: rows and panels are widened block by block for the fp32 kernels.
// The order of summation is the same.

constexpr int64_t kWidenedRows = 64;  // of A
constexpr int64_t kWidenedDepth = kDepth<bfloat16>;
constexpr int64_t kWidenedApart = kWidenedDepth + 16;

// Widens `depth` rows of a panel to fp32.
void widen_panel(const bfloat16* panel, int64_t depth, float* to) {
  using V = Vec<float>;
  for (int64_t p = 0; p < depth; p += 2, panel += 2 * kPanel, to += 2 * kPanel)
    for (int64_t j = 0; j < kPanel; j += V::size) {
      const Lanes x = load_lanes(panel + 2 * j);
      lower_halves(x).store(to + j);
      if (p + 1 < depth) upper_halves(x).store(to + kPanel + j);
    }
}

void gemm_widened(int64_t m, int64_t n, int64_t k, const bfloat16* a, int64_t lda, const bfloat16* packed, float* c,
                  int64_t ldc, bool accumulate, int64_t panel_size) {
  static const auto of_bf16_panels = []<int... i>(std::integer_sequence<int, i...>) {
    return std::array{rows_times_panel<bfloat16, i + 1>...};
  }(kRowNumbers);
  alignas(64) float rows[kWidenedRows * kWidenedApart], panel[kWidenedDepth * kPanel];
  for (int64_t p = 0; p < k; p += kWidenedDepth) {
    const int64_t depth = std::min(kWidenedDepth, k - p);
    for (int64_t first = 0; first < m; first += kWidenedRows) {
      const int64_t count = std::min(kWidenedRows, m - first);
      for (int64_t i = 0; i < count; ++i)
        for_each_vec<float>(depth, [&](int64_t column, int64_t width) {
          Vec<float>::load(a + (first + i) * lda + p + column, width).store(rows + i * kWidenedApart + column, width);
        });
      const Left<float> left{rows, kWidenedApart, 1};
      const Groups groups(count);
      const bfloat16* from = packed + p * kPanel;
      float* to = c + first * ldc;
      for (int64_t j = 0; j < n; j += kPanel, from += panel_size) {
        const int64_t columns = std::min(kPanel, n - j);
        if (groups.count == 1) {
          of_bf16_panels[count - 1](left, from, depth, to + j, ldc, columns, accumulate || p > 0);
          continue;
        }
        widen_panel(from, depth, panel);
        rows_of_panel<float>(groups, left, panel, depth, to + j, ldc, columns, accumulate || p > 0);
      }
    }
  }
}

void gemm_transposed_widened(int64_t m, int64_t n, int64_t k, const bfloat16* packed_a, const bfloat16* packed_b,
                             float* c, int64_t ldc) {
  constexpr int64_t kPanels = 128 / kPanel;  // of A at once
  const int64_t panel_size = round_up(k, kPair<bfloat16>) * kPanel;
  Buffer<float> left(kPanels * kWidenedDepth * kPanel);
  alignas(64) float right[kWidenedDepth * kPanel];
  for (int64_t p = 0; p < k; p += kWidenedDepth) {
    const int64_t depth = std::min(kWidenedDepth, k - p);
    for (int64_t first = 0; first < m; first += kPanels * kPanel) {
      const int64_t last = std::min(m, first + kPanels * kPanel);
      for (int64_t i = first; i < last; i += kPanel)
        widen_panel(packed_a + i / kPanel * panel_size + p * kPanel, depth, left.data() + (i - first) * kWidenedDepth);
      for (int64_t j = 0; j < n; j += kPanel) {
        widen_panel(packed_b + j / kPanel * panel_size + p * kPanel, depth, right);
        for (int64_t i = first; i < last; i += kPanel)
          rows_of_panel<float>(Groups(std::min(kPanel, m - i)), {left.data() + (i - first) * kWidenedDepth, 1, kPanel},
                               right, depth, c + i * ldc + j, ldc, std::min(kPanel, n - j), p > 0);
      }
    }
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
  if (k == 0) {
    for (int64_t i = 0; i < m && !accumulate; ++i) std::fill_n(c + i * ldc, n, acc_t<T>(0));
    return;
  }
  const int64_t panel_size = round_up(packed_k ? packed_k : k, kPair<T>) * kPanel;
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (use_brgemm() && k % 2 == 0 && n % kPanel == 0) {
      for (int64_t j = 0; j < n; j += kPanel, packed += panel_size)
        brgemm()->bf16(m, kPanel, k, lda, kPanel, ldc, accumulate, a, packed, c + j);
      return;
    }
    if (!has_bf16_dot()) return gemm_widened(m, n, k, a, lda, packed, c, ldc, accumulate, panel_size);
  }
  // These block sizes also keep a slice of a panel and a slice of the rows in the caches.
  constexpr int64_t kApart = kDepth<T> + 64 / static_cast<int64_t>(sizeof(T));  // elements between copied rows
  const bool copies = n > kPanel && evict_one_another<T>(m, lda);
  const int64_t block = copies ? std::min<int64_t>(m, 64) : m;
  Buffer<T> copied;
  if (copies) copied = Buffer<T>(block * kApart);
  for (int64_t p = 0; p < k; p += kDepth<T>) {
    const int64_t depth = std::min(kDepth<T>, k - p);
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
  if constexpr (std::is_same_v<T, bfloat16>)
    if (!has_bf16_dot()) return gemm_transposed_widened(m, n, k, packed_a, packed_b, c, ldc);
  const int64_t panel_size = round_up(k, kPair<T>) * kPanel;
  for (int64_t p = 0; p < k; p += kDepth<T>)
    for (int64_t i = 0; i < m; i += kPanel) {
      const Groups groups(std::min(kPanel, m - i));
      for (int64_t j = 0; j < n; j += kPanel)
        rows_of_panel<T>(groups, {packed_a + i / kPanel * panel_size + p * kPanel, kPair<T>, kPanel * kPair<T>},
                         packed_b + j / kPanel * panel_size + p * kPanel, std::min(kDepth<T>, k - p), c + i * ldc + j,
                         ldc, std::min(kPanel, n - j), p > 0);
    }
}

void gemm_release() {
  if (use_brgemm()) brgemm()->release();
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
