// The decoding engine for Python. It takes lists of ids and returns arrays, and releases the GIL while it works.

#include "engine/decoder.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Array;
using python::Bytes;
using python::Object;
using python::Released;

// A model is shared by the sessions and encoders that use it.
using SharedModel = std::shared_ptr<const PackedModel>;

// Reads options by name from a dictionary, and counts them, so that names that nothing reads are an error.
class OptionReader {
 public:
  explicit OptionReader(PyObject* options) : options_(options) {}

  template <typename T>
  T required(const char* name) {
    PyObject* const item = PyDict_GetItemString(options_, name);
    if (item == nullptr) {
      PyErr_SetString(PyExc_KeyError, name);
      throw python::Raised{};
    }
    read_.emplace_back(name);
    try {
      return python::Cast<T>::from(item);
    } catch (const python::Unexpected& why) {
      PyErr_Format(PyExc_TypeError, "options: expected %s for '%s'", why.wanted, name);
      throw python::Raised{};
    }
  }
  template <typename T>
  void optional(const char* name, T& value) {
    if (PyDict_GetItemString(options_, name) != nullptr) value = required<T>(name);
  }
  void expect_end() const {
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t next = 0;
    while (PyDict_Next(options_, &next, &name, &value)) {
      if (std::find(read_.begin(), read_.end(), python::Cast<std::string>::from(name)) != read_.end()) continue;
      PyErr_Format(PyExc_TypeError, "options: got %R, which is not an option of any model", name);
      throw python::Raised{};
    }
  }

 private:
  PyObject* options_;
  std::vector<std::string> read_;
};

ModelOptions options_of(PyObject* d) {
  OptionReader reader(d);
  const auto integer = [&](const char* name) { return reader.required<int64_t>(name); };
  const auto number = [&](const char* name) { return reader.required<float>(name); };
  const auto text = [&](const char* name) { return reader.required<std::string>(name); };
  const auto activation = [](const std::string& name) {
    return name == "clamped_swiglu" ? Activation::clamped_swiglu : activation_named(name);
  };
  ModelOptions o{.precision = precision_named(text("precision")),
                 .d_model = integer("d_model"),
                 .num_heads = integer("num_heads"),
                 .num_kv_heads = integer("num_kv_heads"),
                 .head_dim = integer("head_dim"),
                 .norm_placement = norm_placement_named(text("norm_placement")),
                 .eps = number("eps"),
                 .attention_scale = number("attention_scale"),
                 .max_len = integer("max_len"),
                 .activation = activation(text("activation"))};
  reader.optional("num_encoder_layers", o.num_encoder_layers);
  reader.optional("num_decoder_layers", o.num_decoder_layers);
  reader.optional("rms_norm", o.rms_norm);
  reader.optional("parallel_residual", o.parallel_residual);
  reader.optional("skips_first_norm", o.skips_first_norm);
  reader.optional("is_bare", o.is_bare);
  reader.optional("scale", o.scale);
  reader.optional("attention_softcap", o.attention_softcap);
  reader.optional("logit_softcap", o.logit_softcap);
  reader.optional("experts_per_token", o.experts_per_token);
  reader.optional("norm_topk_prob", o.norm_topk_prob);
  reader.optional("norm_topk_eps", o.norm_topk_eps);
  reader.optional("expert_scale", o.expert_scale);
  reader.optional("sigmoid_router", o.sigmoid_router);
  reader.optional("shared_gate", o.shared_gate);
  reader.optional("fine_decoder", o.fine_decoder);
  reader.optional("padding_idx", o.padding_idx);
  reader.optional("encoder_windows", o.encoder_windows);
  reader.optional("causal_encoder", o.causal_encoder);
  reader.optional("decoder_windows", o.decoder_windows);
  reader.optional("rotary_layers", o.rotary_layers);
  reader.optional("linear_key_heads", o.linear_key_heads);
  reader.optional("mamba_groups", o.mamba_groups);
  reader.optional("layer_head_dims", o.layer_head_dims);
  reader.optional("layer_kv_heads", o.layer_kv_heads);
  reader.optional("key_layers", o.key_layers);
  reader.optional("value_norm", o.value_norm);
  reader.optional("rotary_reach", o.rotary_reach);
  reader.optional("rotates_before_norms", o.rotates_before_norms);
  reader.optional("query_growth", o.query_growth);
  reader.optional("query_growth_length", o.query_growth_length);
  reader.optional("layer_input_scale", o.layer_input_scale);
  reader.expect_end();
  return o;
}

