// Packing of weights, storing of rows, and the loops over panels for packed_gemm.h.

#include "engine/packed_gemm.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/cpu_features.h"
#include "common/gemm.h"
#include "common/helpers.h"
#include "engine/int4_gemm.h"
#include "engine/packed_kernels.h"
#include "engine/panel_memory.h"
#include "engine/tiles.h"

namespace fastformer {
namespace {

constexpr int64_t kAhead = 8192;      // bytes that a stream prefetches: the best of 2 KiB to 128 KiB on Zen 5
constexpr int64_t kPartSteps = 128;   // steps of a part of a panel: 32 KiB, which stay in L1 for all rows
constexpr int64_t kBlockRows = 64;    // rows that a panel meets at once: its parts stay in L1
constexpr int64_t kMostInt8 = 66311;  // k * 255 * 127 < 2^31

// The number of consecutive elements of k in 4 bytes of a row.
int64_t group(Precision precision) { return precision == Precision::fp32 ? 1 : precision == Precision::bf16 ? 2 : 4; }

// A child that was forked while a thread allocated has an instance of its own: the lock of the other stays locked.
std::shared_ptr<char> allocate_panels(int64_t bytes) { return of_process<PanelMemory>().allocate(bytes); }

// The quantisation to 8 or 16 bits: whole = round(x * inverse), x ~ whole * scale. Scale and inverse are 0 if all x are
// (nearly) 0, because steps / range would overflow. The scale is NaN if any x is not finite.
struct Scale {
  float scale = 0, inverse = 0;

  Scale(float range, float steps, bool is_finite) {
    const float least = steps > 255 ? 0x1p-112f : 0x1p-120f;
    if (!is_finite) scale = std::numeric_limits<float>::quiet_NaN();
    else if (range >= least) scale = range / steps, inverse = steps / range;
  }
};

// Returns the bits of |x|. As integers they have the order of the magnitudes, with infinity and NaN above all others.
uint32_t magnitude_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7FFFFFFF;
}

// Rounds to the nearest integer, ties to even, as the vector conversions do.
int32_t to_whole(float x, const Scale& scale) {
  return scale.inverse == 0 ? 0 : _mm_cvtss_si32(_mm_set_ss(x * scale.inverse));
}

// The smallest and the largest number of a row of x and zero.
struct Range {
  float low, high;
  bool is_finite;
};

Range range_of(const float* x, int64_t k) {
  V high(0.f), minus_low(0.f), poison(0.f);
  for_each_vec<float>(k, [&](int64_t c, int64_t count) {
    const V v = V::load(x + c, count);  // zero beyond the end
    high = max(high, v), minus_low = max(minus_low, V(0.f) - v);
    poison = fmadd(v, V(0.f), poison);  // NaN after a NaN or an infinity
  });
  const float width = high.max() + minus_low.max();
  return {-minus_low.max(), high.max(), poison.sum() == 0 && width < std::numeric_limits<float>::infinity()};
}

// Parts of a row that is stored: round(x) + zero, its high and its low byte, and bytes, to which integers saturate.
#if defined(CPU_CAPABILITY_AVX512)
inline Lanes whole_of(V x, int32_t zero) { return _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(zero)); }
inline Lanes high_bytes(Lanes x) { return _mm512_srai_epi32(x, 8); }
inline Lanes low_bytes(Lanes x) { return _mm512_and_si512(x, _mm512_set1_epi32(255)); }
inline Lanes in_16_bits(Lanes x) {
  return _mm512_min_epi32(_mm512_max_epi32(x, _mm512_setzero_si512()), _mm512_set1_epi32(65535));
}
inline void store_bytes(Lanes x, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(_mm512_max_epi32(x, _mm512_setzero_si512())));
}
#else
inline Lanes whole_of(V x, int32_t zero) { return _mm256_add_epi32(_mm256_cvtps_epi32(x.v), _mm256_set1_epi32(zero)); }
inline Lanes high_bytes(Lanes x) { return _mm256_srai_epi32(x, 8); }
inline Lanes low_bytes(Lanes x) { return _mm256_and_si256(x, _mm256_set1_epi32(255)); }
inline Lanes in_16_bits(Lanes x) {
  return _mm256_min_epi32(_mm256_max_epi32(x, _mm256_setzero_si256()), _mm256_set1_epi32(65535));
}
inline void store_bytes(Lanes x, uint8_t* to) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}
#endif

