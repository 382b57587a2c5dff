// The inner loops of packed_gemm.h: a few rows times a few vectors of a panel, for each set of instructions ("path").
//
// A path defines the type of a vector of the weight (Right), the type of the 4 broadcast bytes of a row (Left), how
// their products are added to a Sum, and which shapes of accumulators fit into the registers.
//
// The dot products use inline assembly for two reasons: it needs no compiler flag, so that one module serves CPUs with
// and without these instructions; and GCC 12 copies and spills the accumulators around its builtins (PR 94663), which
// halves the speed.

#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "common/cpu_features.h"
#include "common/simd.h"
#include "engine/packed_gemm.h"

namespace fastformer {

// The cache into which a pass prefetches, given its cache lines per step. A single pass reads what it has prefetched at
// once. If there are several, they prefetch the next panel, and into the second-level cache: in the first one it would
// evict the panel that they read, and hold up their loads (Zen 4: 16 rows of int8 took 1.3 times as long).
constexpr auto hint_of(int lines) { return lines >= 4 ? _MM_HINT_T0 : _MM_HINT_T1; }

// Whether a block of steps is the first or the last one of its sum.
struct Block {
  bool first, last;
};

// The operands of one call of a kernel. `right` and `tail` are those of its first column.
struct Tile {
  const char* left;         // first row
  int64_t left_stride;      // bytes
  const float* left_scale;  // int8: the scale of each row; left_zero: its zero point
  const int32_t* left_zero;
  const char* right;
  int64_t steps;
  const PanelTail* tail;
  int64_t column;     // the column of the first vector in the panel
  const char* ahead;  // the memory to prefetch
  float* out;
  int64_t ld;
  Block part{true, true};  // the part of the sums that `steps` covers; `out` holds the sums of the previous parts
};

using Kernel = void (*)(const Tile&);

// At most `rows` rows by `vecs` vectors of accumulators.
struct Shape {
  int vecs, rows;
};

using V = Vec<float>;

inline uint32_t four_bytes(const char* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return bytes;
}

#if defined(CPU_CAPABILITY_AVX512)

constexpr int kFewest = 4;  // vectors per row of a panel
// The shapes of paths whose operands are one vector each.
constexpr std::array<Shape, 2> kLeanShapes{{{4, 6}, {2, 13}}};
inline bool has_int8_dot() { return cpu_features().avx512_vnni; }
inline Lanes add_product(Lanes sum, Lanes a, int32_t b) {
  return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, _mm512_set1_epi32(b)));
}
inline V to_floats(Lanes x) { return _mm512_cvtepi32_ps(x); }

#else

constexpr int kFewest = 8;
constexpr std::array<Shape, 3> kLeanShapes{{{8, 1}, {4, 3}, {2, 6}}};
inline bool has_int8_dot() { return cpu_features().avx_vnni; }
inline Lanes add_product(Lanes sum, Lanes a, int32_t b) {
  return _mm256_add_epi32(sum, _mm256_mullo_epi32(a, _mm256_set1_epi32(b)));
}
inline V to_floats(Lanes x) { return _mm256_cvtepi32_ps(x); }

#endif

// The common part of the paths with fp32 sums. A long sum is split into blocks, because its rounding error grows with
// its length.
template <int64_t steps>
struct FloatSums {
  using Sum = V;
  static int64_t block_steps() { return steps; }
  static Sum zero() { return V(0.f); }
  static V finish(Sum sum, const Tile& t, int64_t column, int, const float* out, Block block) {
    if (!block.first) sum = V::load(out) + sum;
    return block.last ? sum + V::load(t.tail->bias + column) : sum;
  }
};

// The common part of the int8 paths: the floating-point arithmetic is the same for all of them. kOffset: the number
// that a path subtracts from the bytes of x.
template <int32_t kOffset>
struct IntegerSums {
  using Sum = Lanes;
  static constexpr int64_t block_steps() { return std::numeric_limits<int64_t>::max(); }
  static Sum zero() { return broadcast(0); }
  static V finish(Sum sum, const Tile& t, int64_t column, int row, const float*, Block) {
    const Lanes whole = add_product(sum, load_lanes(t.tail->correction + column), t.left_zero[row] - kOffset);
    const V scale = V::load(t.tail->scale + column) * V(t.left_scale[row]);
    return fmadd(to_floats(whole), scale, V::load(t.tail->bias + column));
  }
};

