#include "engine/adapter.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "common/simd.h"
#include "engine/prefix_table.h"

namespace fastformer {
namespace {

using V = Vec<float>;
constexpr int64_t kLanes = 16, kVecs = kLanes / V::size;
constexpr int kChains = 4;                        // of additions that don't wait for each other
constexpr int kRows = V::size == kLanes ? 4 : 1;  // that share a load of the weights; more don't fit in the registers

// Prefetches as many bytes as are read from here, some way ahead: several adapters don't fit in the cache.
inline __attribute__((always_inline)) void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kAhead = 4096;
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(static_cast<const char*>(from) + kAhead + at, _MM_HINT_T1);
}

// Writes 16 columns of A x for R rows. All loops over sums are unrolled, so that these stay in registers.
template <int R, typename T>
void shrink_rows(const T* a, int64_t k, const float* const* x, float* const* low) {
  V sums[kChains][kVecs][R];
#pragma GCC unroll 64
  for (int i = 0; i < kChains * kVecs * R; ++i) sums[i / (kVecs * R)][i / R % kVecs][i % R] = V(0.f);
  const auto add = [&](int64_t i, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVecs; ++v) {
      const V weight = V::load(a + i * kLanes + v * V::size);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[chain][v][r] = fmadd(V(x[r][i]), weight, sums[chain][v][r]);
    }
  };
  int64_t i = 0;
  for (; i + kChains <= k; i += kChains) {
    prefetch(a + i * kLanes, kChains * kLanes * sizeof(T));
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) add(i + chain, chain);
  }
#pragma GCC unroll 4
  for (int chain = 0; chain < kChains; ++chain)
    if (i + chain < k) add(i + chain, chain);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVecs; ++v)
      ((sums[0][v][r] + sums[1][v][r]) + (sums[2][v][r] + sums[3][v][r])).store(low[r] + v * V::size);
}

// Adds a panel of B low to R rows.
template <int R, typename T>
void expand_rows(const T* b, int64_t count, const float* const* low, float* const* out) {
  constexpr int64_t kAll = kPanelColumns / V::size;
  V sums[R][kAll];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < kAll; ++v) sums[r][v] = V::load(out[r] + v * V::size);
  for (int64_t j = 0; j < count; ++j) {
    prefetch(b + j * kPanelColumns, kPanelColumns * sizeof(T));
#pragma GCC unroll 8
    for (int64_t v = 0; v < kAll; ++v) {
      const V weight = V::load(b + j * kPanelColumns + v * V::size);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][v] = fmadd(V(low[r][j]), weight, sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < kAll; ++v) sums[r][v].store(out[r] + v * V::size);
}

// Calls f.operator()<R>(first) for `count` rows, R of them at a time.
template <typename F>
void for_rows(int64_t count, F&& f) {
  int64_t first = 0;
  for (; first + kRows <= count; first += kRows) f.template operator()<kRows>(first);
  for (; first < count; ++first) f.template operator()<1>(first);
}

template <typename T>
constexpr bool is_rounded = std::is_same_v<T, int8_t>;

// Returns the scale by which numbers become whole numbers from -127 to 127.
template <typename F>
float scale_of(int64_t count, F&& number) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(static_cast<float>(number(i))));
  return largest > 0 ? largest / 127 : 1;
}

}  // namespace

LowRank::LowRank(const Matrix& a, const Matrix& b, Precision precision, PanelMemory& memory)
    : k_(a.k), blocks_((a.n + kBlock - 1) / kBlock) {
  if (a.n < 1 || b.k != a.n) throw std::invalid_argument("expected A and B of one rank");
  if (precision == Precision::fp32) fill(floats_, a, b, memory);
  else if (precision == Precision::bf16) fill(halves_, a, b, memory);
  else fill(bytes_, a, b, memory);
}

template <typename T>
void LowRank::fill(Factors<T>& factors, const Matrix& a, const Matrix& b, PanelMemory& memory) {
  const auto keep = [&](const std::vector<T>& all) {
    const auto bytes = static_cast<int64_t>(all.size() * sizeof(T));
    const auto kept = std::reinterpret_pointer_cast<T>(memory.allocate(bytes));
    std::copy(all.begin(), all.end(), kept.get());
    return kept;
  };
  std::vector<float> scales_of_a(a.n, 1.f), scales_of_b(a.n, 1.f);
  const auto element = [](float number, float scale) {
    if constexpr (is_rounded<T>) return static_cast<T>(std::lround(number / scale));
    else return static_cast<T>(number);
  };
  if constexpr (is_rounded<T>) {
    scales_.assign(width(), 0.f);
    for (int64_t rank = 0; rank < a.n; ++rank) {
      scales_of_a[rank] = scale_of(a.k, [&](int64_t i) { return a.at(rank, i); });
      scales_of_b[rank] = scale_of(b.n, [&](int64_t i) { return b.at(i, rank); });
      scales_[rank] = scales_of_a[rank] * scales_of_b[rank];
    }
  }
  std::vector<T> elements(blocks_ * k_ * kBlock, T(0));
  for (int64_t rank = 0; rank < a.n; ++rank)
    for (int64_t i = 0; i < k_; ++i)
      elements[(rank / kBlock * k_ + i) * kBlock + rank % kBlock] = element(a.at(rank, i), scales_of_a[rank]);
  factors.a = keep(elements);
  elements.clear();
  for (int64_t column = 0; column < b.n; column += kPanelColumns) {
    const int64_t end = std::min(column + kPanelColumns, b.n);
    int64_t first = b.k, last = 0;
    for (int64_t row = column; row < end; ++row)
      for (int64_t rank = 0; rank < b.k; ++rank)
        if (b.at(row, rank) != 0) first = std::min(first, rank), last = std::max(last, rank + 1);
    const int64_t count = std::max<int64_t>(0, last - first);
    panels_.push_back({first, count, std::ssize(elements)});
    for (int64_t rank = first; rank < last; ++rank)
      for (int64_t row = column; row < column + kPanelColumns; ++row)
        elements.push_back(row < end ? element(b.at(row, rank), scales_of_b[rank]) : T(0));
  }
  factors.b = keep(elements);
}