// Stores minus the sum of each 32 bytes (the last group may have fewer) in the low 16 bits.
void store_sums(const uint8_t* bytes, int64_t k, int32_t* to, int64_t stride) {
  for (int64_t first = 0; first < k; first += kInt4Group, to += stride) {
    uint32_t sum = 0;
    if (first + kInt4Group <= k) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + first));
      const __m256i quarters = _mm256_sad_epu8(x, _mm256_setzero_si256());
      const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
      sum = static_cast<uint32_t>(_mm_extract_epi32(halves, 0) + _mm_extract_epi32(halves, 2));
    } else {
      for (int64_t i = first; i < k; ++i) sum += bytes[i];
    }
    *to = static_cast<int32_t>(-sum & 0xFFFF);
  }
}

// Packs a column. Its 4 bytes of each step are 256 bytes apart, from `to` on, and zero-initialised.
void pack_column(const Matrix& w, int64_t column, Precision precision, char* to, PanelTail& tail, int64_t lane) {
  thread_local std::vector<float> row;  // in fp32 and aligned, so that loops over it are vectorised
  row.resize(static_cast<size_t>(w.k));
  float* const x = row.data();
  if (w.kind == Kind::fp32) std::memcpy(x, w.rows(column, column + 1).data, static_cast<size_t>(w.k) * 4);
  else
    for (int64_t i = 0; i < w.k; ++i) x[i] = w.at(column, i);
  if (precision == Precision::fp32) {
    for (int64_t i = 0; i < w.k; ++i) std::memcpy(to + i * kStepBytes, x + i, 4);
  } else if (precision == Precision::bf16) {
    for (int64_t i = 0; i < w.k; ++i) {
      const bfloat16 narrow(x[i]);
      std::memcpy(to + i / 2 * kStepBytes + i % 2 * 2, &narrow, 2);
    }
  } else {
    uint32_t bits = 0;
    for (int64_t i = 0; i < w.k; ++i) bits = std::max(bits, magnitude_bits(x[i]));
    float largest;
    std::memcpy(&largest, &bits, 4);
    const Scale scale(largest, 127, bits < 0x7F800000);
    int32_t sum = 0;
    for (int64_t step = 0; step < w.k; step += 4) {
      char four[4] = {};
      for (int64_t i = step; i < std::min(w.k, step + 4); ++i) {
        const int32_t whole = to_whole(x[i], scale);
        four[i - step] = static_cast<char>(whole);
        sum += whole;
      }
      std::memcpy(to + step / 4 * kStepBytes, four, 4);
    }
    tail.scale[lane] = scale.scale;
    tail.correction[lane] = -sum;
  }
}

const Kernels& kernels(Precision precision) {
  static const Kernels fp32 = kernels_of<Fma>();
  static const Kernels bf16 = [] {
#if defined(CPU_CAPABILITY_AVX512)
    if (has_bf16_dot()) return kernels_of<DotBf16>();
#endif
    return kernels_of<WidenedBf16>();
  }();
  static const Kernels int8 = has_int8_dot() ? kernels_of<DotInt8>() : kernels_of<MultiplyInt8>();
  return precision == Precision::fp32 ? fp32 : precision == Precision::bf16 ? bf16 : int8;
}

// A tile takes as long for a few rows as for 16, so AMX doesn't pay off for fewer rows of int8 (Sapphire Rapids: 8 rows
// took 1.1 times as long with it, 10 rows 1.08 times, 12 rows as long, 15 rows 0.86 times). AMX rounds sums of bf16 in
// a different order, so bf16 uses AMX for any number of rows; even a single row is multiplied faster than the weight
// can be read.
constexpr int64_t kFewestForAmx = 12;

bool takes_tiles(Precision precision, int64_t rows) {
  return (precision == Precision::bf16 || (precision == Precision::int8 && rows >= kFewestForAmx)) &&
         can_tile(precision);
}

// The sums of a product of tiles.
struct TileSums {
  alignas(64) int32_t sums[kMostTiledRows * kPanelColumns];
  Tile tile{};
  int64_t rows = 0;
};

