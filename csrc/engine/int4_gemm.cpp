#include "engine/int4_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/buffer.h"
#include "common/gemm.h"
#include "engine/int4_kernels.h"
#include "engine/tiles.h"

namespace fastformer {
namespace {

constexpr int64_t kHalf = kInt4Group / 2;

template <typename Dot, typename Multiply>
const GroupedKernels& grouped_kernels() {
  static const GroupedKernels kernels = has_int8_dot() ? grouped_kernels_of<Dot>() : grouped_kernels_of<Multiply>();
  return kernels;
}

bool are_small(const int8_t* levels) {
  return std::all_of(levels, levels + std::tuple_size_v<Levels>,
                     [](int level) { return std::abs(level) <= MultiplySmallLevels::kMost; });
}

const GroupedKernels& grouped_kernels(const int8_t* levels) {
  if (levels == nullptr) return grouped_kernels<DotInt4, MultiplyInt4>();
  if (are_small(levels)) return grouped_kernels<DotLevels, MultiplySmallLevels>();
  return grouped_kernels<DotLevels, MultiplyLevels>();
}

// Returns the byte with the bits of input i of a column in a group.
char& nibble_place(char* group, int64_t lane, int64_t i) {
  const int64_t step = i / 4;
  return group[step / 2 * kStepBytes + lane * 4 + i % 4];
}

void pack_column(const Int4Matrix& w, int64_t column, char* panel, int64_t group_bytes, GroupedTail& tail,
                 int64_t lane) {
  const int64_t groups = int4_groups(w.k);
  const uint8_t* from = w.nibbles + column * groups * kHalf;
  const float* scales = w.scales + column * groups;
  const uint8_t* zeros = w.zeros ? w.zeros + column * groups : nullptr;
  float largest = 0;
  bool is_finite = true;
  for (int64_t g = 0; g < groups; ++g) {
    largest = std::max(largest, std::abs(scales[g]));
    is_finite = is_finite && std::isfinite(scales[g]);
  }
  int exponent = 0;
  if (is_finite) std::frexp(largest, &exponent);
  // The largest becomes at least 2^14, which leaves most of fp16's range to the others.
  exponent = largest > 0 ? 15 - exponent : 0;
  double sum = 0;
  for (int64_t g = 0; g < groups; ++g, panel += group_bytes) {
    const float scale = is_finite ? std::ldexp(scales[g], exponent) : 0;
    const int32_t zero = zeros ? zeros[g] : 8;
    int32_t whole = 0;
    for (int64_t i = 0; i < std::min(kInt4Group, w.k - g * kInt4Group); ++i) {
      const int32_t q = from[g * kHalf + i / 2] >> (i % 2 * 4) & 15;
      nibble_place(panel, lane, i) |= static_cast<char>((w.levels ? q : q ^ 8) << (i / 4 % 2 * 4));
      whole += w.levels ? w.levels[q] : q - zero;
    }
    const uint16_t half = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(panel + kNibbleBytes + lane * 2, &half, 2);
    if (zeros) panel[kNibbleBytes + kScaleBytes + lane] = static_cast<char>(zero - 8);
    sum += static_cast<double>(_cvtsh_ss(half)) * whole;
  }
  tail.scale[lane] = is_finite ? std::ldexp(1.f, -exponent) : std::numeric_limits<float>::quiet_NaN();
  tail.correction[lane] = static_cast<float>(-sum);
}

// The sums of some groups of a block: four tiles of 16 rows and all columns, or of 32 rows and half of them.
struct GroupSums {
  static constexpr int64_t kGroups = 2, kTiles = 4;  // of two blocks and their totals, all stay in L1
  alignas(64) int32_t sums[kGroups * kTiles * kTileSums];
  int64_t groups = 0;   // 0: nothing is left to do
  bool is_first, ends;  // the first groups of the tiles; the last ones of the whole block
  int64_t rows;         // of the block: 1 to 32
  const float* scales;  // (groups, 64), from the first column of the tiles on
  float* totals;        // (4, 16, 16): the sums over groups
  const GroupedTail* tail;
  const float* left_scale;
  const int32_t* left_zero;
  float* out;  // the first row and column of the block
  int64_t ld;
};

// Writes the results of a block. totals: those of its 4 or 8 tiles.
void finish_block(const GroupSums& of, const float* totals) {
  const bool is_wide = of.rows > kTileRows;
  for (int64_t r = 0; r < of.rows; ++r) {
    const float* row = totals + r / kTileRows * 2 * kTileSums + r % kTileRows * kTileColumns;
    for (int64_t c = 0; c < kPanelColumns; c += V::size) {
      const int64_t tile = c / kTileColumns, at = is_wide ? tile / 2 * 4 + tile % 2 : tile;
      const V total = V::load(row + at * kTileSums + c % kTileColumns);
      finish_groups(total, 1, *of.tail, c, of.left_scale[r], of.left_zero[r]).store(of.out + r * of.ld + c);
    }
  }
}

// Adds the scaled sums of the tiles [begin, end) to their totals, and finishes the block after the last one.
void add_groups(const void* what, int64_t begin, int64_t end) {
  const GroupSums& of = *static_cast<const GroupSums*>(what);
  const int64_t groups = of.groups;
  for (int64_t tile = begin; tile < end; ++tile)
    for (int64_t c = 0; c < kTileColumns; c += V::size) {
      float* const totals = of.totals + tile * kTileSums + c;
      const int32_t* sums = of.sums + tile * kTileSums + c;
      const bool is_half = of.rows > kTileRows;
      const float* scales = of.scales + (is_half ? tile % 2 : tile) * kTileColumns + c;
      V total[kTileRows];
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) total[r] = of.is_first ? V(0.f) : V::load(totals + r * kTileColumns);
      for (int64_t g = 0; g < groups; ++g, sums += GroupSums::kTiles * kTileSums, scales += kPanelColumns) {
        const V scale = V::load(scales);
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r)
          total[r] = fmadd(to_floats(load_lanes(sums + r * kTileColumns)), scale, total[r]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) total[r].store(totals + r * kTileColumns);
    }
  if (of.ends && end == GroupSums::kTiles)
    finish_block(of, of.totals - (of.rows > kTileRows ? GroupSums::kTiles * kTileSums : 0));
}

// A panel as bytes, and its scales (groups, 64).
struct UnpackedPanel {
  Buffer<char> bytes;
  Buffer<float> scales;
  int64_t half_bytes;