int64_t LowRank::parts(int64_t rows) const { return (rows + kRows - 1) / kRows * blocks_; }

void LowRank::shrink(const int32_t* rows, int64_t count, int64_t begin, int64_t end, const float* x, int64_t x_ld,
                     float* low, int64_t low_ld) const {
  with([&](const auto& factors) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t block = part % blocks_, first = part / blocks_ * kRows;
      for_rows(std::min<int64_t>(kRows, count - first), [&]<int R>(int64_t from) {
        const float* inputs[R];
        float* outputs[R];
        for (int r = 0; r < R; ++r) {
          const int64_t row = rows[first + from + r];
          inputs[r] = x + row * x_ld, outputs[r] = low + row * low_ld + block * kBlock;
        }
        shrink_rows<R>(factors.a.get() + block * k_ * kBlock, k_, inputs, outputs);
        if constexpr (is_rounded<std::remove_cvref_t<decltype(*factors.a)>>)
          for (float* sums : outputs)
            for (int64_t i = 0; i < kBlock; ++i) sums[i] *= scales_[block * kBlock + i];
      });
    }
  });
}

void LowRank::expand(const int32_t* rows, int64_t count, int64_t begin, int64_t end, const float* low, int64_t low_ld,
                     float* out, int64_t out_ld) const {
  with([&](const auto& factors) {
    for (int64_t index = begin; index < end; ++index) {
      const Panel& panel = panels_[index];
      if (panel.count == 0) continue;
      for_rows(count, [&]<int R>(int64_t first) {
        const float* inputs[R];
        float* outputs[R];
        for (int r = 0; r < R; ++r) {
          const int64_t row = rows[first + r];
          inputs[r] = low + row * low_ld + panel.first, outputs[r] = out + row * out_ld + index * kPanelColumns;
        }
        expand_rows<R>(factors.b.get() + panel.offset, panel.count, inputs, outputs);
      });
    }
  });
}

PackedAdapter::PackedAdapter(std::shared_ptr<const PackedModel> model, const ModelTensors& tensors)
    : model_(std::move(model)) {
  static std::atomic<int32_t> last_root{PrefixTable::kNoBlock};
  root_ = --last_root;
  size_t used = 0;
  PanelMemory memory(int64_t(2) << 20);  // of its own, which is freed with it
  const std::vector<PackedLayer>& layers = model_->decoder.layers;
  for (size_t i = 0; i < layers.size() && !model_->options.has_encoder(); ++i) {
    const bool attends = layers[i].attends();
    const std::pair<const char*, const PackedWeight*> weights[] = {
        {attends ? "self_attn.in_proj_weight" : "self_attn.in_proj.weight", &layers[i].qkv},
        {attends ? "self_attn.gate_proj.weight" : "self_attn.gates.weight", &layers[i].gates},
        {"self_attn.out_proj.weight", &layers[i].out},
        {"linear1.weight", &layers[i].ff.ff1},
        {"linear2.weight", &layers[i].ff.ff2}};
    for (const auto& [kind, weight] : weights) {
      const std::string name = "decoder.layers." + std::to_string(i) + "." + kind;
      const auto a = tensors.find(name + ".A"), b = tensors.find(name + ".B");
      if (a == tensors.end() && b == tensors.end()) continue;
      const auto is_matrix = [&](const auto& it) {
        return it != tensors.end() && it->second.data && it->second.kind != Kind::bytes && it->second.shape.size() == 2;
      };
      if (!is_matrix(a) || !is_matrix(b) || a->second.shape[1] != weight->k || b->second.shape[0] != weight->n)
        throw std::invalid_argument("expected A and B that fit " + name);
      const auto matrix = [](const ModelTensor& tensor) {
        return Matrix{tensor.data, tensor.kind, tensor.shape[0], tensor.shape[1]};
      };
      weights_.try_emplace(weight, matrix(a->second), matrix(b->second), model_->options.precision, memory);
      used += 2;
    }
  }
  if (used != tensors.size()) throw std::invalid_argument("expected tensors of weights that the model has");
}

}  // namespace fastformer
