#include "common/brgemm.h"

#include <atomic>

namespace fastformer {
namespace {

std::atomic<const Brgemm*> the_functions{nullptr};

}  // namespace

const Brgemm* brgemm() { return the_functions.load(std::memory_order_acquire); }

void set_brgemm(const Brgemm* functions) { the_functions.store(functions, std::memory_order_release); }

}  // namespace fastformer