  explicit UnpackedPanel(int64_t groups)
      : bytes(groups * 2 * kHalfBytes), scales(groups * kPanelColumns), half_bytes(groups * kHalfBytes) {}

  // The tile of a column and a group.
  char* tile(int64_t column, int64_t g) {
    const int64_t tile = column / kTileColumns;
    return bytes.data() + tile / 2 * half_bytes + g * kHalfBytes + tile % 2 * kTileBytes;
  }
};

// Fetches the places of results that a product will write: the rows of a block are far apart, and each would wait.
void prefetch_results(const float* out, int64_t ld, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += 16)
      _mm_prefetch(reinterpret_cast<const char*>(out + r * ld + c), _MM_HINT_T1);
}

// Returns a mask of the first `count` of each 4 bytes.
Lanes first_bytes(int64_t count) { return broadcast(count >= 4 ? ~0u : count <= 0 ? 0 : (1u << 8 * count) - 1); }

const int8_t* levels_of(const PackedWeight& w) { return w.levels ? w.levels->data() : nullptr; }

// Whether the levels of a weight are too large for products of bytes that are added in 16 bits.
bool has_large_levels(const PackedWeight& w) { return w.levels && !has_int8_dot() && !are_small(w.levels->data()); }

// Unpacks the groups of a panel. Zero points are subtracted from the weights, which still fit in bytes.
template <bool kHasZeros>
void unpack_panel(const PackedWeight& w, const char* group, UnpackedPanel& to) {
  const Lanes first_of_four = sixteen_bytes(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  const Lanes table = table_of(levels_of(w));
  float* scales = to.scales.data();
  for (int64_t g = 0; g < int4_groups(w.k); ++g, group += int4_group_bytes(kHasZeros), scales += kPanelColumns) {
    const int64_t inputs = w.k - g * kInt4Group;  // what is beyond them stays 0
    for (int64_t c = 0; c < kPanelColumns; c += V::size) {
      load_halves(group + kNibbleBytes + c * 2).store(scales + c);
      Lanes zeros = broadcast(0);
      if (kHasZeros) zeros = look_up(widen_bytes(group + kNibbleBytes + kScaleBytes + c), first_of_four);
      auto* at = reinterpret_cast<float*>(to.tile(c, g) + c % kTileColumns * 4);
      for (int64_t block = 0; block < kGroupBlocks; ++block, at += 2 * kTileColumns) {
        StepPair pair = look_up_nibbles(table, load_lanes(group + block * kStepBytes + c * 4));
        if (kHasZeros) {
          pair.low = subtract_bytes(pair.low, zeros & first_bytes(inputs - block * 8));
          pair.high = subtract_bytes(pair.high, zeros & first_bytes(inputs - block * 8 - 4));
        }
        as_floats(pair.low).store(at);
        as_floats(pair.high).store(at + kTileColumns);
      }
    }
  }
}

void unpack_panel(const PackedWeight& w, const char* group, UnpackedPanel& to) {
  (w.has_zeros ? unpack_panel<true> : unpack_panel<false>)(w, group, to);
}

// From this many rows on, faster products of bytes outweigh the cost of unpacking: those of AMX, and dot products, with
// which 24 rows took 1.08 times as long, 64 rows 0.90 times and 256 rows 0.84 times (Emerald Rapids, AVX-512).
constexpr int64_t kFewestOfDots = 32;
#if defined(CPU_CAPABILITY_AVX512)
// Without dot products, no number of rows was measured.
int64_t fewest_unpacked(const PackedWeight&) {
  return has_int8_dot() ? kFewestOfDots : std::numeric_limits<int64_t>::max();
}

const UnpackedKernels& unpacked_kernels(const PackedWeight&) {
  static const auto of_dots = unpacked_kernels_of<DotBytes, kFewestOfDots>();
  return of_dots;
}
#else
// Without dot products, each pass has fewer rows: 8 rows of bytes took 1.08 times as long, 10 rows 0.96 times and 512
// rows 0.8 times; 4 rows of words 1.02 times, 6 rows 0.92 times and 512 rows 0.74 times (Zen 3, AVX2).
constexpr int64_t kFewestOfBytes = 10, kFewestOfWords = 5;

int64_t fewest_unpacked(const PackedWeight& w) {
  return has_int8_dot() ? kFewestOfDots : has_large_levels(w) ? kFewestOfWords : kFewestOfBytes;
}

const UnpackedKernels& unpacked_kernels(const PackedWeight& w) {
  if (has_int8_dot()) {
    static const auto of_dots = unpacked_kernels_of<DotBytes, kFewestOfDots>();
    return of_dots;
  }
  static const auto of_bytes = unpacked_kernels_of<MultiplyBytes, kFewestOfBytes>();
  static const auto of_words = unpacked_kernels_of<MultiplyWords, kFewestOfWords>();
  return has_large_levels(w) ? of_words : of_bytes;
}
#endif

// Multiplies by AMX, group by group, on panels unpacked to bytes. All else is as in the kernels. The sums of some
// groups are scaled while the next ones are multiplied.
void gemm_by_tiles(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
                   int64_t ld) {
  alignas(64) float totals[kMostTiledRows * kPanelColumns];
  GroupSums both[2];
  GroupSums *next = both, *last = both + 1;
  const Tiles tiles(Precision::int8, 2 * kGroupBlocks);
  const int64_t groups = int4_groups(w.k);
  UnpackedPanel panel(groups);
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns) {
    unpack_panel(w, w.panel(p), panel);
    const auto* tail = reinterpret_cast<const GroupedTail*>(w.panel(p) + groups * int4_group_bytes(w.has_zeros));
    for (int64_t first = 0; first < rows; first += kMostTiledRows) {
      const int64_t count = std::min(kMostTiledRows, rows - first);
      const int64_t columns = count > kTileRows ? kPanelColumns / 2 : kPanelColumns;
      for (int64_t column = 0; column < kPanelColumns; column += columns)
        for (int64_t g = 0; g < groups; g += GroupSums::kGroups) {
          next->groups = std::min(GroupSums::kGroups, groups - g);
          next->is_first = g == 0;
          next->ends = g + next->groups == groups && column + columns == kPanelColumns;
          next->rows = count;
          next->scales = panel.scales.data() + g * kPanelColumns + column;
          next->totals = totals + column * kMostTiledRows;
          next->tail = tail;
          next->left_scale = x.scales() + first;
          next->left_zero = x.zeros() + first;
          next->out = out + first * ld;
          next->ld = ld;
          const int64_t row = count * g / groups, next_row = count * (g + next->groups) / groups;
          prefetch_results(next->out + row * ld + column, ld, next_row - row, columns);
          Meanwhile scaling(add_groups, last, last->groups > 0 ? GroupSums::kTiles : 0);
          const char* left = x.data() + first * x.stride() + g * kGroupBytes;
          tiles.multiply_apart(round_up(count, kTileRows), left, x.stride(), panel.tile(column, g), panel.half_bytes,
                               next->groups, next->sums, scaling);
          std::swap(next, last);
        }
    }
    add_groups(last, 0, GroupSums::kTiles);  // the next panel gets other scales
    last->groups = 0;
  }
}

