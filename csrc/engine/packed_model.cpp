#include "engine/packed_model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "common/rows.h"

namespace fastformer {
namespace {

float at(const ModelTensor& tensor, int64_t i) {
  if (tensor.data == nullptr) throw std::invalid_argument("expected an array, got a matrix that is read in parts");
  return number_at(tensor.data, tensor.kind, i);
}

// The bytes in a row of an Int4Matrix.
int64_t nibble_bytes(int64_t k) { return int4_groups(k) * kInt4Group / 2; }

// Looks up tensors by names with a common prefix.
class Names {
 public:
  Names(const ModelTensors& tensors, std::string prefix) : tensors_(tensors), prefix_(std::move(prefix)) {}

  Names within(const std::string& name) const { return {tensors_, prefix_ + name + "."}; }
  const ModelTensor* find(const std::string& name) const {
    const auto it = tensors_.find(prefix_ + name);
    return it == tensors_.end() ? nullptr : &it->second;
  }
  const ModelTensor& get(const std::string& name) const {
    const ModelTensor* tensor = find(name);
    if (!tensor) throw std::invalid_argument("the model has no tensor " + prefix_ + name);
    return *tensor;
  }
  std::vector<float> vector(const std::string& name, int64_t size, float otherwise) const {
    std::vector<float> values(size, otherwise);
    if (find(name)) {
      const ModelTensor& tensor = numbers(name);
      check(name, tensor, {size});
      for (int64_t i = 0; i < size; ++i) values[i] = at(tensor, i);
    }
    return values;
  }
  // Returns the factors of a depthwise convolution (channels, 1, size) as (size, channels).
  std::vector<float> taps(const std::string& name) const {
    const ModelTensor& tensor = numbers(name);
    const int64_t channels = tensor.shape[0], size = tensor.shape[2];
    std::vector<float> taps(size * channels);
    for (int64_t i = 0; i < channels * size; ++i) taps[i % size * channels + i / size] = at(tensor, i);
    return taps;
  }
  Norm norm(const std::string& name, int64_t size) const {
    return {vector(name + ".weight", size, 1), vector(name + ".bias", size, 0)};
  }
  // Returns the names and the addresses of all tensors within.
  std::vector<std::pair<std::string, const void*>> addresses() const {
    std::vector<std::pair<std::string, const void*>> all;
    for (auto it = tensors_.lower_bound(prefix_); it != tensors_.end() && it->first.starts_with(prefix_); ++it)
      all.emplace_back(it->first.substr(prefix_.size()), it->second.address());
    return all;
  }
  // Returns a tensor of two dimensions, and checks the second one if `columns` is given.
  const ModelTensor& table(const std::string& name, int64_t columns = -1) const {
    check_table(name, columns);
    return numbers(name);
  }
  // Returns the number of rows of a weight with k columns.
  int64_t rows(const std::string& name, int64_t k) const {
    check_table(name, get(name).kind == Kind::bytes ? nibble_bytes(k) : k);
    return get(name).shape[0];
  }
  PackedWeight weight(const std::string& name, const std::string& bias, int64_t begin, int64_t end, int64_t rows,
                      int64_t k, Precision precision) const {
    const std::vector<float> biases = find(bias) ? vector(bias, rows, 0) : std::vector<float>();
    const float* from = biases.empty() ? nullptr : biases.data() + begin;
    if (get(name).kind == Kind::bytes) {
      if (precision != Precision::int4) throw_unexpected(name, "dtype");
      return int4(name, begin, end, rows, k, from);
    }
    const ModelTensor& tensor = get(name);
    check(name, tensor, {rows, k});
    const auto read = [&](int64_t first, int64_t last) {
      return Matrix{tensor.rows(begin + first, begin + last), tensor.kind, last - first, k};
    };
    // In an int4 model, matrices without groups are packed as int8.
    return {end - begin, k, RowReader<Matrix>(read), from, precision == Precision::int4 ? Precision::int8 : precision};
  }

