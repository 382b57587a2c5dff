// What fastformer/ops/_eager.py and kernels/_plans.py ask of the arguments of every call, and nn/guards.py of the
// modules of a stack, and prepack.py of the tensors of a model. All have it in Python, too, where the answers about six
// tensors take as long as the launch of a kernel.

#include <ATen/Context.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "bindings/bindings.h"

namespace fastformer {
namespace {

namespace py = pybind11;

// Whether it is a Tensor or a Parameter and of no class derived from them.
bool is_tensor(PyObject* x) { return THPVariable_CheckTypeExact(Py_TYPE(x)); }

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_tensor(std::string& key, const at::Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  key += 'T';
  put(key, x.scalar_type());
  put(key, static_cast<int32_t>(sizes.size()));
  for (const int64_t size : sizes) put(key, size);
  for (const int64_t stride : strides) put(key, stride);
  put(key, static_cast<uint8_t>(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16));
}

// False where it is of a kind that no key holds.
bool put_value(std::string& key, PyObject* x) {
  if (x == Py_None) {
    key += 'N';
  } else if (PyBool_Check(x)) {
    key += x == Py_True ? '1' : '0';
  } else if (PyFloat_CheckExact(x)) {
    key += 'F';
    put(key, PyFloat_AS_DOUBLE(x));
  } else if (PyLong_CheckExact(x)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
    if (overflow != 0) return false;
    key += 'I';
    put(key, value);
  } else if (THPDtype_Check(x)) {
    key += 'D';
    put(key, reinterpret_cast<THPDtype*>(x)->scalar_type);
  } else if (PyUnicode_CheckExact(x)) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(x, &length);
    if (text == nullptr) throw py::error_already_set();
    key += 'S';
    put(key, length);
    key.append(text, static_cast<size_t>(length));
  } else if (PyList_CheckExact(x)) {
    key += 'L';
    put(key, PyList_GET_SIZE(x));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(x); ++i)
      if (!put_value(key, PyList_GET_ITEM(x, i))) return false;
  } else {
    return false;
  }
  return true;
}

// `_plans.geometry`, as bytes.
py::object geometry(const py::tuple& args) {
  static thread_local std::string key;  // keeps its memory
  key.clear();
  if (args.empty() || !is_tensor(args[0].ptr())) return py::none();
  const at::Device device = THPVariable_Unpack(args[0].ptr()).device();
  put(key, device.type());
  put(key, device.index());
  put(key, at::globalContext().deterministicAlgorithms());
  for (const py::handle argument : args) {
    if (is_tensor(argument.ptr())) put_tensor(key, THPVariable_Unpack(argument.ptr()));
    else if (!put_value(key, argument.ptr())) return py::none();
  }
  return py::bytes(key);
}

// The keys of a tensor that is nothing but strided memory, which autograd may see.
uint64_t plain_keys(c10::DispatchKey backend, c10::DispatchKey autocast, c10::DispatchKey autograd) {
  return c10::DispatchKeySet({backend, autocast, autograd, c10::DispatchKey::ADInplaceOrView}).raw_repr();
}

// `_eager.device_of`.
py::tuple device_of(const py::tuple& args, const py::dict& places) {
  using c10::DispatchKey;
  static const uint64_t cpu = plain_keys(DispatchKey::CPU, DispatchKey::AutocastCPU, DispatchKey::AutogradCPU);
  static const uint64_t cuda = plain_keys(DispatchKey::CUDA, DispatchKey::AutocastCUDA, DispatchKey::AutogradCUDA);
  py::tuple kinds(args.size());
  for (size_t i = 0; i < args.size(); ++i) kinds[i] = py::type::handle_of(args[i]);
  // Not the dict's own lookup: `Places` knows what to do about kinds that it has not met.
  const auto where = py::reinterpret_steal<py::tuple>(PyObject_GetItem(places.ptr(), kinds.ptr()));
  if (!where) throw py::error_already_set();
  uint64_t seen = 0;
  bool requires_grad = false;
  for (const py::handle place : where) {
    const at::Tensor& x = THPVariable_Unpack(PyTuple_GET_ITEM(args.ptr(), PyLong_AsSsize_t(place.ptr())));
    const uint64_t keys = x.key_set().raw_repr();
    if ((keys != cpu && keys != cuda) || (seen != 0 && keys != seen)) return py::make_tuple(py::none(), false);
    seen = keys;
    requires_grad = requires_grad || x.requires_grad();
  }
  if (seen == 0) return py::make_tuple(py::none(), false);
  static PyObject* const names[] = {PyUnicode_InternFromString("cpu"), PyUnicode_InternFromString("cuda")};
  return py::make_tuple(py::handle(names[seen == cuda]), requires_grad);
}

