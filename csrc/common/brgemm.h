// oneDNN's brgemm, the only way to AMX here. It lies in PyTorch, behind functions that are no part of its stable
// interface. They are looked up by their full C++ names, which hold the types of all parameters: a PyTorch that has
// other functions, or the same with other parameters, is one without them, and products take the plain way.

#pragma once

#include <cstdint>

#include "common/bfloat16.h"
#include "common/export.h"

namespace fastformer {

struct Brgemm {
  bool (*is_enabled)();  // oneDNN may be switched off and on again (torch.backends.mkldnn); then products would throw
  bool (*has_bf16)();    // whether the CPU has AMX for it, as far as PyTorch tells
  bool (*has_u8s8)();
  // C = A * B or, with `adds`, C += A * B: A (m, k), B (k, n) with its rows interleaved by 2 of bf16 or 4 of int8.
  void (*bf16)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
               const bfloat16* b, float* c);
  void (*u8s8)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
               const int8_t* b, int32_t* c);
  void (*release)();  // the tiles; on each thread, behind its last product
};

// Null without PyTorch, or where it has other functions.
FASTFORMER_API const Brgemm* brgemm();

}  // namespace fastformer
