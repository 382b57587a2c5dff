// An optional module that is bound to one version of PyTorch and of Python. It reads tensors directly, in a fraction of
// the time that the same functions in csrc/bindings/tensors.cpp take, which are used without it.

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "bindings/python.h"

namespace fastformer {
namespace {

using python::Object;

const at::Tensor& tensor_at(PyObject* list, Py_ssize_t i) {
  PyObject* const x = python::sure(PyList_GetItem(list, i));
  if (!THPVariable_Check(x)) throw python::Unexpected{"a list of tensors"};
  return THPVariable_Unpack(x);
}

// The dispatch keys of plain strided tensors of a device: of those that autograd may track, and of those that were made
// in inference mode.
struct Keys {
  c10::DispatchKeySet untracked, tracked;

  Keys(c10::DispatchKey backend, c10::DispatchKey autocast, c10::DispatchKey autograd)
      : untracked({backend, autocast}), tracked({backend, autocast, autograd, c10::DispatchKey::ADInplaceOrView}) {}
  bool contains(c10::DispatchKeySet keys) const { return keys == tracked || keys == untracked; }
};

Object device_of(PyObject* args, PyObject* places) {
  using c10::DispatchKey;
  static const Keys cpu(DispatchKey::CPU, DispatchKey::AutocastCPU, DispatchKey::AutogradCPU);
  static const Keys cuda(DispatchKey::CUDA, DispatchKey::AutocastCUDA, DispatchKey::AutogradCUDA);
  if (!PyTuple_Check(args)) throw python::Unexpected{"a tuple"};
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  const Object kinds(python::sure(PyTuple_New(count)));
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(args, i)));
    PyTuple_SET_ITEM(kinds.get(), i, Object::borrowed(type).release());
  }
  // PyDict_GetItem would skip `TensorIndices.__missing__`, which handles new kinds.
  const Object where(python::sure(PyObject_GetItem(places, kinds.get())));
  const auto found = [](PyObject* device, bool requires_grad) {
    return Object(python::sure(PyTuple_Pack(2, device, requires_grad ? Py_True : Py_False)));
  };
  const Keys* seen = nullptr;
  bool requires_grad = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(where.get()); ++i) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(where.get(), i));
    const at::Tensor& x = THPVariable_Unpack(PyTuple_GET_ITEM(args, place));
    if (seen == nullptr) seen = cpu.contains(x.key_set()) ? &cpu : &cuda;
    if (!seen->contains(x.key_set())) return found(Py_None, false);
    requires_grad = requires_grad || x.requires_grad();
  }
  if (seen == nullptr) return found(Py_None, false);
  static PyObject* const names[] = {PyUnicode_InternFromString("cpu"), PyUnicode_InternFromString("cuda")};
  return found(names[seen == &cuda], requires_grad);
}

template <class T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

Object bytes_of(const std::string& key) {
  return Object(python::sure(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()))));
}

Object tensor_layout(PyObject* tensors) {
  if (!PyList_Check(tensors)) throw python::Unexpected{"a list of tensors"};
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  std::string key;
  key.reserve(static_cast<size_t>(count) * 64);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const at::Tensor& x = tensor_at(tensors, i);
    put(key, PyList_GET_ITEM(tensors, i));
    put(key, x.scalar_type());
    put(key, x.const_data_ptr());
    put(key, static_cast<int32_t>(x.dim()));
    for (const int64_t size : x.sizes()) put(key, size);
    for (const int64_t stride : x.strides()) put(key, stride);
  }
  return bytes_of(key);
}

Object tensor_versions(PyObject* tensors) {
  if (!PyList_Check(tensors)) throw python::Unexpected{"a list of tensors"};
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  std::string key;
  key.reserve(static_cast<size_t>(count) * 4);
  for (Py_ssize_t i = 0; i < count; ++i) put(key, static_cast<uint32_t>(tensor_at(tensors, i)._version()));
  return bytes_of(key);
}

#define FASTFORMER_TEXT(name) #name
#define FASTFORMER_TEXT_OF(name) FASTFORMER_TEXT(name)
#define FASTFORMER_INIT(name) PyInit_##name
#define FASTFORMER_INIT_OF(name) FASTFORMER_INIT(name)

}  // namespace
}  // namespace fastformer

PyMODINIT_FUNC FASTFORMER_INIT_OF(FASTFORMER_MODULE)() {
  using namespace fastformer;
  using python::function;
  static PyMethodDef functions[] = {function<"device_of", "args places", &device_of>(),
                                    function<"tensor_layout", "tensors", &tensor_layout>(),
                                    function<"tensor_versions", "tensors", &tensor_versions>(),
                                    {}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   FASTFORMER_TEXT_OF(FASTFORMER_MODULE),
                                   "reads of PyTorch's objects, for fastformer",
                                   -1,
                                   functions,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
