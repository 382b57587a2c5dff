// The inner loops of int4_gemm.cpp: a few rows times a few vectors of a panel of 4-bit weights.
//
// A group is 32 inputs. For each group, a panel has four blocks of 64 columns times 4 bytes, the group's 64 scales as
// fp16, and its zero points as int8 if the weight has any. The low nibbles of a column's 4 bytes are one step of 4
// inputs, the high nibbles the next. Both are two's complement, from -8 to 7, or numbers of levels.
//
// The integer sum of a group is exact with any instructions. It is multiplied by the group's scale and added in fp32,
// group by group, in the same order on all paths, so that all give the same bits.

#pragma once

#include "engine/packed_kernels.h"
#include "engine/tiles.h"

namespace fastformer {

constexpr int64_t kGroupBlocks = 4;
constexpr int64_t kNibbleBytes = kGroupBlocks * kStepBytes;
constexpr int64_t kScaleBytes = 2 * kPanelColumns;
constexpr int64_t kGroupBytes = 2 * kGroupBlocks * 4;  // bytes of a group in a row of activations

// For many rows, a panel is unpacked to bytes first: for each half of 32 columns and each group, two tiles of 16
// columns (8 steps, 16 columns, 4 bytes).
constexpr int64_t kTileStepBytes = 4 * kTileColumns;
constexpr int64_t kTileBytes = 2 * kGroupBlocks * kTileStepBytes;
constexpr int64_t kHalfBytes = 2 * kTileBytes;

// The data after the groups of a panel.
struct GroupedTail {
  float bias[kPanelColumns];
  float scale[kPanelColumns];       // a power of two: the scales of groups are multiples of it
  float correction[kPanelColumns];  // minus the sum of the column, in multiples of `scale`
};

// The operands of one call of a kernel.
struct GroupedTile {
  const char* left;  // first row
  int64_t left_stride;
  const float* left_scale;  // the scale of each row; left_zero: its zero point
  const int32_t* left_zero;
  const int32_t* left_sums;  // (groups, rows): minus the sum of the bytes, in the low 16 bits
  int64_t sums_stride;       // elements from one group to the next
  const char* right;         // the panel
  int64_t groups, group_bytes;
  const GroupedTail* tail;
  const int8_t* levels;  // those of a weight that has them
  int64_t column;        // the index of the first column in the panel
  const char* ahead;     // the address to prefetch
  float* out;
  int64_t ld;