// Whether a place (a dictionary, the `vars` of a class, or an object, and a name) holds an object; None where it holds
// nothing.
bool place_holds(PyObject* place, PyObject* expected) {
  PyObject *const holder = PyTuple_GET_ITEM(place, 0), *const name = PyTuple_GET_ITEM(place, 1);
  if (PyDict_Check(holder)) {
    PyObject* const found = PyDict_GetItemWithError(holder, name);
    if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return found == expected || (found == nullptr && expected == Py_None);
  }
  const bool is_proxy = Py_TYPE(holder) == &PyDictProxy_Type;
  PyObject* const found = is_proxy ? PyObject_GetItem(holder, name) : PyObject_GetAttr(holder, name);
  if (found == nullptr) PyErr_Clear();
  Py_XDECREF(found);  // it is compared, and not looked into
  return found == expected || (found == nullptr && expected == Py_None);
}

// `Guards.hold`; `record` is what guards.py says it is.
bool guards_hold(const py::handle owner, const py::tuple& record) {
  PyObject* parts[12];
  if (record.size() != 12) throw py::value_error("guards_hold: expected twelve parts");
  for (size_t i = 0; i < 12; ++i) {
    parts[i] = PyTuple_GET_ITEM(record.ptr(), i);
    if (!PyTuple_Check(parts[i])) throw py::type_error("guards_hold: expected tuples");
  }
  const auto [kinds, modules, names, own_values, sized, sizes, spaces, values, places, expected, tensors, types] =
      parts;
  const Py_ssize_t num_modules = PyTuple_GET_SIZE(modules);
  if (PyTuple_GET_ITEM(kinds, 0) != reinterpret_cast<PyObject*>(Py_TYPE(owner.ptr()))) return false;
  for (Py_ssize_t i = 0; i < num_modules; ++i)
    if (PyTuple_GET_ITEM(kinds, i + 1) != reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(modules, i))))
      return false;
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner.ptr(), nullptr));
  if (!own) throw py::error_already_set();
  if (PyDict_Size(own.ptr()) != PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, 0))) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* const found = PyDict_GetItemWithError(own.ptr(), PyTuple_GET_ITEM(names, i));
    if (found != PyTuple_GET_ITEM(own_values, i) && !(found == nullptr && PyTuple_GET_ITEM(own_values, i) == Py_None))
      return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sized); ++i)
    if (PyDict_Size(PyTuple_GET_ITEM(sized, i)) != PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i + 1))) return false;
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(spaces); ++i) {
    PyObject* const space = PyTuple_GET_ITEM(spaces, i);
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(space, &at, nullptr, &value))
      if (seen >= PyTuple_GET_SIZE(values) || value != PyTuple_GET_ITEM(values, seen++)) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i)
    if (!place_holds(PyTuple_GET_ITEM(places, i), PyTuple_GET_ITEM(expected, i))) return false;
  seen = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(PyTuple_GET_ITEM(tensors, i), &at, nullptr, &value))
      if (seen >= PyTuple_GET_SIZE(types) ||
          reinterpret_cast<PyObject*>(Py_TYPE(value)) != PyTuple_GET_ITEM(types, seen++))
        return false;
  }
  return true;
}