struct Fma : FloatSums<64> {
  using Right = V;
  using Left = V;
  static constexpr auto kShapes = kLeanShapes;
  static Right right(const char* p) { return V::load(reinterpret_cast<const float*>(p)); }
  static Left left(const char* p) { return as_floats(broadcast(four_bytes(p))); }
  static Sum add(Sum sum, Right w, Left x) { return fmadd(x, w, sum); }
};

// bf16 without bf16 instructions. The low half of a step's 4 bytes is the even element of k. The blocks have as many
// elements as those of Fma, which multiplies many rows by a widened panel with the same results.
struct WidenedBf16 : FloatSums<32> {
  struct Pair {
    V even, odd;
  };
  using Right = Pair;
  using Left = Pair;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr std::array<Shape, 2> kShapes{{ {4, 5}, {2, 12} }};
#else
  static constexpr std::array<Shape, 3> kShapes{{{8, 1}, {4, 2}, {2, 4}}};
#endif
  static Pair widen(Lanes x) { return {lower_halves(x), upper_halves(x)}; }
  static Right right(const char* p) { return widen(load_lanes(p)); }
  static Left left(const char* p) { return widen(broadcast(four_bytes(p))); }
  static Sum add(Sum sum, Right w, Left x) { return fmadd(x.odd, w.odd, fmadd(x.even, w.even, sum)); }
};

// Sums by vdpbf16ps. With blocks of 32 steps, adding blocks takes 4 % of the time. On an AMD CPU (Zen 5), blocks of 64
// have a smaller error over 3,072 inputs and more, and one that is 5 % larger over 768. On an Intel CPU their error was
// more than twice plain PyTorch's (tests/engine/test_packed_gemm.py).
struct DotSums : FloatSums<64> {
  static int64_t block_steps() {
    static const int64_t steps = is_intel_cpu() ? 32 : 64;
    return steps;
  }
};

#if defined(CPU_CAPABILITY_AVX512)

struct DotBf16 : DotSums {
  using Right = Lanes;
  using Left = Lanes;
  static constexpr auto kShapes = kLeanShapes;
  static Right right(const char* p) { return load_lanes(p); }
  static Left left(const char* p) { return broadcast(four_bytes(p)); }
  static Sum add(Sum sum, Right w, Left x) {
    dot_bf16(sum.v, w, x);
    return sum;
  }
};

#endif

// vpdpbusd adds four products of a u8 of x and an s8 of W to each 32-bit sum.
struct DotInt8 : IntegerSums<0> {
  using Right = Lanes;
  using Left = Lanes;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr std::array<Shape, 2> kShapes{{ {4, 4}, {2, 13} }};  // two passes read 5 rows' weight faster than one
#else
  static constexpr auto kShapes = kLeanShapes;
#endif
  static Right right(const char* p) { return load_lanes(p); }
  static Left left(const char* p) { return broadcast(four_bytes(p)); }
  static Sum add(Sum sum, Right w, Left x) {
    dot_bytes(sum, x, w);
    return sum;
  }
};

// int8 without dot products: pmaddubsw multiplies u8 by s8 and adds adjacent products in 16 bits. These sums could
// saturate with the bytes of x. So |x - 128| is multiplied by W with the sign of x - 128: 2 * 128 * 127 < 2^15.
struct MultiplyInt8 : IntegerSums<128> {
  using Right = Lanes;
#if defined(CPU_CAPABILITY_AVX512)
  struct Left {
    Lanes magnitude;
    __mmask64 negative;
  };
  static constexpr std::array<Shape, 2> kShapes{{ {4, 5}, {2, 11} }};
  static Left left(const char* p) {
    const Lanes x = _mm512_xor_si512(broadcast(four_bytes(p)), broadcast(0x80808080));
    return {_mm512_abs_epi8(x), _mm512_movepi8_mask(x)};
  }
  static Sum add(Sum sum, Right w, Left x) {
    const Lanes signed_w = _mm512_mask_sub_epi8(w, x.negative, _mm512_setzero_si512(), w);
    const Lanes pairs = _mm512_maddubs_epi16(x.magnitude, signed_w);
    return add_products(sum, pairs);
  }
#else
  struct Left {
    Lanes value, magnitude;
  };
  static constexpr std::array<Shape, 3> kShapes{{{8, 1}, {4, 2}, {2, 4}}};
  static Left left(const char* p) {
    const Lanes x = _mm256_xor_si256(broadcast(four_bytes(p)), broadcast(0x80808080));
    return {x, _mm256_abs_epi8(x)};
  }
  static Sum add(Sum sum, Right w, Left x) {
    const Lanes pairs = _mm256_maddubs_epi16(x.magnitude, _mm256_sign_epi8(w, x.value));
    return add_products(sum, pairs);
  }
#endif
  static Right right(const char* p) { return load_lanes(p); }

