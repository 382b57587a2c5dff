// numpy's arrays in C++, by numpy's C interface, which Python's limited API allows.

#pragma once

#include "bindings/python.h"

namespace fastformer::python {

enum class Dtype { fp32, uint16, uint8, other };

// An array that is kept alive.
class Array {
 public:
  explicit Array(Object array);

  Dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  int64_t shape(size_t dimension) const { return shape_[dimension]; }
  bool is_dense() const { return is_dense_; }  // C-contiguous, aligned, in the byte order of the machine
  bool is_writable() const { return is_writable_; }
  void* data() const { return data_; }
  Object& object() { return array_; }

 private:
  Object array_;
  Dtype dtype_ = Dtype::other;
  std::vector<int64_t> shape_;
  bool is_dense_ = false, is_writable_ = false;
  void* data_ = nullptr;
};

template <>
struct Cast<Array> {
  static Array from(PyObject* object);
};

// An array of fp32 without gaps, converted from an object: a copy unless the object is one.
struct Floats {
  Array array;
  const float* data() const { return static_cast<const float*>(array.data()); }
};
template <>
struct Cast<Floats> {
  static Floats from(PyObject* object);
};

// An array of bytes without gaps; other objects are refused.
struct Bytes {
  Array array;
  const uint8_t* data() const { return static_cast<const uint8_t*>(array.data()); }
};
template <>
struct Cast<Bytes> {
  static Bytes from(PyObject* object);
};

// New arrays of two dimensions; their contents are undefined.
Array new_floats(int64_t rows, int64_t columns);
Array new_ids(int64_t rows, int64_t columns);

}  // namespace fastformer::python