 private:
  PackedWeight int4(const std::string& name, int64_t begin, int64_t end, int64_t rows, int64_t k,
                    const float* bias) const {
    const int64_t groups = int4_groups(k);
    const auto part = [&](const std::string& part, Kind kind, int64_t columns) {
      check(part, get(part), {rows, columns});
      if (get(part).kind != kind) throw_unexpected(part, "dtype");
      return &get(part);
    };
    const ModelTensor *nibbles = part(name, Kind::bytes, nibble_bytes(k)),
                      *scales = part(name + ".scale", Kind::fp32, groups),
                      *zeros = find(name + ".zero") ? part(name + ".zero", Kind::bytes, groups) : nullptr;
    std::optional<Levels> levels;
    if (const ModelTensor* table = find(name + ".levels")) {
      check(name + ".levels", *table, {std::tuple_size_v<Levels>});
      if (table->kind != Kind::bytes) throw_unexpected(name + ".levels", "dtype");
      std::memcpy(levels.emplace().data(), table->data, sizeof(Levels));
    }
    const auto read = [&](int64_t first, int64_t last) {
      const auto bytes = [&](const ModelTensor* tensor) {
        return reinterpret_cast<const uint8_t*>(tensor->rows(begin + first, begin + last));
      };
      return Int4Matrix{bytes(nibbles),
                        reinterpret_cast<const float*>(bytes(scales)),
                        zeros ? bytes(zeros) : nullptr,
                        last - first,
                        k,
                        levels ? levels->data() : nullptr};
    };
    return {end - begin, k, RowReader<Int4Matrix>(read), bias, zeros != nullptr, levels};
  }

  // Returns a tensor whose elements at() can read.
  const ModelTensor& numbers(const std::string& name) const {
    if (get(name).kind == Kind::bytes) throw_unexpected(name, "dtype");
    return get(name);
  }
  void check(const std::string& name, const ModelTensor& tensor, const std::vector<int64_t>& shape) const {
    if (tensor.shape != shape) throw_unexpected(name, "shape");
  }
  void check_table(const std::string& name, int64_t columns) const {
    const std::vector<int64_t>& shape = get(name).shape;
    if (shape.size() != 2 || shape[0] < 1 || (columns >= 0 && shape[1] != columns)) throw_unexpected(name, "shape");
  }
  [[noreturn]] void throw_unexpected(const std::string& name, const char* what) const {
    throw std::invalid_argument("the tensor " + prefix_ + name + " has an unexpected " + what);
  }

