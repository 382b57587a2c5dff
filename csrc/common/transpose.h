// Transposition of square blocks of 32-bit units, which turns rows of a weight into the panels that products read.

#pragma once

#include <cstdint>

#include "common/simd.h"

namespace fastformer {

constexpr int64_t kBlock = Vec<float>::size;  // 32-bit elements per vector

#if defined(CPU_CAPABILITY_AVX512)

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