 private:
  // Adds adjacent 16-bit products.
  static Sum add_products(Sum sum, Lanes pairs) {
#if defined(CPU_CAPABILITY_AVX512)
    const Lanes products = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const Lanes products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    add_dwords_to(sum, products);
    return sum;
  }
};

// int8 whose bytes were widened to 16 bits, two to a step, for many rows on CPUs without dot products.
struct WordInt8 : IntegerSums<0> {
  using Right = Lanes;
  using Left = Lanes;
  static constexpr std::array<Shape, 1> kShapes{kLeanShapes.back()};
  static Right right(const char* p) { return load_lanes(p); }
  static Left left(const char* p) { return broadcast(four_bytes(p)); }
  static Sum add(Sum sum, Right w, Left x) {
#if defined(CPU_CAPABILITY_AVX512)
    const Lanes products = _mm512_madd_epi16(w, x);
#else
    const Lanes products = _mm256_madd_epi16(w, x);
#endif
    add_dwords_to(sum, products);
    return sum;
  }
};

// Widens each 4 bytes of a row to words: first bytes 0 and 2, then 1 and 3.
inline void widen_row(const uint32_t* from, int64_t steps, uint32_t* to) {
  for (int64_t i = 0; i < steps; ++i) to[2 * i] = from[i] & 0xFF00FF, to[2 * i + 1] = from[i] >> 8 & 0xFF00FF;
}

// Reads along kRows rows with one pointer for every fourth row. x86 addressing covers the rows between.
template <int kRows>
struct RowPointers {
  static constexpr int kPointers = (kRows + 3) / 4;
  const char* at[kPointers];
  int64_t stride;

  RowPointers(const char* first, int64_t stride) : stride(stride) {
    for (int i = 0; i < kPointers; ++i) at[i] = first + 4 * i * stride;
  }
  const char* operator[](int row) const { return at[row / 4] + row % 4 * stride; }
  void advance(int64_t bytes = 4) {
    for (auto& pointer : at) pointer += bytes;
  }
};

// Multiplies kRows rows by kVecs vectors of a panel, and prefetches kLines cache lines per step from `ahead`, so that
// arithmetic and memory accesses overlap.
template <typename Path, int kVecs, int kRows, int kLines>
void rows_times_panel(const Tile& tile) {
  const Tile t = tile;  // a local copy: no store can change it
  RowPointers<kRows> left(t.left, t.left_stride);
  const char *right = t.right, *ahead = t.ahead;
  int64_t rest = t.steps;
  const int64_t block_steps = Path::block_steps();
  bool is_first = t.part.first;
  do {
    typename Path::Sum sum[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Path::zero();
    const int64_t steps = std::min(rest, block_steps);
#pragma GCC unroll 1
    for (int64_t step = 0; step < steps; ++step, left.advance(), right += kStepBytes, ahead += 64 * kLines) {
      // The inner loop runs over the larger set of operands, while the smaller set stays in registers.
      if constexpr (kRows < kVecs) {
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line) _mm_prefetch(ahead + line * 64, hint_of(kLines));
        typename Path::Left x[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) x[r] = Path::left(left[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const auto w = Path::right(right + v * sizeof(V));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) sum[r][v] = Path::add(sum[r][v], w, x[r]);
        }
      } else {
        typename Path::Right w[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) w[v] = Path::right(right + v * sizeof(V));
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line) _mm_prefetch(ahead + line * 64, hint_of(kLines));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto x = Path::left(left[r]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) sum[r][v] = Path::add(sum[r][v], w[v], x);
        }
      }
    }
    rest -= steps;
    const Block block{is_first, rest == 0 && t.part.last};
    float* out = t.out + t.column;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, out += t.ld)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        float* to = out + v * V::size;
        Path::finish(sum[r][v], t, t.column + v * V::size, r, to, block).store(to);
      }
    is_first = false;
  } while (rest > 0);
}

// How to multiply a panel by a number of rows: with the first shape that has room for them, or else in groups of nearly
// equal size, for each slice of the panel's columns.
struct Walk {
  int shape = 0;
  int64_t rows = 0, groups = 0, slices = 0;

  template <size_t kNumShapes>
  constexpr Walk(const std::array<Shape, kNumShapes>& shapes, int num_shapes, int64_t rows) : rows(rows) {
    while (shape + 1 < num_shapes && shapes[shape].rows < rows) ++shape;
    groups = (rows + shapes[shape].rows - 1) / shapes[shape].rows, slices = kFewest / shapes[shape].vecs;
  }

