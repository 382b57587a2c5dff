// A pool of large buffers. Every call of `generate` begins a session, and an op packs weights in every call: fresh
// pages from the system would take much of the time of both.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "common/export.h"

namespace fastformer {

// Uninitialised memory, new or from the pool, aligned to huge pages, which it requests from the system. The pool keeps
// the last 64 MiB that were released.
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

// Memory aligned to a cache line, and counted: see memory_report.h. From 1 MiB on it comes from the pool: the C library
// returns such blocks to the system when they are freed, and an op that packs weights would get fresh pages in each
// call.
struct FASTFORMER_API ReleaseScratch {
  PooledMemory pooled;
  void operator()(void* data) const;
};
using Scratch = std::unique_ptr<void, ReleaseScratch>;
FASTFORMER_API Scratch new_scratch(int64_t bytes);

// Rows of floats for the steps of a session; their contents are undefined after reserve.
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
