// Dropout by counter, as defined in fastformer/ops/_dropout.py: Philox4x32 with 7 rounds, four calls for 64 columns.
//
//   column  = 64 * group + 8 * pair + 2 * call + odd
//   key     = (seed low, seed high)
//   counter = (4 * group + call, row, plane, offset)
//   an element is kept if byte 2 * pair + odd of its call's four words >= threshold
//
// The four calls of a group run in the four 32-bit lanes of a 128-bit block. Word w of the four calls holds the
// decisions of columns 16 * w to 16 * w + 15 in 16-bit units, which one shuffle within the 128 bits puts in order.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "common/simd.h"
#include "common/tensor.h"

namespace fastformer {

// The dropout of one call of an op: decides which elements of each row are kept.
struct Dropout {
  static constexpr int64_t kGroup = 64;  // the number of columns that are decided together

  uint32_t key0 = 0, key1 = 0, offset = 0;
  uint32_t threshold = 0;  // elements with a byte below this are dropped
  double scale = 1.0;      // the factor for kept elements
  bool on = false;

  Dropout() = default;
  // seed: int64 (2,), with the key and the offset. It is not needed if p is 0.
  Dropout(double p, const OptionalTensor& seed) {
    on = p > 0 && seed.has_value();
    if (!on) return;
    threshold = p >= 1 ? 256 : static_cast<uint32_t>(std::clamp(std::nearbyint(p * 256.0), 1.0, 255.0));
    scale = threshold == 256 ? 0.0 : 256.0 / (256 - static_cast<int64_t>(threshold));
    const int64_t* pair = seed->const_data_ptr<int64_t>();
    key0 = static_cast<uint32_t>(pair[0]);
    key1 = static_cast<uint32_t>(static_cast<uint64_t>(pair[0]) >> 32);
    offset = static_cast<uint32_t>(pair[seed->stride(0)]);  // the pair may be a column of a larger tensor
  }

  // Writes the multipliers (scale or 0) of columns [first_column, first_column + n) of rows [row, row + rows), each row
  // `stride` after the previous one. Up to kGroup elements after a row's n are overwritten too, so `out` needs room for
  // (rows - 1) * stride + n + kGroup; stride >= n.
  template <typename acc>
  void multipliers(int64_t row, int64_t rows, int64_t plane, int64_t first_column, int64_t n, acc* out,
                   int64_t stride) const {
    const int64_t first_group = first_column / kGroup, before = first_column % kGroup;
    const int64_t groups = (before + n + kGroup - 1) / kGroup, total = rows * groups;
    const acc multiplier = static_cast<acc>(scale);
    Decisions decisions;
    int64_t r = 0, g = 0;  // row and index of the next group, in row-major order
    for (int64_t done = 0; done < total; done += kTogether) {
      uint32_t first_call[kTogether] = {}, row_of[kTogether] = {};
      acc* to[kTogether];
      const int64_t here = std::min(kTogether, total - done), first = g;
      for (int64_t t = 0; t < here; ++t) {
        first_call[t] = static_cast<uint32_t>(4 * (first_group + g));
        row_of[t] = static_cast<uint32_t>(row + r);
        to[t] = out + r * stride + g * kGroup - before;
        if (++g == groups) g = 0, ++r;
      }
      decide(first_call, row_of, static_cast<uint32_t>(plane), decisions);
      for (int64_t t = 0; t < here; ++t) {
        if (before == 0 || (first + t) % groups > 0) {
          write(decisions, t, multiplier, to[t]);
        } else {
          acc whole[kGroup];
          write(decisions, t, multiplier, whole);
          std::copy(whole + before, whole + kGroup, to[t] + before);
        }
      }
    }
  }

  // Writes the multipliers of one row.
  template <typename acc>
  void multipliers(int64_t row, int64_t plane, int64_t first_column, int64_t n, acc* out) const {
    multipliers(row, 1, plane, first_column, n, out, n);
  }

#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int64_t kTogether = 4;  // groups: 16 calls of Philox at once
  using Decisions = __mmask64[4];          // bit 16 * t + c of the w-th: is column 16 * w + c of group t kept?