  const ModelTensors& tensors_;
  std::string prefix_;
};

PackedWeight pack_linear(const ModelOptions& o, const Names& names, const std::string& name, int64_t n, int64_t k) {
  return names.weight(name + ".weight", name + ".bias", 0, n, n, k, o.precision);
}

// Packs feed-forward networks whose matrices are one below the other.
std::vector<FeedForward> pack_experts(const ModelOptions& o, const Names& names, int64_t count) {
  const int64_t dim = o.d_model, all = names.rows("linear1.weight", dim), inner = all / count;
  if (all % count) throw std::invalid_argument("expected experts of one size");
  const int64_t d_ff = is_gated(o.activation) ? inner / 2 : inner;
  std::vector<FeedForward> experts;
  for (int64_t i = 0; i < count; ++i) {
    const auto part = [&](const std::string& name, int64_t n, int64_t k) {
      return names.weight(name + ".weight", name + ".bias", i * n, (i + 1) * n, count * n, k, o.precision);
    };
    experts.push_back({part("linear1", inner, dim), part("linear2", dim, d_ff)});
  }
  return experts;
}

Mixture pack_mixture(const ModelOptions& o, const Names& names) {
  Mixture mixture;
  const int64_t rows = names.rows("router.weight", o.d_model);
  if (names.find("shared.linear1.weight")) mixture.shared = pack_experts(o, names.within("shared"), 1);
  const int64_t count = rows - (o.shared_gate ? std::ssize(mixture.shared) : 0);
  if (o.experts_per_token < 1 || o.experts_per_token > count)
    throw std::invalid_argument("expected experts_per_token from 1 to the number of experts");
  mixture.router = names.weight("router.weight", "router.bias", 0, rows, rows, o.d_model, Precision::fp32);
  mixture.choice_bias = names.vector("router.choice_bias", count, 0);
  mixture.experts = pack_experts(o, names, count);
  return mixture;
}

// Packs the parts of a layer of linear attention.
void pack_delta(const ModelOptions& o, const Names& names, PackedLayer& layer) {
  const std::vector<int64_t>&conv = names.get("conv_weight").shape, &heads = names.get("A_log").shape,
        &norm = names.get("norm.weight").shape;
  if (conv.size() != 3 || conv[1] != 1 || conv[2] < 1 || heads.size() != 1 || norm.size() != 1 ||
      o.linear_key_heads < 1 || heads[0] < 1 || norm[0] < 1 || heads[0] % o.linear_key_heads)
    throw std::invalid_argument("the tensors of linear attention have unexpected shapes");
  const int64_t channels = conv[0], size = conv[2], values = heads[0] * norm[0], keys = channels - values;
  if (keys < 1 || keys % (2 * o.linear_key_heads) || o.fine_decoder)
    throw std::invalid_argument("expected linear attention with equal heads of queries and keys, without fine_decoder");
  DeltaNet net{o.linear_key_heads, heads[0], keys / (2 * o.linear_key_heads), norm[0], size};
  net.conv = names.taps("conv_weight");
  net.rate = names.vector("A_log", heads[0], 0), net.dt_bias = names.vector("dt_bias", heads[0], 0);
  for (float& rate : net.rate) rate = -std::exp(rate);
  net.norm = names.norm("norm", norm[0]);
  layer.qkv = pack_linear(o, names, "in_proj", channels + values, o.d_model);
  layer.gates = pack_linear(o, names, "gates", 2 * heads[0], o.d_model);
  layer.out = pack_linear(o, names, "out_proj", o.d_model, values);
  layer.delta.push_back(std::move(net));
}

// Packs the parts of a layer that is a state space model.
void pack_mamba(const ModelOptions& o, const Names& names, PackedLayer& layer) {
  const std::vector<int64_t>&conv = names.get("conv_weight").shape, &heads = names.get("A_log").shape,
        &norm = names.get("norm_weight").shape;
  const int64_t groups = o.mamba_groups;
  if (conv.size() != 3 || conv[1] != 1 || conv[2] < 1 || heads.size() != 1 || norm.size() != 1 || heads[0] < 1 ||
      norm[0] < 1 || norm[0] % heads[0] || groups < 1 || heads[0] % groups || conv[0] <= norm[0] ||
      (conv[0] - norm[0]) % (2 * groups) || o.fine_decoder)
    throw std::invalid_argument("expected the tensors of a state space model, without fine_decoder");
  const int64_t values = norm[0], channels = conv[0];
  Mamba mamba{heads[0], values / heads[0], (channels - values) / (2 * groups), groups, conv[2]};
  mamba.conv = names.taps("conv_weight"), mamba.conv_bias = names.vector("conv_bias", channels, 0);
  mamba.rate = names.vector("A_log", heads[0], 0), mamba.dt_bias = names.vector("dt_bias", heads[0], 0);
  for (float& rate : mamba.rate) rate = -std::exp(rate);
  mamba.skip = names.vector("D", heads[0], 1);
  mamba.norm = names.vector("norm_weight", values, 1), mamba.no_bias.resize(values);
  layer.qkv = pack_linear(o, names, "in_proj", values + channels, o.d_model);
  layer.gates = pack_linear(o, names, "gates", heads[0], o.d_model);
  layer.out = pack_linear(o, names, "out_proj", o.d_model, values);
  layer.mamba.push_back(std::move(mamba));
}

// Packs the parts of a layer that is a gated convolution.
void pack_conv(const ModelOptions& o, const Names& names, PackedLayer& layer) {
  const std::vector<int64_t>& shape = names.get("conv_weight").shape;
  const int64_t dim = o.d_model;
  if (shape.size() != 3 || shape[0] != dim || shape[1] != 1 || shape[2] < 1 || o.fine_decoder)
    throw std::invalid_argument("expected a convolution (d_model, 1, size), without fine_decoder");
  layer.conv.push_back({shape[2], names.taps("conv_weight")});
  layer.qkv = pack_linear(o, names, "in_proj", 3 * dim, dim);
  layer.out = pack_linear(o, names, "out_proj", dim, dim);
}

int64_t of_layer(const std::vector<int64_t>& values, size_t layer, int64_t otherwise) {
  return values.empty() ? otherwise : values[layer];
}

// The caller sets the window.
PackedLayer pack_layer(const ModelOptions& o, const Names& names, bool has_cross, size_t index) {
  PackedLayer layer;
  layer.head_dim = of_layer(o.layer_head_dims, index, o.head_dim);
  layer.num_kv_heads = of_layer(o.layer_kv_heads, index, o.num_kv_heads);
  layer.attention_scale =
      o.attention_scale != 0 ? o.attention_scale : 1 / std::sqrt(static_cast<float>(layer.head_dim));
  layer.keys_of = of_layer(o.key_layers, index, static_cast<int64_t>(index));
  layer.has_keys = layer.keys_of == static_cast<int64_t>(index);
  const int64_t dim = o.d_model, q_dim = o.num_heads * layer.head_dim;
  const auto head_norm = [&](const Names& where, const std::string& name, int64_t heads) {
    // Either one weight that all heads share, or one for each feature of all heads.
    const bool is_shared = where.get(name).shape == std::vector<int64_t>{layer.head_dim};
    const int64_t size = is_shared ? layer.head_dim : heads * layer.head_dim;
    return Norm{where.vector(name, size, 1), std::vector<float>(size)};
  };
  const Names own = names.within("self_attn"), cross = names.within("multihead_attn");
  if (own.find("D")) {
    pack_mamba(o, own, layer);
  } else if (own.find("A_log")) {
    pack_delta(o, own, layer);
  } else if (own.find("conv_weight")) {
    pack_conv(o, own, layer);
  } else {
    layer.keys_as_values = layer.has_keys && own.rows("in_proj_weight", dim) == q_dim + layer.kv_dim();
    const int64_t rows = q_dim + (layer.keys_as_values ? 1 : layer.has_keys ? 2 : 0) * layer.kv_dim();
    layer.qkv = own.weight("in_proj_weight", "in_proj_bias", 0, rows, rows, dim, o.precision);
    layer.out = pack_linear(o, own, "out_proj", dim, q_dim);
    if (own.find("gate_proj.weight")) layer.gates = pack_linear(o, own, "gate_proj", q_dim, dim);
  }
  if (own.find("q_norm.weight")) {
    layer.q_norm.push_back(head_norm(own, "q_norm.weight", o.num_heads));
    if (layer.has_keys) layer.k_norm.push_back(head_norm(own, "k_norm.weight", layer.num_kv_heads));
    const int64_t size = layer.norms_all_heads() ? layer.kv_dim() : layer.head_dim;
    if (layer.has_keys && std::ssize(layer.k_norm[0].weight) != size)
      throw std::invalid_argument("the tensors q_norm.weight and k_norm.weight have unexpected shapes");
  }
  if (o.rotates_before_norms && layer.norms_all_heads())
    throw std::invalid_argument("expected norms of each head, or none, where they follow rotations");
  if (layer.keys_as_values && layer.norms_all_heads())
    throw std::invalid_argument("expected norms of each head, or none, where keys make the values");
  if (o.value_norm && layer.has_keys)
    layer.v_norm.push_back({std::vector<float>(layer.head_dim, 1.f), std::vector<float>(layer.head_dim)});
  if (own.find("sinks")) layer.sinks = own.vector("sinks", o.num_heads, 0);
  if (has_cross) {
    const int64_t rows = o.qkv_dim();
    layer.cross_q = cross.weight("in_proj_weight", "in_proj_bias", 0, q_dim, rows, dim, o.precision);
    layer.cross_kv = cross.weight("in_proj_weight", "in_proj_bias", q_dim, rows, rows, dim, o.precision);
    layer.cross_out = pack_linear(o, cross, "out_proj", dim, q_dim);
    layer.norm3 = names.norm("norm3", dim);
  }
  if (o.norm_placement != NormPlacement::post)
    layer.norm1 = names.norm("norm1", dim), layer.norm2 = names.norm("norm2", dim);
  if (o.has_norms_behind())
    layer.post_norm1 = names.norm("post_norm1", dim), layer.post_norm2 = names.norm("post_norm2", dim);
  if (names.find("mixture.router.weight") && o.fine_decoder)
    throw std::invalid_argument("fine_decoder: expected a model without experts");
  if (names.find("mixture.router.weight")) layer.mixture = pack_mixture(o, names.within("mixture"));
  else layer.ff = pack_experts(o, names, 1)[0];
  if (names.find("layer_input.gate.weight")) {
    const Names input = names.within("layer_input");
    const int64_t size = input.rows("gate.weight", dim);
    layer.input.push_back({pack_linear(o, input, "gate", size, dim), pack_linear(o, input, "projection", dim, size),
                           input.norm("norm", dim)});
  }
  layer.scale = names.vector("layer_scalar", 1, 1)[0];
  return layer;
}

// windows: the window of each layer.
PackedStack pack_stack(const ModelOptions& o, const Names& names, bool has_cross, const std::vector<int64_t>& windows) {
  constexpr int64_t kWidest = int64_t(1) << 32;  // more than any text has tokens; sums with positions can't overflow
  PackedStack stack;
  std::map<std::vector<std::pair<std::string, const void*>>, size_t>
      packed;  // layers that share all tensors share them
  for (size_t i = 0; i < windows.size(); ++i) {
    const Names layer = names.within("layers." + std::to_string(i));
    const auto [first, is_new] = packed.try_emplace(layer.addresses(), i);
    stack.layers.push_back(is_new ? pack_layer(o, layer, has_cross, i) : stack.layers[first->second]);
    PackedLayer& added = stack.layers.back();
    added.window = std::min(windows[i], kWidest);
    added.keys_of = of_layer(o.key_layers, i, static_cast<int64_t>(i));
    added.has_keys = added.keys_of == static_cast<int64_t>(i) && added.attends();
    added.place = added.has_keys ? stack.cached_layers++ : stack.layers[added.keys_of].place;
    const auto place = [&](auto& part) { part.state = stack.state_floats, stack.state_floats += part.state_floats(); };
    for (DeltaNet& net : added.delta) place(net);
    for (ShortConv& conv : added.conv) place(conv);
    for (Mamba& mamba : added.mamba) place(mamba);
  }
  // The layers of torch.nn end without a norm, unless one is given.
  if (names.find("norm.weight") || (o.norm_placement != NormPlacement::sum && !o.is_bare))
    stack.final_norm.push_back(names.norm("norm", o.d_model));
  return stack;
}

PositionBias position_bias(const ModelOptions& o, const Names& names, const std::string& name) {
  if (!names.find(name)) return {};
  const ModelTensor& tensor = names.table(name);
  const int64_t distances = tensor.shape[1];
  if (tensor.shape[0] != o.num_heads || distances % 2 == 0)
    throw std::invalid_argument(
        "expected a position bias for each head that reaches as far before a query as after it");
  std::vector<float> values(o.num_heads * distances);
  for (int64_t i = 0; i < std::ssize(values); ++i) values[i] = at(tensor, i);
  return {std::move(values), distances / 2};
}

// Checks options before they are used as divisors or factors.
const ModelOptions& checked(const ModelOptions& o) {
  constexpr int64_t kMost = 1 << 20;
  const auto is_size = [](int64_t n) { return 1 <= n && n <= kMost; };
  const bool has_sizes = is_size(o.d_model) && is_size(o.num_heads) && is_size(o.num_kv_heads) && is_size(o.head_dim) &&
                         (is_size(o.num_decoder_layers) || (o.num_decoder_layers == 0 && o.has_encoder())) &&
                         o.num_encoder_layers <= kMost && o.q_dim() <= kMost;
  if (!has_sizes || o.num_heads % o.num_kv_heads)
    throw std::invalid_argument(
        "expected at least one layer, and a number of kv heads that divides the number of query heads");
  if (std::ssize(o.decoder_windows) != o.num_decoder_layers)
    throw std::invalid_argument("expected a window for each decoder layer");
  if (std::ssize(o.encoder_windows) != std::max<int64_t>(0, o.num_encoder_layers))
    throw std::invalid_argument("expected a window for each encoder layer");
  if (o.is_bare && !o.has_encoder())
    throw std::invalid_argument("expected a model without embeddings of sources to have an encoder");
  if (o.parallel_residual && (o.norm_placement != NormPlacement::pre || o.has_encoder()))
    throw std::invalid_argument("expected pre-norm and no encoder in a model with a parallel residual");
  if (o.value_norm && o.has_encoder()) throw std::invalid_argument("expected norms of values in a decoder-only model");
  if (o.query_growth_length < 1) throw std::invalid_argument("expected queries that grow after a positive length");
  for (const auto* values : {&o.layer_head_dims, &o.layer_kv_heads, &o.key_layers})
    if (!values->empty() && (o.has_encoder() || std::ssize(*values) != o.num_decoder_layers))
      throw std::invalid_argument("expected options of layers for each layer of a decoder-only model");
  for (int64_t i = 0; i < o.num_decoder_layers; ++i) {
    const int64_t dim = of_layer(o.layer_head_dims, i, 1), heads = of_layer(o.layer_kv_heads, i, 1);
    const int64_t from = of_layer(o.key_layers, i, i);
    if (!is_size(dim) || !is_size(heads) || o.num_heads % heads || o.num_heads * dim > kMost)
      throw std::invalid_argument("expected layers with a number of kv heads that divides the number of query heads");
    if (from < 0 || from > i || of_layer(o.key_layers, from, from) != from ||
        of_layer(o.layer_head_dims, from, 1) != dim || of_layer(o.layer_kv_heads, from, 1) != heads)
      throw std::invalid_argument("expected layers that read keys of layers before them, with heads like theirs");
  }
  if (o.has_norms_behind() && o.has_encoder() && o.has_decoder())  // cross-attention has no norm after it
    throw std::invalid_argument("expected norms of sub-layer outputs only in a model without cross-attention");
  return o;
}

}  // namespace

NormPlacement norm_placement_named(std::string_view name) {
  if (name == "pre") return NormPlacement::pre;
  if (name == "post") return NormPlacement::post;
  if (name == "both") return NormPlacement::both;
  if (name == "sum") return NormPlacement::sum;
  throw std::invalid_argument("norm_placement: expected 'pre', 'post', 'both' or 'sum', got '" + std::string(name) +
                              "'");
}

Table::Table(const ModelTensor& tensor, Precision precision) : rows_(tensor.shape[0]), dim_(tensor.shape[1]) {
  const auto copy = [&]<typename T>(std::shared_ptr<const std::vector<T>>& to) {
    auto values = std::make_shared<std::vector<T>>(rows_ * dim_);
    constexpr int64_t kNumbers = 1 << 18;
    const int64_t step = std::max<int64_t>(1, kNumbers / std::max<int64_t>(1, dim_));
    for (int64_t row = 0; row < rows_; row += step) {
      const int64_t end = std::min(rows_, row + step);
      const char* from = tensor.rows(row, end);
      for (int64_t i = 0; i < (end - row) * dim_; ++i)
        (*values)[row * dim_ + i] = static_cast<T>(number_at(from, tensor.kind, i));
    }
    to = std::move(values);
  };
  if (precision == Precision::fp32 && tensor.kind != Kind::bf16) copy(wide_);
  else copy(narrow_);
}

Table::Table(const PackedWeight& weight) : rows_(weight.n), dim_(weight.k), packed_(weight) {}

void Table::add_to(int64_t row, float factor, float* to, int64_t columns) const {
  if (packed_.n > 0) return packed_.add_column(row, factor, to);
  const auto add = [=, this](const auto* from) {
    for_each_vec<float>(columns < 0 ? dim_ : columns, [=](int64_t c, int64_t n) {
      fmadd(Vec<float>::load(from + c, n), Vec<float>(factor), Vec<float>::load(to + c, n)).store(to + c, n);
    });
  };
  if (wide_) add(wide_->data() + row * dim_);
  else add(narrow_->data() + row * dim_);
}

void PositionBias::add_to(int64_t head, int64_t query, int64_t key, int64_t count, float* scores) const {
  const float* row = values_.data() + head * (2 * reach_ + 1) + reach_;  // row[distance]
  const int64_t near = std::clamp<int64_t>(query - reach_ - key, 0, count);
  const int64_t far = std::clamp<int64_t>(query + reach_ + 1 - key, near, count);
  const auto add_one = [=](int64_t begin, int64_t end, float value) {
    for_each_vec<float>(end - begin, [=](int64_t c, int64_t n) {
      (Vec<float>::load(scores + begin + c, n) + Vec<float>(value)).store(scores + begin + c, n);
    });
  };
  add_one(0, near, row[-reach_]);
  const float* from = row + (key + near - query);
  for_each_vec<float>(far - near, [=](int64_t c, int64_t n) {
    (Vec<float>::load(scores + near + c, n) + Vec<float>::load(from + c, n)).store(scores + near + c, n);
  });
  add_one(far, count, row[reach_]);
}

RotaryTable::RotaryTable(const ModelTensor& cos, const ModelTensor& sin, int64_t reach)
    : dim_(2 * cos.shape[1]), reach_(reach ? reach : dim_ / 2) {
  const int64_t positions = cos.shape[0], half = dim_ / 2;
  cos_.resize(positions * dim_), sin_.resize(positions * dim_);
  std::vector<float> c(half), s(half);
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t i = 0; i < half; ++i) c[i] = at(cos, position * half + i), s[i] = at(sin, position * half + i);
    lay_out_angles(c.data(), s.data(), half, false, false, cos_.data() + position * dim_,
                   sin_.data() + position * dim_);
  }
}

