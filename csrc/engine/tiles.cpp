#include "engine/tiles.h"

#include <cstdlib>

#include "common/cpu_features.h"
#include "common/instructions.h"

namespace fastformer {
namespace {

constexpr int64_t kRowBytes = 4 * kPanelColumns;  // of a step, and of a row of sums

thread_local int64_t num_products = 0;

bool has_tiles() {
  static const bool has = request_tiles();
  return has;
}

bool has_amx(Precision precision) {
  const CpuFeatures& cpu = cpu_features();
  return (precision == Precision::bf16 ? cpu.amx_bf16 : cpu.amx_int8) && has_tiles();
}

bool is_emulated() {
  static const bool is_asked = [] {
    const char* setting = std::getenv("FASTFORMER_BRGEMM");
    return setting != nullptr && setting[0] == '1';
  }();
  return is_asked;
}

// Prefetches a quarter of the steps of a tile, some way ahead of a place in a panel.
template <int kQuarter>
void prefetch_quarter(const char* place) {
  constexpr int64_t kAhead = 8192, kBytes = kTileSteps * kRowBytes / 4;
  const auto* ahead = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(place) + kAhead + kQuarter * kBytes);
#pragma GCC unroll 16
  for (int64_t at = 0; at < kBytes; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T0);
}

// The sums are tiles 0 to 3, the rows 4 and 5, and the panel's 6 and 7. place: of the steps in the panel, of which
// `right` may be a copy.
template <bool kBf16>
void add_16_rows(const char* left, int64_t stride, const char* right, const char* place) {
  load_tile<4>(left, stride);
  load_tile<6>(right, kRowBytes);
  prefetch_quarter<0>(place);
  add_tile<kBf16, 0, 4, 6>();
  load_tile<7>(right + 64, kRowBytes);
  prefetch_quarter<1>(place);
  add_tile<kBf16, 1, 4, 7>();
  load_tile<6>(right + 128, kRowBytes);
  prefetch_quarter<2>(place);
  add_tile<kBf16, 2, 4, 6>();
  load_tile<7>(right + 192, kRowBytes);
  prefetch_quarter<3>(place);
  add_tile<kBf16, 3, 4, 7>();
}
template <bool kBf16>
void add_32_rows(const char* left, int64_t stride, const char* right, const char*) {
  load_tile<6>(right, kRowBytes);
  load_tile<4>(left, stride);
  add_tile<kBf16, 0, 4, 6>();
  load_tile<7>(right + 64, kRowBytes);
  add_tile<kBf16, 1, 4, 7>();
  load_tile<5>(left + kTileRows * stride, stride);
  add_tile<kBf16, 2, 5, 6>();
  add_tile<kBf16, 3, 5, 7>();
}

// Multiplies 16 rows by a panel, or 32 rows by half of one.
template <bool kBf16, bool kWide>
void multiply_tiles(const char* left, int64_t stride, const char* right, int64_t steps, int64_t tile_steps, char* sums,
                    Meanwhile& meanwhile) {
  constexpr auto add = kWide ? add_32_rows<kBf16> : add_16_rows<kBf16>;
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (; steps >= tile_steps; steps -= tile_steps, left += 4 * tile_steps, right += tile_steps * kRowBytes) {
    add(left, stride, right, right);
    meanwhile.go_on();
  }
  if (steps > 0) {
    alignas(64) char last[kTileSteps * kRowBytes];
    std::memcpy(last, right, static_cast<size_t>(steps * kRowBytes));
    std::memset(last + steps * kRowBytes, 0, static_cast<size_t>((kTileSteps - steps) * kRowBytes));
    add(left, stride, last, right);
  }
  store_tile<0>(sums, kRowBytes);
  store_tile<1>(sums + 64, kRowBytes);
  store_tile<2>(sums + (kWide ? kTileRows * kRowBytes : 128), kRowBytes);
  store_tile<3>(sums + (kWide ? kTileRows * kRowBytes : 128) + 64, kRowBytes);
}

// A tile is stored after the products of the next two: its own takes 52 cycles, and a store that waits for it keeps
// back all products behind it.
template <bool kWide>
void multiply_groups(const char* left, int64_t stride, const char* right, int64_t half_bytes, int64_t steps,
                     int64_t groups, int32_t* sums, Meanwhile& meanwhile) {
  constexpr int64_t kBytes = 4 * kTileSums;
  const int64_t tile = steps * 64;
  char* to = reinterpret_cast<char*>(sums);
  for (int64_t g = 0; g < groups; ++g, left += 4 * steps, right += 2 * tile, to += 4 * kBytes) {
    load_tile<6>(right, 64);
    load_tile<4>(left, stride);
    zero_tile<0>(), zero_tile<1>();
    add_tile<false, 0, 4, 6>();
    load_tile<7>(right + tile, 64);
    add_tile<false, 1, 4, 7>();
    if (g > 0) store_tile<2>(to - 2 * kBytes, 64), store_tile<3>(to - kBytes, 64);
    zero_tile<2>(), zero_tile<3>();
    if constexpr (kWide) {
      load_tile<5>(left + kTileRows * stride, stride);
      add_tile<false, 2, 5, 6>();
      add_tile<false, 3, 5, 7>();
    } else {
      load_tile<6>(right + half_bytes, 64);
      add_tile<false, 2, 4, 6>();
      load_tile<7>(right + half_bytes + tile, 64);
      add_tile<false, 3, 4, 7>();
    }
    store_tile<0>(to, 64), store_tile<1>(to + kBytes, 64);
    meanwhile.go_on();
  }
  store_tile<2>(to - 2 * kBytes, 64), store_tile<3>(to - kBytes, 64);
}

template <bool kBf16>
void multiply_rows(int64_t rows, const char* left, int64_t stride, const char* right, int64_t steps, int64_t tile_steps,
                   char* sums, Meanwhile& meanwhile) {
  if (rows == kTileRows) return multiply_tiles<kBf16, false>(left, stride, right, steps, tile_steps, sums, meanwhile);
  multiply_tiles<kBf16, true>(left, stride, right, steps, tile_steps, sums, meanwhile);
  multiply_tiles<kBf16, true>(left, stride, right + 128, steps, tile_steps, sums + 128, meanwhile);
}

void emulate(bool is_bf16, int64_t rows, const char* left, int64_t stride, const char* right, int64_t steps,
             void* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const char *x = left + r * stride, *w = right + 4 * c;
      float sum = 0;
      int32_t whole = 0;
      for (int64_t step = 0; step < steps; ++step, x += 4, w += kRowBytes)
        for (int64_t i = 0; i < 4; ++i) {
          if (!is_bf16) whole += static_cast<uint8_t>(x[i]) * static_cast<int8_t>(w[i]);
          else if (i == 0)
            sum = static_cast<float>(sum + double{number_at(x, Kind::bf16, 0)} * number_at(w, Kind::bf16, 0) +
                                     double{number_at(x, Kind::bf16, 1)} * number_at(w, Kind::bf16, 1));
        }
      if (is_bf16) static_cast<float*>(sums)[r * kPanelColumns + c] = sum;
      else static_cast<int32_t*>(sums)[r * kPanelColumns + c] = whole;
    }
}

