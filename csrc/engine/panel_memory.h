// The memory of weights that each decoding step reads.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

namespace fastformer {

// Allocates memory for weights: in huge pages if the system has them, because a decode step reads all weights and would
// miss the TLB with 4 KiB pages; and contiguously, so that prefetches beyond the end of one weight mostly reach the
// next one. A chunk is freed together with the last weight in it.
class PanelMemory {
 public:
  // chunk: the least bytes that are reserved at once. Pages that are never written use no memory.
  explicit PanelMemory(int64_t chunk = int64_t(32) << 20) : chunk_(chunk) {}

  std::shared_ptr<char> allocate(int64_t bytes) {
    constexpr int64_t kHugePage = int64_t(2) << 20;
    const std::lock_guard lock(mutex_);
    std::shared_ptr<char> chunk = current_.lock();
    if (!chunk || size_ - used_ < bytes) {
      const int64_t capacity = (std::max(bytes, chunk_) + kHugePage - 1) / kHugePage * kHugePage;
      void* memory = std::aligned_alloc(kHugePage, static_cast<size_t>(capacity));
      if (memory == nullptr) throw std::bad_alloc();
      madvise(memory, static_cast<size_t>(capacity), MADV_HUGEPAGE);
      chunk = std::shared_ptr<char>(static_cast<char*>(memory), std::free);
      current_ = chunk, size_ = capacity, used_ = 0;
    }
    char* first = chunk.get() + used_;
    used_ += (bytes + 63) / 64 * 64;
    return {std::move(chunk), first};
  }

 private:
  const int64_t chunk_;
  std::mutex mutex_;
  std::weak_ptr<char> current_;
  int64_t used_ = 0, size_ = 0;
};

}  // namespace fastformer
