// The decoding engine as Python sees it. Lists of ids come in, arrays go out; the GIL is released while there is work.

#include "engine/decoder.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace fastformer {
namespace {

ModelOptions options_of(const py::dict& d) {
  const auto integer = [&](const char* name) { return d[name].cast<int64_t>(); };
  const auto flag = [&](const char* name) { return d[name].cast<bool>(); };
  const auto number = [&](const char* name) { return d[name].cast<float>(); };
  return {.precision = precision_named(d["precision"].cast<std::string>()),
          .d_model = integer("d_model"),
          .num_heads = integer("num_heads"),
          .num_kv_heads = integer("num_kv_heads"),
          .head_dim = integer("head_dim"),
          .num_encoder_layers = integer("num_encoder_layers"),
          .num_decoder_layers = integer("num_decoder_layers"),
          .norm_placement = norm_placement_named(d["norm_placement"].cast<std::string>()),
          .rms_norm = flag("rms_norm"),
          .rotary_interleaved = flag("rotary_interleaved"),
          .parallel_residual = flag("parallel_residual"),
          .skips_first_norm = d.contains("skips_first_norm") && flag("skips_first_norm"),
          .eps = number("eps"),
          .scale = number("scale"),
          .attention_scale = number("attention_scale"),
          .attention_softcap = number("attention_softcap"),
          .logit_softcap = number("logit_softcap"),
          .padding_idx = integer("padding_idx"),
          .encoder_windows = d["encoder_windows"].cast<std::vector<int64_t>>(),
          .decoder_windows = d["decoder_windows"].cast<std::vector<int64_t>>(),
          .max_len = integer("max_len"),
          .activation = activation_named(d["activation"].cast<std::string>())};
}

ModelTensors tensors_of(const py::dict& arrays) {
  ModelTensors tensors;
  for (const auto& [name, value] : arrays) {
    const auto array = value.cast<py::array>();
    const bool is_bf16 = py::isinstance<py::array_t<uint16_t>>(array),
               is_byte = py::isinstance<py::array_t<uint8_t>>(array);
    if (!is_bf16 && !is_byte && !py::isinstance<py::array_t<float>>(array))
      throw std::invalid_argument("expected arrays of float32, of uint16 for the bits of bfloat16, or of uint8");
    if (!(array.flags() & py::array::c_style)) throw std::invalid_argument("expected arrays without gaps");
    using Kind = ModelTensor::Kind;
    const Kind kind = is_bf16 ? Kind::bf16 : is_byte ? Kind::bytes : Kind::fp32;
    tensors[name.cast<std::string>()] = {array.data(), kind, {array.shape(), array.shape() + array.ndim()}};
  }
  return tensors;
}

// A session that raises an error when two threads use it at once.
class GuardedSession {
 public:
  GuardedSession(std::shared_ptr<const PackedModel> model, int64_t num_tokens)
      : session_(std::move(model), num_tokens) {}

  template <typename F>
  auto with(F&& f) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) throw std::runtime_error("a session serves one thread at a time; make one for each");
    return f(session_);
  }

 private:
  std::mutex mutex_;
  Session session_;
};

py::tuple step(GuardedSession& guarded, const Ids& tokens, int64_t k, bool log_probs, const Ids& logit_rows,
               std::optional<py::array_t<float, py::array::c_style>> logits, int threads) {
  return guarded.with([&](Session& session) {
    if (k < 1 || k > session.model().vocab_size())
      throw std::invalid_argument("expected k from 1 to the size of the vocabulary");
    Selection selection{k, log_probs, logit_rows};
    if (!logit_rows.empty()) {
      if (!logits || logits->ndim() != 2 || logits->shape(0) != static_cast<py::ssize_t>(logit_rows.size()) ||
          logits->shape(1) != session.model().vocab_size())
        throw std::invalid_argument("expected room for the logits of the rows that were named");
      for (const int32_t row : logit_rows)
        if (row < 0 || row >= session.num_rows()) throw std::invalid_argument("expected rows that are there");
      selection.logits = logits->mutable_data();
    }
    const Candidates* candidates;
    {
      const py::gil_scoped_release released;
      candidates = &session.step(tokens, selection, threads);
    }
    const std::vector<py::ssize_t> shape{session.num_rows(), static_cast<py::ssize_t>(k)};
    return py::make_tuple(py::array_t<int32_t>(shape, candidates->ids.data()),
                          py::array_t<float>(shape, candidates->values.data()));
  });
}

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<PackedModel, std::shared_ptr<PackedModel>>(m, "PackedModel")
      .def(py::init([](const py::dict& options, const py::dict& arrays) {
             const ModelOptions o = options_of(options);
             const ModelTensors tensors = tensors_of(arrays);
             const py::gil_scoped_release released;
             return std::make_shared<PackedModel>(o, tensors);
           }),
           py::arg("options"), py::arg("tensors"))
      .def_property_readonly("step_bytes", &PackedModel::step_bytes);

  py::class_<GuardedSession>(m, "Session")
      .def(py::init([](std::shared_ptr<PackedModel> model, int64_t num_tokens) {
             return std::make_unique<GuardedSession>(std::move(model), num_tokens);
           }),
           py::arg("model"), py::arg("num_tokens"))
      .def("admit",
           [](GuardedSession& guarded, const std::vector<Ids>& sources, const std::vector<Ids>& tokens, int threads) {
             const py::gil_scoped_release released;
             return guarded.with([&](Session& session) { return session.admit(sources, tokens, threads); });
           })
      // Logits that would be copied would be lost.
      .def("step", step, py::arg("tokens"), py::arg("k"), py::arg("log_probs"), py::arg("logit_rows"),
           py::arg("logits").noconvert(), py::arg("threads"))
      .def("run",
           [](GuardedSession& guarded, const std::vector<Search*>& searches, const Ids& tokens, int64_t max_steps,
              double seconds, int64_t least_rows, bool log_probs, int threads) {
             const py::gil_scoped_release released;
             const RunLimits limits{max_steps, seconds, least_rows};
             return guarded.with(
                 [&](Session& session) { return session.run(searches, tokens, limits, log_probs, threads); });
           })
      .def("reorder", [](GuardedSession& guarded,
                         const std::vector<Ids>& parents) { guarded.with([&](Session& s) { s.reorder(parents); }); })
      .def("release", [](GuardedSession& guarded,
                         const std::vector<int64_t>& groups) { guarded.with([&](Session& s) { s.release(groups); }); })
      .def("set_shortlist",
           [](GuardedSession& guarded, const Ids& ids) { guarded.with([&](Session& s) { s.set_shortlist(ids); }); })
      .def("free_tokens",
           [](GuardedSession& guarded) { return guarded.with([](Session& s) { return s.free_tokens(); }); })
      .def("step_tokens",
           [](GuardedSession& guarded) { return guarded.with([](Session& s) { return s.step_tokens(); }); })
      .def("shared_tokens",
           [](GuardedSession& guarded) { return guarded.with([](Session& s) { return s.shared_tokens(); }); })
      .def("known", [](GuardedSession& guarded, const Ids& tokens) {
        return guarded.with([&](Session& session) {
          const TokenCache::Known known = session.known(tokens);
          return py::make_tuple(known.cached, known.held);
        });
      });
}

}  // namespace fastformer
