// A model in the engine's form, for decoding or an encoder alone: its weights are packed once, for all sessions, and
// never change afterwards.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/activation_kinds.h"
#include "engine/packed_gemm.h"

namespace fastformer {

// A tensor of the model in memory: contiguous, and read while the model is packed. A matrix of bytes has the nibbles of
// an Int4Matrix, (n, 16 * groups); the tensors with its name and ".scale" (fp32) and ".zero" (bytes, or missing) are
// the rest.
struct ModelTensor {
  enum class Kind { fp32, bf16, bytes };
  const void* data;
  Kind kind;
  std::vector<int64_t> shape;
};
using ModelTensors = std::map<std::string, ModelTensor>;

// The place of the norms of a sub-layer f; x is the residual stream.
enum class NormPlacement {
  pre,   // x + f(norm(x))
  post,  // x + norm(f(x))
  both,  // x + post_norm(f(norm(x)))
  sum,   // norm(x + f(x)), which torch.nn calls post-norm
};
// By these names; std::invalid_argument for another one.
NormPlacement norm_placement_named(std::string_view name);

// The options that don't follow from the tensors. A window below zero: no window. A soft cap of 0: no cap.
// An option with a value here may be missing in the dictionary that Python gives (`options_of` in
// bindings/decoder.cpp).
struct ModelOptions {
  Precision precision;
  int64_t d_model, num_heads, num_kv_heads, head_dim;
  int64_t num_encoder_layers = -1;  // below zero: a decoder-only model
  int64_t num_decoder_layers = 0;   // 0: an encoder alone
  NormPlacement norm_placement;
  bool rms_norm = false;
  bool parallel_residual = false;  // x + attention(norm1(x)) + feed_forward(norm2(x)), with norms in front alone
  bool skips_first_norm = false;   // the first layer of the encoder reads the embeddings as they are
  bool is_bare = false;            // layers alone, and maybe a norm behind them: the embeddings come with each call
  float eps;
  float scale = 1;  // of embeddings
  float attention_scale;
  float attention_softcap = 0, logit_softcap = 0;                   // 0: none
  int64_t padding_idx = -1;                                         // whose embedding is zero; -1: none
  std::vector<int64_t> encoder_windows = {}, decoder_windows = {};  // of each layer; -1: none
  int64_t max_len;                                                  // of a model without a table of positions
  Activation activation;

  int64_t q_dim() const { return num_heads * head_dim; }
  int64_t kv_dim() const { return num_kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
  bool has_encoder() const { return num_encoder_layers >= 0; }
  bool has_decoder() const { return num_decoder_layers > 0; }
  bool has_norms_in_front() const {
    return norm_placement == NormPlacement::pre || norm_placement == NormPlacement::both;
  }
  bool has_norms_behind() const {
    return norm_placement == NormPlacement::post || norm_placement == NormPlacement::both;
  }
};

struct Norm {
  std::vector<float> weight, bias;  // ones and zeros where the model has none
};

// A layer of either stack; the parts that an encoder's layer lacks are empty.
struct PackedLayer {
  PackedWeight qkv, out, cross_q, cross_kv, cross_out, ff1, ff2;
  Norm norm1, norm2, norm3;          // in front of its sub-layers, or of the sums behind them
  Norm post_norm1, post_norm2;       // of the outputs of attention and of the feed-forward network
  std::vector<Norm> q_norm, k_norm;  // one or none: of each head, or of all heads together
  int64_t window;

  bool norms_all_heads(const ModelOptions& o) const {
    return !q_norm.empty() && static_cast<int64_t>(q_norm[0].weight.size()) != o.head_dim;
  }
};

// A bias on scores that depends on the distance from query to key: relative positions.
class PositionBias {
 public:
  PositionBias() = default;
  // (num_heads, 2 * reach + 1), from the key that is `reach` before its query to the key that is `reach` after it; keys
  // further away have the same bias. It is added before the scores are scaled.
  PositionBias(std::vector<float> values, int64_t reach) : values_(std::move(values)), reach_(reach) {}
  explicit operator bool() const { return !values_.empty(); }
  // Adds the bias to the scores of a query and `count` keys from `key` on.
  void add_to(int64_t head, int64_t query, int64_t key, int64_t count, float* scores) const;

