// Compiles the code for AVX-512, and for the dot products and tiles of later CPUs, into libraries that any CPU with
// AVX2 runs: `make test-avx512` includes this file before every source. SIMDe has most intrinsics in plain C++; this
// file has those that its release 0.7.4 lacks or spells wrongly, and the functions of common/instructions.h.
//
// Results are those of the CPUs, to the bit, but for the products of bf16 numbers, whose order of additions is free.

#pragma once

#if !defined(__AVX512F__)

#define FASTFORMER_EMULATED
#define FASTFORMER_WITH_BF16
#if defined(CPU_CAPABILITY_AVX2)
#define CPU_CAPABILITY_AVX512
#endif
// Instructions that follow AVX-512; "avxvnni" is what CPUs without it have.
#define __builtin_cpu_supports(name) (name[3] == '5' || name[1] == 'm')

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <x86intrin.h>  // all of them, before their names become macros
#include <simde/x86/avx512.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#undef __m512
#undef __m512i
#undef __m512d
#undef __m512bh
#define __m512 simde__m512
#define __m512i simde__m512i
#define __m512d simde__m512d
#define __m512bh simde__m512i

namespace emulated {

template <typename T, typename Vector>
struct Numbers {
  static constexpr int size = sizeof(Vector) / sizeof(T);
  T v[size];