void RotaryTable::turn(int64_t position, float* head) const {
  const float *cos = cos_.data() + position * dim_, *sin = sin_.data() + position * dim_;
  for_each_vec<float>(dim_ / 2, [=, this](int64_t c, int64_t n) {
    using V = Vec<float>;
    const V a = V::load(head + c, n), b = V::load(head + reach_ + c, n), x = V::load(cos + c, n),
            y = V::load(sin + c, n);
    (a * x - b * y).store(head + c, n);
    (b * x + a * y).store(head + reach_ + c, n);
  });
}

PackedModel::PackedModel(const ModelOptions& o, const ModelTensors& tensors) : options(checked(o)) {
  const Names names(tensors, "");
  if (o.has_encoder()) encoder = pack_stack(o, names.within("encoder"), false, o.encoder_windows);
  if (o.has_decoder()) decoder = pack_stack(o, names.within("decoder"), o.has_encoder(), o.decoder_windows);
  if (encoder.state_floats || (o.has_encoder() && decoder.state_floats))
    throw std::invalid_argument("expected layers with a state only in a model without an encoder");
  std::vector<PackedLayer>& layers = o.has_decoder() ? decoder.layers : encoder.layers;
  if (!o.rotary_layers.empty() && o.rotary_layers.size() != layers.size())
    throw std::invalid_argument("expected rotary_layers to have an entry for each layer");
  for (size_t i = 0; i < o.rotary_layers.size(); ++i) layers[i].rotates = o.rotary_layers[i] != 0;
  for (int64_t i = 0; i < std::ssize(decoder.layers); ++i)
    if (decoder.layers[i].keys_of == i) last_keys = i;
  if (names.find("front.0.weight")) {
    const auto convolution = [&](const std::string& name, int64_t k) {
      return names.weight(name + ".weight", name + ".bias", 0, o.d_model, o.d_model, k, o.precision);
    };
    front = {convolution("front.0", names.table("front.0.weight").shape[1]), convolution("front.1", 3 * o.d_model)};
    if (front[0].k % 3) throw std::invalid_argument("expected a convolution over three frames");
    front_positions = Table(names.table("front.positions", o.d_model), Precision::fp32);
  }
  encoder.position_bias = position_bias(o, names, "encoder_position_bias");
  decoder.position_bias = position_bias(o, names, "decoder_position_bias");
  std::map<const void*, Table> tables;  // a table that both sides, or the output, share is stored once
  if (o.has_decoder()) {
    const int64_t vocab = names.rows("output", o.d_model);
    output = names.weight("output", "output_bias", 0, vocab, vocab, o.d_model, o.precision);
    const ModelTensor &shared = names.get("output"), &embedding = names.table("target_embedding", o.d_model);
    if (embedding.shape[0] < vocab) throw std::invalid_argument("expected an embedding for each output token");
    const bool is_exact = output.precision == Precision::fp32 || output.precision == Precision::bf16;
    if (is_exact && embedding.shape == shared.shape) tables.emplace(shared.address(), Table(output));
  }
  const auto table = [&](const std::string& name, int64_t width) {
    const ModelTensor& tensor = names.table(name, width);
    const auto [place, is_new] = tables.try_emplace(tensor.address());
    if (is_new) place->second = Table(tensor, o.precision);
    return place->second;
  };
  const auto input = [&](const std::string& side, int64_t width) {
    Input tables{table(side + "_embedding", width), {}, {}, {}};
    if (names.find(side + "_positions")) {
      tables.positions = table(side + "_positions", width);
      max_len_ = max_len_ ? std::min(max_len_, tables.positions.rows()) : tables.positions.rows();
    }
    if (names.find(side + "_types")) tables.types = table(side + "_types", width);
    const std::string norm = side + "_embedding_norm";
    if (names.find(norm + ".weight")) tables.norm.push_back(names.norm(norm, width));
    return tables;
  };
  if (o.has_encoder() && !o.is_bare) {
    const bool is_projected = names.find("source_projection.weight") != nullptr;
    source_ = input("source", is_projected ? names.table("source_embedding").shape[1] : o.d_model);
    if (is_projected)
      source_projection.push_back(names.weight("source_projection.weight", "source_projection.bias", 0, o.d_model,
                                               o.d_model, source_.embedding.dim(), o.precision));
  }
  if (o.has_decoder()) target_ = input("target", o.d_model);
  if (names.find("layer_embedding")) add_layer_embedding(tensors);
  const auto rotary = [&](const std::string& prefix) -> RotaryTable {
    if (!names.find(prefix + "cos")) return {};
    const ModelTensor& cos = names.table(prefix + "cos");
    const ModelTensor& sin = names.table(prefix + "sin", cos.shape[1]);
    const RotaryTable made = cos.shape[1] < 1 || sin.shape != cos.shape
                                 ? RotaryTable()
                                 : RotaryTable(cos, sin, prefix.empty() ? o.rotary_reach : 0);
    if (!made || o.rotary_reach < 0 || (prefix.empty() && o.rotary_reach && o.rotary_reach < cos.shape[1]))
      throw std::invalid_argument("expected rotary tables with half as many columns as a head has rotated features");
    return made;
  };
  rotary_ = rotary(""), local_rotary_ = rotary("local_");
  for (const PackedLayer& layer : layers)
    if (const RotaryTable* table = this->rotary(layer); table && table->features() > layer.head_dim)
      throw std::invalid_argument("expected rotary tables with half as many columns as a head has rotated features");
  if (rotary_) max_len_ = max_len_ ? std::min(max_len_, rotary_.rows()) : rotary_.rows();
  if (!max_len_) max_len_ = o.max_len;
  if (local_rotary_ && local_rotary_.rows() != rotary_.rows())
    throw std::invalid_argument("expected two rotary tables with the same number of positions");
}