// Scales the sums of some rows, or adds them to those of the parts before them.
template <typename Path>
void finish_tiles(const void* what, int64_t begin, int64_t end) {
  const TileSums& of = *static_cast<const TileSums*>(what);
  const Tile t = of.tile;  // a local copy: no store can change it
  const int32_t* sums = of.sums + begin * kPanelColumns;
  for (int64_t r = begin; r < end; ++r, sums += kPanelColumns)
#pragma GCC unroll 8
    for (int64_t c = 0; c < kPanelColumns; c += V::size) {
      const Lanes sum = load_lanes(sums + c);
      float* to = t.out + r * t.ld + c;
      if constexpr (std::is_same_v<Path, DotInt8>) Path::finish(sum, t, c, static_cast<int>(r), to, t.part).store(to);
      else Path::finish(as_floats(sum), t, c, static_cast<int>(r), to, t.part).store(to);
    }
}

// Sums of bf16 are formed in blocks of steps, as in the other kernels, and added here. Integer sums are exact in any
// order. Few rows are multiplied faster than the weight is read. So the sums of each of their products are finished
// during the next one, and reading doesn't pause.
template <typename Path>
void gemm_by_tiles(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
                   int64_t ld) {
  TileSums both[2];
  TileSums *next = both, *last = both + 1;
  const bool finishes_later = rows <= kMostTiledRows;
  const Tiles tiles(w.precision);
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns) {
    const char* panel = w.panel(p);
    const auto* tail = reinterpret_cast<const PanelTail*>(panel + w.steps() * kStepBytes);
    for (int64_t step = 0, steps; step < w.steps(); step += steps) {
      steps = std::min(w.steps() - step, Path::block_steps());
      const Block block{step == 0, step + steps == w.steps()};
      const char* right = panel + step * kStepBytes;
      for (int64_t first = 0; first < rows; first += kMostTiledRows) {
        next->rows = std::min(kMostTiledRows, rows - first);
        const char* left = x.data() + first * x.stride() + step * 4;
        const float* scales = x.scales() + first;
        float* to = out + first * ld;
        next->tile = {left, x.stride(), scales, x.zeros() + first, right, steps, tail, 0, nullptr, to, ld, block};
        tiles.multiply(round_up(next->rows, kTileRows), left, x.stride(), right, steps, next->sums,
                       {finish_tiles<Path>, last, last->rows});
        if (finishes_later) std::swap(next, last);
        else finish_tiles<Path>(next, 0, next->rows);
      }
    }
  }
  finish_tiles<Path>(last, 0, last->rows);
}

// Rows of activations as multiply_panel reads them: see Tile.
struct LeftRows {
  const char* data;
  int64_t stride;
  const float* scales;
  const int32_t* zeros;

  LeftRows from(int64_t row) const { return {data + row * stride, stride, scales + row, zeros + row}; }
};

// Widens steps of a panel to twice as many.
using Widen = void (*)(const char* from, int64_t steps, char* to);

// A panel, or its first columns.
struct PanelView {
  const char* steps;
  const PanelTail* tail;
  int64_t num_steps, panel_bytes;  // panel_bytes: from one panel to the next
  int64_t tail_bytes;              // that follow the steps
  int64_t columns = kPanelColumns;

  PanelView(const PackedWeight& w, int64_t panel)
      : steps(w.panel(panel)),
        tail(reinterpret_cast<const PanelTail*>(steps + w.steps() * kStepBytes)),
        num_steps(w.steps()),
        panel_bytes(w.panel_bytes()),
        tail_bytes(panel_bytes - num_steps * kStepBytes) {}
  PanelView(const BytePanels& w, int64_t panel)
      : steps(w.steps + panel * w.panel_bytes),
        tail(reinterpret_cast<const PanelTail*>(w.tail + panel * w.tail_bytes)),
        num_steps(w.num_steps),
        panel_bytes(w.panel_bytes),
        tail_bytes(0),
        columns(std::min(kPanelColumns, w.columns - panel * kPanelColumns)) {}
};

