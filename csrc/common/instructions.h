// Instructions that only some of a library's CPUs have (cpu_features.h), and a few additions that the compiler places
// badly: as inline assembly, which needs no flag of the compiler. So one library serves CPUs with and without them.
//
// tests/csrc/emulated.h defines the same functions in plain C++, for tests of the AVX-512 and AMX code on any CPU.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#if !defined(FASTFORMER_EMULATED)

#define FASTFORMER_WITH_BF16 __attribute__((target("avx512bf16")))

namespace fastformer {

#if defined(CPU_CAPABILITY_AVX512)

// Adds the four products of unsigned bytes of x and signed ones of w to each 32-bit sum.
inline void dot_bytes(__m512i& sum, __m512i x, __m512i w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

// Adds the two products of 16-bit numbers to each 32-bit sum.
inline void dot_words(__m512i& sum, __m512i x, __m512i w) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

// Adds the two products of bf16 numbers to each fp32 sum. Numbers below 2^-126 count as 0.
inline void dot_bf16(__m512& sum, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
inline void dot_bf16(__m512& sum, __m512i x, const void* w) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "m"(*static_cast<const __m512i_u*>(w)));
}

// Rounds to nearest even. Magnitudes below 2^-126 give 0.
inline __m256i to_bf16(__m512 x) {
  __m256i rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
  return rounded;
}

#else

inline void dot_bytes(__m256i& sum, __m256i x, __m256i w) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}
inline void dot_words(__m256i& sum, __m256i x, __m256i w) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
}

#endif

// sum += x. Without inline assembly, GCC 12 keeps the sum in a second register and spills others.
template <typename Lanes>
void add_dwords_to(Lanes& sum, Lanes x) {
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x));
}
template <typename Lanes>
void add_words_to(Lanes& sum, Lanes x) {
  asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(x));
}

// AMX. The compiler itself never uses tiles.

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Asks Linux for the registers of AMX, for all threads of the process. Returns whether it may have them.
inline bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
void load_tile(const char* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
void store_tile(char* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
// kBf16: pairs of bf16 numbers and fp32 sums; else unsigned bytes on the left, signed ones, and 32-bit sums.
template <bool kBf16, int kSum, int kLeft, int kRight>
void add_tile() {
  if constexpr (kBf16) asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  else asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

}  // namespace fastformer

#endif