 private:
  std::vector<float> values_;
  int64_t reach_ = 0;
};

struct PackedStack {
  std::vector<PackedLayer> layers;
  std::vector<Norm> final_norm;  // one or none
  PositionBias position_bias;    // of self-attention in all layers; empty: none
};

// Rows of a table: a copy in fp32, or in bf16 for the smaller precisions.
class Table {
 public:
  Table() = default;
  Table(const ModelTensor& tensor, Precision precision);
  explicit operator bool() const { return rows_ > 0; }
  int64_t rows() const { return rows_; }
  int64_t dim() const { return dim_; }
  // to[i] += factor * row[i].
  void add_to(int64_t row, float factor, float* to) const;

 private:
  int64_t rows_ = 0, dim_ = 0;
  std::shared_ptr<const std::vector<float>> wide_;
  std::shared_ptr<const std::vector<bfloat16>> narrow_;
};

// Cosines and sines of each position, which rotate the first `dim` features of a head.
class RotaryTable {
 public:
  RotaryTable() = default;
  // cos, sin: (positions, dim / 2).
  RotaryTable(const ModelTensor& cos, const ModelTensor& sin);
  explicit operator bool() const { return dim_ > 0; }
  int64_t rows() const { return dim_ ? static_cast<int64_t>(cos_.size()) / dim_ : 0; }
  // Rotates one head of queries or keys.
  void turn(int64_t position, float* head) const;

 private:
  int64_t dim_ = 0;
  std::vector<float> cos_, sin_;  // as rotate_halves reads them; see lay_out_angles
};

// The tensors' names are those of the model's state_dict, except for "source_embedding", "target_embedding" and
// "output", which name a tied matrix too, and "source_positions", "target_positions", "source_types",
// "source_projection", "cos" and "sin", its tables, "local_cos" and "local_sin", those of layers with a window, if they
// differ, and "encoder_position_bias" and "decoder_position_bias", see PositionBias.
class PackedModel {
 public:
  PackedModel(const ModelOptions& options, const ModelTensors& tensors);

  // to = the embedding of a token at a position, normalised if the model has a norm for that: d_model numbers, or the
  // number of inputs of the projection. type: the token's type, if the model has types.
  void embed(bool is_source, int32_t token, int32_t type, int64_t position, float* to) const;

  // The table that rotates the queries and keys of a layer; null: no rotation.
  const RotaryTable* rotary(const PackedLayer& layer) const {
    const RotaryTable& found = layer.window >= 0 && local_rotary_ ? local_rotary_ : rotary_;
    return found ? &found : nullptr;
  }

  int64_t vocab_size() const { return output.n; }
  int64_t source_vocab_size() const { return source_.embedding.rows(); }
  int64_t num_token_types() const { return source_.types.rows(); }
  int64_t max_len() const { return max_len_; }
  // The number of positions of an encoder's tokens, and of places in attention.
  int64_t num_positions() const { return source_.positions ? source_.positions.rows() : kNoEnd; }
  int64_t num_places() const { return rotary_ ? rotary_.rows() : kNoEnd; }
  // The bytes of weights that a step of one row reads, and those that an encoder reads for a token.
  int64_t step_bytes() const;
  int64_t encoder_bytes() const;

  const ModelOptions options;
  std::vector<PackedWeight> source_projection;  // one or none: from what is embedded to d_model
  PackedStack encoder, decoder;
  PackedWeight output;

 private:
  static constexpr int64_t kNoEnd = int64_t(1) << 30;

  // The input of a stack.
  struct Input {
    Table embedding, positions, types;
    std::vector<Norm> norm;  // one or none
  };
  Input source_, target_;
  RotaryTable rotary_, local_rotary_;
  int64_t max_len_ = 0;
};

}  // namespace fastformer
