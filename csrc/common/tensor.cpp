#include "common/tensor.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <atomic>
#include <cstring>
#include <limits>

namespace fastformer {
namespace {

namespace stable = torch::stable::detail;

std::atomic<bool> fills{false};

std::shared_ptr<void> owner_of(AtenTensorHandle handle) {
  return {handle, [](void* owned) { aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(owned)); }};
}

int64_t element_size(ScalarType dtype) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(static_cast<int32_t>(dtype)));
}

template <typename T>
void fill_with_nan(const Tensor& t) {
  std::fill_n(t.mutable_data_ptr<T>(), t.numel(), std::numeric_limits<T>::quiet_NaN());
}

void fill(const Tensor& t) {
  if (t.scalar_type() == kFloat) fill_with_nan<float>(t);
  else if (t.scalar_type() == kDouble) fill_with_nan<double>(t);
  else if (t.scalar_type() == kBFloat16) fill_with_nan<bfloat16>(t);
  else if (t.scalar_type() == kLong) std::fill_n(t.mutable_data_ptr<int64_t>(), t.numel(), int64_t{1} << 62);
}

// Calls a PyTorch operator that has one result. The call takes ownership of the handles among the arguments.
template <size_t kArguments>
Tensor call(const char* name, std::array<StableIValue, kArguments> stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return Tensor(stable::to<AtenTensorHandle>(stack[0]));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Dims& dims) {
  out << '[';
  for (int64_t i = 0; i < dims.size(); ++i) out << (i > 0 ? ", " : "") << dims[i];
  return out << ']';
}

Tensor::Tensor(AtenTensorHandle handle) : is_input_(true), is_whole_(true), owner_(owner_of(handle)), handle_(handle) {
  const void* data = nullptr;
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
  data_ = const_cast<void*>(data);
  dtype_ = static_cast<ScalarType>(dtype);
  sizes_ = Dims(sizes, dim), strides_ = Dims(strides, dim);
  numel_ = sizes_.product();
}

Tensor empty(const Dims& sizes, const Dims& strides, ScalarType dtype) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                  static_cast<int32_t>(dtype), cpu, 0, &handle));
  Tensor made(nullptr, dtype, sizes, strides, owner_of(handle));
  made.handle_ = handle, made.is_whole_ = true;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &made.data_));
  if (fills.load(std::memory_order_relaxed)) fill(made);
  return made;
}

Tensor zeros(const Dims& sizes, ScalarType dtype) {
  Tensor made = empty(sizes, dtype);
  made.zero();
  return made;
}

void fill_new_tensors(bool on) { fills.store(on, std::memory_order_relaxed); }

bool Tensor::is_contiguous() const {
  if (numel_ == 0) return true;
  int64_t stride = 1;
  for (int64_t d = dim() - 1; d >= 0; --d) {
    if (sizes_[d] == 1) continue;
    if (strides_[d] != stride) return false;
    stride *= sizes_[d];
  }
  return true;
}

bool Tensor::is_plain() const {
  static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
  int32_t device = cpu, layout = strided;
  if (handle_ != nullptr) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle_, &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle_, &layout));
  }
  return device == cpu && layout == strided;
}

void* Tensor::mutable_data_ptr() const {
  if (!is_input_) return data_;
  void* whole = nullptr;
  const void* read = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &read));
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_, &whole));
  return static_cast<char*>(whole) + (static_cast<const char*>(data_) - static_cast<const char*>(read));
}

Tensor Tensor::view(const Dims& sizes, const Dims& strides, int64_t offset) const {
  Tensor view = *this;
  view.is_whole_ = false;
  view.data_ = static_cast<char*>(data_) + offset * element_size(dtype_);
  view.sizes_ = sizes, view.strides_ = strides, view.numel_ = sizes.product();
  return view;
}

Tensor Tensor::narrow(int64_t d, int64_t start, int64_t length) const {
  check(start >= 0 && length >= 0 && start + length <= sizes_[d], "expected at least ", start + length,
        " in dimension ", d, " of ", sizes_);
  Dims sizes = sizes_;
  sizes[d] = length;
  return view(sizes, strides_, start * strides_[d]);
}

Tensor Tensor::flattened(int64_t kept) const {
  const int64_t leading = dim() - kept;
  int64_t rows = 1, stride = 0;
  bool is_view = true;
  for (int64_t d = leading - 1; d >= 0; --d) {
    if (sizes_[d] == 1) continue;
    if (rows == 1) stride = strides_[d];
    else if (strides_[d] != stride * rows) is_view = false;
    rows *= sizes_[d];
  }
  if (numel_ > 0 && !is_view) return contiguous().flattened(kept);
  Dims sizes{rows}, strides{stride};
  int64_t width = 1;
  for (int64_t d = leading; d < dim(); ++d) {
    sizes.push_back(sizes_[d]), strides.push_back(strides_[d]);
    width += (sizes_[d] - 1) * strides_[d];
  }
  if (rows <= 1 || numel_ == 0) strides[0] = std::max<int64_t>(width, 1);  // the stride of a single row has no meaning
  return view(sizes, strides);
}

void Tensor::zero() const {
  if (numel_ > 0) std::memset(mutable_data_ptr(), 0, numel_ * element_size(dtype_));
}

void Tensor::copy_from(const Tensor& from) const {
  const Tensor source(from.borrowed());
  const Tensor target(borrowed());
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(target.handle_, source.handle_, 0));
}

Tensor Tensor::copied_to(ScalarType dtype) const {
  Tensor copy = empty(sizes_, dtype);
  copy.copy_from(*this);
  return copy;
}

AtenTensorHandle Tensor::release() const {
  check(handle_ != nullptr, "an op returned memory that PyTorch did not allocate");
  AtenTensorHandle handle = nullptr;
  if (is_whole_) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &handle));
  } else {
    const void* begin = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &begin));
    const int64_t offset = (static_cast<const char*>(data_) - static_cast<const char*>(begin)) / element_size(dtype_);
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(handle_, dim(), sizes_.data(), strides_.data(), offset, &handle));
  }
  return handle;
}

AtenTensorHandle Tensor::borrowed() const {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(data_, dim(), sizes_.data(), strides_.data(), 0,
                                                            static_cast<int32_t>(dtype_), cpu, 0, &handle));
  return handle;
}

void Tensor::throw_unexpected(ScalarType dtype) const { fail("expected ", dtype, ", got ", dtype_); }

Tensor torch_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const auto added = bias ? std::make_optional(bias->borrowed()) : std::nullopt;
  return call("aten::linear",
              std::array{stable::from(x.borrowed()), stable::from(weight.borrowed()), stable::from(added)});
}

Tensor torch_mm(const Tensor& a, const Tensor& b) {
  return call("aten::mm", std::array{stable::from(a.borrowed()), stable::from(b.borrowed())});
}

}  // namespace fastformer
