// One vector type for all kernels: 16 floats with AVX-512, 8 with AVX2, and a "vector" of one double, with which the
// same code runs in fp64 for gradcheck. Half dtypes exist in memory only: they are widened on load and rounded on
// store.
//
// If a or b is NaN, max(a, b) is b, like the instruction. So write a bound first: max(bound, x) keeps a NaN in x.
// A running maximum may lose a NaN, but it is only used as a shift, and the exponentials then produce the NaN.
//
// A tail is loaded and stored with a count: lanes beyond it read as zero and are never written. Whole vectors use the
// unmasked instructions, because a masked AVX2 store takes tens of cycles on some AMD cores. If the count is a
// constant, the compiler makes this choice.

#pragma once

#include <immintrin.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/instructions.h"

namespace fastformer {

using bfloat16 = c10::BFloat16;

// The type in which values of type T are computed.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
struct Vec;

template <>
struct Vec<double> {
  static constexpr int64_t size = 1;
  double v;

  Vec() = default;
  Vec(double x) : v(x) {}
  static Vec load(const double* p) { return *p; }
  static Vec load(const double* p, int64_t) { return *p; }
  static Vec load(const float* p) { return double(*p); }
  static Vec load(const float* p, int64_t) { return double(*p); }
  static Vec load(const bool* p, int64_t) { return *p ? 1.0 : 0.0; }
  void store(double* p) const { *p = v; }
  void store(double* p, int64_t) const { *p = v; }

  friend Vec operator+(Vec a, Vec b) { return a.v + b.v; }
  friend Vec operator-(Vec a, Vec b) { return a.v - b.v; }
  friend Vec operator*(Vec a, Vec b) { return a.v * b.v; }
  friend Vec operator/(Vec a, Vec b) { return a.v / b.v; }
  friend Vec fmadd(Vec a, Vec b, Vec c) { return a.v * b.v + c.v; }
  friend Vec max(Vec a, Vec b) { return a.v > b.v ? a.v : b.v; }
  friend Vec exp2(Vec a) { return std::exp2(a.v); }
  // x if condition > 0 or NaN, else y.
  friend Vec where_positive(Vec condition, Vec x, Vec y) { return condition.v <= 0 ? y : x; }
  // A mask with a bit for each lane in which a > b or a is NaN.
  friend uint32_t lanes_above(Vec a, Vec b) { return a.v <= b.v ? 0 : 1; }
  Vec first_lanes(int64_t) const { return v; }
  friend void store_sums(Vec a, Vec b, Vec c, Vec d, double* to) { to[0] = a.v, to[1] = b.v, to[2] = c.v, to[3] = d.v; }
  double sum() const { return v; }
  double max() const { return v; }
};

#if defined(CPU_CAPABILITY_AVX512)

template <>
struct Vec<float> {
  static constexpr int64_t size = 16;
  __m512 v;

  Vec() = default;
  Vec(__m512 x) : v(x) {}
  Vec(float x) : v(_mm512_set1_ps(x)) {}
  static __mmask16 first(int64_t n) { return n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }
  static __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static __m256i narrow(__m512 x) {  // round to nearest even; NaN stays NaN
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF)), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(r);
  }

  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const float* p, int64_t n) { return n >= size ? load(p) : Vec(_mm512_maskz_loadu_ps(first(n), p)); }
  static Vec load(const bfloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Vec load(const bfloat16* p, int64_t n) {
    return n >= size ? load(p) : Vec(widen(_mm256_maskz_loadu_epi16(first(n), p)));
  }
  static Vec load(const bool* p, int64_t n) {  // 1 or 0
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { n >= size ? store(p) : _mm512_mask_storeu_ps(p, first(n), v); }
  void store(bfloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
  void store_at_once(bfloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
  void store(bfloat16* p, int64_t n) const { n >= size ? store(p) : _mm256_mask_storeu_epi16(p, first(n), narrow(v)); }

  friend Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
  friend Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
  friend Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
  friend Vec where_positive(Vec condition, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(condition.v, _mm512_setzero_ps(), _CMP_NLE_UQ), y.v, x.v);
  }
  friend uint32_t lanes_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ); }
  // x where a is above b or either is NaN, else zero.
  friend Vec where_above(Vec a, Vec b, Vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ), x.v);
  }
  friend Vec swap_neighbours(Vec a) { return _mm512_permute_ps(a.v, 0xB1); }  // 1, 0, 3, 2, ...
  friend Vec round(Vec a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2**n for an integral n; underflows to 0 and overflows to inf.
  friend Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }
  Vec first_lanes(int64_t n) const { return n >= size ? *this : Vec(_mm512_maskz_mov_ps(first(n), v)); }  // zero beyond
  // Stores the lane sums of four vectors next to each other; this is cheaper than four separate sums.
  friend void store_sums(Vec a, Vec b, Vec c, Vec d, float* to) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float max() const { return _mm512_reduce_max_ps(v); }
};

