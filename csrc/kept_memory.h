// Large buffers that outlive their users: a session begins with every call of `generate`, an op packs weights in every
// call, and fresh pages from the system cost much of either's time.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <utility>

namespace fastformer {

// Memory that is unwritten or was another buffer's; aligned to huge pages, which the system is asked for. At most 64
// MiB are kept for the next ones when buffers go.
class KeptMemory {
 public:
  KeptMemory() = default;
  explicit KeptMemory(int64_t bytes);
  KeptMemory(KeptMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  KeptMemory& operator=(KeptMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~KeptMemory();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// The same as what PyTorch's allocators give, and counted by its profiler as theirs is.
c10::DataPtr kept_data(int64_t bytes);

// Rows of floats for the steps of a session; what they hold is undefined after make_room.
class Floats {
 public:
  void make_room(int64_t count) {
    if (count * 4 > memory_.bytes()) memory_ = KeptMemory(), memory_ = KeptMemory(count * 4);
  }
  float* data() const { return reinterpret_cast<float*>(memory_.data()); }

 private:
  KeptMemory memory_;
};

}  // namespace fastformer