// Multiplies at most kBlockRows rows by a panel. With `widen`, the kernels read widened steps: those of a part at a
// time, or of the whole panel if sums are integers, in `widened`.
void multiply_panel(const Kernels& all, const LeftRows& x, int64_t rows, const PanelView& panel, float* out, int64_t ld,
                    Widen widen = nullptr, char* widened = nullptr) {
  const Walk walk(all.shapes, all.num_shapes, rows);
  const int vecs = all.shapes[walk.shape].vecs;
  const int64_t passes = walk.passes();
  const int64_t steps_of_one = widen == nullptr ? 1 : 2, all_steps = panel.num_steps * steps_of_one;
  // An integer sum is a single block and has one part.
  const bool has_parts = (passes > 1 || widen != nullptr) && all.block_steps <= kPartSteps;
  const int64_t part = has_parts ? kPartSteps : all_steps;
  const int64_t distance = passes == 1 ? kAhead : has_parts ? 2 * kPartSteps * kStepBytes : panel.panel_bytes;
  const char* next = panel.steps + distance;
  // Prefetch the tail, because the passes over a panel prefetch only as many bytes as the steps have.
  for (const char* line = next - panel.tail_bytes; line < next; line += 64) _mm_prefetch(line, _MM_HINT_T0);
  int64_t step = 0, steps;
  do {
    steps = std::min(part, all_steps - step);
    const int64_t at = step / steps_of_one * kStepBytes;
    const int64_t fetched = steps * 64 * lines_fetched(passes);  // bytes, in one pass
    const Block block{step == 0, step + steps == all_steps};
    const char* right = panel.steps + at;
    if (widen != nullptr) {
      widen(right, steps / 2, widened);
      right = widened;
    }
    walk.for_each_pass([&](int64_t pass, int64_t slice, int64_t first, int64_t count) {
      const int64_t column = slice * vecs * V::size;
      if (column >= panel.columns) return;
      const Tile tile{x.data + first * x.stride + step * 4,
                      x.stride,
                      x.scales + first,
                      x.zeros + first,
                      right + column * 4,
                      steps,
                      panel.tail,
                      column,
                      next + at + pass * fetched,
                      out + first * ld,
                      ld,
                      block};
      all.table[walk.shape][count - 1][fetch_of(pass, passes)](tile);
    });
    step += steps;
  } while (step < all_steps);
}

// From this many rows on, widening rows and panels once is faster than widening them in each kernel. On Emerald Rapids
// (AVX-512, without its dot products), 12 rows of bf16 took 1.06 times as long, 16 rows 0.95 times, 256 rows 0.76
// times; 16 rows of int8 took 0.72 times as long, 256 rows 0.65 times.
constexpr int64_t kFewestWidened = 16;

// How 4 bytes of a row or a column become twice 4 bytes: bf16 becomes floats, and int8 becomes words of 16 bits, first
// bytes 0 and 2, then 1 and 3. The order within a step doesn't matter to sums of integers.
struct Bf16ToFloats {
  static const Kernels& kernels() { return fastformer::kernels(Precision::fp32); }
  static void widen_row(const uint32_t* from, int64_t steps, uint32_t* to) {
    for (int64_t i = 0; i < steps; ++i) to[2 * i] = from[i] << 16, to[2 * i + 1] = from[i] & 0xFFFF0000;
  }
  static void widen_step(const uint32_t* from, uint32_t* first, uint32_t* second) {
    for (int64_t c = 0; c < kPanelColumns; ++c) first[c] = from[c] << 16, second[c] = from[c] & 0xFFFF0000;
  }
};

struct Int8ToWords {
  static const Kernels& kernels() {
    static const Kernels all = kernels_of<WordInt8>();
    return all;
  }
  static void widen_row(const uint32_t* from, int64_t steps, uint32_t* to) { fastformer::widen_row(from, steps, to); }
  static void widen_step(const uint32_t* from, uint32_t* first, uint32_t* second) {
    const auto* words = reinterpret_cast<const int16_t*>(from);
    auto *low = reinterpret_cast<int16_t*>(first), *high = reinterpret_cast<int16_t*>(second);
    for (int64_t i = 0; i < 2 * kPanelColumns; ++i)
      low[i] = static_cast<int8_t>(words[i]), high[i] = static_cast<int16_t>(words[i] >> 8);
  }
};

template <typename Way>
void widen_steps(const char* from, int64_t steps, char* to) {
  for (int64_t step = 0; step < steps; ++step, from += kStepBytes, to += 2 * kStepBytes)
    Way::widen_step(reinterpret_cast<const uint32_t*>(from), reinterpret_cast<uint32_t*>(to),
                    reinterpret_cast<uint32_t*>(to + kStepBytes));
}

