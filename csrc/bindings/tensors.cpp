// Inspects the arguments of every call for fastformer/ops/_dispatch.py and kernels/_plans.py, and the tensors of a
// model for engine/frozen.py. Each function also has a version in Python, which takes as long for six
// tensors as a kernel launch. Tensors are read through DLPack's function table and their attributes, without PyTorch's
// C++.

#include <cstdint>
#include <string>

#include "bindings/dlpack.h"
#include "bindings/module.h"

namespace fastformer {
namespace {

using python::Object;

Object attribute(PyObject* object, const char* name) {
  return Object(python::sure(PyObject_GetAttrString(object, name)));
}

// The dispatch keys of plain strided tensors of a device: of those that autograd may track, and of those that were made
// in inference mode.
struct Keys {
  uint64_t tracked, untracked;

  bool contains(uint64_t keys) const { return keys == tracked || keys == untracked; }
};

// Objects of PyTorch that are looked up once and stay alive.
struct Torch {
  PyObject *tensor, *parameter, *dtype;          // classes
  PyObject *is_deterministic, *keys_of;          // functions
  PyObject *raw_repr, *requires_grad, *version;  // names
  PyObject *cpu, *cuda;                          // strings
  Keys cpu_keys, cuda_keys;
  int (*read)(void* object, dlpack::Tensor* tensor);
};
Torch torch;

uint64_t number(PyObject* object) {
  const uint64_t found = PyLong_AsUnsignedLongLong(object);
  if (found == static_cast<uint64_t>(-1) && PyErr_Occurred() != nullptr) throw python::Raised{};
  return found;
}

Keys plain_keys(PyObject* c_module, const std::string& device) {
  const Object key = attribute(c_module, "DispatchKey"), set = attribute(c_module, "DispatchKeySet");
  const auto with = [&](const Object& others, const std::string& name) {
    const Object one = attribute(key.get(), name.c_str());
    Object keys(python::sure(PyObject_CallFunctionObjArgs(set.get(), one.get(), nullptr)));
    return others ? Object(python::sure(PyNumber_Or(others.get(), keys.get()))) : std::move(keys);
  };
  const auto raw = [](const Object& keys) {
    return number(Object(python::sure(PyObject_CallMethod(keys.get(), "raw_repr", nullptr))).get());
  };
  const Object untracked = with(with(Object(), device), "Autocast" + device);
  return {raw(with(with(untracked, "Autograd" + device), "ADInplaceOrView")), raw(untracked)};
}

// Returns whether this version of PyTorch has all attributes that are read here.
bool find_torch() {
  const Object module(PyImport_ImportModule("torch"));
  if (!module) throw python::Raised{};
  const Object c_module = attribute(module.get(), "_C"), nn = attribute(module.get(), "nn");
  Object tensor = attribute(module.get(), "Tensor");
  const Object capsule(PyObject_GetAttrString(tensor.get(), "__dlpack_c_exchange_api__"));
  if (!capsule) {
    PyErr_Clear();
    return false;
  }
  const auto* table = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.get(), dlpack::kCapsule));
  if (table == nullptr) throw python::Raised{};
  while (table != nullptr && table->major > dlpack::kMajorVersion) table = table->older;
  if (table == nullptr || table->major != dlpack::kMajorVersion || table->tensor_from_object == nullptr) return false;
  torch.read = table->tensor_from_object;
  torch.cpu_keys = plain_keys(c_module.get(), "CPU"), torch.cuda_keys = plain_keys(c_module.get(), "CUDA");
  torch.parameter = attribute(nn.get(), "Parameter").release();
  torch.dtype = attribute(module.get(), "dtype").release();
  torch.is_deterministic = attribute(c_module.get(), "_get_deterministic_algorithms").release();
  torch.keys_of = attribute(c_module.get(), "_dispatch_keys").release();
  torch.tensor = tensor.release();
  torch.raw_repr = PyUnicode_InternFromString("raw_repr");
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.version = PyUnicode_InternFromString("_version");
  torch.cpu = PyUnicode_InternFromString("cpu"), torch.cuda = PyUnicode_InternFromString("cuda");
  return true;
}

