// A model as the engine reads it, for decoding or for a standalone encoder. Its weights are packed once for all
// sessions and never change afterwards.

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

// A contiguous tensor of the model, which is read while the model is packed. A matrix of bytes holds the nibbles of an
// Int4Matrix, (n, 16 * groups). Its scales (fp32) and optional zero points or levels (bytes) are the tensors with its
// name plus ".scale", ".zero" and ".levels".
struct ModelTensor {
  const void* data;  // null: a matrix that is read in parts
  Kind kind;
  std::vector<int64_t> shape;
  RowReader<const void*> read;
  const void* source;  // what `read` reads; null if the matrix is in memory

  // Returns what differs unless the tensors have the same numbers.
  const void* address() const { return data == nullptr ? source : data; }
  // Returns rows [begin, end) of a matrix, which are valid until the next call.
  const char* rows(int64_t begin, int64_t end) const {
    if (data == nullptr) return static_cast<const char*>(read(begin, end));
    return static_cast<const char*>(data) + begin * shape[1] * element_bytes(kind);
  }
};
using ModelTensors = std::map<std::string, ModelTensor>;

// Where a sub-layer f has its norms; x is the residual stream.
enum class NormPlacement {
  pre,   // x + f(norm(x))
  post,  // x + norm(f(x))
  both,  // x + post_norm(f(norm(x)))
  sum,   // norm(x + f(x)), which torch.nn calls post-norm
};
// Returns the placement with one of these names. Throws std::invalid_argument for other names.
NormPlacement norm_placement_named(std::string_view name);

// The options that don't follow from the tensors. A negative window means no window, a soft cap of 0 no cap. Options
// with a default here may be missing in the dictionary from Python (`options_of` in bindings/decoder.cpp).
struct ModelOptions {
  Precision precision;
  int64_t d_model, num_heads, num_kv_heads, head_dim;
  int64_t num_encoder_layers = -1;  // negative: a decoder-only model
  int64_t num_decoder_layers = 0;   // 0: a standalone encoder
  NormPlacement norm_placement;
  bool rms_norm = false;
  bool parallel_residual = false;  // x + attention(norm1(x)) + feed_forward(norm2(x)); only with NormPlacement::pre
  bool skips_first_norm = false;   // the encoder's first layer reads the embeddings without a norm
  bool causal_encoder = false;     // the encoder's tokens attend to no later token
  bool is_bare = false;            // sources have no embeddings or final norm, unless given: calls pass their states
  float eps;
  float scale = 1;                                                  // the factor for embeddings
  float attention_scale;                                            // 0: 1 / sqrt(head_dim) of each layer
  float attention_softcap = 0, logit_softcap = 0;                   // 0: none
  int64_t padding_idx = -1;                                         // the id whose embedding is zero; -1: none
  std::vector<int64_t> encoder_windows = {}, decoder_windows = {};  // the window of each layer; -1: none
  std::vector<int64_t> rotary_layers = {};  // for each layer of the only stack, whether it rotates; empty: all do
  // Of a decoder-only model, for each layer; empty: all layers are alike.
  std::vector<int64_t> layer_head_dims = {}, layer_kv_heads = {};
  std::vector<int64_t> key_layers = {};  // the layer whose keys and values it reads: itself, or one before it
  bool value_norm = false;               // an RMS norm of each head's values, without a weight
  int64_t rotary_reach = 0;              // how far behind a rotated feature the other of its pair is; 0: half of them
  bool rotates_before_norms = false;     // queries and keys are rotated first, and then each head is normalised
  // A query at position p has the factor 1 + query_growth * log(1 + floor(p / query_growth_length)), if it is rotated.
  float query_growth = 0;
  int64_t query_growth_length = 1;
  float layer_input_scale = 1;    // the factor for the embeddings that layers have of their own
  int64_t linear_key_heads = 0;   // of queries and keys in layers of linear attention
  int64_t mamba_groups = 0;       // of heads that share b and c, in layers that are a state space model
  int64_t experts_per_token = 0;  // the number of experts that a router chooses, in layers that have one
  bool norm_topk_prob = true;     // whether the weights of a token's experts are divided by their sum
  float norm_topk_eps = 0;        // is added to that sum
  float expert_scale = 1;         // the factor of the weights of a token's experts, at the end
  bool sigmoid_router = false;    // the weights are the sigmoids of scores, and not a softmax over them
  bool shared_gate = true;        // the shared expert's output is multiplied by the sigmoid of a score
  int64_t max_len;                // for a model without a table of positions
  Activation activation;
  bool fine_decoder = false;  // int8: the decoder's products, but for those of sources, read rows of 16 bits

