// A model as the decoding engine reads it: its weights packed once, for all sessions; nothing in it changes afterwards.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/activation.h"
#include "engine/packed_gemm.h"

namespace fastformer {

// A tensor of the model where it lies in memory: contiguous, fp32 or bf16. It is read while a model is packed.
struct ModelTensor {
  const void* data;
  bool is_bf16;
  std::vector<int64_t> shape;
};
using ModelTensors = std::map<std::string, ModelTensor>;

// What does not follow from the tensors. A window below zero: none.
struct ModelOptions {
  Precision precision;
  int64_t d_model, num_heads, num_kv_heads;
  int64_t num_encoder_layers;  // below zero: a decoder-only model
  int64_t num_decoder_layers;
  bool norm_first, rms_norm, rotary_interleaved;
  float eps, scale;
  int64_t padding_idx;  // whose embedding is zero; -1: none
  int64_t encoder_window, decoder_window;
  int64_t max_len;  // of a model without a table of positions
  Activation activation;

  int64_t head_dim() const { return d_model / num_heads; }
  int64_t kv_dim() const { return num_kv_heads * head_dim(); }
  bool has_encoder() const { return num_encoder_layers >= 0; }
};

struct Norm {
  std::vector<float> weight, bias;  // ones and zeros where the model has none
};

// A layer of either stack; what an encoder's lacks is empty.
struct PackedLayer {
  PackedWeight qkv, out, cross_q, cross_kv, cross_out, ff1, ff2;
  Norm norm1, norm2, norm3;
};

// What scores get by how far a key lies from its query: relative positions.
class PositionBias {
 public:
  PositionBias() = default;
  // (num_heads, 2 * reach + 1), from the key that lies `reach` before its query to the one that far behind it; beyond,
  // all are alike. It is added before the scores are scaled.
  PositionBias(std::vector<float> values, int64_t reach) : values_(std::move(values)), reach_(reach) {}
  explicit operator bool() const { return !values_.empty(); }
  // To the scores of a query and `count` keys from `key` on.
  void add_to(int64_t head, int64_t query, int64_t key, int64_t count, float* scores) const;

 private:
  std::vector<float> values_;
  int64_t reach_ = 0;
};

struct PackedStack {
  std::vector<PackedLayer> layers;
  std::vector<Norm> final_norm;  // one or none
  int64_t window;
  PositionBias position_bias;  // of self-attention in all layers; empty: none
};

// Rows of a table: a copy in fp32, or in bf16 for the smaller precisions.
class Table {
 public:
  Table() = default;
  Table(const ModelTensor& tensor, Precision precision);
  explicit operator bool() const { return rows_ > 0; }
  int64_t rows() const { return rows_; }
  // to[i] += factor * row[i].
  void add_to(int64_t row, float factor, float* to) const;

 private:
  int64_t rows_ = 0, dim_ = 0;
  std::shared_ptr<const std::vector<float>> wide_;
  std::shared_ptr<const std::vector<bfloat16>> narrow_;
};

// The tensors' names are those of the model's state_dict, but for "source_embedding", "target_embedding" and "output",
// which stand for a tied matrix too, and "source_positions", "target_positions", "cos" and "sin", its tables,
// and "encoder_position_bias" and "decoder_position_bias", see PositionBias.
class PackedModel {
 public:
  PackedModel(const ModelOptions& options, const ModelTensors& tensors);

  // to = the embedding of a token at a position, normalised where the model has a norm for that.
  void embed(bool is_source, int32_t token, int64_t position, float* to) const;

  // The turn of one position, as rotate_halves or rotate_neighbours read it; see lay_out_angles.
  const float* cos(int64_t position) const { return cos_.data() + position * options.head_dim(); }
  const float* sin(int64_t position) const { return sin_.data() + position * options.head_dim(); }
  bool is_rotary() const { return !cos_.empty(); }

  int64_t vocab_size() const { return output.n; }
  int64_t source_vocab_size() const { return source_.embedding.rows(); }
  int64_t max_len() const { return max_len_; }
  // Of the weights that a step of one row reads.
  int64_t step_bytes() const;

  const ModelOptions options;
  PackedStack encoder, decoder;
  PackedWeight output;

 private:
  // What a stack's tokens become first.
  struct Input {
    Table embedding, positions;
    std::vector<Norm> norm;  // one or none
  };
  Input source_, target_;
  std::vector<float> cos_, sin_;
  int64_t max_len_ = 0;
};

}  // namespace fastformer
