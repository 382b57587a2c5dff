// What nn/guards.py asks of the modules of a stack in every call, and prepack.py of the memory of a model. Both have it in
// Python, too, where it takes several times as long.

#include <cstdint>
#include <cstring>

#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Object;

PyObject* item(PyObject* tuple, Py_ssize_t i) { return python::sure(PyTuple_GetItem(tuple, i)); }

Py_ssize_t number(PyObject* tuple, Py_ssize_t i) { return PyLong_AsSsize_t(item(tuple, i)); }

// Whether a place (a dictionary, the `vars` of a class, or an object, and a name) holds an object; None where it holds
// nothing.
bool place_holds(PyObject* place, PyObject* expected) {
  PyObject *const holder = item(place, 0), *const name = item(place, 1);
  if (PyDict_Check(holder)) {
    PyObject* const found = PyDict_GetItemWithError(holder, name);
    if (found == nullptr && PyErr_Occurred()) throw python::Raised{};
    return found == expected || (found == nullptr && expected == Py_None);
  }
  const bool is_proxy = Py_TYPE(holder) == &PyDictProxy_Type;
  PyObject* const found = is_proxy ? PyObject_GetItem(holder, name) : PyObject_GetAttr(holder, name);
  if (found == nullptr) PyErr_Clear();
  Py_XDECREF(found);  // it is compared, and not looked into
  return found == expected || (found == nullptr && expected == Py_None);
}

// `Guards.hold`; `record` is what guards.py says it is.
bool guards_hold(PyObject* owner, PyObject* record) {
  PyObject* parts[12];
  if (!PyTuple_Check(record) || PyTuple_Size(record) != 12)
    throw std::invalid_argument("guards_hold: expected twelve parts");
  for (Py_ssize_t i = 0; i < 12; ++i) {
    parts[i] = item(record, i);
    if (!PyTuple_Check(parts[i])) throw python::Unexpected{"tuples as parts of the record"};
  }
  const auto [kinds, modules, names, own_values, sized, sizes, spaces, values, places, expected, tensors, types] =
      parts;
  const Py_ssize_t num_modules = PyTuple_Size(modules);
  if (item(kinds, 0) != reinterpret_cast<PyObject*>(Py_TYPE(owner))) return false;
  for (Py_ssize_t i = 0; i < num_modules; ++i)
    if (item(kinds, i + 1) != reinterpret_cast<PyObject*>(Py_TYPE(item(modules, i)))) return false;
  const Object own(python::sure(PyObject_GenericGetDict(owner, nullptr)));
  if (PyDict_Size(own.get()) != number(sizes, 0)) return false;
  const Py_ssize_t num_names = PyTuple_Size(names), num_sized = PyTuple_Size(sized);
  for (Py_ssize_t i = 0; i < num_names; ++i) {
    PyObject *const found = PyDict_GetItemWithError(own.get(), item(names, i)), *const was = item(own_values, i);
    if (found != was && !(found == nullptr && was == Py_None)) return false;
  }
  for (Py_ssize_t i = 0; i < num_sized; ++i)
    if (PyDict_Size(item(sized, i)) != number(sizes, i + 1)) return false;
  const Py_ssize_t num_spaces = PyTuple_Size(spaces), num_values = PyTuple_Size(values);
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < num_spaces; ++i) {
    PyObject* const space = item(spaces, i);
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(space, &at, nullptr, &value))
      if (seen >= num_values || value != item(values, seen++)) return false;
  }
  const Py_ssize_t num_places = PyTuple_Size(places);
  for (Py_ssize_t i = 0; i < num_places; ++i)
    if (!place_holds(item(places, i), item(expected, i))) return false;
  const Py_ssize_t num_tensors = PyTuple_Size(tensors), num_types = PyTuple_Size(types);
  seen = 0;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(item(tensors, i), &at, nullptr, &value))
      if (seen >= num_types || reinterpret_cast<PyObject*>(Py_TYPE(value)) != item(types, seen++)) return false;
  }
  return true;
}

// 128 bits of what is in some places of memory, (address, number of bytes) each, which the caller keeps alive. Each
// step is one-to-one in the word that it takes in, so that a change of one word always shows.
Object memory_digest(const std::vector<std::tuple<int64_t, int64_t>>& places) {
  constexpr uint64_t kFirst = 0x9E3779B97F4A7C15, kSecond = 0xC2B2AE3D27D4EB4F;  // odd
  uint64_t lanes[4] = {1, 2, 3, 4};
  const auto take = [&lanes](int lane, uint64_t word) {
    const uint64_t mixed = (lanes[lane] ^ word) * kFirst;
    lanes[lane] = mixed ^ (mixed >> 29);
  };
  for (const auto& [address, bytes] : places) {
    const auto* from = reinterpret_cast<const char*>(static_cast<uintptr_t>(address));
    auto left = static_cast<size_t>(bytes);
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
  return Object(python::sure(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found), sizeof found)));
}

}  // namespace

void bind_guards(PyObject* module) {
  using python::function;
  static PyMethodDef functions[] = {
      function<"guards_hold", "owner record", &guards_hold>(
          "Whether all places that guards watch hold the same objects as when they were made."),
      function<"memory_digest", "places", &memory_digest>("128 bits of what is in (address, bytes) places."),
      {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