// Whether an object is exactly a Tensor or a Parameter, and not an instance of a subclass.
bool is_tensor(PyObject* x) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch.tensor || type == torch.parameter;
}

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_sizes(std::string& key, const dlpack::Tensor& x) {
  put(key, x.code), put(key, x.bits), put(key, x.lanes);
  put(key, x.ndim);
  for (int32_t i = 0; i < x.ndim; ++i) put(key, x.shape[i]);
  for (int32_t i = 0; i < x.ndim; ++i) put(key, x.strides[i]);
}

// Returns false for a value of a kind that keys can't contain.
bool put_value(std::string& key, PyObject* x) {
  if (x == Py_None) {
    key += 'N';
  } else if (PyBool_Check(x)) {
    key += x == Py_True ? '1' : '0';
  } else if (PyFloat_CheckExact(x)) {
    key += 'F';
    put(key, PyFloat_AsDouble(x));
  } else if (PyLong_CheckExact(x)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
    if (overflow != 0) return false;
    key += 'I';
    put(key, value);
  } else if (reinterpret_cast<PyObject*>(Py_TYPE(x)) == torch.dtype) {
    key += 'D';
    put(key, x);  // by identity: each dtype is a single object
  } else if (PyUnicode_CheckExact(x)) {
    const std::string text = python::Cast<std::string>::from(x);
    key += 'S';
    put(key, text.size());
    key += text;
  } else if (PyList_CheckExact(x)) {
    key += 'L';
    const Py_ssize_t size = PyList_Size(x);
    put(key, size);
    for (Py_ssize_t i = 0; i < size; ++i)
      if (!put_value(key, PyList_GetItem(x, i))) return false;
  } else {
    return false;
  }
  return true;
}

Object bytes_of(const std::string& key) {
  return Object(python::sure(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()))));
}

// Implements `_plans.geometry`; returns bytes.
Object geometry(PyObject* args) {
  static thread_local std::string key;  // static, to reuse its memory
  if (!PyTuple_Check(args)) throw python::Unexpected{"a tuple"};
  key.clear();
  const Py_ssize_t count = PyTuple_Size(args);
  if (count == 0 || !is_tensor(PyTuple_GetItem(args, 0))) return Object::borrowed(Py_None);
  const Object deterministic(python::sure(PyObject_CallObject(torch.is_deterministic, nullptr)));
  put(key, deterministic.get() == Py_True);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const argument = PyTuple_GetItem(args, i);
    if (is_tensor(argument)) {
      dlpack::Tensor x;
      if (torch.read(argument, &x) != 0) {  // the tensor has a dtype or device that DLPack doesn't define
        PyErr_Clear();
        return Object::borrowed(Py_None);
      }
      if (i == 0) put(key, x.device_type), put(key, x.device_index);
      key += 'T';
      put_sizes(key, x);
      put(key, static_cast<uint8_t>((reinterpret_cast<uintptr_t>(x.data) + x.byte_offset) % 16));
    } else if (!put_value(key, argument)) {
      return Object::borrowed(Py_None);
    }
  }
  return bytes_of(key);
}