  int64_t q_dim() const { return num_heads * head_dim; }
  int64_t kv_dim() const { return num_kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
  bool has_encoder() const { return num_encoder_layers >= 0; }
  bool has_decoder() const { return num_decoder_layers > 0; }
  int64_t decoder_parts() const { return fine_decoder && precision == Precision::int8 ? 2 : 1; }
  bool has_norms_in_front() const {
    return norm_placement == NormPlacement::pre || norm_placement == NormPlacement::both;
  }
  bool has_norms_behind() const {
    return norm_placement == NormPlacement::post || norm_placement == NormPlacement::both;
  }
};

struct Norm {
  std::vector<float> weight, bias;  // ones and zeros if the model has none
};

struct FeedForward {
  PackedWeight ff1, ff2;

  int64_t inner_columns() const { return ff1.num_panels * kPanelColumns; }  // of the product with ff1
  int64_t bytes() const { return ff1.bytes() + ff2.bytes(); }
};

// What a layer adds of its own embedding of the token: norm(projection(act(gate(x)) * embedding)).
struct LayerInput {
  PackedWeight gate, projection;
  Norm norm;

  int64_t bytes() const { return gate.bytes() + projection.bytes(); }
};

// Several feed-forward networks, of which a router chooses some for each token.
struct Mixture {
  PackedWeight router;               // a column for each expert, and one for the shared expert's gate; always fp32
  std::vector<float> choice_bias;    // what is added to an expert's weight when the experts of a token are chosen
  std::vector<FeedForward> experts;  // none: the layer has no mixture
  std::vector<FeedForward> shared;   // one or none: it computes all tokens

  explicit operator bool() const { return !experts.empty(); }
};

// A gated DeltaNet, in the place of self-attention (forward_states.cpp). PackedLayer::qkv gives its queries, keys,
// values and the gates of its outputs; PackedLayer::gates the logits of beta and those of the decay.
struct DeltaNet {
  int64_t key_heads, value_heads, key_dim, value_dim, conv_size;
  std::vector<float> conv;           // (conv_size, channels)
  std::vector<float> rate, dt_bias;  // of each value head; rate: -exp(A_log)
  Norm norm;                         // of the output of a head
  int64_t state = 0;                 // where its part of a row's states begins

  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_heads * key_dim + values(); }
  int64_t width() const { return (value_dim + 15) / 16 * 16; }  // of a row of a state
  int64_t state_floats() const { return value_heads * key_dim * width() + (conv_size - 1) * channels(); }
};

// A gated convolution over a few tokens, in the place of self-attention (forward_states.cpp). PackedLayer::qkv gives b,
// c and u, and its output is out(c * conv(b * u)).
struct ShortConv {
  int64_t size;
  std::vector<float> taps;  // (size, d_model)
  int64_t state = 0;        // where its part of a row's states begins: b * u of the last size - 1 tokens

  int64_t channels() const { return std::ssize(taps) / size; }
  int64_t state_floats() const { return (size - 1) * channels(); }
};

// A state space model (Mamba-2), in the place of self-attention (forward_states.cpp). PackedLayer::qkv gives z, x, b
// and c; PackedLayer::gates the logits of a head's steps.
struct Mamba {
  int64_t heads, head_dim, state_dim, groups, conv_size;
  std::vector<float> conv, conv_bias;      // (conv_size, channels), (channels)
  std::vector<float> rate, dt_bias, skip;  // of each head; rate: -exp(A_log)
  std::vector<float> norm, no_bias;        // of the outputs of all heads, each group of them apart
  int64_t state = 0;                       // where its part of a row's states begins

