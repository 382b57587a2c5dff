#include "engine/int4_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/gemm.h"
#include "engine/int4_kernels.h"
#include "engine/tiles.h"

namespace fastformer {
namespace {

constexpr int64_t kHalf = kInt4Group / 2;

const GroupedKernels& grouped_kernels() {
  static const GroupedKernels kernels =
      has_int8_dot() ? grouped_kernels_of<DotInt4>() : grouped_kernels_of<MultiplyInt4>();
  return kernels;
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
      nibble_place(panel, lane, i) |= static_cast<char>((q ^ 8) << (i / 4 % 2 * 4));
      whole += q - zero;
    }
    const uint16_t half = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(panel + kNibbleBytes + lane * 2, &half, 2);
    if (zeros) panel[kNibbleBytes + kScaleBytes + lane] = static_cast<char>(zero - 8);
    sum += static_cast<double>(_cvtsh_ss(half)) * whole;
  }
  tail.scale[lane] = is_finite ? std::ldexp(1.f, -exponent) : std::numeric_limits<float>::quiet_NaN();
  tail.correction[lane] = static_cast<float>(-sum);
}

// From this many rows on, AMX outweighs the cost of unpacking and of calls for single groups.
constexpr int64_t kFewestForAmx = 32;

// Multiplies by AMX, group by group, on weights unpacked to bytes. All else is as in the kernels.
void gemm_by_tiles(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
                   int64_t ld) {
  alignas(64) int32_t sums[kMostTiledRows * kPanelColumns];
  alignas(64) char bytes[2 * kNibbleBytes];
  const Tiles tiles(Precision::int8, 2 * kGroupBlocks);
  const int64_t groups = int4_groups(w.k), group_bytes = int4_group_bytes(w.has_zeros);
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns) {
    const char* group = w.panel(p);
    const auto& tail = *reinterpret_cast<const GroupedTail*>(group + groups * group_bytes);
    for (int64_t g = 0; g < groups; ++g, group += group_bytes) {
      for (int64_t at = 0; at < kNibbleBytes; at += sizeof(V)) {
        const StepPair pair = signed_nibbles(load_lanes(group + at));
        char* to = bytes + at / kStepBytes * 2 * kStepBytes + at % kStepBytes;
        as_floats(pair.low).store(reinterpret_cast<float*>(to));
        as_floats(pair.high).store(reinterpret_cast<float*>(to + kStepBytes));
      }
      for (int64_t first = 0; first < rows; first += kMostTiledRows) {
        const int64_t count = std::min(kMostTiledRows, rows - first);
        tiles.multiply(round_up(count, kTileRows), x.data() + first * x.stride() + g * kGroupBytes, x.stride(), bytes,
                       2 * kGroupBlocks, sums);
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = 0; c < kPanelColumns; c += V::size) {
            Lanes sum = load_lanes(sums + r * kPanelColumns + c);
            if (w.has_zeros)
              sum = add_words(sum, multiply_pairs(widen_bytes(group + kNibbleBytes + kScaleBytes + c),
                                                  broadcast(x.sums()[g * x.rows() + first + r])));
            float* to = out + (first + r) * ld + c;
            fmadd(to_floats(sum), load_halves(group + kNibbleBytes + c * 2), g == 0 ? V(0.f) : V::load(to)).store(to);
          }
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < kPanelColumns; c += V::size) {
        float* to = out + r * ld + c;
        finish_groups(V::load(to), 1, tail, c, x.scales()[r], x.zeros()[r]).store(to);
      }
  }
}

}  // namespace

int64_t int4_group_bytes(bool has_zeros) { return kNibbleBytes + kScaleBytes + (has_zeros ? kPanelColumns : 0); }

int64_t int4_panel_bytes(int64_t k, bool has_zeros) {
  return int4_groups(k) * int4_group_bytes(has_zeros) + static_cast<int64_t>(sizeof(GroupedTail));
}

void pack_int4(const Int4Matrix& w, const float* bias, char* panels) {
  grouped_kernels();  // an invalid FASTFORMER_CPU_FEATURES throws here and not in a product
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
  if (w.k > 0 && rows >= kFewestForAmx && can_tile(Precision::int8))
    return gemm_by_tiles(x, rows, w, begin, end, out, ld);
  constexpr int64_t kAhead = 8192;  // bytes that a stream prefetches
  const GroupedKernels& all = grouped_kernels();
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
                             slice * vecs * V::size,
                             next + pass * fetched,
                             out + first * ld,
                             ld};
      all.table[walk.shape][count - 1][which](tile);
    });
  }
}

}  // namespace fastformer
