// PyTorch's profiler is told of the kernels' scratch memory where a module that knows it (csrc/host) is loaded.

#pragma once

#include <cstdint>

#include "common/export.h"

namespace fastformer {

struct MemoryReport {
  void (*allocated)(void* data, int64_t bytes);
  void (*released)(void* data);
  // A profiler watches threads. What watches the calling one, to be forgotten in the end; null: nothing.
  void* (*watcher)();
  void (*watch)(void* watcher, void (*work)(void*), void* what);  // calls work(what), watched
  void (*forget)(void* watcher);
};

// Null where no module has handed them over.
FASTFORMER_API const MemoryReport* memory_report();
FASTFORMER_API void set_memory_report(const MemoryReport* functions);

// Lets a profiler of the thread that makes it watch others that work for that thread.
class Watcher {
 public:
  Watcher() : report_(memory_report()), state_(report_ == nullptr ? nullptr : report_->watcher()) {}
  ~Watcher() {
    if (state_ != nullptr) report_->forget(state_);
  }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  template <typename F>
  void run(const F& work) const {
    if (state_ == nullptr) return work();
    report_->watch(state_, [](void* what) { (*static_cast<const F*>(what))(); }, const_cast<F*>(&work));
  }

 private:
  const MemoryReport* report_;
  void* state_;
};

}  // namespace fastformer
