// For engine/frozen.py, checks the modules of a stack in every call, and hashes the memory of a model.
// Both also have a version in Python, which takes several times as long.

#include <cstdint>
#include <cstring>

#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Object;

using Items = std::vector<PyObject*>;

// Returns the items of a tuple as borrowed references.
Items items_of(PyObject* tuple) {
  if (!PyTuple_Check(tuple)) throw python::Unexpected{"a tuple"};
  Items items(static_cast<size_t>(PyTuple_Size(tuple)));
  for (size_t i = 0; i < items.size(); ++i) items[i] = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
  return items;
}

// A name in a dictionary, or in the `vars` of a class or an object.
struct Place {
  PyObject *holder, *name, *expected;
  bool is_dict, is_proxy;

  // Whether the place holds the expected object, or, if that is None, holds nothing.
  bool holds() const {
    PyObject* found;
    if (is_dict) {
      found = PyDict_GetItemWithError(holder, name);
      if (found == nullptr && PyErr_Occurred() != nullptr) throw python::Raised{};
    } else {
      found = is_proxy ? PyObject_GetItem(holder, name) : PyObject_GetAttr(holder, name);
      if (found == nullptr) PyErr_Clear();
      Py_XDECREF(found);  // only the address is compared
    }
    return found == expected || (found == nullptr && expected == Py_None);
  }
};

// The record of engine/frozen.py, unpacked once. Each call passes the record itself, which keeps the objects alive.
class GuardRecord {
 public:
  explicit GuardRecord(PyObject* record) : record_(record) {
    const Items parts = items_of(record);
    if (parts.size() != 12) throw std::invalid_argument("GuardRecord: expected twelve parts");
    kinds_ = items_of(parts[0]), modules_ = items_of(parts[1]);
    names_ = items_of(parts[2]), own_values_ = items_of(parts[3]);
    sized_ = items_of(parts[4]), sizes_ = python::Cast<std::vector<int64_t>>::from(parts[5]);
    spaces_ = items_of(parts[6]), values_ = items_of(parts[7]);
    const Items places = items_of(parts[8]), expected = items_of(parts[9]);
    tensors_ = items_of(parts[10]), types_ = items_of(parts[11]);
    if (kinds_.size() != modules_.size() + 1 || names_.size() != own_values_.size() ||
        sizes_.size() != sized_.size() + 1 || places.size() != expected.size())
      throw std::invalid_argument("GuardRecord: expected parts of matching sizes");
    for (size_t i = 0; i < places.size(); ++i) {
      const Items place = items_of(places[i]);
      if (place.size() != 2) throw std::invalid_argument("GuardRecord: expected pairs as places");
      places_.push_back(
          {place[0], place[1], expected[i], PyDict_Check(place[0]) != 0, Py_TYPE(place[0]) == &PyDictProxy_Type});
    }
  }

  // Implements `Guards.hold`.
  bool holds(PyObject* owner, PyObject* record) const {
    if (record != record_) throw std::invalid_argument("GuardRecord: expected the record from which it was made");
    if (kinds_[0] != type(owner)) return false;
    for (size_t i = 0; i < modules_.size(); ++i)
      if (kinds_[i + 1] != type(modules_[i])) return false;
    const Object own(python::sure(PyObject_GenericGetDict(owner, nullptr)));
    if (PyDict_Size(own.get()) != sizes_[0]) return false;
    for (size_t i = 0; i < names_.size(); ++i) {
      PyObject* const found = PyDict_GetItemWithError(own.get(), names_[i]);
      if (found != own_values_[i] && !(found == nullptr && own_values_[i] == Py_None)) return false;
    }
    for (size_t i = 0; i < sized_.size(); ++i)
      if (PyDict_Size(sized_[i]) != sizes_[i + 1]) return false;
    size_t seen = 0;
    for (PyObject* const space : spaces_) {
      Py_ssize_t at = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(space, &at, nullptr, &value))
        if (seen >= values_.size() || value != values_[seen++]) return false;
    }
    for (const Place& place : places_)
      if (!place.holds()) return false;
    seen = 0;
    for (PyObject* const parameters : tensors_) {
      Py_ssize_t at = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(parameters, &at, nullptr, &value))
        if (seen >= types_.size() || type(value) != types_[seen++]) return false;
    }
    return true;
  }

 private:
  static PyObject* type(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

  PyObject* record_;
  Items kinds_, modules_, names_, own_values_, sized_, spaces_, values_, tensors_, types_;
  std::vector<int64_t> sizes_;
  std::vector<Place> places_;
};

std::unique_ptr<GuardRecord> new_record(PyObject* record) { return std::make_unique<GuardRecord>(record); }

bool holds(GuardRecord& guards, PyObject* owner, PyObject* record) { return guards.holds(owner, record); }

// Returns a 128-bit digest of memory, given as (address, number of bytes) pairs that the caller keeps alive. Each step
// is a bijection in the word that it reads, so a change of a single word is always detected.
Object memory_digest(const std::vector<std::tuple<int64_t, int64_t>>& places) {
  constexpr uint64_t kFirst = 0x9E3779B97F4A7C15, kSecond = 0xC2B2AE3D27D4EB4F;  // odd
  uint64_t lanes[4] = {1, 2, 3, 4};
  const auto take = [&lanes](int lane, uint64_t word) {
    uint64_t mixed = (lanes[lane] ^ word) * kFirst;
    asm(""
        : "+r"(mixed));  // prevents vectorisation: AVX2 has no 64-bit multiplication, and its emulation takes four
                         // times as long
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
  static PyMethodDef methods[] = {python::method<"holds", "owner record", &holds>(), {}};
  static PyGetSetDef properties[] = {{}};
  python::add_class<GuardRecord>(module, "GuardRecord", &python::construct<&new_record, "GuardRecord", "record">,
                                 methods, properties);
  static PyMethodDef functions[] = {python::function<"memory_digest", "places", &memory_digest>(
                                        "A 128-bit digest of memory, given as (address, number of bytes)."),
                                    {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