// The rows of activations as kernels of unpacked panels read them: bytes or, for large levels, words.
struct LeftRows {
  const char* data;
  int64_t stride;
  Buffer<char> words;

  LeftRows(const RowsView& x, int64_t rows, const PackedWeight& w) : data(x.data()), stride(x.stride()) {
    if (!has_large_levels(w)) return;
    stride = 2 * stride | 64;  // an odd number of cache lines: see PackedRows::resize
    words = Buffer<char>(rows * stride);
    data = words.data();
    for (int64_t r = 0; r < rows; ++r)
      widen_row(reinterpret_cast<const uint32_t*>(x.from(r).data()), w.k / 4,
                reinterpret_cast<uint32_t*>(words.data() + r * stride));
  }
};

// Multiplies on panels unpacked to bytes. The passes over one together prefetch the next.
void gemm_by_bytes(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
                   int64_t ld) {
  const UnpackedKernels& all = unpacked_kernels(w);
  const LeftRows left(x, rows, w);
  const Walk walk(all.shapes, all.num_shapes, rows);
  const int64_t columns = all.shapes[walk.shape].vecs * V::size;
  const int64_t groups = int4_groups(w.k), group_bytes = int4_group_bytes(w.has_zeros);
  const int64_t all_lines = (group_bytes + 63) / 64, lines = (all_lines + walk.passes() - 1) / walk.passes();
  UnpackedPanel panel(groups);
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns) {
    unpack_panel(w, w.panel(p), panel);
    const auto* tail = reinterpret_cast<const GroupedTail*>(w.panel(p) + groups * group_bytes);
    const char* next = w.panel(p) + w.panel_bytes();
    walk.for_each_pass([&](int64_t pass, int64_t slice, int64_t first, int64_t count) {
      const int64_t column = slice * columns;
      const UnpackedTile tile{left.data + first * left.stride,
                              left.stride,
                              x.scales() + first,
                              x.zeros() + first,
                              panel.tile(column, 0),
                              panel.scales.data() + column,
                              groups,
                              tail,
                              column,
                              next + pass * lines * groups * 64,
                              pass * lines < all_lines ? lines : 0,
                              out + first * ld,
                              ld};
      all.table[walk.shape][count - 1][0](tile);
    });
  }
}

}  // namespace