void PackedModel::embed(bool is_source, int32_t token, int32_t type, int64_t position, float* to) const {
  const ModelOptions& o = options;
  const Input& input = is_source ? source_ : target_;
  const int64_t width = input.embedding.dim();
  std::fill_n(to, width, 0.f);
  if (token != o.padding_idx) input.embedding.add_to(token, o.scale, to);
  if (input.positions) input.positions.add_to(position, 1, to);
  if (input.types) input.types.add_to(type, 1, to);
  for (const Norm& norm : input.norm) {
    // normalise_row completes its sums before it writes, so it may run in place.
    normalise_row<false, false, float, float, float>(to, nullptr, nullptr, norm.weight.data(), norm.bias.data(), o.eps,
                                                     o.rms_norm, width, nullptr, to);
  }
}

void PackedModel::add_layer_embedding(const ModelTensors& tensors) {
  const Names names(tensors, "");
  const auto layers = std::ssize(decoder.layers);
  if (layers == 0 || !options.rms_norm || options.norm_placement == NormPlacement::sum ||
      options.activation == Activation::clamped_swiglu)
    throw std::invalid_argument(
        "expected embeddings of layers in a decoder with RMS norms whose activation has no limits");
  layer_input_dim = decoder.layers[0].input.empty() ? 0 : decoder.layers[0].input[0].gate.n;
  for (const PackedLayer& layer : decoder.layers)
    if (layer.input.empty() || layer.input[0].gate.n != layer_input_dim)
      throw std::invalid_argument("expected inputs of one size for all layers");
  const int64_t width = layers * layer_input_dim;
  layer_embedding_ = Table(names.table("layer_embedding", width), options.precision);
  if (layer_embedding_.rows() < vocab_size()) throw std::invalid_argument("expected an embedding for each token");
  layer_projection = names.weight("layer_projection.weight", "layer_projection.bias", 0, width, width, options.d_model,
                                  options.precision);
  layer_norm_ = names.norm("layer_projection_norm", layer_input_dim);
}