  bool has_zeros() const { return group_bytes > kNibbleBytes + kScaleBytes; }
};

using GroupedKernel = void (*)(const GroupedTile&);

#if defined(CPU_CAPABILITY_AVX512)

constexpr int kMostKept = 24;  // accumulators that stay in registers from group to group
constexpr std::array<Shape, 2> kShapesOfGroups{{{4, 3}, {2, 6}}};
inline Lanes left_by_4(Lanes x) { return _mm512_slli_epi16(x, 4); }
inline Lanes right_by_4(Lanes x) { return _mm512_srli_epi16(x, 4); }
inline Lanes left_by_8(Lanes x) { return _mm512_slli_epi16(x, 8); }
inline Lanes right_by_8(Lanes x) { return _mm512_srli_epi16(x, 8); }
inline Lanes add_words(Lanes a, Lanes b) { return _mm512_add_epi32(a, b); }
inline Lanes subtract_bytes(Lanes a, Lanes b) { return _mm512_sub_epi8(a, b); }
inline Lanes multiply_pairs(Lanes a, Lanes b) { return _mm512_madd_epi16(a, b); }
inline Lanes multiply_bytes(Lanes u8, Lanes s8) { return _mm512_maddubs_epi16(u8, s8); }
inline Lanes ones_of_words() { return _mm512_set1_epi16(1); }
inline Lanes widen_bytes(const char* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V load_halves(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

#else

constexpr int kMostKept = 4;
constexpr std::array<Shape, 3> kShapesOfGroups{{{8, 1}, {4, 2}, {2, 4}}};
inline Lanes left_by_4(Lanes x) { return _mm256_slli_epi16(x, 4); }
inline Lanes right_by_4(Lanes x) { return _mm256_srli_epi16(x, 4); }
inline Lanes left_by_8(Lanes x) { return _mm256_slli_epi16(x, 8); }
inline Lanes right_by_8(Lanes x) { return _mm256_srli_epi16(x, 8); }
inline Lanes add_words(Lanes a, Lanes b) { return _mm256_add_epi32(a, b); }
inline Lanes subtract_bytes(Lanes a, Lanes b) { return _mm256_sub_epi8(a, b); }
inline Lanes multiply_pairs(Lanes a, Lanes b) { return _mm256_madd_epi16(a, b); }
inline Lanes multiply_bytes(Lanes u8, Lanes s8) { return _mm256_maddubs_epi16(u8, s8); }
inline Lanes ones_of_words() { return _mm256_set1_epi16(1); }
inline Lanes widen_bytes(const char* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline V load_halves(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

#endif

// The two steps that a vector of a block contains.
struct StepPair {
  Lanes low, high;
};

// Returns the bytes of a table at the places that nibbles say.
inline StepPair look_up_nibbles(Lanes table, Lanes x) {
  const Lanes mask = broadcast(0x0F0F0F0F);
  return {look_up(table, x & mask), look_up(table, right_by_4(x) & mask)};
}

// levels: null: the nibbles are whole numbers.
inline Lanes table_of(const int8_t* levels) {
  if (levels != nullptr) return sixteen_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
  return sixteen_bytes(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
}

// Uses vpdpbusd with the weights in the upper half of each byte. The sums are 16 times too large, which the scale
// compensates at no cost.
struct DotInt4 {
  using Pair = StepPair;
  using Left = Lanes;
  static constexpr float kUnit = 1.f / 16;
  static constexpr bool kMayHaveZeros = true;
  static constexpr auto kShapes = kShapesOfGroups;
  explicit DotInt4(const GroupedTile&) {}
  Pair unpack(Lanes x) const {
    const Lanes mask = broadcast(0xF0F0F0F0);
    return {left_by_4(x) & mask, x & mask};
  }
  static Left left(const char* p) { return DotInt8::left(p); }
  static Lanes multiply(const Pair& w, Lanes low, Lanes high) { return add(broadcast(0), w, low, high); }
  static Lanes add(Lanes sum, const Pair& w, Lanes low, Lanes high) {
    return DotInt8::add(DotInt8::add(sum, w.low, low), w.high, high);
  }
  static Lanes of_group(Lanes sum) { return sum; }
  static Lanes zeros(const char* p) { return left_by_4(widen_bytes(p)); }
  static Lanes add_pairs(Lanes sum, Lanes a, Lanes b) {
    dot_words(sum, a, b);
    return sum;
  }
};

// Without dot products, pmaddubsw adds two products in 16 bits. The sum of a whole group fits: 16 * 255 * 8 < 2^15.
struct MultiplyInt4 {
  using Pair = StepPair;
  using Left = Lanes;
  static constexpr float kUnit = 1;
  static constexpr bool kMayHaveZeros = true;
  static constexpr auto kShapes = kShapesOfGroups;
  explicit MultiplyInt4(const GroupedTile&) {}
  Pair unpack(Lanes x) const { return look_up_nibbles(table_of(nullptr), x); }
  static Left left(const char* p) { return DotInt8::left(p); }
  static Lanes multiply(const Pair& w, Lanes low, Lanes high) {
    return add_products(multiply_bytes(low, w.low), w.high, high);
  }
  static Lanes add(Lanes sum, const Pair& w, Lanes low, Lanes high) {
    return add_products(add_products(sum, w.low, low), w.high, high);
  }
  static Lanes of_group(Lanes sum) { return multiply_pairs(sum, ones_of_words()); }
  static Lanes zeros(const char* p) { return widen_bytes(p); }
  static Lanes add_pairs(Lanes sum, Lanes a, Lanes b) { return add_words(sum, multiply_pairs(a, b)); }

  static Lanes add_products(Lanes sum, Lanes w, Lanes x) {
    add_words_to(sum, multiply_bytes(x, w));
    return sum;
  }
};

// Uses vpdpbusd with levels, which stay in a register.
struct DotLevels {
  using Pair = StepPair;
  using Left = Lanes;
  static constexpr float kUnit = 1;
  static constexpr bool kMayHaveZeros = false;
  static constexpr auto kShapes = kShapesOfGroups;
  explicit DotLevels(const GroupedTile& t) : table(table_of(t.levels)) {}
  Pair unpack(Lanes x) const { return look_up_nibbles(table, x); }
  static Left left(const char* p) { return DotInt8::left(p); }
  static Lanes multiply(const Pair& w, Lanes low, Lanes high) { return add(broadcast(0), w, low, high); }
  static Lanes add(Lanes sum, const Pair& w, Lanes low, Lanes high) {
    return DotInt8::add(DotInt8::add(sum, w.low, low), w.high, high);
  }
  static Lanes of_group(Lanes sum) { return sum; }

  Lanes table;
};

// Without dot products, four products with levels up to kMost fit in 16 bits, as do eight (MultiplyBytes).
struct MultiplySmallLevels : DotLevels {
  static constexpr int kMost = 16;
  using DotLevels::DotLevels;
  static Lanes multiply(const Pair& w, Lanes low, Lanes high) {
    return multiply_pairs(MultiplyInt4::multiply(w, low, high), ones_of_words());
  }
  static Lanes add(Lanes sum, const Pair& w, Lanes low, Lanes high) {
    return WordInt8::add(sum, ones_of_words(), MultiplyInt4::multiply(w, low, high));
  }
};

// Other levels are widened to 16 bits, times 256.
struct MultiplyLevels {
  struct Words {
    Lanes even, odd;
  };
  using Pair = StepPair;
  using Left = Words;
  static constexpr float kUnit = 1.f / 256;
  static constexpr bool kMayHaveZeros = false;
  static constexpr auto kShapes = kShapesOfGroups;
  explicit MultiplyLevels(const GroupedTile& t) : table(table_of(t.levels)) {}
  Pair unpack(Lanes x) const { return look_up_nibbles(table, x); }
  static Left left(const char* p) {
    const Lanes x = broadcast(four_bytes(p));
    return {x & broadcast(0x00FF00FF), right_by_8(x)};
  }
  static Lanes multiply(const Pair& w, const Left& low, const Left& high) {
    const Lanes first = multiply_pairs(left_by_8(w.low), low.even);
    return add_step(WordInt8::add(first, w.low & broadcast(0xFF00FF00), low.odd), w.high, high);
  }
  static Lanes add(Lanes sum, const Pair& w, const Left& low, const Left& high) {
    return add_step(add_step(sum, w.low, low), w.high, high);
  }
  static Lanes of_group(Lanes sum) { return sum; }

  Lanes table;

 private:
  static Lanes add_step(Lanes sum, Lanes w, const Left& x) {
    return WordInt8::add(WordInt8::add(sum, left_by_8(w), x.even), w & broadcast(0xFF00FF00), x.odd);
  }
};

// Returns a row's product with a vector of columns, given the sum over groups.
inline V finish_groups(V total, float unit, const GroupedTail& tail, int64_t column, float scale, int32_t zero) {
  const V moved = fmadd(V(static_cast<float>(zero)), V::load(tail.correction + column), total * V(unit));
  return fmadd(moved, V::load(tail.scale + column) * V(scale), V::load(tail.bias + column));
}

// Multiplies kRows rows by kVecs vectors of a panel, and prefetches kLines cache lines per block from `ahead`.
template <typename Path, int kVecs, int kRows, int kLines>
void rows_times_groups(const GroupedTile& tile) {
  constexpr bool kKept = kRows * kVecs * 2 <= kMostKept;
  const GroupedTile t = tile;
  const Path path(t);
  const bool has_zeros = Path::kMayHaveZeros && t.has_zeros();
  RowPointers<kRows> left(t.left, t.left_stride);
  const char *group = t.right, *ahead = t.ahead;
  const int32_t* left_sums = t.left_sums;
  // If there are too few registers, the fp32 sums stay in memory, at addresses that the compiler can't analyse.
  V total[kKept ? kRows : 1][kVecs];
  alignas(64) float memory[kKept ? 1 : kRows * kVecs * V::size];
  float* waiting = memory;
  asm("" : "+r"(waiting));
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kKept) total[r][v] = V(0.f);
      else V(0.f).store(waiting + (r * kVecs + v) * V::size);
    }
#pragma GCC unroll 1
  for (int64_t g = 0; g < t.groups; ++g, group += t.group_bytes, left_sums += t.sums_stride) {
    Lanes sum[kRows][kVecs];
    const char* right = group + t.column * 4;
#pragma GCC unroll 4
    for (int block = 0; block < kGroupBlocks; ++block, right += kStepBytes, left.advance(8)) {
#pragma GCC unroll 8
      for (int line = 0; line < kLines; ++line) _mm_prefetch(ahead + line * 64, hint_of(kLines));
      ahead += kLines * 64;
      if constexpr (kRows < kVecs) {
        typename Path::Left low[kRows], high[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) low[r] = Path::left(left[r]), high[r] = Path::left(left[r] + 4);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const typename Path::Pair w = path.unpack(load_lanes(right + v * sizeof(V)));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
            sum[r][v] = block == 0 ? Path::multiply(w, low[r], high[r]) : Path::add(sum[r][v], w, low[r], high[r]);
        }
      } else {
        typename Path::Pair w[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) w[v] = path.unpack(load_lanes(right + v * sizeof(V)));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto low = Path::left(left[r]), high = Path::left(left[r] + 4);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v)
            sum[r][v] = block == 0 ? Path::multiply(w[v], low, high) : Path::add(sum[r][v], w[v], low, high);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Path::of_group(sum[r][v]);
    if constexpr (Path::kMayHaveZeros)
      if (has_zeros) {
        Lanes zeros[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v)
          zeros[v] = Path::zeros(group + kNibbleBytes + kScaleBytes + t.column + v * V::size);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Lanes of_row = broadcast(static_cast<uint32_t>(left_sums[r]));
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) sum[r][v] = Path::add_pairs(sum[r][v], zeros[v], of_row);
        }
      }
    V scale[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) scale[v] = load_halves(group + kNibbleBytes + (t.column + v * V::size) * 2);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        if constexpr (kKept) {
          total[r][v] = fmadd(to_floats(sum[r][v]), scale[v], total[r][v]);
        } else {
          float* at = waiting + (r * kVecs + v) * V::size;
          fmadd(to_floats(sum[r][v]), scale[v], V::load(at)).store(at);
        }
      }
  }
  float* out = t.out + t.column;
#pragma GCC unroll 1
  for (int r = 0; r < kRows; ++r, out += t.ld)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const V sum = kKept ? total[r][v] : V::load(waiting + (r * kVecs + v) * V::size);
      finish_groups(sum, Path::kUnit, *t.tail, t.column + v * V::size, t.left_scale[r], t.left_zero[r])
          .store(out + v * V::size);
    }
}

