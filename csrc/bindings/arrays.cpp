#include "bindings/arrays.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

namespace fastformer::python {
namespace {

PyArrayObject* as_array(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// Runs when the first array is made, because the rest of the module works without numpy.
void load_numpy() {
  if (PyArray_API == nullptr && _import_array() < 0) throw Raised{};
}

Array new_array(int type, int64_t rows, int64_t columns) {
  load_numpy();
  npy_intp shape[] = {static_cast<npy_intp>(rows), static_cast<npy_intp>(columns)};
  return Array(Object(sure(PyArray_SimpleNew(2, shape, type))));
}

}  // namespace

Array::Array(Object array) : array_(std::move(array)) {
  PyArrayObject* const from = as_array(array_.get());
  const int type = PyArray_TYPE(from);
  dtype_ = type == NPY_FLOAT    ? Dtype::fp32
           : type == NPY_HALF   ? Dtype::fp16
           : type == NPY_UINT16 ? Dtype::uint16
           : type == NPY_UINT8  ? Dtype::uint8
                                : Dtype::other;
  shape_.assign(PyArray_DIMS(from), PyArray_DIMS(from) + PyArray_NDIM(from));
  is_packed_ = PyArray_IS_C_CONTIGUOUS(from) && PyArray_ISNOTSWAPPED(from);
  is_aligned_ = PyArray_ISALIGNED(from);
  is_writable_ = PyArray_ISWRITEABLE(from);
  data_ = PyArray_DATA(from);
}

Array Cast<Array>::from(PyObject* object) {
  load_numpy();
  if (!PyArray_Check(object)) throw Unexpected{"a NumPy array"};
  return Array(Object::borrowed(object));
}

Floats Cast<Floats>::from(PyObject* object) {
  load_numpy();
  return {Array(Object(sure(PyArray_FROM_OTF(object, NPY_FLOAT, NPY_ARRAY_IN_ARRAY | NPY_ARRAY_FORCECAST))))};
}

Bytes Cast<Bytes>::from(PyObject* object) {
  Bytes bytes{Cast<Array>::from(object)};
  if (bytes.array.dtype() != Dtype::uint8 || !bytes.array.is_dense()) throw Unexpected{"a contiguous array of uint8"};
  return bytes;
}

Array new_floats(int64_t rows, int64_t columns) { return new_array(NPY_FLOAT, rows, columns); }
Array new_ids(int64_t rows, int64_t columns) { return new_array(NPY_INT32, rows, columns); }

}  // namespace fastformer::python