int64_t int4_group_bytes(bool has_zeros) { return kNibbleBytes + kScaleBytes + (has_zeros ? kPanelColumns : 0); }

int64_t int4_panel_bytes(int64_t k, bool has_zeros) {
  return int4_groups(k) * int4_group_bytes(has_zeros) + static_cast<int64_t>(sizeof(GroupedTail));
}

void pack_int4(const Int4Matrix& w, const float* bias, char* panels) {
  grouped_kernels(w.levels);  // an invalid FASTFORMER_CPU_FEATURES throws here and not in a product
  const int64_t panel_bytes = int4_panel_bytes(w.k, w.zeros != nullptr);
  for (int64_t column = 0; column < w.n; ++column) {
    char* panel = panels + column / kPanelColumns * panel_bytes;
    auto& tail = *reinterpret_cast<GroupedTail*>(panel + panel_bytes - sizeof(GroupedTail));
    const int64_t lane = column % kPanelColumns;
    pack_column(w, column, panel, int4_group_bytes(w.zeros != nullptr), tail, lane);
    if (bias != nullptr) tail.bias[lane] = bias[column];
  }
}

void copy_int4_column(int64_t k, bool has_zeros, const char* from_panel, int64_t from, char* to_panel, int64_t to) {
  int64_t at = 0;
  const auto copy = [&](int64_t blocks, int64_t bytes) {
    for (; blocks > 0; --blocks, at += bytes * kPanelColumns)
      std::memcpy(to_panel + at + to * bytes, from_panel + at + from * bytes, static_cast<size_t>(bytes));
  };
  for (int64_t g = 0; g < int4_groups(k); ++g) {
    copy(kGroupBlocks, 4);
    copy(1, 2);
    if (has_zeros) copy(1, 1);
  }
  copy(sizeof(GroupedTail) / (4 * kPanelColumns), 4);
}