// The operands of one call of a kernel for unpacked panels. `right` and `scales` are those of its first column.
struct UnpackedTile {
  const char* left;  // first row
  int64_t left_stride;
  const float* left_scale;
  const int32_t* left_zero;
  const char* right;
  const float* scales;  // (groups, 64)
  int64_t groups;
  const GroupedTail* tail;
  int64_t column;     // the index of the first column in the panel
  const char* ahead;  // the memory to prefetch, and how many cache lines of it for each group
  int64_t lines;
  float* out;
  int64_t ld;
};

using UnpackedKernel = void (*)(const UnpackedTile&);

// Multiplies kRows rows by kVecs vectors of an unpacked panel. The fp32 sums are in memory, so that the registers have
// room for more rows than in rows_times_groups, and each load of a weight serves more products.
template <typename Path, int kVecs, int kRows>
void rows_times_bytes(const UnpackedTile& tile) {
  constexpr int kVecsOfTile = kTileColumns / V::size, kParts = 2 * kGroupBlocks / Path::kSteps;
  static_assert(kVecs % kVecsOfTile == 0 && kVecs <= 2 * kVecsOfTile, "whole tiles of one half");
  const UnpackedTile t = tile;
  RowPointers<kRows> left(t.left, t.left_stride);
  const char *right = t.right, *ahead = t.ahead;
  const float* scales = t.scales;
  float* out = t.out + t.column;
  alignas(64) float memory[kRows * kVecs * V::size];
  float* waiting = memory;
#pragma GCC unroll 1
  for (int i = 0; i < kRows * kVecs; ++i) V(0.f).store(waiting + i * V::size);
#pragma GCC unroll 1
  for (int64_t g = 0; g < t.groups; ++g, right += kHalfBytes, scales += kPanelColumns) {
#pragma GCC unroll 1
    for (int64_t line = 0; line < t.lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    // Results go to rows that are far apart. Unless these places are in a cache, stores wait, and loads behind them.
    if (g < kRows)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v += kVecsOfTile)
        _mm_prefetch(reinterpret_cast<const char*>(out + g * t.ld + v * V::size), _MM_HINT_T1);
    Lanes sum[kRows][kVecs];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Lanes sums[kRows][kVecs];
#pragma GCC unroll 16
      for (int i = 0; i < Path::kSteps * Path::kWords; ++i, left.advance()) {
        const char* const at = right + (part * Path::kSteps + i / Path::kWords) * kTileStepBytes;
        Lanes w[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v)
          w[v] = Path::right(at + v / kVecsOfTile * kTileBytes + v % kVecsOfTile * sizeof(V), i % Path::kWords);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Lanes x = DotInt8::left(left[r]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v)
            sums[r][v] = i == 0 ? Path::multiply(w[v], x) : Path::add(sums[r][v], w[v], x);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const Lanes whole = Path::of_group(sums[r][v]);
          sum[r][v] = part == 0 ? whole : add_words(sum[r][v], whole);
        }
    }
    V scale[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) scale[v] = V::load(scales + v * V::size);
    // Without this, GCC 12 keeps a second copy of the fp32 sums on the stack. Without "memory", it spills some of them.
    asm volatile("" : "+r"(waiting)::"memory");
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        float* at = waiting + (r * kVecs + v) * V::size;
        fmadd(to_floats(sum[r][v]), scale[v], V::load(at)).store(at);
      }
  }