// Multiplies bf16 or int8 without dot products.
template <typename Way>
void gemm_widened(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
                  int64_t ld) {
  const Kernels& all = Way::kernels();
  const int64_t stride = (w.steps() * 8 + 63) / 64 * 64 | 64;  // an odd number of cache lines: see PackedRows::resize
  Buffer<char> wide(rows * stride),
      widened(std::min(2 * w.steps(), std::max(kPartSteps, all.block_steps)) * kStepBytes);
  for (int64_t r = 0; r < rows; ++r)
    Way::widen_row(reinterpret_cast<const uint32_t*>(x.from(r).data()), w.steps(),
                   reinterpret_cast<uint32_t*>(wide.data() + r * stride));
  const LeftRows left{wide.data(), stride, x.scales(), x.zeros()};
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns)
    for (int64_t first = 0; first < rows; first += kBlockRows)
      multiply_panel(all, left.from(first), std::min(kBlockRows, rows - first), {w, p}, out + first * ld, ld,
                     widen_steps<Way>, widened.data());
}

void multiply(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
              int64_t ld) {
  if (w.precision == Precision::int4) return gemm_int4(x, rows, w, begin, end, out, ld);
  if (w.k > 0 && takes_tiles(w.precision, rows))
    return (w.precision == Precision::int8 ? gemm_by_tiles<DotInt8> : gemm_by_tiles<FloatSums<128>>)(x, rows, w, begin,
                                                                                                     end, out, ld);
  if (rows >= kFewestWidened) {
    if (w.precision == Precision::bf16 && !has_bf16_dot())
      return gemm_widened<Bf16ToFloats>(x, rows, w, begin, end, out, ld);
    if (w.precision == Precision::int8 && !has_int8_dot())
      return gemm_widened<Int8ToWords>(x, rows, w, begin, end, out, ld);
  }
  const LeftRows left{x.data(), x.stride(), x.scales(), x.zeros()};
  for (int64_t p = begin; p < end; ++p, out += kPanelColumns)
    for (int64_t first = 0; first < rows; first += kBlockRows)
      multiply_panel(kernels(w.precision), left.from(first), std::min(kBlockRows, rows - first), {w, p},
                     out + first * ld, ld);
}

// Adds rows 2 * row and 2 * row + 1 of a panel's columns, each of which has the bias, into row.
void add_parts(int64_t rows, const float* bias, float* out, int64_t ld) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < kPanelColumns; c += V::size) {
      const float* parts = out + 2 * row * ld + c;
      (V::load(parts) + (V::load(parts + ld) - V::load(bias + c))).store(out + row * ld + c);
    }
}

// Calls f(begin, end) for parts of n rows of k, of whole panels.
template <typename F>
void for_each_part(int64_t n, int64_t k, const F& f) {
  constexpr int64_t kNumbers = 1 << 18;
  const int64_t step = std::max<int64_t>(1, kNumbers / (std::max<int64_t>(1, k) * kPanelColumns)) * kPanelColumns;
  for (int64_t begin = 0; begin < n; begin += step) f(begin, std::min(n, begin + step));
}

}  // namespace

Precision precision_named(std::string_view name) {
  if (name == "fp32") return Precision::fp32;
  if (name == "bf16") return Precision::bf16;
  if (name == "int8") return Precision::int8;
  if (name == "int4") return Precision::int4;
  throw std::invalid_argument("precision: expected 'fp32', 'bf16', 'int8' or 'int4', got '" + std::string(name) + "'");
}

PackedWeight::PackedWeight(int64_t n, int64_t k, const RowReader<Matrix>& read, const float* bias, Precision precision)
    : n(n), k(k), num_panels(round_up(n, kPanelColumns) / kPanelColumns), precision(precision) {
  if (precision == Precision::int8 && k > kMostInt8)
    throw std::invalid_argument("int8: expected a weight of at most " + std::to_string(kMostInt8) +
                                " inputs, got one of " + std::to_string(k));
  kernels(precision);  // an invalid FASTFORMER_CPU_FEATURES throws here and not in a product
  steps_ = round_up(k, group(precision)) / group(precision);
  const int64_t tail_bytes = precision == Precision::int8 ? sizeof(PanelTail) : sizeof(PanelTail::bias);
  panel_bytes_ = steps_ * kStepBytes + tail_bytes;
  const std::shared_ptr<char> memory = allocate_panels(num_panels * panel_bytes_);
  for_each_part(n, k, [&](int64_t begin, int64_t end) {
    const Matrix rows = read(begin, end);
    for (int64_t column = begin; column < end; ++column) {
      const int64_t lane = column % kPanelColumns;
      char* panel = memory.get() + column / kPanelColumns * panel_bytes_;
      if (lane == 0) std::memset(panel, 0, static_cast<size_t>(panel_bytes_));
      auto& tail = *reinterpret_cast<PanelTail*>(panel + steps_ * kStepBytes);
      pack_column(rows, column - begin, precision, panel + lane * 4, tail, lane);
      if (bias != nullptr) tail.bias[lane] = bias[column];
    }
  });
  panels_ = memory;
}

