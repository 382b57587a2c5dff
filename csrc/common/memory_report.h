// Tells PyTorch's profiler of the kernels' scratch memory, if a module that knows it (csrc/host) is loaded.

#pragma once

#include <cstdint>

#include "common/export.h"

namespace fastformer {

struct MemoryReport {
  void (*allocated)(void* data, int64_t bytes);
  void (*released)(void* data);
  // A profiler watches threads. Returns the watcher of the calling thread, to be released at the end; null: none.
  void* (*watcher)();
  void (*watch)(void* watcher, void (*work)(void*), void* what);  // calls work(what), watched
  void (*forget)(void* watcher);
};

// Null if no module has provided it.
FASTFORMER_API const MemoryReport* memory_report();
FASTFORMER_API void set_memory_report(const MemoryReport* functions);

// Lets a profiler of the thread that creates this watch other threads that work for it.
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