#pragma GCC unroll 1
  for (int r = 0; r < kRows; ++r, out += t.ld)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v)
      finish_groups(V::load(waiting + (r * kVecs + v) * V::size), Path::kUnit, *t.tail, t.column + v * V::size,
                    t.left_scale[r], t.left_zero[r])
          .store(out + v * V::size);
}

using GroupedKernels = KernelTable<GroupedKernel, 3>;
constexpr std::array<int, 3> kGroupLines{0, 2, 5};  // cache lines per block

template <typename Path>
GroupedKernels grouped_kernels_of() {
  // A single pass prefetches 5 lines. If there are several passes, the first ones prefetch 2 each, which together cover
  // the next panel.
  constexpr auto kReached =
      reached<Path, GroupedKernels>([](int64_t, int64_t passes, int which) { return (which == 2) == (passes == 1); });
  return kernel_table<Path, GroupedKernels, kReached>(
      []<int v, int r, int which>() { return rows_times_groups<Path, v, r, kGroupLines[which]>; });
}

// The paths of unpacked panels. A sum has room for kSteps steps, each of which is kWords products.
struct DotBytes {
  static constexpr int kSteps = 2 * kGroupBlocks, kWords = 1;
  static constexpr float kUnit = 1;
  static constexpr std::array<Shape, 1> kShapes{DotInt8::kShapes.back()};
  static Lanes right(const char* p, int) { return load_lanes(p); }
  static Lanes multiply(Lanes w, Lanes x) { return DotInt8::add(broadcast(0), w, x); }
  static Lanes add(Lanes sum, Lanes w, Lanes x) { return DotInt8::add(sum, w, x); }
  static Lanes of_group(Lanes sum) { return sum; }
};

