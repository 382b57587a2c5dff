// Scratch memory of the kernels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/buffer_pool.h"

namespace fastformer {

// An array of n uninitialised elements, aligned to a cache line; std::vector would write zeros first. PyTorch's
// profiler counts its memory.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : memory_(new_scratch(n * static_cast<int64_t>(sizeof(T)))) {}
  T* data() { return static_cast<T*>(memory_.get()); }
  const T* data() const { return static_cast<const T*>(memory_.get()); }

 private:
  Scratch memory_;
};

// Returns a buffer of n elements that all have the given value.
template <typename T>
Buffer<T> filled(int64_t n, T value) {
  Buffer<T> buffer(n);
  std::fill_n(buffer.data(), n, value);
  return buffer;
}

}  // namespace fastformer