  constexpr int64_t passes() const { return groups * slices; }

  // Calls each(pass, slice, first row, number of rows).
  template <typename F>
  constexpr void for_each_pass(F each) const {
    int64_t pass = 0;
    for (int64_t slice = 0; slice < slices; ++slice)
      for (int64_t g = 0, first = 0; g < groups; ++g, ++pass) {
        const int64_t count = (rows - first) / (groups - g);
        each(pass, slice, first, count);
        first += count;
      }
  }
};

// The kernels of a path, by shape, number of rows - 1, and amount to prefetch. Null: no Walk uses that kernel.
constexpr int kMostRows = 13;
template <typename K, int kNumFetches>
struct KernelTable {
  static constexpr int kFetches = kNumFetches;
  using OfRows = std::array<K, kFetches>;
  std::array<Shape, 3> shapes{};
  int num_shapes = 0;
  int64_t block_steps = 0;  // the steps of a block in the path's sums; 0: the path has no blocks
  std::array<std::array<OfRows, kMostRows>, 3> table{};
};

// Finds the entries of a table that are used. fetches(pass, passes, which): whether a pass may use that amount of
// prefetching. Most entries are unused, and their kernels would take two thirds of the compile time. Considering up to
// 64 rows suffices: with more groups, their sizes only get closer to the rows of the shape, and later passes prefetch
// like earlier ones.
template <typename Path, typename Table, typename F>
consteval auto reached(F fetches) {
  std::array<std::array<std::array<bool, Table::kFetches>, kMostRows>, Path::kShapes.size()> fetched{};
  for (int64_t rows = 1; rows <= 64; ++rows) {
    const Walk walk(Path::kShapes, Path::kShapes.size(), rows);
    walk.for_each_pass([&](int64_t pass, int64_t, int64_t, int64_t count) {
      for (int which = 0; which < Table::kFetches; ++which)
        if (fetches(pass, walk.passes(), which)) fetched[walk.shape][count - 1][which] = true;
    });
  }
  return fetched;
}

// Fills a table. kernel.operator()<vecs, rows, which>() returns the kernel of an entry.
template <typename Path, typename Table, auto kReached, typename F>
Table kernel_table(F kernel) {
  constexpr int kNumShapes = Path::kShapes.size();
  Table all;
  all.num_shapes = kNumShapes;
  const auto add_rows = [&]<int s, int r, int... which>(std::integer_sequence<int, which...>) {
    const auto add = [&]<int i>() {
      if constexpr (kReached[s][r][i])
        all.table[s][r][i] = kernel.template operator()<Path::kShapes[s].vecs, r + 1, i>();
    };
    (add.template operator()<which>(), ...);
  };
  const auto add_shape = [&]<int s, int... r>(std::integer_sequence<int, r...>) {
    all.shapes[s] = Path::kShapes[s];
    (add_rows.template operator()<s, r>(std::make_integer_sequence<int, Table::kFetches>{}), ...);
  };
  const auto add_shapes = [&]<int... s>(std::integer_sequence<int, s...>) {
    (add_shape.template operator()<s>(std::make_integer_sequence<int, Path::kShapes[s].rows>{}), ...);
  };
  add_shapes(std::make_integer_sequence<int, kNumShapes>{});
  return all;
}

using Kernels = KernelTable<Kernel, 4>;
constexpr std::array<int, 4> kLines{0, 1, 2, 4};  // cache lines per step

// The cache lines per step that the first passes over a panel, or a part of it, prefetch of the next one. A single pass
// prefetches its own stream.
constexpr int64_t lines_fetched(int64_t passes) { return passes >= 4 ? 1 : passes >= 2 ? 2 : 4; }

// The index in kLines of the amount that a pass prefetches.
constexpr int fetch_of(int64_t pass, int64_t passes) {
  const int64_t lines = lines_fetched(passes);
  return pass * lines >= 4 ? 0 : lines == 4 ? 3 : static_cast<int>(lines);
}

template <typename Path>
Kernels kernels_of() {
  constexpr auto kReached =
      reached<Path, Kernels>([](int64_t pass, int64_t passes, int which) { return which == fetch_of(pass, passes); });
  Kernels all = kernel_table<Path, Kernels, kReached>(
      []<int v, int r, int which>() { return rows_times_panel<Path, v, r, kLines[which]>; });
  all.block_steps = Path::block_steps();
  return all;
}

}  // namespace fastformer
