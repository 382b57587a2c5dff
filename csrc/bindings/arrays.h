// NumPy arrays in C++, through NumPy's C API, which works with Python's limited API.

#pragma once

#include "bindings/python.h"

namespace fastformer::python {

enum class Dtype { fp32, fp16, uint16, uint8, other };

// An array, which this object keeps alive.
class Array {
 public:
  explicit Array(Object array);

  Dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t ndim() const { return std::ssize(shape_); }
  int64_t shape(size_t dimension) const { return shape_[dimension]; }
  bool is_dense() const { return is_packed_ && is_aligned_; }
  bool is_packed() const { return is_packed_; }  // C-contiguous, in native byte order
  bool is_writable() const { return is_writable_; }
  void* data() const { return data_; }
  Object& object() { return array_; }

 private:
  Object array_;
  Dtype dtype_ = Dtype::other;
  std::vector<int64_t> shape_;
  bool is_packed_ = false, is_aligned_ = false, is_writable_ = false;
  void* data_ = nullptr;
};

template <>
struct Cast<Array> {
  static Array from(PyObject* object);
};

// A contiguous fp32 array. Other objects are converted to one, which copies.
struct Floats {
  Array array;
  const float* data() const { return static_cast<const float*>(array.data()); }
};
template <>
struct Cast<Floats> {
  static Floats from(PyObject* object);
};

// A contiguous array of bytes; other objects are refused.
struct Bytes {
  Array array;
  const uint8_t* data() const { return static_cast<const uint8_t*>(array.data()); }
};
template <>
struct Cast<Bytes> {
  static Bytes from(PyObject* object);
};

// New two-dimensional arrays with undefined contents.
Array new_floats(int64_t rows, int64_t columns);
Array new_ids(int64_t rows, int64_t columns);

}  // namespace fastformer::python