  // The multipliers of group t.
  template <typename acc>
  static void write(const Decisions& decisions, int64_t t, acc multiplier, acc* to) {
    for (int w = 0; w < 4; ++w) {
      const uint64_t bits = decisions[w] >> (16 * t);
      if constexpr (std::is_same_v<acc, float>) {
        _mm512_storeu_ps(to + 16 * w, _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), _mm512_set1_ps(multiplier)));
      } else {
        _mm512_storeu_pd(to + 16 * w, _mm512_maskz_mov_pd(static_cast<__mmask8>(bits), _mm512_set1_pd(multiplier)));
        _mm512_storeu_pd(to + 16 * w + 8,
                         _mm512_maskz_mov_pd(static_cast<__mmask8>(bits >> 8), _mm512_set1_pd(multiplier)));
      }
    }
  }
#else
  static constexpr int64_t kTogether = 2;  // groups: 8 calls of Philox at once
  struct Decisions {
    alignas(32) uint8_t of[kTogether][kGroup];
    uint32_t limit;
  };

  // The multipliers of group t.
  template <typename acc>
  static void write(const Decisions& decisions, int64_t t, acc multiplier, acc* to) {
    for (int64_t i = 0; i < kGroup; ++i) to[i] = decisions.of[t][i] >= decisions.limit ? multiplier : acc(0);
  }
#endif

  // The decisions of a group of columns of a row each, in the columns' order. first_call: 4 times the group.
  void decide(const uint32_t* first_call, const uint32_t* row_of, uint32_t plane, Decisions& out) const {
    Lanes c0 = broadcast_each(first_call) | sixteen_bytes(_mm_setr_epi32(0, 1, 2, 3)), c1 = broadcast_each(row_of);
    Lanes c2 = broadcast(plane), c3 = broadcast(offset);
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 7; ++round) {
      const Product first = multiply(c0, 0xD2511F53), second = multiply(c2, 0xCD9E8D57);
      c0 = exclusive_or(second.high, c1, broadcast(k0)), c1 = second.low;
      c2 = exclusive_or(first.high, c3, broadcast(k1)), c3 = first.low;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    // Of four words in 128 bits: the low halves of all, then the high halves.
    const Lanes order = sixteen_bytes(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    keep({look_up(c0, order), look_up(c1, order), look_up(c2, order), look_up(c3, order)}, out);
  }

 private:
  using Words = Lanes[4];
  struct Product {
    Lanes low, high;
  };

#if defined(CPU_CAPABILITY_AVX512)
  static Lanes broadcast_each(const uint32_t* each) {  // one value to the four lanes of each 128 bits
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(each));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                    _mm512_castsi128_si512(four));
  }
  static Product multiply(Lanes a, uint32_t b) {
    const Lanes even = _mm512_mul_epu32(a, broadcast(b)),
                odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), broadcast(b));
    return {_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32)),
            _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd)};
  }
  static Lanes exclusive_or(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  void keep(const Words& words, Decisions& out) const {
    // A threshold of 256 doesn't fit in a byte; all elements that it keeps are multiplied by 0.
    const Lanes limit = _mm512_set1_epi8(static_cast<char>(std::min(threshold, 255u)));
    for (int w = 0; w < 4; ++w) out[w] = _mm512_cmpge_epu8_mask(words[w], limit);
  }
#else
  static Lanes broadcast_each(const uint32_t* each) {  // one value to the four lanes of each 128 bits
    return _mm256_set_m128i(_mm_set1_epi32(static_cast<int>(each[1])), _mm_set1_epi32(static_cast<int>(each[0])));
  }
  static Product multiply(Lanes a, uint32_t b) {
    const Lanes even = _mm256_mul_epu32(a, broadcast(b)),
                odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), broadcast(b));
    return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA),
            _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)};
  }
  static Lanes exclusive_or(Lanes a, Lanes b, Lanes c) { return a ^ b ^ c; }
  void keep(const Words& words, Decisions& out) const {
    out.limit = threshold;
    for (int w = 0; w < 4; ++w) {
      _mm_store_si128(reinterpret_cast<__m128i*>(out.of[0] + 16 * w), _mm256_castsi256_si128(words[w]));
      _mm_store_si128(reinterpret_cast<__m128i*>(out.of[1] + 16 * w), _mm256_extracti128_si256(words[w], 1));
    }
  }
#endif
};

}  // namespace fastformer
