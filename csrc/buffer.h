// Scratch memory of the kernels.

#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>

namespace fastformer {

// n elements that nobody has written yet (std::vector would spend a pass on zeros), aligned to a cache line, from the
// allocator that tensors come from: what measures their memory measures this, too.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : data_(c10::GetCPUAllocator()->allocate(static_cast<size_t>(n) * sizeof(T))) {}
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
