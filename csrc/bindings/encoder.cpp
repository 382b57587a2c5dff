// The standalone encoder for Python. It takes lists of ids and returns an array, and releases the GIL while it works.

#include "engine/encoder.h"

#include <algorithm>
#include <limits>

#include "bindings/arrays.h"
#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Object;
using SharedModel = std::shared_ptr<const PackedModel>;
using Lists = std::vector<std::vector<int64_t>>;

// An id that doesn't fit into 32 bits becomes the largest 32-bit id, which is out of range for every model.
std::vector<Ids> narrow(const Lists& lists) {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  std::vector<Ids> converted;
  converted.reserve(lists.size());
  for (const std::vector<int64_t>& list : lists) {
    Ids& ids = converted.emplace_back(list.size());
    for (size_t i = 0; i < list.size(); ++i) ids[i] = static_cast<int32_t>(std::clamp(list[i], kLeast, kMost));
  }
  return converted;
}

std::unique_ptr<Encoder> new_encoder(SharedModel* model) {
  if (model == nullptr) throw std::invalid_argument("expected a model, got None");
  return std::make_unique<Encoder>(*model);
}

int64_t max_len(const Encoder& encoder) { return encoder.model().max_len(); }
int64_t weight_bytes(const Encoder& encoder) { return encoder.model().encoder_bytes(); }

Object encode(Encoder& encoder, const Lists& ids, const std::optional<Lists>& types, const std::string& pooling,
              bool normalise, int32_t threads, const std::optional<Lists>& positions,
              const std::optional<Lists>& places, const std::optional<std::vector<int64_t>>& unseen) {
  Texts texts{narrow(ids), types ? narrow(*types) : std::vector<Ids>()};
  if (positions) texts.positions = narrow(*positions);
  if (places) texts.places = narrow(*places);
  if (unseen) texts.unseen = *unseen;
  const Pooling how = pooling_named(pooling);
  if (types && types->size() != ids.size()) throw std::invalid_argument("token_types: expected one list for each text");
  python::Array out = python::new_floats(encoder.num_rows(texts, how), encoder.model().options.d_model);
  {
    const python::Released released;
    encoder.encode(texts, how, normalise, threads, static_cast<float*>(out.data()));
  }
  return std::move(out.object());
}

// Runs the layers on embeddings, one text after another.
Object encode_states(Encoder& encoder, const python::Floats& states, const std::vector<int64_t>& lengths,
                     int32_t threads) {
  const int64_t dim = encoder.model().options.d_model;
  Texts texts;
  texts.embedded = states.data(), texts.lengths = lengths;
  if (states.array.ndim() != 2 || states.array.shape(1) != dim ||
      encoder.num_rows(texts, Pooling::none) != states.array.shape(0))
    throw std::invalid_argument("states: expected sum(lengths) rows of d_model numbers");
  python::Array out = python::new_floats(states.array.shape(0), dim);
  {
    const python::Released released;
    encoder.encode(texts, Pooling::none, false, threads, static_cast<float*>(out.data()));
  }
  return std::move(out.object());
}

// Runs an encoder of speech on features of (recordings, num_mels, frames).
Object encode_features(Encoder& encoder, const python::Floats& features, int32_t threads) {
  const PackedModel& model = encoder.model();
  const int64_t mels = model.num_mels(), most = 2 * model.front_positions.rows();
  if (mels == 0) throw std::invalid_argument("features: expected ids, the model reads no features");
  if (features.array.ndim() != 3 || features.array.shape(1) != mels || features.array.shape(2) < 1 ||
      features.array.shape(2) > most)
    throw std::invalid_argument("features: expected shape (recordings, " + std::to_string(mels) + ", 1 to " +
                                std::to_string(most) + ")");
  Texts texts;
  texts.features = features.data(), texts.frames = features.array.shape(2);
  texts.lengths.assign(features.array.shape(0), (texts.frames + 1) / 2);
  python::Array out = python::new_floats(encoder.num_rows(texts, Pooling::none), model.options.d_model);
  {
    const python::Released released;
    encoder.encode(texts, Pooling::none, false, threads, static_cast<float*>(out.data()));
  }
  return std::move(out.object());
}

}  // namespace

void bind_encoder(PyObject* module) {
  static PyMethodDef methods[] = {
      python::method<"encode", "ids token_types pooling normalize threads positions? places? unseen?", &encode>(),
      python::method<"encode_states", "states lengths threads", &encode_states>(),
      python::method<"encode_features", "features threads", &encode_features>(),
      {}};
  static PyGetSetDef properties[] = {
      python::property<&max_len>("max_len"), python::property<&weight_bytes>("weight_bytes"), {}};
  python::add_class<Encoder>(module, "Encoder", &python::construct<&new_encoder, "Encoder", "model">, methods,
                             properties);
}

}  // namespace fastformer
