// Dropout by counter, as defined in fastformer/ops/_dropout.py: Philox4x32 with 7 rounds, one call for eight columns.
//
//   key     = (seed low, seed high)
//   counter = (column / 8, row, plane, offset)
//   an element is kept when its 16-bit decision >= threshold
//
// The four words of a call lie in memory as the eight decisions in column order, so nothing is shuffled but the
// vectors.

#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include "simd.h"

namespace fastformer {

// One dropout: what it needs to say which elements of which row are kept.
struct Dropout {
  uint32_t key0 = 0, key1 = 0, offset = 0;
  uint32_t threshold = 0;  // decisions below it are dropped
  double scale = 1.0;      // of what is kept
  bool on = false;

  Dropout() = default;
  // seed: int64 (2,), the key and the offset; none where p is 0.
  Dropout(double p, const std::optional<at::Tensor>& seed) {
    threshold = static_cast<uint32_t>(std::nearbyint(p * 65536.0));
    on = p > 0 && seed.has_value();
    if (!on) return;
    const int64_t* pair = seed->const_data_ptr<int64_t>();
    key0 = static_cast<uint32_t>(pair[0]);
    key1 = static_cast<uint32_t>(static_cast<uint64_t>(pair[0]) >> 32);
    offset = static_cast<uint32_t>(pair[seed->stride(0)]);  // the pair may be a column of something larger
    scale = threshold >= 65536 ? 0.0 : 65536.0 / (65536 - static_cast<int64_t>(threshold));
  }

  // Writes the multiplier (scale or 0) of columns [first_column, first_column + n) of a row. first_column % 8 == 0.
  // `out` has room for n rounded up to kDecisions.
  template <typename acc>
  void multipliers(int64_t row, int64_t plane, int64_t first_column, int64_t n, acc* out) const {
    for (int64_t c = 0; c < n; c += kDecisions) {
      alignas(64) uint16_t decisions[kDecisions];
      decide(static_cast<uint32_t>(row), static_cast<uint32_t>(plane), static_cast<uint32_t>((first_column + c) / 8),
             decisions);
      const acc kept = static_cast<acc>(scale);
      const uint32_t limit = threshold;
      for (int64_t i = 0; i < kDecisions; ++i) out[c + i] = decisions[i] >= limit ? kept : acc(0);
    }
  }

#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int64_t kDecisions = 128;  // 16 calls of Philox at once

  void decide(uint32_t row, uint32_t plane, uint32_t first_block, uint16_t* out) const {
    // Lane (L, e) of the four 128-bit lanes holds block e * 4 + L: after the transpose inside the lanes, vector e is
    // blocks 4e .. 4e + 3 in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first_block)), order);
    __m512i c1 = _mm512_set1_epi32(static_cast<int>(row));
    __m512i c2 = _mm512_set1_epi32(static_cast<int>(plane));
    __m512i c3 = _mm512_set1_epi32(static_cast<int>(offset));
    const __m512i m0 = _mm512_set1_epi32(static_cast<int>(0xD2511F53u)),
                  m1 = _mm512_set1_epi32(static_cast<int>(0xCD9E8D57u));
    uint32_t k0 = key0, k1 = key1;
    const auto multiply = [](__m512i a, __m512i m, __m512i& low, __m512i& high) {
      const __m512i even = _mm512_mul_epu32(a, m);
      const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
      low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
      high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    };
    for (int round = 0; round < 7; ++round) {
      __m512i low0, high0, low1, high1;
      multiply(c0, m0, low0, high0);
      multiply(c2, m1, low1, high1);
      c0 = _mm512_ternarylogic_epi32(high1, c1, _mm512_set1_epi32(static_cast<int>(k0)), 0x96);
      c1 = low1;
      c2 = _mm512_ternarylogic_epi32(high0, c3, _mm512_set1_epi32(static_cast<int>(k1)), 0x96);
      c3 = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
    const __m512i c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(out + 64, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(out + 96, _mm512_unpackhi_epi64(b, d));
  }
#else
  static constexpr int64_t kDecisions = 64;  // 8 calls of Philox at once

  void decide(uint32_t row, uint32_t plane, uint32_t first_block, uint16_t* out) const {
    // Lane (L, e) of the two 128-bit lanes holds block e * 2 + L, as above.
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first_block)), order);
    __m256i c1 = _mm256_set1_epi32(static_cast<int>(row));
    __m256i c2 = _mm256_set1_epi32(static_cast<int>(plane));
    __m256i c3 = _mm256_set1_epi32(static_cast<int>(offset));
    const __m256i m0 = _mm256_set1_epi32(static_cast<int>(0xD2511F53u)),
                  m1 = _mm256_set1_epi32(static_cast<int>(0xCD9E8D57u));
    uint32_t k0 = key0, k1 = key1;
    const auto multiply = [](__m256i a, __m256i m, __m256i& low, __m256i& high) {
      const __m256i even = _mm256_mul_epu32(a, m);
      const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
      low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
      high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    };
    for (int round = 0; round < 7; ++round) {
      __m256i low0, high0, low1, high1;
      multiply(c0, m0, low0, high0);
      multiply(c2, m1, low1, high1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(static_cast<int>(k0)));
      c1 = low1;
      c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(k1)));
      c3 = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const __m256i a = _mm256_unpacklo_epi32(c0, c1), b = _mm256_unpackhi_epi32(c0, c1);
    const __m256i c = _mm256_unpacklo_epi32(c2, c3), d = _mm256_unpackhi_epi32(c2, c3);
    __m256i* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_unpacklo_epi64(a, c));
    _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(a, c));
    _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi64(b, d));
    _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi64(b, d));
  }
#endif
};

}  // namespace fastformer