  static Numbers of(Vector x) {
    Numbers numbers;
    std::memcpy(&numbers, &x, sizeof(x));
    return numbers;
  }
  Vector vector() const {
    Vector x;
    std::memcpy(&x, v, sizeof(x));
    return x;
  }
};

// Memory under a mask: lanes that it lacks read as 0, and are not written.
template <typename T, typename Vector>
Vector load(uint64_t mask, const void* from) {
  Numbers<T, Vector> numbers{};
  for (int i = 0; i < numbers.size; ++i)
    if (mask >> i & 1) std::memcpy(&numbers.v[i], static_cast<const T*>(from) + i, sizeof(T));
  return numbers.vector();
}
template <typename T, typename Vector>
void store(void* to, uint64_t mask, Vector x) {
  const auto numbers = Numbers<T, Vector>::of(x);
  for (int i = 0; i < numbers.size; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<T*>(to) + i, &numbers.v[i], sizeof(T));
}

// Applies a function to each number of a vector.
template <typename From, typename To, typename Result, typename Vector, typename Function>
Result each(Vector x, Function function) {
  const auto from = Numbers<From, Vector>::of(x);
  Numbers<To, Result> to;
  static_assert(from.size == to.size);
  for (int i = 0; i < to.size; ++i) to.v[i] = function(from.v[i]);
  return to.vector();
}

template <typename Function>
float reduced(__m512 x, Function function) {
  auto numbers = Numbers<float, __m512>::of(x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) numbers.v[i] = function(numbers.v[i], numbers.v[i + half]);
  return numbers.v[0];
}

// Adds kNumbers products of X and W to each 32-bit sum, modulo 2^32.
template <typename X, typename W, int kNumbers>
void dot(__m512i& sum, __m512i x, __m512i w) {
  auto sums = Numbers<uint32_t, __m512i>::of(sum);
  const auto left = Numbers<X, __m512i>::of(x);
  const auto right = Numbers<W, __m512i>::of(w);
  for (int i = 0; i < kNumbers * sums.size; ++i)
    sums.v[i / kNumbers] += static_cast<uint32_t>(int32_t{left.v[i]} * int32_t{right.v[i]});
  sum = sums.vector();
}

inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
inline float widened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
inline uint16_t narrowed(uint32_t x) {
  if ((x & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(x >> 16 | 0x40);  // NaN
  if ((x & 0x7F800000) == 0) return static_cast<uint16_t>(x >> 16 & 0x8000);
  return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}
inline __m512 dot_bf16(__m512 sum, __m512i x, __m512i w) {
  auto sums = Numbers<float, __m512>::of(sum);
  const auto left = Numbers<uint16_t, __m512i>::of(x), right = Numbers<uint16_t, __m512i>::of(w);
  for (int i = 0; i < 2 * sums.size; ++i) {
    const float a = flushed(widened(left.v[i ^ 1])), b = flushed(widened(right.v[i ^ 1]));  // the odd ones come first
    sums.v[i / 2] = flushed(std::fma(a, b, flushed(sums.v[i / 2])));
  }
  return sums.vector();
}

template <int kHalf>
__m256 half(__m512 x) {
  __m256 halves[2];
  std::memcpy(halves, &x, 64);
  return halves[kHalf];
}
template <int kOrder>
__m512 permuted(__m512 x) {
  const __m256 halves[2] = {_mm256_permute_ps(half<0>(x), kOrder), _mm256_permute_ps(half<1>(x), kOrder)};
  __m512 result;
  std::memcpy(&result, halves, 64);
  return result;
}

}  // namespace emulated

#undef _mm256_mask_storeu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi8
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtusepi32_epi8
#undef _mm512_dpbf16_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_madd_epi16
#undef _mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_ps
#undef _mm512_permute_ps
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_srai_epi32
#undef _mm_mask_storeu_epi8
#undef _mm_maskz_loadu_epi8
#define _mm256_mask_storeu_epi16(to, mask, x) emulated::store<uint16_t, __m256i>(to, mask, x)
#define _mm256_maskz_loadu_epi16(mask, from) emulated::load<uint16_t, __m256i>(mask, from)
#define _mm256_maskz_loadu_epi8(mask, from) emulated::load<uint8_t, __m256i>(mask, from)
#define _mm_mask_storeu_epi8(to, mask, x) emulated::store<uint8_t, __m128i>(to, mask, x)
#define _mm_maskz_loadu_epi8(mask, from) emulated::load<uint8_t, __m128i>(mask, from)
#define _mm512_mask_storeu_ps(to, mask, x) emulated::store<float, __m512>(to, mask, x)
#define _mm512_maskz_loadu_ps(mask, from) emulated::load<float, __m512>(mask, from)
#define _mm512_cvtepi8_epi32(x) emulated::each<int8_t, int32_t, __m512i>(x, [](int8_t y) { return y; })
#define _mm512_cvtepu8_epi32(x) emulated::each<uint8_t, int32_t, __m512i>(x, [](uint8_t y) { return y; })
#define _mm512_cvtepu16_epi32(x) emulated::each<uint16_t, int32_t, __m512i>(x, [](uint16_t y) { return y; })
#define _mm512_cvtepi32_epi16(x) emulated::each<int32_t, int16_t, __m256i>(x, [](int32_t y) { return int16_t(y); })
#define _mm512_cvtusepi32_epi8(x) \
  emulated::each<uint32_t, uint8_t, __m128i>(x, [](uint32_t y) { return uint8_t(std::min(y, 255u)); })
#define _mm512_cvtepi32_ps(x) emulated::each<int32_t, float, __m512>(x, [](int32_t y) { return float(y); })
#define _mm512_cvtps_epi32(x) \
  emulated::each<float, int32_t, __m512i>(x, [](float y) { return _mm_cvtss_si32(_mm_set_ss(y)); })
#define _mm512_cvtph_ps(x) emulated::each<uint16_t, float, __m512>(x, [](uint16_t y) { return _cvtsh_ss(y); })
#define _mm512_srai_epi32(x, by) emulated::each<int32_t, int32_t, __m512i>(x, [](int32_t y) { return y >> (by); })
#define _mm512_reduce_add_ps(x) emulated::reduced(x, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(x) emulated::reduced(x, [](float a, float b) { return a > b ? a : b; })
#define _mm512_extractf32x8_ps(x, which) emulated::half<which>(x)
#define _mm512_permute_ps(x, order) emulated::permuted<order>(x)
#define _mm512_madd_epi16(x, y) simde_mm512_madd_epi16(x, y)
#define _mm512_dpbf16_ps(sum, x, w) emulated::dot_bf16(sum, x, w)

namespace fastformer {

inline void dot_bytes(__m512i& sum, __m512i x, __m512i w) { emulated::dot<uint8_t, int8_t, 4>(sum, x, w); }
inline void dot_words(__m512i& sum, __m512i x, __m512i w) { emulated::dot<int16_t, int16_t, 2>(sum, x, w); }
inline void dot_bf16(__m512& sum, __m512i w, __m512i x) { sum = emulated::dot_bf16(sum, w, x); }
inline void dot_bf16(__m512& sum, __m512i x, const void* w) { sum = emulated::dot_bf16(sum, x, _mm512_loadu_si512(w)); }
inline __m256i to_bf16(__m512 x) { return emulated::each<uint32_t, uint16_t, __m256i>(x, emulated::narrowed); }
inline void add_dwords_to(__m512i& sum, __m512i x) { sum = _mm512_add_epi32(sum, x); }
inline void add_words_to(__m512i& sum, __m512i x) { sum = _mm512_add_epi16(sum, x); }

struct TileConfig {
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
struct Tiles8 {
  TileConfig config;
  char rows[8][16][64];
};
inline thread_local Tiles8 tiles;

inline bool request_tiles() { return true; }
inline void configure_tiles(const TileConfig& config) { tiles.config = config; }
inline void release_tiles() { tiles.config = {}; }  // tiles without rows multiply nothing, which results show

template <int kTile>
void zero_tile() {
  std::memset(tiles.rows[kTile], 0, sizeof(tiles.rows[kTile]));
}
template <int kTile>
void load_tile(const char* from, int64_t stride) {
  zero_tile<kTile>();
  for (int r = 0; r < tiles.config.rows[kTile]; ++r)
    std::memcpy(tiles.rows[kTile][r], from + r * stride, tiles.config.row_bytes[kTile]);
}
template <int kTile>
void store_tile(char* to, int64_t stride) {
  for (int r = 0; r < tiles.config.rows[kTile]; ++r)
    std::memcpy(to + r * stride, tiles.rows[kTile][r], tiles.config.row_bytes[kTile]);
}
template <bool kBf16, int kSum, int kLeft, int kRight>
void add_tile() {
  const auto [row_bytes, rows] = std::pair(tiles.config.row_bytes, tiles.config.rows);
  const bool fits = rows[kSum] == rows[kLeft] && row_bytes[kSum] == row_bytes[kRight];
  if (!fits || row_bytes[kLeft] != 4 * rows[kRight]) std::abort();  // a CPU ends the process, too
  for (int r = 0; r < rows[kSum]; ++r) {
    __m512i left, right;
    __m512 sum;
    std::memcpy(&sum, tiles.rows[kSum][r], 64);
    for (int k = 0; k < rows[kRight]; ++k) {
      left = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(tiles.rows[kLeft][r] + 4 * k));
      right = _mm512_loadu_si512(tiles.rows[kRight][k]);
      if (kBf16) dot_bf16(sum, left, right);
      else dot_bytes(reinterpret_cast<__m512i&>(sum), left, right);
    }
    std::memcpy(tiles.rows[kSum][r], &sum, 64);
  }
}

}  // namespace fastformer

#endif
