// LoRA adapters (Hu et al. 2021): y = W x + B (A x), for the rows of the requests that use one. A and B are thin, and
// the scale of their product is a factor of B. The model's weights stay as they are.

#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/packed_model.h"
#include "engine/panel_memory.h"

namespace fastformer {

// A and B of one weight: as precise as the weights of the model, but with 8 bits for those of int4; x and sums are
// always fp32. A row's result depends, bit for bit, only on the row.
class LowRank {
 public:
  // a: (rank, k), b: (n, rank).
  LowRank(const Matrix& a, const Matrix& b, Precision precision, PanelMemory& memory);

  // The columns of A x, a multiple of 16; those behind the rank are 0.
  int64_t width() const { return blocks_ * kBlock; }
  // How many independent parts A x has for so many rows.
  int64_t parts(int64_t rows) const;
  // Computes the parts [begin, end) of low[row] = A x[row] for `count` rows, whose numbers are in `rows`; x and low
  // have a row each `x_ld` and `low_ld` floats.
  void shrink(const int32_t* rows, int64_t count, int64_t begin, int64_t end, const float* x, int64_t x_ld, float* low,
              int64_t low_ld) const;
  // Adds the columns of the panels [begin, end) of B low[row] to out[row], which begins with the first of all columns.
  void expand(const int32_t* rows, int64_t count, int64_t begin, int64_t end, const float* low, int64_t low_ld,
              float* out, int64_t out_ld) const;

 private:
  static constexpr int64_t kBlock = 16;  // columns of A x
  // The ranks of a panel of outputs whose weights are not all 0: q, k and v of one weight have ranks of their own.
  struct Panel {
    int64_t first, count, offset;
  };
  template <typename T>
  struct Factors {
    std::shared_ptr<const T> a;  // (blocks, k, kBlock)
    std::shared_ptr<const T> b;  // for each panel, (its ranks, kPanelColumns)
  };
  template <typename T>
  void fill(Factors<T>& factors, const Matrix& a, const Matrix& b, PanelMemory& memory);
  template <typename F>
  void with(F&& f) const {
    if (floats_.a) f(floats_);
    else if (halves_.a) f(halves_);
    else f(bytes_);
  }

  int64_t k_, blocks_;
  std::vector<Panel> panels_;
  Factors<float> floats_;
  Factors<bfloat16> halves_;
  Factors<int8_t> bytes_;
  std::vector<float> scales_;  // of each rank of bytes: the product of A's scale and B's
};

// The adapter of a model.
class PackedAdapter {
 public:
  // tensors: by the name of a weight, with the end ".A" or ".B". Throws std::invalid_argument for other names, for a
  // weight without one of the two, and for unexpected shapes.
  PackedAdapter(std::shared_ptr<const PackedModel> model, const ModelTensors& tensors);

  // Returns the factors of one of the model's weights; null: the adapter doesn't change it.
  const LowRank* find(const PackedWeight& weight) const {
    const auto it = weights_.find(&weight);
    return it == weights_.end() ? nullptr : &it->second;
  }
  const PackedModel& model() const { return *model_; }
  // The block before a prompt's first one in a PrefixTable: keys and values depend on the adapter.
  int32_t root() const { return root_; }

 private:
  std::shared_ptr<const PackedModel> model_;
  std::unordered_map<const PackedWeight*, LowRank> weights_;
  int32_t root_;
};

}  // namespace fastformer
