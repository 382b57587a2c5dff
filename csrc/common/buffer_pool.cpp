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
// Beyond the first bound the system may take a pooled buffer's pages back; beyond the second, buffers are freed.
constexpr int64_t kMostResident = int64_t{64} << 20, kMostKept = int64_t{512} << 20;
constexpr int64_t kLarge = int64_t{1} << 20;
constexpr int64_t kLine = 64;

struct Chunk {
  char* data;
  int64_t bytes;
};

// Never destroyed, because buffers may be released while the process exits.
struct Pool {
  std::mutex mutex;
  std::vector<Chunk> chunks;
  int64_t bytes = 0;
};
Pool& pool() {
  static Pool* const shared = [] {
    // Otherwise a process that forks while another thread holds the lock gives its child a lock that stays locked.
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return new Pool;
  }();
  return *shared;
}

}  // namespace

PooledMemory::PooledMemory(int64_t bytes)
    : bytes_((std::max<int64_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage) {
  Pool& shared = pool();
  {
    const std::lock_guard lock(shared.mutex);
    auto best = shared.chunks.end();
    for (auto chunk = shared.chunks.begin(); chunk != shared.chunks.end(); ++chunk)
      if (chunk->bytes >= bytes_ && (best == shared.chunks.end() || chunk->bytes < best->bytes)) best = chunk;
    if (best != shared.chunks.end()) {
      data_ = best->data, bytes_ = best->bytes;
      shared.bytes -= bytes_;
      shared.chunks.erase(best);
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
  std::vector<Chunk> evicted;
  Pool& shared = pool();
  {
    const std::lock_guard lock(shared.mutex);
    auto chunk = shared.chunks.begin();
    for (; shared.bytes + bytes_ > kMostKept; ++chunk) {
      shared.bytes -= chunk->bytes;
      evicted.push_back(*chunk);
    }
    shared.chunks.erase(shared.chunks.begin(), chunk);
    shared.chunks.push_back({data_, bytes_});
    shared.bytes += bytes_;
    if (shared.bytes > kMostResident) madvise(data_, static_cast<size_t>(bytes_), MADV_FREE);
  }
  for (const Chunk& chunk : evicted) std::free(chunk.data);
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
