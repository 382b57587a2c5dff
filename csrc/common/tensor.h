// The tensor of the ops: a pointer, sizes, strides, a dtype, and the owner of the memory.
//
// The ops use only PyTorch's stable C functions (torch/csrc/stable), so one build works with every version from 2.11
// on. These functions aren't inlined, and some go through the dispatcher. Therefore this class reads a tensor's
// properties once, makes views without PyTorch, and converts or copies only if necessary.

#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/simd.h"

namespace fastformer {

using torch::headeronly::ScalarType;
constexpr auto kFloat = ScalarType::Float, kDouble = ScalarType::Double, kBFloat16 = ScalarType::BFloat16,
               kLong = ScalarType::Long, kInt = ScalarType::Int, kBool = ScalarType::Bool;

template <typename T>
constexpr ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<T, float>) return kFloat;
  else if constexpr (std::is_same_v<T, double>) return kDouble;
  else if constexpr (std::is_same_v<T, bfloat16>) return kBFloat16;
  else if constexpr (std::is_same_v<T, int64_t>) return kLong;
  else if constexpr (std::is_same_v<T, int32_t>) return kInt;
  else return kBool;
}

// Sizes or strides. Up to kFew of them need no heap allocation.
class Dims {
 public:
  Dims() = default;
  Dims(const int64_t* from, int64_t count) : size_(count) {
    if (count > kFew) many_.resize(count);
    std::copy_n(from, count, data());
  }
  Dims(std::initializer_list<int64_t> from) : Dims(from.begin(), std::ssize(from)) {}

  int64_t size() const { return size_; }
  const int64_t* data() const { return size_ > kFew ? many_.data() : few_; }
  int64_t* data() { return size_ > kFew ? many_.data() : few_; }
  int64_t operator[](int64_t i) const { return data()[i]; }
  int64_t& operator[](int64_t i) { return data()[i]; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t& back() { return data()[size_ - 1]; }
  void push_back(int64_t x) {
    if (size_ == kFew) many_.assign(few_, few_ + size_);
    if (size_ >= kFew) many_.push_back(x);
    else few_[size_] = x;
    ++size_;
  }
  int64_t product() const {
    int64_t product = 1;
    for (const int64_t x : *this) product *= x;
    return product;
  }
  // Returns the strides of a contiguous tensor with these sizes.
  Dims contiguous() const {
    Dims strides = *this;
    int64_t stride = 1;
    for (int64_t d = size_ - 1; d >= 0; stride *= std::max<int64_t>((*this)[d], 1), --d) strides[d] = stride;
    return strides;
  }
  friend bool operator==(const Dims& a, const Dims& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }
  friend std::ostream& operator<<(std::ostream& out, const Dims& dims);

 private:
  static constexpr int64_t kFew = 5;
  int64_t size_ = 0;
  int64_t few_[kFew];
  std::vector<int64_t> many_;
};

class Tensor {
 public:
  Tensor() = default;
  // Wraps a tensor of PyTorch, which is deleted with the last reference to its memory.
  explicit Tensor(AtenTensorHandle handle);
  // Wraps memory that `owner` keeps alive.
  Tensor(void* data, ScalarType dtype, const Dims& sizes, const Dims& strides, std::shared_ptr<void> owner)
      : data_(data),
        dtype_(dtype),
        numel_(sizes.product()),
        sizes_(sizes),
        strides_(strides),
        owner_(std::move(owner)) {}

  bool defined() const { return owner_ != nullptr; }
  int64_t dim() const { return sizes_.size(); }
  int64_t numel() const { return numel_; }
  ScalarType scalar_type() const { return dtype_; }
  const Dims& sizes() const { return sizes_; }
  const Dims& strides() const { return strides_; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim() : d]; }  // a negative d counts from the end
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim() : d]; }
  bool is_contiguous() const;
  bool is_plain() const;  // plain strided CPU memory, which kernels can read

  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const;
  template <typename T>
  const T* const_data_ptr() const {
    expect(scalar_type_of<T>());
    return static_cast<const T*>(data_);
  }
  template <typename T>
  T* mutable_data_ptr() const {
    expect(scalar_type_of<T>());
    return static_cast<T*>(mutable_data_ptr());
  }

  // Returns a view that starts `offset` elements after the first one.
  Tensor view(const Dims& sizes, const Dims& strides, int64_t offset = 0) const;
  Tensor narrow(int64_t d, int64_t start, int64_t length) const;
  Tensor t() const { return view({size(1), size(0)}, {stride(1), stride(0)}); }  // for a matrix
  // Merges all dimensions but the last `kept`, so that size(0) is the number of rows. Copies if the strides don't allow
  // a view.
  Tensor flattened(int64_t kept) const;

  // Returns the tensor itself if it is contiguous, else a contiguous copy.
  Tensor contiguous() const { return is_contiguous() ? *this : copied_to(dtype_); }
  Tensor to(ScalarType dtype) const { return dtype == dtype_ ? *this : copied_to(dtype); }

  void zero() const;  // for contiguous memory
  void copy_from(const Tensor& from) const;

  // Returns a handle that the caller deletes: of PyTorch's tensor, or of a new tensor for a view that was made here.
  AtenTensorHandle release() const;
  // Returns a handle to this memory that the caller deletes. It does not keep the memory alive.
  AtenTensorHandle borrowed() const;

 private:
  friend Tensor empty(const Dims& sizes, const Dims& strides, ScalarType dtype);

  void expect(ScalarType dtype) const {
    if (dtype != dtype_) [[unlikely]]
      throw_unexpected(dtype);
  }
  [[noreturn]] void throw_unexpected(ScalarType dtype) const;
  Tensor copied_to(ScalarType dtype) const;

  void* data_ = nullptr;
  ScalarType dtype_ = kFloat;
  bool is_input_ = false;  // writing to this memory may need PyTorch's bookkeeping
  bool is_whole_ = false;  // not a view that was made here
  int64_t numel_ = 0;
  Dims sizes_, strides_;
  std::shared_ptr<void> owner_;        // also deletes handle_
  AtenTensorHandle handle_ = nullptr;  // null if the memory is not PyTorch's
};

using OptionalTensor = std::optional<Tensor>;

// Returns an uninitialised tensor that PyTorch allocates.
Tensor empty(const Dims& sizes, const Dims& strides, ScalarType dtype);
inline Tensor empty(const Dims& sizes, ScalarType dtype) { return empty(sizes, sizes.contiguous(), dtype); }
Tensor zeros(const Dims& sizes, ScalarType dtype);

// Returns the tensor itself if each row is dense, as the kernels require, else a copy. The rows may have any strides;
// in an expanded tensor, all rows share their memory.
inline Tensor rows_of(const Tensor& t) { return t.numel() == 0 || t.stride(-1) == 1 ? t : t.contiguous(); }

inline OptionalTensor contiguous(const OptionalTensor& t) { return t ? OptionalTensor(t->contiguous()) : t; }

// PyTorch's own products x weight^T + bias and a b, called through the dispatcher without gradients.
Tensor torch_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);
Tensor torch_mm(const Tensor& a, const Tensor& b);

// Sets whether new tensors are filled with NaN, for tests.
void fill_new_tensors(bool fills);

}  // namespace fastformer
