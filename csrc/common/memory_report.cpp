#include "common/memory_report.h"

#include <atomic>

namespace fastformer {
namespace {

std::atomic<const MemoryReport*> the_report{nullptr};

}  // namespace

const MemoryReport* memory_report() { return the_report.load(std::memory_order_acquire); }

void set_memory_report(const MemoryReport* functions) { the_report.store(functions, std::memory_order_release); }

}  // namespace fastformer