void gemm_int4(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
               int64_t ld) {
  if (w.k > 0 && rows >= kFewestOfDots && can_tile(Precision::int8))
    return gemm_by_tiles(x, rows, w, begin, end, out, ld);
  if (w.k > 0 && rows >= fewest_unpacked(w)) return gemm_by_bytes(x, rows, w, begin, end, out, ld);
  constexpr int64_t kAhead = 8192;  // bytes that a stream prefetches
  const GroupedKernels& all = grouped_kernels(levels_of(w));
  const Walk walk(all.shapes, all.num_shapes, rows);
  const int vecs = all.shapes[walk.shape].vecs;
  const int64_t passes = walk.passes();
  const int64_t groups = int4_groups(w.k), group_bytes = int4_group_bytes(w.has_zeros);
  // A single pass prefetches its own stream. If there are several passes, the first ones prefetch the whole next panel.
  const int64_t lines = kGroupLines[passes == 1 ? 2 : 1], fetched = groups * kGroupBlocks * lines * 64;
  const int64_t distance = passes == 1 ? kAhead : w.panel_bytes();
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns) {
    const char *panel = w.panel(p), *next = panel + distance;
    const auto* tail = reinterpret_cast<const GroupedTail*>(panel + groups * group_bytes);
    walk.for_each_pass([&](int64_t pass, int64_t slice, int64_t first, int64_t count) {
      const int which = passes == 1 ? 2 : pass * fetched < w.panel_bytes() ? 1 : 0;
      const GroupedTile tile{x.data() + first * x.stride(),
                             x.stride(),
                             x.scales() + first,
                             x.zeros() + first,
                             x.sums() + first,
                             x.rows(),
                             panel,
                             groups,
                             group_bytes,
                             tail,
                             levels_of(w),
                             slice * vecs * V::size,
                             next + pass * fetched,
                             out + first * ld,
                             ld};
      all.table[walk.shape][count - 1][which](tile);
    });
  }
}

}  // namespace fastformer