PackedWeight::PackedWeight(int64_t n, int64_t k, const RowReader<Int4Matrix>& read, const float* bias, bool has_zeros,
                           std::optional<Levels> levels)
    : n(n),
      k(k),
      num_panels(round_up(n, kPanelColumns) / kPanelColumns),
      precision(Precision::int4),
      has_zeros(has_zeros),
      levels(levels),
      panel_bytes_(int4_panel_bytes(k, has_zeros)) {
  // Bytes of x beyond k aren't 0, and 0 needn't be a level.
  if (levels && (has_zeros || k % kInt4Group))
    throw std::invalid_argument("int4: expected levels without zero points, of a multiple of " +
                                std::to_string(kInt4Group) + " inputs, got " + std::to_string(k) + " inputs" +
                                (has_zeros ? " and zero points" : ""));
  const std::shared_ptr<char> memory = allocate_panels(bytes());
  for_each_part(n, k, [&](int64_t begin, int64_t end) {
    char* panels = memory.get() + begin / kPanelColumns * panel_bytes_;
    std::memset(panels, 0, static_cast<size_t>(round_up(end - begin, kPanelColumns) / kPanelColumns * panel_bytes_));
    pack_int4(read(begin, end), bias == nullptr ? nullptr : bias + begin, panels);
  });
  panels_ = memory;
}

PackedWeight PackedWeight::columns(const std::vector<int32_t>& candidates) const {
  PackedWeight some = *this;
  some.n = std::ssize(candidates);
  some.num_panels = round_up(some.n, kPanelColumns) / kPanelColumns;
  const std::shared_ptr<char> memory = allocate_panels(some.num_panels * panel_bytes_);
  std::memset(memory.get(), 0, static_cast<size_t>(some.num_panels * panel_bytes_));
  for (int64_t i = 0; i < some.n; ++i) {
    const char* from = panel(candidates[i] / kPanelColumns);
    char* to = memory.get() + i / kPanelColumns * panel_bytes_;
    const int64_t from_lane = candidates[i] % kPanelColumns, lane = i % kPanelColumns;
    if (precision == Precision::int4) copy_int4_column(k, has_zeros, from, from_lane, to, lane);
    else  // a panel, including its tail, interleaves its columns in units of 4 bytes
      for (int64_t at = 0; at < panel_bytes_; at += kStepBytes)
        std::memcpy(to + at + lane * 4, from + at + from_lane * 4, 4);
  }
  some.panels_ = memory;
  return some;
}

void PackedWeight::add_column(int64_t column, float factor, float* to) const {
  const char* from = panel(column / kPanelColumns) + column % kPanelColumns * 4;
  const bool is_bf16 = precision == Precision::bf16;
  for (int64_t i = 0; i < k; ++i) {
    const char* element = is_bf16 ? from + i / 2 * kStepBytes + i % 2 * 2 : from + i * kStepBytes;
    to[i] = std::fma(number_at(element, is_bf16 ? Kind::bf16 : Kind::fp32, 0), factor, to[i]);
  }
}

void PackedRows::resize(int64_t rows, int64_t k, Precision precision, int64_t parts) {
  rows *= parts;
  rows_ = rows, parts_ = parts, k_ = k, precision_ = precision;
  // The stride is an odd number of cache lines, because rows at a power-of-two distance would share few cache sets.
  stride_ = (round_up(k, kInt4Group) * 4 / group(precision) + 63) / 64 * 64;
  if (stride_ / 64 % 2 == 0) stride_ += 64;
  const int64_t bytes = round_up(rows, kTileRows) * stride_;
  if (bytes > capacity_) {
    data_ = Buffer<char>(bytes);
    capacity_ = bytes;
  }
  if (std::ssize(scales_) < rows) scales_.resize(rows), zeros_.resize(rows);
  const int64_t sums = precision == Precision::int4 ? rows * int4_groups(k) : 0;
  if (std::ssize(sums_) < sums) sums_.resize(sums);
}