  int64_t values() const { return heads * head_dim; }
  int64_t channels() const { return values() + 2 * groups * state_dim; }  // of x, b and c
  int64_t width() const { return (head_dim + 15) / 16 * 16; }             // of a row of a state
  int64_t state_floats() const { return heads * state_dim * width() + (conv_size - 1) * channels(); }
};

// A layer of the encoder or the decoder; parts that encoder layers lack are empty there.
struct PackedLayer {
  PackedWeight qkv, out, cross_q, cross_kv, cross_out;
  int64_t head_dim = 0, num_kv_heads = 0;
  float attention_scale = 1;
  int64_t keys_of = 0;          // the layer whose keys and values it reads
  int64_t place = 0;            // that of those keys and values in the cache
  bool has_keys = true;         // makes keys and values, and doesn't read those of another layer
  bool keys_as_values = false;  // makes values of the product for its keys
  FeedForward ff;               // empty in a layer with a mixture
  Mixture mixture;
  Norm norm1, norm2, norm3;          // before the sub-layers, or after the residual additions
  Norm post_norm1, post_norm2;       // on the outputs of attention and of the feed-forward network
  std::vector<Norm> q_norm, k_norm;  // one or none: over each head, or over all heads together
  std::vector<Norm> v_norm;          // one or none: over each head
  std::vector<float> sinks;          // for each head, the score of a key without a value; empty: none
  PackedWeight gates;                // to logits of factors of the heads' outputs, or of `delta` or `mamba`; or empty
  std::vector<DeltaNet> delta;       // one or none
  std::vector<ShortConv> conv;       // one or none
  std::vector<Mamba> mamba;          // one or none
  std::vector<LayerInput> input;     // one or none: after the feed-forward network
  float scale = 1;                   // the factor for the residual stream at the end
  int64_t window;
  bool rotates = true;  // queries and keys, if the model has rotary positions

  bool attends() const { return delta.empty() && conv.empty() && mamba.empty(); }
  bool norms_all_heads() const { return !q_norm.empty() && std::ssize(q_norm[0].weight) != head_dim; }
  int64_t q_dim() const { return out.k; }
  int64_t kv_dim() const { return num_kv_heads * head_dim; }
};

// A bias on scores that depends on the distance from the query to the key (relative positions).
class PositionBias {
 public:
  PositionBias() = default;
  // values: (num_heads, 2 * reach + 1), for keys from `reach` positions before the query to `reach` positions after it.
  // Keys further away have the bias of the nearest entry. The bias is added before the scores are scaled.
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
  int64_t cached_layers = 0;     // those with keys and values
  int64_t state_floats = 0;      // of a row, in all layers with a state

  int64_t token_bytes(const ModelOptions& o) const;  // of the weights that each token reads
};

// A lookup table: a copy in fp32, or in bf16 for the lower precisions, or the columns of a packed weight.
class Table {
 public:
  Table() = default;
  Table(const ModelTensor& tensor, Precision precision);
  // Reads the outputs of a weight of fp32 or bf16, so that a matrix that is a table and a weight is in memory once.
  explicit Table(const PackedWeight& weight);
  explicit operator bool() const { return rows_ > 0; }
  int64_t rows() const { return rows_; }
  int64_t dim() const { return dim_; }
  // to[i] += factor * row[i], for the first `columns` numbers; negative: all. A packed weight adds all.
  void add_to(int64_t row, float factor, float* to, int64_t columns = -1) const;

 private:
  int64_t rows_ = 0, dim_ = 0;
  std::shared_ptr<const std::vector<float>> wide_;
  std::shared_ptr<const std::vector<bfloat16>> narrow_;
  PackedWeight packed_;
};

// The cosines and sines of each position, which rotate features i and i + reach of a head, for i < dim / 2.
class RotaryTable {
 public:
  RotaryTable() = default;
  // cos, sin: (positions, dim / 2). reach: 0: dim / 2.
  RotaryTable(const ModelTensor& cos, const ModelTensor& sin, int64_t reach);
  explicit operator bool() const { return dim_ > 0; }
  int64_t rows() const { return dim_ ? std::ssize(cos_) / dim_ : 0; }
  int64_t features() const { return reach_ + dim_ / 2; }  // that a head has at least
  // Rotates one head of queries or keys.
  void turn(int64_t position, float* head) const;

