#include "common/buffer_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "common/memory_report.h"

namespace fastformer {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kMostKept = int64_t{64} << 20;
constexpr int64_t kLarge = int64_t{1} << 20;
constexpr int64_t kLine = 64;

struct Chunk {
  char* data;
  int64_t bytes;
};

// Never destroyed, because buffers may be released while the process exits.
struct Kept {
  std::mutex mutex;
  std::vector<Chunk> chunks;
  int64_t bytes = 0;
};
Kept& kept() {
  static Kept* const all = [] {
    // Otherwise a process that forks while another thread holds the lock gives its child a lock that stays locked.
    pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, [] { kept().mutex.unlock(); });
    return new Kept;
  }();
  return *all;
}

}  // namespace

PooledMemory::PooledMemory(int64_t bytes)
    : bytes_((std::max<int64_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage) {
  Kept& all = kept();
  {
    const std::lock_guard lock(all.mutex);
    auto best = all.chunks.end();
    for (auto chunk = all.chunks.begin(); chunk != all.chunks.end(); ++chunk)
      if (chunk->bytes >= bytes_ && (best == all.chunks.end() || chunk->bytes < best->bytes)) best = chunk;
    if (best != all.chunks.end()) {
      data_ = best->data, bytes_ = best->bytes;
      all.bytes -= bytes_;
      all.chunks.erase(best);
      return;
    }
  }
  data_ = static_cast<char*>(std::aligned_alloc(kHugePage, static_cast<size_t>(bytes_)));
  if (data_ == nullptr) throw std::bad_alloc();
  madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
}

PooledMemory::~PooledMemory() {
  if (data_ == nullptr) return;
  if (bytes_ > kMostKept) {
    std::free(data_);
    return;
  }
  // Evict the oldest: a pool full of small buffers would otherwise never keep a large one again.
  std::vector<Chunk> gone;
  Kept& all = kept();
  {
    const std::lock_guard lock(all.mutex);
    auto chunk = all.chunks.begin();
    for (; all.bytes + bytes_ > kMostKept; ++chunk) {
      all.bytes -= chunk->bytes;
      gone.push_back(*chunk);
    }
    all.chunks.erase(all.chunks.begin(), chunk);
    all.chunks.push_back({data_, bytes_});
    all.bytes += bytes_;
  }
  for (const Chunk& chunk : gone) std::free(chunk.data);
}

Scratch new_scratch(int64_t bytes) {
  if (bytes < 0) throw std::bad_alloc();
  ReleaseScratch release;
  void* data = nullptr;
  if (bytes >= kLarge) {
    release.pooled = PooledMemory(bytes);
    data = release.pooled.data();
  } else {
    const int64_t whole = std::max<int64_t>((bytes + kLine - 1) / kLine, 1) * kLine;
    data = std::aligned_alloc(kLine, static_cast<size_t>(whole));
    if (data == nullptr) throw std::bad_alloc();
  }
  if (const MemoryReport* report = memory_report()) report->allocated(data, bytes);
  return Scratch(data, std::move(release));
}

void ReleaseScratch::operator()(void* data) const {
  if (const MemoryReport* report = memory_report()) report->released(data);
  if (pooled.data() == nullptr) std::free(data);
}

}  // namespace fastformer