void PackedModel::embed_for_layers(int32_t token, int64_t layers, float* product) const {
  const int64_t dim = layer_input_dim, width = layers * dim;
  const auto scale = [=](float factor) {
    for_each_vec<float>(width, [=](int64_t c, int64_t n) {
      (Vec<float>::load(product + c, n) * Vec<float>(factor)).store(product + c, n);
    });
  };
  scale(1 / std::sqrt(static_cast<float>(options.d_model)));
  for (float* x = product; x < product + width; x += dim)
    normalise_row<false, false, float, float, float>(x, nullptr, nullptr, layer_norm_.weight.data(),
                                                     layer_norm_.bias.data(), options.eps, true, dim, nullptr, x);
  layer_embedding_.add_to(token, options.layer_input_scale, product, width);
  scale(std::sqrt(0.5f));
}

int64_t PackedStack::token_bytes(const ModelOptions& o) const {
  int64_t bytes = 0;
  for (const PackedLayer& layer : layers) {
    for (const PackedWeight* w :
         {&layer.qkv, &layer.out, &layer.gates, &layer.cross_q, &layer.cross_out, &layer.mixture.router})
      bytes += w->bytes();
    bytes += layer.ff.bytes();
    if (layer.mixture) bytes += o.experts_per_token * layer.mixture.experts[0].bytes();
    for (const FeedForward& shared : layer.mixture.shared) bytes += shared.bytes();
    for (const LayerInput& input : layer.input) bytes += input.bytes();
  }
  return bytes;
}

}  // namespace fastformer