// A vector of integers.
using Lanes = __m512i;
inline Lanes load_lanes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_lanes(void* p, Lanes x) { _mm512_storeu_si512(p, x); }
inline Lanes broadcast(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Lanes sixteen_bytes(__m128i x) { return _mm512_broadcast_i32x4(x); }  // the same in each 128 bits
inline Lanes look_up(Lanes table, Lanes index) { return _mm512_shuffle_epi8(table, index); }  // within 128 bits
inline Lanes shift_left_by_16(Lanes x) { return _mm512_slli_epi32(x, 16); }
inline Vec<float> as_floats(Lanes x) { return _mm512_castsi512_ps(x); }

#else

template <>
struct Vec<float> {
  static constexpr int64_t size = 8;
  __m256 v;

  Vec() = default;
  Vec(__m256 x) : v(x) {}
  Vec(float x) : v(_mm256_set1_ps(x)) {}
  static __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(std::min<int64_t>(n, 8))),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static __m128i narrow(__m256 x) {  // round to nearest even; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF)), 16);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }

  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load(const float* p, int64_t n) { return n >= size ? load(p) : Vec(_mm256_maskload_ps(p, first(n))); }
  static Vec load(const bfloat16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Vec load(const bfloat16* p, int64_t n) {
    if (n >= size) return load(p);
    alignas(16) uint16_t lanes[8] = {};
    std::memcpy(lanes, p, std::min<int64_t>(n, 8) * 2);
    return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(lanes)));
  }
  static Vec load(const bool* p, int64_t n) {  // 1 or 0
    int64_t lanes = 0;
    std::memcpy(&lanes, p, std::min<int64_t>(n, 8));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(lanes)));
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { n >= size ? store(p) : _mm256_maskstore_ps(p, first(n), v); }
  void store(bfloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v)); }
  void store(bfloat16* p, int64_t n) const {
    if (n >= size) return store(p);
    alignas(16) uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), narrow(v));
    std::memcpy(static_cast<void*>(p), lanes, std::min<int64_t>(n, 8) * 2);
  }

  friend Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }
  friend Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
  friend Vec max(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
  friend Vec where_positive(Vec condition, Vec x, Vec y) {
    return _mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(condition.v, _mm256_setzero_ps(), _CMP_NLE_UQ));
  }
  friend uint32_t lanes_above(Vec a, Vec b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NLE_UQ)));
  }
  // x where a is above b or either is NaN, else zero.
  friend Vec where_above(Vec a, Vec b, Vec x) { return _mm256_and_ps(x.v, _mm256_cmp_ps(a.v, b.v, _CMP_NLE_UQ)); }
  friend Vec swap_neighbours(Vec a) { return _mm256_permute_ps(a.v, 0xB1); }  // 1, 0, 3, 2, ...
  friend Vec round(Vec a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2**n for an integral n, in two halves so that the exponent field never overflows.
  friend Vec scale_by_power(Vec a, Vec n) {
    const __m256 clamped = _mm256_min_ps(_mm256_max_ps(n.v, _mm256_set1_ps(-252.f)), _mm256_set1_ps(252.f));
    const __m256i whole = _mm256_cvtps_epi32(clamped);
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const auto power = [](__m256i e) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(a.v, power(half)), power(rest));
  }
  Vec first_lanes(int64_t n) const {  // zero beyond
    return n >= size ? *this : Vec(_mm256_and_ps(v, _mm256_castsi256_ps(first(n))));
  }
  // Stores the lane sums of four vectors next to each other; this is cheaper than four separate sums.
  friend void store_sums(Vec a, Vec b, Vec c, Vec d, float* to) {
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
  }
  float sum() const {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  float max() const {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
};

// A vector of integers.
using Lanes = __m256i;
inline Lanes load_lanes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_lanes(void* p, Lanes x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline Lanes broadcast(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Lanes sixteen_bytes(__m128i x) { return _mm256_broadcastsi128_si256(x); }  // the same in each 128 bits
inline Lanes look_up(Lanes table, Lanes index) { return _mm256_shuffle_epi8(table, index); }  // within 128 bits
inline Lanes shift_left_by_16(Lanes x) { return _mm256_slli_epi32(x, 16); }
inline Vec<float> as_floats(Lanes x) { return _mm256_castsi256_ps(x); }

#endif

// Widen the bf16 in the lower or upper half of each 32 bits to floats.
inline Vec<float> lower_halves(Lanes x) { return as_floats(shift_left_by_16(x)); }
inline Vec<float> upper_halves(Lanes x) { return as_floats(x & broadcast(0xFFFF0000)); }

// Reads a row of a packed matrix from units of 32 bits: a float each, or an even and an odd row of bf16.
template <typename T>
Vec<float> load_row(const void* units, bool is_odd) {
  if constexpr (std::is_same_v<T, float>) return Vec<float>::load(static_cast<const float*>(units));
  else return is_odd ? upper_halves(load_lanes(units)) : lower_halves(load_lanes(units));
}

// Computes 2**x to about 1 ulp: x = n + f with |f| <= 1/2, and a Taylor polynomial of degree 6 in f ln 2 for 2**f. It
// is 0 from -inf to -126; NaN stays NaN; and +inf gives inf or NaN, depending on the CPU. The result is never denormal:
// masked scores would give many denormals, each of which costs an Intel CPU a hundred cycles or more.
inline Vec<float> exp2(Vec<float> x) {
  const Vec<float> lowest(-126.f), above = max(lowest, x);
  const Vec<float> n = round(above), f = above - n;
  Vec<float> p = 1.5403530e-4f;
  p = fmadd(p, f, 1.3333558e-3f);
  p = fmadd(p, f, 9.6181291e-3f);
  p = fmadd(p, f, 5.5504109e-2f);
  p = fmadd(p, f, 2.4022651e-1f);
  p = fmadd(p, f, 6.9314718e-1f);
  p = fmadd(p, f, 1.f);
  return where_above(x, lowest, scale_by_power(p, n));
}

// Computes e**x. The product with log2(e) is split in two so that a large |x| keeps its last bits. Special values are
// those of exp2; the result is 0 up to -87.33.
inline Vec<float> exp(Vec<float> x) {
  constexpr float log2e = 1.44269504f;
  constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const Vec<float> lowest(-87.33f), above = max(lowest, x);
  const Vec<float> n = round(above * Vec<float>(log2e));
  Vec<float> r = fmadd(n, Vec<float>(-ln2_high), above);
  r = fmadd(n, Vec<float>(-ln2_low), r);
  Vec<float> p = 1.3888889e-3f;
  p = fmadd(p, r, 8.3333338e-3f);
  p = fmadd(p, r, 4.1666667e-2f);
  p = fmadd(p, r, 1.6666667e-1f);
  p = fmadd(p, r, 0.5f);
  p = fmadd(p, r, 1.f);
  p = fmadd(p, r, 1.f);
  return where_above(x, lowest, scale_by_power(p, n));
}
inline Vec<double> exp(Vec<double> x) { return std::exp(x.v); }

// Stores a vector as bf16. kAtOnce: uses the AVX512_BF16 instruction.
template <bool kAtOnce>
void store_narrow(Vec<float> x, bfloat16* to) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kAtOnce) return x.store_at_once(to);
#endif
  x.store(to);
}

// Runs f(column, count) over [0, n) in steps of one vector; count < size only in the last step.
template <typename acc, typename F>
inline void for_each_vec(int64_t n, F&& f) {
  constexpr int64_t W = Vec<acc>::size;
  int64_t c = 0;
  for (; c + W <= n; c += W) f(c, W);
  if (c < n) f(c, n - c);
}

// Returns the sum of f(column, count) over [0, n) in steps of one vector; lanes of f beyond count must be zero. Four
// independent accumulators keep an addition from waiting for the previous one.
template <typename acc, typename F>
inline Vec<acc> sum_vecs(int64_t n, F&& f) {
  constexpr int64_t W = Vec<acc>::size;
  Vec<acc> a(acc(0)), b(acc(0)), c(acc(0)), d(acc(0));
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a = a + f(i, W);
    b = b + f(i + W, W);
    c = c + f(i + 2 * W, W);
    d = d + f(i + 3 * W, W);
  }
  for (; i + W <= n; i += W) a = a + f(i, W);
  if (i < n) b = b + f(i, n - i);
  return (a + b) + (c + d);
}

}  // namespace fastformer
