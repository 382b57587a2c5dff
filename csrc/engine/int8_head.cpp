#include "engine/int8_head.h"

#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "engine/int8_cache.h"
#include "engine/packed_kernels.h"

namespace fastformer {
namespace {

int64_t key_steps(int64_t dim) { return (dim + 3) / 4; }
int64_t key_panel_bytes(int64_t dim) { return key_steps(dim) * kStepBytes + static_cast<int64_t>(sizeof(PanelTail)); }
int64_t keys_bytes(int64_t count, int64_t dim) {
  return round_up(count, kPanelColumns) / kPanelColumns * key_panel_bytes(dim);
}
int64_t value_panel_bytes(int64_t count) { return round_up(count, kPanelColumns) / 4 * kStepBytes; }
int64_t values_bytes(int64_t count, int64_t dim) {
  return round_up(dim, kPanelColumns) / kPanelColumns * value_panel_bytes(count);
}

// The tail of panels of values, whose scales are in the weights. These have a zero point of 0.
const PanelTail& tail_of_values() {
  static const PanelTail tail = [] {
    PanelTail ones{};
    std::fill(std::begin(ones.scale), std::end(ones.scale), 1.f);
    return ones;
  }();
  return tail;
}

// What is added to the weights of a panel of keys before they are rounded. Of the many weights below half of a step in
// a long text, as many become 1 as they add up to. A weight of 0 stays 0.
const float* shifts_of_weights() {
  static const auto shifts = [] {
    std::array<float, kPanelColumns> all{};
    for (int i = 0; i < kPanelColumns; ++i) {
      int place = 0;  // the bits of i in reverse, so that those of neighbours lie far apart
      for (int bit = 1; bit < kPanelColumns; bit *= 2) place = 2 * place + ((i & bit) != 0);
      all[i] = (place + 0.5f) / kPanelColumns - 0.5f;
    }
    return all;
  }();
  return shifts.data();
}

}  // namespace

bool Int8Head::is_fast() {
  static const bool is = has_int8_dot() && !use_brgemm();
  return is;
}

void Int8Head::reserve(int64_t count, int64_t dim) {
  const int64_t all = round_up(count, kPanelColumns), bytes = all * round_up(dim, kPanelColumns);
  dim_ = dim;
  if (std::ssize(key_rows_) < bytes) key_rows_.resize(bytes), value_rows_.resize(bytes);
  if (std::ssize(key_scales_) < all) key_scales_.resize(all), value_scales_.resize(all);
  origin_.assign(dim, 0.f), centred_.resize(dim);
}

void Int8Head::centre(const float* keys, int64_t stride, int64_t count) {
  const V factor(1.f / static_cast<float>(count));
  for (int64_t i = 0; i < count; ++i, keys += stride) {
    V sum(0.f);
    for_each_vec<float>(dim_, [&](int64_t c, int64_t n) { sum = sum + V::load(keys + c, n); });
    if (!std::isfinite(sum.sum())) continue;  // it spoils what sees it, and nothing else
    for_each_vec<float>(dim_, [&](int64_t c, int64_t n) {
      float* to = origin_.data() + c;
      fmadd(V::load(keys + c, n), factor, V::load(to, n)).store(to, n);
    });
  }
}

void Int8Head::store(int64_t i, const float* k, const float* v) {
  const int64_t stride = round_up(dim_, kPanelColumns);
  for_each_vec<float>(dim_, [&](int64_t c, int64_t n) {
    (V::load(k + c, n) - V::load(origin_.data() + c, n)).store(centred_.data() + c, n);
  });
  key_scales_[i] = round_to_bytes(centred_.data(), dim_, key_rows_.data() + i * stride);
  value_scales_[i] = round_to_bytes(v, dim_, value_rows_.data() + i * stride);
  pad(i);
}

void Int8Head::store_bytes(int64_t i, const int8_t* k, float k_scale, const int8_t* v, float v_scale) {
  const int64_t stride = round_up(dim_, kPanelColumns);
  std::memcpy(key_rows_.data() + i * stride, k, static_cast<size_t>(dim_));
  std::memcpy(value_rows_.data() + i * stride, v, static_cast<size_t>(dim_));
  key_scales_[i] = k_scale, value_scales_[i] = v_scale;
  pad(i);
}

// Fills the rows of a key and a value to their end.
void Int8Head::pad(int64_t i) {
  const int64_t stride = round_up(dim_, kPanelColumns);
  for (auto* rows : {&key_rows_, &value_rows_})
    std::memset(rows->data() + i * stride + dim_, 0, static_cast<size_t>(stride - dim_));
}

int64_t Int8Head::bytes(int64_t count, int64_t dim) {
  return keys_bytes(count, dim) + values_bytes(count, dim) + round_up(count, kPanelColumns) * 4;
}

void Int8Head::pack_into(int64_t count, char* memory) {
  const int64_t steps = key_steps(dim_), stride = round_up(dim_, kPanelColumns), all = round_up(count, kPanelColumns);
  for (auto* rows : {&key_rows_, &value_rows_})
    std::fill(rows->begin() + count * stride, rows->begin() + all * stride, int8_t(0));
  for (auto* scales : {&key_scales_, &value_scales_}) std::fill(scales->begin() + count, scales->begin() + all, 0.f);
  for (int64_t first = 0; first < count; first += kPanelColumns, memory += key_panel_bytes(dim_)) {
    auto& tail = *reinterpret_cast<PanelTail*>(memory + steps * kStepBytes);
    for (int64_t lane = 0; lane < kPanelColumns; ++lane) {
      const int8_t* row = key_rows_.data() + (first + lane) * stride;
      for (int64_t step = 0; step < steps; ++step)
        std::memcpy(memory + step * kStepBytes + lane * 4, row + 4 * step, 4);
      tail.bias[lane] = 0;
      tail.scale[lane] = key_scales_[first + lane];
      tail.correction[lane] = -std::accumulate(row, row + dim_, 0);
    }
  }
  for (int64_t column = 0; column < dim_; column += kPanelColumns)
    for (int64_t i = 0; i < all; i += 4, memory += kStepBytes) {
      const uint8_t* rows[4];
      for (int j = 0; j < 4; ++j)
        rows[j] = reinterpret_cast<const uint8_t*>(value_rows_.data()) + (i + j) * stride + column;
      auto* to = reinterpret_cast<uint32_t*>(memory);
      for (int64_t c = 0; c < kPanelColumns; ++c)
        to[c] = rows[0][c] | rows[1][c] << 8 | rows[2][c] << 16 | static_cast<uint32_t>(rows[3][c]) << 24;
    }
  std::copy_n(value_scales_.data(), all, reinterpret_cast<float*>(memory));
}

void Int8Head::use(const char* memory, int64_t count, int64_t dim) {
  count_ = count, dim_ = dim;
  packed_keys_ = memory, packed_values_ = memory + keys_bytes(count, dim);
  packed_scales_ = reinterpret_cast<const float*>(packed_values_ + values_bytes(count, dim));
}

void Int8Head::pack(int64_t count) {
  if (std::ssize(memory_) < bytes(count, dim_)) memory_.resize(bytes(count, dim_));
  pack_into(count, memory_.data());
  use(memory_.data(), count, dim_);
}

float* Int8Head::multiply_keys(const float* q, int64_t q_stride, int64_t rows, const Seen& seen) {
  queries_.resize(rows, dim_, Precision::int8);
  for (int64_t i = 0; i < rows; ++i) queries_.store(i, q + i * q_stride);
  if (std::ssize(scores_) < kQueryRows * seen.width) scores_.resize(kQueryRows * seen.width);
  const int64_t panel_bytes = key_panel_bytes(dim_), steps = key_steps(dim_);
  const char* panels = packed_keys_ + seen.from / kPanelColumns * panel_bytes;
  gemm(queries_, rows, {panels, panels + steps * kStepBytes, steps, panel_bytes, panel_bytes, seen.width},
       scores_.data(), seen.width);
  weights_.resize(rows, seen.width, Precision::int8, 2);
  return scores_.data();
}

float Int8Head::weigh(int64_t row, float* x, float lowered, float scale2, const Seen& seen) {
  const float sum = weigh_row<false>(x, seen.width, lowered, scale2, packed_scales_ + seen.from, x);
  weights_.store(row, x, shifts_of_weights());
  return sum;
}

const float* Int8Head::multiply_values(int64_t rows, const Seen& seen) {
  const int64_t stride = sums_stride();
  if (std::ssize(sums_) < 2 * kQueryRows * stride) sums_.resize(2 * kQueryRows * stride);
  // The sums of this many products of bytes fit into 32 bits: 255 * 127 * 2^16 < 2^31.
  constexpr int64_t kMost = 1 << 16;
  const auto* tail = reinterpret_cast<const char*>(&tail_of_values());
  std::vector<float> more(seen.width > kMost ? sums_.size() : 0);
  for (int64_t at = 0; at < seen.width; at += kMost) {
    const char* values = packed_values_ + (seen.from + at) / 4 * kStepBytes;
    const int64_t steps = std::min(kMost, seen.width - at) / 4;
    float* to = at == 0 ? sums_.data() : more.data();
    gemm(weights_, rows, {values, tail, steps, value_panel_bytes(count_), 0, dim_, at}, to, stride);
    for (int64_t i = 0; at > 0 && i < rows * stride; ++i) sums_[i] += more[i];
  }
  return sums_.data();
}

}  // namespace fastformer
