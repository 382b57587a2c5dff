// Scratch memory of the kernels.

#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>

#include "common/buffer_pool.h"

namespace fastformer {

// Buffers of this size and more come from the pool: the C library returns such blocks to the system when they are
// freed, and an op that packs weights would get fresh pages in each call.
constexpr int64_t kLargeBuffer = int64_t{1} << 20;

// n uninitialised elements (std::vector would spend a pass on zeros), aligned to a cache line. PyTorch's profiler
// counts them.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    data_ = bytes < kLargeBuffer ? c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes)) : pooled_data(bytes);
  }
  T* data() { return static_cast<T*>(data_.get()); }
  const T* data() const { return static_cast<const T*>(data_.get()); }

 private:
  c10::DataPtr data_;
};

// n elements that all hold a value.
template <typename T>
Buffer<T> filled(int64_t n, T value) {
  Buffer<T> buffer(n);
  std::fill_n(buffer.data(), n, value);
  return buffer;
}

}  // namespace fastformer