void emulate_groups(int64_t rows, const char* left, int64_t stride, const char* right, int64_t half_bytes,
                    int64_t steps, int64_t groups, int32_t* sums) {
  const int64_t across = rows == kTileRows ? 4 : 2;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t tile = 0; tile < 4; ++tile)
      for (int64_t i = 0; i < kTileSums; ++i, ++sums) {
        const char* x = left + (tile / across * kTileRows + i / kTileColumns) * stride + 4 * steps * g;
        const char* w = right + tile % across / 2 * half_bytes + (2 * g + tile % 2) * steps * 64 + i % kTileColumns * 4;
        *sums = 0;
        for (int64_t j = 0; j < 4 * steps; ++j)
          *sums += static_cast<uint8_t>(x[j]) * static_cast<int8_t>(w[j / 4 * 64 + j % 4]);
      }
}

}  // namespace

bool can_tile(Precision precision) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr bool has_panels = true;
#else
  constexpr bool has_panels = false;
#endif
  return has_panels && precision != Precision::fp32 && (is_emulated() || has_amx(precision));
}

Tiles::Tiles(Precision precision, int64_t tile_steps)
    : is_bf16_(precision == Precision::bf16), tile_steps_(tile_steps) {
  if (is_emulated()) return;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * tile_steps : 64);
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? kTileRows : tile_steps);
  }
  configure_tiles(config);
}

Tiles::~Tiles() {
  if (!is_emulated()) release_tiles();
}

void Tiles::multiply(int64_t rows, const char* left, int64_t left_stride, const char* right, int64_t steps, void* sums,
                     Meanwhile&& meanwhile) const {
  ++num_products;
  meanwhile.divide(steps / tile_steps_ * (rows / kTileRows));
  if (is_emulated()) {
    emulate(is_bf16_, rows, left, left_stride, right, steps, sums);
  } else {
    const auto multiply = is_bf16_ ? multiply_rows<true> : multiply_rows<false>;
    multiply(rows, left, left_stride, right, steps, tile_steps_, static_cast<char*>(sums), meanwhile);
  }
  meanwhile.finish();
}

void Tiles::multiply_apart(int64_t rows, const char* left, int64_t left_stride, const char* right, int64_t half_bytes,
                           int64_t groups, int32_t* sums, Meanwhile& meanwhile) const {
  ++num_products;
  meanwhile.divide(groups);
  if (is_emulated()) {
    emulate_groups(rows, left, left_stride, right, half_bytes, tile_steps_, groups, sums);
  } else {
    const auto multiply = rows == kTileRows ? multiply_groups<false> : multiply_groups<true>;
    multiply(left, left_stride, right, half_bytes, tile_steps_, groups, sums, meanwhile);
  }
  meanwhile.finish();
}

int64_t num_tile_products() { return num_products; }

}  // namespace fastformer