// `model_guards.layout_of`: which tensors these are, where they are, and how their memory is read.
py::bytes tensor_layout(const py::list& tensors) {
  std::string key;
  key.reserve(tensors.size() * 64);
  for (const py::handle each : tensors) {
    if (!THPVariable_Check(each.ptr())) throw py::type_error("tensor_layout: expected tensors");
    const at::Tensor& x = THPVariable_Unpack(each.ptr());
    put(key, each.ptr());
    put(key, x.scalar_type());
    put(key, x.const_data_ptr());
    put(key, static_cast<int32_t>(x.dim()));
    for (const int64_t size : x.sizes()) put(key, size);
    for (const int64_t stride : x.strides()) put(key, stride);
  }
  return py::bytes(key);
}

// How often each tensor was changed, as PyTorch counts it.
py::bytes tensor_versions(const py::list& tensors) {
  std::string key;
  key.reserve(tensors.size() * 4);
  for (const py::handle each : tensors) {
    if (!THPVariable_Check(each.ptr())) throw py::type_error("tensor_versions: expected tensors");
    put(key, static_cast<uint32_t>(THPVariable_Unpack(each.ptr())._version()));
  }
  return py::bytes(key);
}

// 128 bits of what is in some places of memory, (address, number of bytes) each, which the caller keeps alive. Each
// step is one-to-one in the word that it takes in, so that a change of one word always shows.
py::bytes memory_digest(const py::list& places) {
  constexpr uint64_t kFirst = 0x9E3779B97F4A7C15, kSecond = 0xC2B2AE3D27D4EB4F;  // odd
  uint64_t lanes[4] = {1, 2, 3, 4};
  const auto take = [&lanes](int lane, uint64_t word) {
    const uint64_t mixed = (lanes[lane] ^ word) * kFirst;
    lanes[lane] = mixed ^ (mixed >> 29);
  };
  for (const py::handle place : places) {
    const auto pair = py::reinterpret_borrow<py::tuple>(place);
    const auto* from = reinterpret_cast<const char*>(pair[0].cast<uintptr_t>());
    size_t left = pair[1].cast<size_t>();
    uint64_t words[4];
    for (; left >= sizeof words; left -= sizeof words, from += sizeof words) {
      std::memcpy(words, from, sizeof words);
      for (int lane = 0; lane < 4; ++lane) take(lane, words[lane]);
    }
    std::memset(words, 0, sizeof words);
    std::memcpy(words, from, left);
    for (int lane = 0; lane < 4; ++lane) take(lane, words[lane]);
  }
  uint64_t found[2] = {0, 0};
  for (const uint64_t lane : lanes) {
    found[0] = (found[0] ^ lane) * kFirst;
    found[0] ^= found[0] >> 32;
    found[1] = (found[1] + lane) * kSecond;
    found[1] ^= found[1] >> 31;
  }
  return py::bytes(reinterpret_cast<const char*>(found), sizeof found);
}

}  // namespace

void bind_eager_call(py::module_& m) {
  m.def("geometry", &geometry, py::arg("args"), "Equal bytes for two calls that one plan serves, or None.");
  m.def("device_of", &device_of, py::arg("args"), py::arg("places"),
        "(the type of device on which all tensors of a call are plain ones or None, whether one requires a gradient).");
  m.def("guards_hold", &guards_hold, py::arg("owner"), py::arg("record"),
        "Whether all places that guards watch hold the same objects as when they were made.");
  m.def("tensor_layout", &tensor_layout, py::arg("tensors"), "Which tensors these are, and where, as bytes.");
  m.def("tensor_versions", &tensor_versions, py::arg("tensors"), "How often each was changed, as bytes.");
  m.def("memory_digest", &memory_digest, py::arg("places"), "128 bits of what is in (address, bytes) places.");
}

}  // namespace fastformer