 private:
  int64_t dim_ = 0, reach_ = 0;
  std::vector<float> cos_, sin_;  // as rotate_halves reads them; see lay_out_angles
};

// The tensors have the names of the model's state_dict, with these exceptions. "source_embedding", "target_embedding"
// and "output" may name the same tied matrix. "source_positions", "target_positions", "source_types",
// "source_projection", "cos" and "sin" are the model's tables; "local_cos" and "local_sin" those of layers with a
// window, if they differ. "front.0", "front.1" and "front.positions" are the front of an encoder of speech. For
// "encoder_position_bias" and "decoder_position_bias", see PositionBias. "layer_embedding" has the embeddings of a
// token for all layers, one after another; "layer_projection.weight" makes as many of the token's embedding, and
// "layer_projection_norm.weight" normalises each.
class PackedModel {
 public:
  PackedModel(const ModelOptions& options, const ModelTensors& tensors);

  // Writes the embedding of a token at a position: d_model floats, or as many as the projection has inputs. It is
  // normalised if the model has an embedding norm. type: the token's type, if the model has types.
  void embed(bool is_source, int32_t token, int32_t type, int64_t position, float* to) const;

  // Returns the table that rotates the queries and keys of a layer; null: no rotation.
  const RotaryTable* rotary(const PackedLayer& layer) const {
    if (!layer.rotates) return nullptr;
    const RotaryTable& table = layer.window >= 0 && local_rotary_ ? local_rotary_ : rotary_;
    return table ? &table : nullptr;
  }

  int64_t vocab_size() const { return output.n; }
  int64_t num_mels() const { return front.empty() ? 0 : front[0].k / 3; }
  int64_t source_vocab_size() const { return source_.embedding.rows(); }
  int64_t num_token_types() const { return source_.types.rows(); }
  int64_t max_len() const { return max_len_; }
  // The bound for the position ids of an encoder's tokens, and for their original indices.
  int64_t num_positions() const { return source_.positions ? source_.positions.rows() : kNoEnd; }
  int64_t num_places() const { return rotary_ ? rotary_.rows() : kNoEnd; }
  // The bytes of weights that a decode step of one row reads, and those that the encoder reads for a token.
  int64_t step_bytes() const { return decoder.token_bytes(options) + layer_projection.bytes() + output.bytes(); }
  // The bytes of a row's state, in all layers that have one.
  int64_t state_bytes() const { return 4 * decoder.state_floats; }
  int64_t encoder_bytes() const { return encoder.token_bytes(options); }

  const ModelOptions options;
  std::vector<PackedWeight> source_projection;  // one or none: from the embeddings to d_model
  // Two or none: convolutions over three frames, whose weights are (d_model, 3 * inputs), frame by frame; the second
  // one takes every other frame. GELU follows each of them. front_positions: (frames, d_model), added to the result.
  std::vector<PackedWeight> front;
  Table front_positions;
  PackedStack encoder, decoder;
  int64_t last_keys = 0;  // the last layer of the decoder that makes keys, or a state
  // The numbers in a layer's own embedding of a token; 0: layers have none. See LayerInput.
  int64_t layer_input_dim = 0;
  PackedWeight layer_projection;
  // Writes those of the first `layers` layers for a token, given the product of its embedding with layer_projection.
  void embed_for_layers(int32_t token, int64_t layers, float* product) const;
  PackedWeight output;

 private:
  static constexpr int64_t kNoEnd = int64_t(1) << 30;

  // The input of a stack.
  struct Input {
    Table embedding, positions, types;
    std::vector<Norm> norm;  // one or none
  };
  void add_layer_embedding(const ModelTensors& tensors);

  Input source_, target_;
  Table layer_embedding_;
  Norm layer_norm_;
  RotaryTable rotary_, local_rotary_;
  int64_t max_len_ = 0;
};

}  // namespace fastformer
