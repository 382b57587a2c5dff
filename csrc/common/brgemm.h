// oneDNN's brgemm, the only way to AMX here. It lies in PyTorch, behind functions that change from one version to the
// next, so a module that is built for one version of PyTorch (csrc/host) hands them over when it is loaded.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

#include "common/export.h"

namespace fastformer {

struct Brgemm {
  bool (*is_enabled)();  // oneDNN may be switched off and on again (torch.backends.mkldnn); then products would throw
  bool (*has_bf16)();    // whether the CPU has AMX for it, as far as PyTorch tells
  bool (*has_u8s8)();
  // C = A * B or, with `adds`, C += A * B: A (m, k), B (k, n) with its rows interleaved by 2 of bf16 or 4 of int8.
  void (*bf16)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const c10::BFloat16* a,
               const c10::BFloat16* b, float* c);
  void (*u8s8)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
               const int8_t* b, int32_t* c);
  void (*release)();  // the tiles; on each thread, behind its last product
};

// Null where no module has handed them over.
FASTFORMER_API const Brgemm* brgemm();
FASTFORMER_API void set_brgemm(const Brgemm* functions);

}  // namespace fastformer
