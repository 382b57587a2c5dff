// Reports the kernels' scratch memory to PyTorch's profiler; see common/memory_report.h.

#include "common/memory_report.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace fastformer {
namespace {

using State = std::shared_ptr<c10::ThreadLocalDebugInfo>;

constexpr MemoryReport kReport{
    [](void* data, int64_t bytes) { c10::profiledCPUMemoryReporter().New(data, static_cast<size_t>(bytes)); },
    [](void* data) { c10::profiledCPUMemoryReporter().Delete(data); },
    []() -> void* {
      State current = c10::ThreadLocalDebugInfo::current();
      return current == nullptr ? nullptr : new State(std::move(current));
    },
    [](void* watcher, void (*work)(void*), void* what) {
      const c10::DebugInfoGuard guard(*static_cast<State*>(watcher));
      work(what);
    },
    [](void* watcher) { delete static_cast<State*>(watcher); },
};

[[maybe_unused]] const bool is_set = (set_memory_report(&kReport), true);

}  // namespace
}  // namespace fastformer
