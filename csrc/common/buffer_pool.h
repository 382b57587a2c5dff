// A pool of large buffers. Every call of `generate` opens a session, and every call of an op packs weights; page faults
// on fresh memory would take a large part of their time.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "common/export.h"

namespace fastformer {

// Uninitialised memory, new or from the pool. It is aligned to huge pages and requests them from the system. The pool
// keeps the last 512 MiB that were released; the system takes what is beyond 64 MiB when it runs short of memory.
class FASTFORMER_API PooledMemory {
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

// Frees scratch memory, which is aligned to a cache line and reported to the profiler (memory_report.h). Blocks of 1
// MiB and more come from the pool: the C library would return them to the system, and an op that packs weights would
// take page faults in each call.
struct FASTFORMER_API ReleaseScratch {
  PooledMemory pooled;
  void operator()(void* data) const;
};
using Scratch = std::unique_ptr<void, ReleaseScratch>;
FASTFORMER_API Scratch new_scratch(int64_t bytes);

// Rows of floats for the steps of a session. Their contents are undefined after reserve().
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
