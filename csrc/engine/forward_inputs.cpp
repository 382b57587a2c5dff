// The embeddings that layers have of their own, in Forward: a token's embeddings for all layers are computed once, at
// the beginning of a pass, and each layer adds its own one.

#include "engine/forward.h"

namespace fastformer {

// Projects the embeddings in x_, and adds those of the tokens. Prompts need no layer behind the last keys.
void Forward::add_layer_embeddings(const Pass& pass, Chunk chunk) {
  const PackedWeight& weight = model_.layer_projection;
  const int64_t ld = padded(weight.n);
  const int64_t layers = pass.last_rows ? std::ssize(pass.stack.layers) : static_cast<int64_t>(pass.last_keys);
  const int64_t panels = padded(layers * model_.layer_input_dim) / kPanelColumns;
  const int64_t tasks = std::min<int64_t>(panels, pass.threads);
  if (layers == 0) return;
  float* const out = inputs_.data() + chunk.first * ld;
  stages_.push_back({tasks,
                     [=, this, &weight](int64_t task) {
                       const int64_t begin = panels * task / tasks, end = panels * (task + 1) / tasks;
                       gemm(embedded_, chunk.count, weight, begin, end, out + begin * kPanelColumns, ld);
                     },
                     gemm_work(embedded_, chunk.count, weight) * static_cast<double>(panels) /
                         static_cast<double>(weight.num_panels)});
  add_rows(chunk.count, pass.threads, [=, this, &ids = pass.batch.ids](int64_t r) {
    model_.embed_for_layers(ids[chunk.first + r], layers, out + r * ld);
  });
}

// Adds a layer's own input to the residual stream, whose rows narrow_ has.
void Forward::add_layer_input(const Pass& pass, size_t layer, Chunk chunk) {
  const PackedLayer& weights = pass.stack.layers[layer];
  const LayerInput& input = weights.input[0];
  const int64_t dim = input.gate.n, wide = padded(dim), ld = padded(model_.layer_projection.n);
  PackedRows& gated = wide_.at(dim);
  add_product(narrow_, input.gate, hidden_.data(), chunk.count, pass.threads);
  const float* const given = inputs_.data() + chunk.first * ld + static_cast<int64_t>(layer) * dim;
  add_rows(chunk.count, pass.threads, [=, this, &gated, activation = model_.options.activation](int64_t r) {
    float* const row = hidden_.data() + r * wide;
    for_each_vec<float>(dim, [=](int64_t c, int64_t n) {
      (activate<float>(activation, Vec<float>::load(row + c, n)) * Vec<float>::load(given + r * ld + c, n))
          .store(row + c, n);
    });
    gated.store(r, row);
  });
  add_product(gated, input.projection, y_.data(), chunk.count, pass.threads);
  add_join(pass, chunk, input.norm, input.norm,
           {.of_given = &input.norm,
            .next = first_norm(pass, layer + 1),
            .states = pass.is_last(layer) ? pass.states : nullptr,
            .scale = weights.scale});
}

}  // namespace fastformer
