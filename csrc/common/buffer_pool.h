// Large buffers that outlive their users: a session begins with every call of `generate`, an op packs weights in every
// call, and fresh pages from the system cost much of either's time.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <utility>

namespace fastformer {

// Memory that is unwritten or was another buffer's; aligned to huge pages, which the system is asked for. At most 64
// MiB are kept for the next ones when buffers go.
class PooledMemory {
 public:
  PooledMemory() = default;
  explicit PooledMemory(int64_t bytes);
  PooledMemory(PooledMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PooledMemory& operator=(PooledMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PooledMemory();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// The same as what PyTorch's allocators give, and counted by its profiler as theirs is.
c10::DataPtr pooled_data(int64_t bytes);

// Rows of floats for the steps of a session; what they hold is undefined after reserve.
class FloatBuffer {
 public:
  void reserve(int64_t count) {
    if (count * 4 > memory_.bytes()) memory_ = PooledMemory(), memory_ = PooledMemory(count * 4);
  }
  float* data() const { return reinterpret_cast<float*>(memory_.data()); }

 private:
  PooledMemory memory_;
};

}  // namespace fastformer