// Implements `_dispatch.device_of`.
Object device_of(PyObject* args, PyObject* tensor_indices) {
  if (!PyTuple_Check(args)) throw python::Unexpected{"a tuple"};
  const Py_ssize_t count = PyTuple_Size(args);
  const Object kinds(python::sure(PyTuple_New(count)));
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GetItem(args, i)));
    PyTuple_SetItem(kinds.get(), i, Object::borrowed(type).release());
  }
  // PyDict_GetItem would skip `TensorIndices.__missing__`, which handles new types.
  const Object where(python::sure(PyObject_GetItem(tensor_indices, kinds.get())));
  const auto found = [](PyObject* device, bool requires_grad) {
    return python::make_tuple(Object::borrowed(device), requires_grad);
  };
  const Keys* seen = nullptr;
  bool requires_grad = false;
  const Py_ssize_t tensors = PyTuple_Size(where.get());
  for (Py_ssize_t i = 0; i < tensors; ++i) {
    PyObject* const x = python::sure(PyTuple_GetItem(args, PyLong_AsSsize_t(PyTuple_GetItem(where.get(), i))));
    const Object set(python::sure(PyObject_CallFunctionObjArgs(torch.keys_of, x, nullptr)));
    const Object raw(python::sure(PyObject_CallMethodObjArgs(set.get(), torch.raw_repr, nullptr)));
    const uint64_t keys = number(raw.get());
    if (seen == nullptr) seen = torch.cpu_keys.contains(keys) ? &torch.cpu_keys : &torch.cuda_keys;
    if (!seen->contains(keys)) return found(Py_None, false);
    requires_grad = requires_grad || Object(python::sure(PyObject_GetAttr(x, torch.requires_grad))).get() == Py_True;
  }
  if (seen == nullptr) return found(Py_None, false);
  return found(seen == &torch.cuda_keys ? torch.cuda : torch.cpu, requires_grad);
}

// Implements `guards.layout_of`: returns the identity, address and memory layout of the tensors, or None if
// DLPack can't describe one of them.
Object tensor_layout(PyObject* tensors) {
  if (!PyList_Check(tensors)) throw python::Unexpected{"a list"};
  std::string key;
  const Py_ssize_t count = PyList_Size(tensors);
  key.reserve(static_cast<size_t>(count) * 64);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const each = python::sure(PyList_GetItem(tensors, i));
    dlpack::Tensor x;
    const int is_instance = PyObject_IsInstance(each, torch.tensor);
    if (is_instance < 0) throw python::Raised{};
    if (is_instance == 0) throw python::Unexpected{"a list of tensors"};
    if (torch.read(each, &x) != 0) {
      PyErr_Clear();
      return Object::borrowed(Py_None);
    }
    put(key, each);
    put(key, static_cast<char*>(x.data) + x.byte_offset);
    put_sizes(key, x);
  }
  return bytes_of(key);
}

// Returns the version counter of each tensor.
Object tensor_versions(PyObject* tensors) {
  if (!PyList_Check(tensors)) throw python::Unexpected{"a list"};
  std::string key;
  const Py_ssize_t count = PyList_Size(tensors);
  key.reserve(static_cast<size_t>(count) * 8);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Object version(python::sure(PyObject_GetAttr(python::sure(PyList_GetItem(tensors, i)), torch.version)));
    put(key, PyLong_AsLongLong(version.get()));
  }
  if (PyErr_Occurred() != nullptr) throw python::Raised{};
  return bytes_of(key);
}

// Adds the functions that read PyTorch's objects to this module.
void read_torch(PyObject* module) {
  using python::function;
  if (torch.tensor != nullptr || !find_torch()) return;  // without them, the versions in Python are used
  static PyMethodDef functions[] = {
      function<"geometry", "args", &geometry>("Bytes that are equal for calls that can share a plan, or None."),
      function<"device_of", "args tensor_indices", &device_of>(
          "(the type of device on which all tensors of a call are plain ones or None, whether one requires a "
          "gradient)."),
      function<"tensor_layout", "tensors", &tensor_layout>(
          "The identity, addresses and layout of the tensors, as bytes, or None."),
      function<"tensor_versions", "tensors", &tensor_versions>("The version counters of the tensors, as bytes."),
      {}};
  python::add_functions(module, functions);
}

}  // namespace

// Speech is decoded without PyTorch, which would be imported for nothing.
void bind_tensors(PyObject* module) {
  static PyMethodDef functions[] = {
      python::function<"read_torch", "module", &read_torch>("Adds functions that read tensors to the module."), {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