// Holds the GIL during its lifetime.
class Held {
 public:
  Held() : state_(PyGILState_Ensure()) {}
  ~Held() { PyGILState_Release(state_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  PyGILState_STATE state_;
};

// Returns a matrix that is read in parts, from a tuple (rows, columns, whether they are bytes, read); read(begin, end)
// returns an array of rows. The dictionary keeps the tuple alive.
ModelTensor matrix_in_parts(PyObject* value) {
  const auto [rows, columns, is_bytes, read] = python::Cast<std::tuple<int64_t, int64_t, bool, PyObject*>>::from(value);
  if (rows < 0 || columns < 0) throw std::invalid_argument("expected a matrix of no negative size");
  const Kind kind = is_bytes ? Kind::bytes : Kind::fp32;
  const auto part = std::make_shared<std::optional<Array>>();
  const auto read_part = [=, columns = columns, read = read](int64_t begin, int64_t end) -> const void* {
    const Held held;
    part->reset();
    const Object result(python::sure(PyObject_CallFunction(read, "nn", begin, end)));
    part->emplace(python::Cast<Array>::from(result.get()));
    const bool is_right = (*part)->dtype() == (kind == Kind::bytes ? python::Dtype::uint8 : python::Dtype::fp32);
    if (!is_right || !(*part)->is_packed() || (*part)->shape() != std::vector<int64_t>{end - begin, columns})
      throw std::invalid_argument("expected contiguous rows of a matrix, of its dtype");
    return (*part)->data();
  };
  return {nullptr, kind, {rows, columns}, read_part, value};
}

ModelTensors tensors_of(PyObject* arrays) {
  ModelTensors tensors;
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t next = 0;
  while (PyDict_Next(arrays, &next, &name, &value)) {
    if (PyTuple_Check(value)) {
      tensors[python::Cast<std::string>::from(name)] = matrix_in_parts(value);
      continue;
    }
    const Array array = python::Cast<Array>::from(value);  // the dictionary keeps the memory alive
    using python::Dtype;
    if (array.dtype() == Dtype::other)
      throw std::invalid_argument("expected arrays of float32, float16, uint16 (the bits of bfloat16) or uint8");
    if (!array.is_packed()) throw std::invalid_argument("expected contiguous arrays");
    const Kind kind = array.dtype() == Dtype::uint16  ? Kind::bf16
                      : array.dtype() == Dtype::fp16  ? Kind::fp16
                      : array.dtype() == Dtype::uint8 ? Kind::bytes
                                                      : Kind::fp32;
    tensors[python::Cast<std::string>::from(name)] = {array.data(), kind, array.shape(), {}, nullptr};
  }
  return tensors;
}

// Returns a copy of a dictionary, which can't change while the GIL is released.
Object dictionary(PyObject* object) {
  if (!PyDict_Check(object)) throw python::Unexpected{"a dictionary"};
  return Object(python::sure(PyDict_Copy(object)));
}

std::unique_ptr<SharedModel> pack_model(PyObject* options, PyObject* tensors) {
  const Object all = dictionary(tensors), settings = dictionary(options);
  const ModelOptions o = options_of(settings.get());
  const ModelTensors of_model = tensors_of(all.get());
  const Released released;
  return std::make_unique<SharedModel>(std::make_shared<const PackedModel>(o, of_model));
}

int64_t step_bytes(const SharedModel& model) { return model->step_bytes(); }
int64_t state_bytes(const SharedModel& model) { return model->state_bytes(); }

// A session that raises an error when two threads use it at once.
class GuardedSession {
 public:
  GuardedSession(SharedModel model, int64_t num_tokens, std::optional<CacheType> type)
      : session_(std::move(model), num_tokens, type) {}

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

std::unique_ptr<GuardedSession> new_session(SharedModel* model, int64_t num_tokens,
                                            const std::optional<std::string>& cache_dtype) {
  if (model == nullptr) throw std::invalid_argument("expected a model, got None");
  if (cache_dtype && *cache_dtype != "int8") throw std::invalid_argument("expected cache_dtype to be 'int8' or None");
  const auto type = cache_dtype ? std::optional(CacheType::int8) : std::nullopt;
  return std::make_unique<GuardedSession>(*model, num_tokens, type);
}

std::unique_ptr<SharedAdapter> pack_adapter(SharedModel* model, PyObject* tensors) {
  if (model == nullptr) throw std::invalid_argument("expected a model, got None");
  const Object all = dictionary(tensors);
  const ModelTensors of_adapter = tensors_of(all.get());
  const Released released;
  return std::make_unique<SharedAdapter>(std::make_shared<const PackedAdapter>(*model, of_adapter));
}

std::vector<int64_t> admit(GuardedSession& guarded, const std::vector<Ids>& sources, const std::vector<Ids>& tokens,
                           int32_t threads, const std::optional<std::vector<SharedAdapter*>>& adapters) {
  std::vector<SharedAdapter> of_requests;
  for (const SharedAdapter* adapter : adapters.value_or(std::vector<SharedAdapter*>()))
    of_requests.push_back(adapter == nullptr ? SharedAdapter() : *adapter);
  const Released released;
  std::vector<Source> of_prompts;
  for (const Ids& ids : sources) of_prompts.push_back({ids.data(), nullptr, std::ssize(ids)});
  return guarded.with([&](Session& session) { return session.admit(of_prompts, tokens, threads, of_requests); });
}

// states: (prompts, tokens, d_model).
void admit_states(GuardedSession& guarded, const python::Floats& states, const std::vector<Ids>& tokens,
                  int32_t threads) {
  const std::vector<int64_t>& shape = states.array.shape();
  std::vector<Source> sources;
  for (int64_t i = 0; shape.size() == 3 && i < shape[0]; ++i)
    sources.push_back({nullptr, states.data() + i * shape[1] * shape[2], shape[1]});
  const Released released;
  guarded.with([&](Session& session) {
    if (shape.size() != 3 || shape[1] < 1 || shape[2] != session.model().options.d_model)
      throw std::invalid_argument("states: expected shape (prompts, tokens, d_model)");
    session.admit(sources, tokens, threads);
  });
}

Object align(GuardedSession& guarded, int64_t group, int64_t source, const Ids& tokens, const Ids& targets, int32_t end,
             const std::vector<std::tuple<int64_t, int64_t>>& heads, int32_t threads) {
  const auto count = std::ssize(tokens);
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (const auto& [layer, head] : heads) pairs.emplace_back(layer, head);
  Array probabilities = python::new_floats(1, count), scores = python::new_floats(std::ssize(heads) * count, source);
  guarded.with([&](Session& session) {
    if (group < 0 || group >= session.num_groups() || session.source_tokens(group) != source)
      throw std::invalid_argument("expected a group of the session, and the number of its source's tokens");
    const Released released;
    session.align(group, tokens, targets, end, pairs, threads, static_cast<float*>(probabilities.data()),
                  static_cast<float*>(scores.data()));
  });
  return python::make_tuple(std::move(probabilities.object()), std::move(scores.object()));
}

// The logits array must be dense, because results written to a converted copy of it would be lost.
Object step(GuardedSession& guarded, const Ids& tokens, int64_t k, bool log_probs, const Ids& logit_rows,
            const std::optional<Array>& logits, int32_t threads, const std::optional<Ids>& masked_rows,
            const std::optional<Bytes>& masks, const std::optional<std::vector<int64_t>>& counts) {
  return guarded.with([&](Session& session) {
    if (k < 1 || k > session.model().vocab_size())
      throw std::invalid_argument("expected k from 1 to the size of the vocabulary");
    if (logits && (logits->dtype() != python::Dtype::fp32 || !logits->is_dense() || !logits->is_writable()))
      throw std::invalid_argument("expected a writable, contiguous float32 array for logits");
    Selection selection{k, log_probs, logit_rows};
    if (!logit_rows.empty()) {
      if (!logits || logits->ndim() != 2 || logits->shape(0) != std::ssize(logit_rows) ||
          logits->shape(1) != session.model().vocab_size())
        throw std::invalid_argument("expected a logits array with a row for each of logit_rows");
      for (const int32_t row : logit_rows)
        if (row < 0 || row >= std::ssize(tokens))
          throw std::invalid_argument("expected logit_rows to be rows of the step, one for each token");
      selection.logits = static_cast<float*>(logits->data());
    }
    if (masked_rows && !masked_rows->empty()) {
      const int64_t words = (session.model().vocab_size() + 31) / 32;
      if (!masks || masks->array.ndim() != 2 || masks->array.shape(0) != std::ssize(*masked_rows) ||
          masks->array.shape(1) % 4 != 0 || masks->array.shape(1) < 4 * words)
        throw std::invalid_argument("expected masks with a row of " + std::to_string(4 * words) +
                                    " bytes for each of masked_rows");
      int32_t behind = 0;
      for (const int32_t row : *masked_rows) {
        if (row < behind || row >= std::ssize(tokens))
          throw std::invalid_argument("expected masked_rows to be rows of the step, in ascending order");
        behind = row + 1;
      }
      selection.masked_rows = *masked_rows, selection.mask_words = masks->array.shape(1) / 4;
      selection.masks.resize(masked_rows->size() * selection.mask_words);
      std::memcpy(selection.masks.data(), masks->data(), selection.masks.size() * 4);
    }
    const Candidates* candidates;
    {
      const Released released;
      candidates = &session.step(tokens, counts.value_or(Session::Places()), selection, threads);
    }
    const int64_t rows = std::ssize(tokens);
    Array ids = python::new_ids(rows, k), values = python::new_floats(rows, k);
    std::copy_n(candidates->ids.data(), rows * k, static_cast<int32_t*>(ids.data()));
    std::copy_n(candidates->values.data(), rows * k, static_cast<float*>(values.data()));
    return python::make_tuple(std::move(ids.object()), std::move(values.object()));
  });
}

std::vector<std::pair<Ids, Ids>> draft(GuardedSession& guarded, const Ids& tokens, const std::vector<int64_t>& counts,
                                       const std::vector<float>& chances, const std::vector<std::vector<float>>& least,
                                       int32_t threads) {
  const Released released;
  std::vector<std::pair<Ids, Ids>> drafts;
  guarded.with([&](Session& session) {
    for (Draft& each : session.draft(tokens, counts, chances, least, threads))
      drafts.emplace_back(std::move(each.ids), std::move(each.parts));
  });
  return drafts;
}

std::vector<int64_t> run(GuardedSession& guarded, const std::vector<Search*>& searches, const Ids& tokens,
                         int64_t max_steps, double seconds, int64_t least_rows, bool log_probs, int32_t threads) {
  const Released released;
  const RunLimits limits{max_steps, seconds, least_rows};
  return guarded.with([&](Session& session) { return session.run(searches, tokens, limits, log_probs, threads); });
}

// These two only compute if prompts are pending. Else they are so short that another thread, which may keep the GIL for
// milliseconds, would cost more.
void reorder(GuardedSession& guarded, const std::vector<Ids>& parents) {
  guarded.with([&](Session& session) {
    std::optional<Released> released;
    if (session.has_pending()) released.emplace();
    session.reorder(parents);
  });
}

void release(GuardedSession& guarded, const std::vector<int64_t>& groups) {
  guarded.with([&](Session& session) {
    std::optional<Released> released;
    if (session.has_pending()) released.emplace();
    session.release(groups);
  });
}

void cut(GuardedSession& guarded, const std::vector<int64_t>& counts) {
  guarded.with([&](Session& session) { session.cut(counts); });
}

void set_shortlist(GuardedSession& guarded, const Ids& ids) {
  const Released released;
  guarded.with([&](Session& session) { session.set_shortlist(ids); });
}

int64_t free_tokens(GuardedSession& guarded) {
  return guarded.with([](Session& session) { return session.free_tokens(); });
}

int64_t step_tokens(GuardedSession& guarded) {
  return guarded.with([](Session& session) { return session.step_tokens(); });
}

int64_t shared_tokens(GuardedSession& guarded) {
  return guarded.with([](Session& session) { return session.shared_tokens(); });
}

Object known(GuardedSession& guarded, const Ids& tokens, const std::optional<SharedAdapter*>& adapter) {
  return guarded.with([&](Session& session) {
    const TokenCache::Known known = session.known(tokens, adapter ? **adapter : SharedAdapter());
    return python::make_tuple(known.cached, known.held);
  });
}

}  // namespace

void bind_decoder(PyObject* module) {
  using python::method;
  static PyMethodDef none[] = {{}};
  static PyGetSetDef model_properties[] = {
      python::property<&step_bytes>("step_bytes"), python::property<&state_bytes>("state_bytes"), {}};
  python::add_class<SharedModel>(
      module, "PackedModel", &python::construct<&pack_model, "PackedModel", "options tensors">, none, model_properties);
  static PyGetSetDef no_properties[] = {{}};
  python::add_class<SharedAdapter>(module, "PackedAdapter",
                                   &python::construct<&pack_adapter, "PackedAdapter", "model tensors">, none,
                                   no_properties);
  static PyMethodDef methods[] = {
      method<"admit", "sources tokens threads adapters?", &admit>(),
      method<"admit_states", "states tokens threads", &admit_states>(),
      method<"align", "group source tokens targets end heads threads", &align>(),
      method<"step", "tokens k log_probs logit_rows logits threads masked_rows? masks? counts?", &step>(),
      method<"draft", "tokens counts chances least threads", &draft>(),
      method<"run", "searches tokens max_steps seconds least_rows log_probs threads", &run>(),
      method<"cut", "counts", &cut>(),
      method<"reorder", "parents", &reorder>(),
      method<"release", "groups", &release>(),
      method<"set_shortlist", "ids", &set_shortlist>(),
      method<"free_tokens", "", &free_tokens>(),
      method<"step_tokens", "", &step_tokens>(),
      method<"shared_tokens", "", &shared_tokens>(),
      method<"known", "tokens adapter?", &known>(),
      {}};
  python::add_class<GuardedSession>(module, "Session",
                                    &python::construct<&new_session, "Session", "model num_tokens cache_dtype?">,
                                    methods, no_properties);
}

}  // namespace fastformer
