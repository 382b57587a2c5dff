// Helper threads, and objects of which a process has one.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace fastformer {

// Starts a thread that runs f() with all signals blocked, because the program's own threads handle them. Returns false
// if the system is out of threads or memory.
template <typename F>
bool start_helper(F f) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool has_begun = true;
  try {
    std::thread(std::move(f)).detach();
  } catch (const std::exception&) {
    has_begun = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return has_begun;
}

// Returns the only instance of T in the process. It is never deleted, because helpers use it until the process ends. A
// forked child makes a new one: it has no helpers, and locks that other threads held stay locked.
template <typename T>
T& of_process() {
  static std::atomic<T*> instance{nullptr};
  [[maybe_unused]] static const int watches_fork =
      pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr, std::memory_order_relaxed); });
  T* existing = instance.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  auto made = std::make_unique<T>();
  if (instance.compare_exchange_strong(existing, made.get(), std::memory_order_acq_rel)) return *made.release();
  return *existing;
}

}  // namespace fastformer
