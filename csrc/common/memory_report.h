// Reports the kernels' scratch memory to PyTorch's profiler, if the module for this version of PyTorch (csrc/host) is
// loaded.

#pragma once

#include <cstdint>

#include "common/export.h"

namespace fastformer {

struct MemoryReport {
  void (*allocated)(void* data, int64_t bytes);
  void (*released)(void* data);
  // Profilers watch single threads. Returns the watcher of the calling thread, which the caller releases with forget();
  // null if there is none.
  void* (*watcher)();
  void (*watch)(void* watcher, void (*work)(void*), void* what);  // calls work(what) under this watcher
  void (*forget)(void* watcher);
};

// Returns null unless a module has provided the functions.
FASTFORMER_API const MemoryReport* memory_report();
FASTFORMER_API void set_memory_report(const MemoryReport* functions);

// Extends the profiler of the thread that creates this object to other threads that work for that thread.
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