void PackedRows::store(int64_t row, const float* x, const float* shifts) {
  row *= parts_;
  char* to = data_.data() + row * stride_;
  if (precision_ == Precision::fp32) {
    std::memcpy(to, x, static_cast<size_t>(k_) * 4);
  } else if (precision_ == Precision::bf16) {
    // Write whole vectors, with zeros beyond k, as in the weight.
    const auto store = [&]<bool kAtOnce>() {
      for_each_vec<float>(k_, [&](int64_t c, int64_t count) {
        store_narrow<kAtOnce>(V::load(x + c, count), reinterpret_cast<bfloat16*>(to) + c);
      });
    };
    cpu_features().avx512_bf16 ? store.operator()<true>() : store.operator()<false>();
    std::memset(to + k_ * 2, 0, static_cast<size_t>(stride_ - k_ * 2));  // tiles read it
  } else {
    const Range range = range_of(x, k_);
    const bool is_fine = parts_ == 2;
    const Scale scale(range.high - range.low, is_fine ? 65535 : 255, range.is_finite);
    const bool is_zero = scale.inverse == 0;  // zero or not finite
    const int32_t zero = is_zero ? 0 : to_whole(-range.low, scale);
    scales_[row] = scale.scale, zeros_[row] = zero;
    if (is_fine) {
      scales_[row] = 256 * scale.scale, zeros_[row] = zero >> 8;
      scales_[row + 1] = scale.scale, zeros_[row + 1] = zero & 255;
    }
    for_each_vec<float>(k_, [&](int64_t c, int64_t count) {
      V exact = is_zero ? V(0.f) : V::load(x + c, count) * V(scale.inverse);
      if (shifts != nullptr) exact = exact + V::load(shifts + c % kPanelColumns);
      const Lanes whole = whole_of(exact, zero);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(to) + c;
      if (!is_fine) return store_bytes(whole, bytes);
      store_bytes(high_bytes(in_16_bits(whole)), bytes);
      store_bytes(low_bytes(in_16_bits(whole)), bytes + stride_);
    });
    if (precision_ == Precision::int4) store_sums(reinterpret_cast<const uint8_t*>(to), k_, sums_.data() + row, rows_);
  }
}

void PackedRows::copy(int64_t row, const PackedRows& from, int64_t from_row) {
  std::memcpy(data_.data() + row * stride_, from.data_.data() + from_row * stride_, static_cast<size_t>(stride_));
  if (precision_ != Precision::int8 && precision_ != Precision::int4) return;
  scales_[row] = from.scales_[from_row], zeros_[row] = from.zeros_[from_row];
  for (int64_t g = 0; precision_ == Precision::int4 && g < int4_groups(k_); ++g)
    sums_[g * rows_ + row] = from.sums_[g * from.rows_ + from_row];
}

void gemm(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out, int64_t ld) {
  if (rows <= 0 || begin >= end) return;
  multiply(x, rows * x.parts(), w, begin, end, out, ld);
  for (int64_t p = begin; p < end && x.parts() == 2; ++p, out += kPanelColumns)
    add_parts(rows, reinterpret_cast<const PanelTail*>(w.panel(p) + w.steps() * kStepBytes)->bias, out, ld);
}

void gemm(const RowsView& x, int64_t rows, const BytePanels& w, float* out, int64_t ld) {
  const LeftRows left{x.data() + w.first_input, x.stride(), x.scales(), x.zeros()};
  const int64_t all = rows * x.parts();
  for (int64_t p = 0; p * kPanelColumns < w.columns; ++p, out += kPanelColumns) {
    const PanelView panel(w, p);
    for (int64_t first = 0; first < all; first += kBlockRows)
      multiply_panel(kernels(Precision::int8), left.from(first), std::min(kBlockRows, all - first), panel,
                     out + first * ld, ld);
    if (x.parts() == 2) add_parts(rows, panel.tail->bias, out, ld);
  }
}

}  // namespace fastformer
