// Transposition of square blocks of 32-bit units, which turns rows of a weight into the panels that products read.

#pragma once

#include <cstdint>

#include "common/simd.h"

namespace fastformer {

#if defined(CPU_CAPABILITY_AVX512)

using Lanes = __m512i;
constexpr int64_t kBlock = 16;  // 32-bit elements per vector

inline Lanes load_lanes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_lanes(void* p, Lanes x) { _mm512_storeu_si512(p, x); }

// Widens the bf16 in the lower or upper half of each 32 bits to floats.
inline Vec<float> lower_halves(Lanes x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vec<float> upper_halves(Lanes x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Transposes 16 x 16 elements of 32 bits.
inline void transpose_block(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4g + j], lane L: element 4L + j of rows 4g .. 4g + 3. Gather the lanes of the four groups.
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88),
                  d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(b, d, 0xDD));
  }
}

#else

using Lanes = __m256i;
constexpr int64_t kBlock = 8;

inline Lanes load_lanes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_lanes(void* p, Lanes x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

inline Vec<float> lower_halves(Lanes x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Vec<float> upper_halves(Lanes x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Transposes 8 x 8 elements of 32 bits.
inline void transpose_block(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load_lanes(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    store_lanes(to + j * to_stride, _mm256_permute2x128_si256(r[j], r[4 + j], 0x20));
    store_lanes(to + (4 + j) * to_stride, _mm256_permute2x128_si256(r[j], r[4 + j], 0x31));
  }
}

#endif

}  // namespace fastformer
