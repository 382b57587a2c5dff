// An encoder alone as Python sees it. Lists of ids come in, an array goes out; the GIL is released while there is work.

#include "engine/encoder.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace fastformer {
namespace {

using Lists = std::vector<std::vector<int64_t>>;

// One that 32 bits can't hold is out of range in every model, as the largest of them is.
std::vector<Ids> narrow(const Lists& lists) {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  std::vector<Ids> found;
  found.reserve(lists.size());
  for (const std::vector<int64_t>& list : lists) {
    Ids& ids = found.emplace_back(list.size());
    for (size_t i = 0; i < list.size(); ++i) ids[i] = static_cast<int32_t>(std::clamp(list[i], kLeast, kMost));
  }
  return found;
}

py::array_t<float> encode(Encoder& encoder, const Lists& ids, const std::optional<Lists>& types,
                          const std::string& pooling, bool normalise, int threads) {
  const Texts texts{narrow(ids), types ? narrow(*types) : std::vector<Ids>()};
  const Pooling how = pooling_named(pooling);
  if (types && types->size() != ids.size()) throw std::invalid_argument("token_types: expected those of each text");
  py::array_t<float> out({static_cast<py::ssize_t>(encoder.num_rows(texts, how)),
                          static_cast<py::ssize_t>(encoder.model().options.d_model)});
  float* to = out.mutable_data();
  const py::gil_scoped_release released;
  encoder.encode(texts, how, normalise, threads, to);
  return out;
}

}  // namespace

void bind_encoder(py::module_& m) {
  py::class_<Encoder>(m, "Encoder")
      .def(py::init([](std::shared_ptr<PackedModel> model) { return std::make_unique<Encoder>(std::move(model)); }),
           py::arg("model"))
      .def_property_readonly("max_len", [](const Encoder& encoder) { return encoder.model().max_len(); })
      .def("encode", encode, py::arg("ids"), py::arg("token_types"), py::arg("pooling"), py::arg("normalize"),
           py::arg("threads"));
}

}  // namespace fastformer