// Without dot products: 16-bit sums of weights up to 16, of half a group: 8 * 255 * 16 < 2^15.
struct MultiplyBytes : DotBytes {
  static constexpr int kSteps = kGroupBlocks;
  static constexpr std::array<Shape, 1> kShapes{kLeanShapes.back()};
  static Lanes multiply(Lanes w, Lanes x) { return multiply_bytes(x, w); }
  static Lanes add(Lanes sum, Lanes w, Lanes x) { return MultiplyInt4::add_products(sum, w, x); }
  static Lanes of_group(Lanes sum) { return MultiplyInt4::of_group(sum); }
};

// Larger weights are widened as in MultiplyLevels: first bytes 0 and 2 of each 4, then 1 and 3, as those of the rows.
struct MultiplyWords : MultiplyBytes {
  static constexpr int kSteps = 2 * kGroupBlocks, kWords = 2;
  static constexpr float kUnit = MultiplyLevels::kUnit;
  static Lanes right(const char* p, int word) {
    return word == 0 ? left_by_8(load_lanes(p)) : load_lanes(p) & broadcast(0xFF00FF00);
  }
  static Lanes multiply(Lanes w, Lanes x) { return multiply_pairs(w, x); }
  static Lanes add(Lanes sum, Lanes w, Lanes x) { return WordInt8::add(sum, w, x); }
  static Lanes of_group(Lanes sum) { return sum; }
};

using UnpackedKernels = KernelTable<UnpackedKernel, 1>;

// The kernels for kFewest rows and more.
template <typename Path, int64_t kFewest>
UnpackedKernels unpacked_kernels_of() {
  constexpr auto kReached = reached<Path, UnpackedKernels>(
      [](int64_t, int64_t passes, int) { return passes >= Walk(Path::kShapes, 1, kFewest).passes(); });
  return kernel_table<Path, UnpackedKernels, kReached>(
      []<int v, int r, int>() { return rows_times_bytes<Path, v, r>; });
}

}  // namespace fastformer
