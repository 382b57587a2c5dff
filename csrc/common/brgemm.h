// oneDNN's brgemm, the only way to AMX here. It is in PyTorch, in functions outside of its stable interface. They are
// looked up by their full C++ names, which contain the types of all parameters. If a PyTorch has other functions, or
// other parameters, it counts as one without brgemm, and products use the plain way.

#pragma once

#include <cstdint>

#include "common/bfloat16.h"
#include "common/export.h"

namespace fastformer {

struct Brgemm {
  bool (*is_enabled)();  // oneDNN may be switched off and on (torch.backends.mkldnn); if it is off, products throw
  bool (*has_bf16)();    // whether the CPU has AMX for it, according to PyTorch
  bool (*has_u8s8)();
  // C = A * B or, with `adds`, C += A * B: A (m, k), B (k, n) with its rows interleaved by 2 of bf16 or 4 of int8.
  void (*bf16)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
               const bfloat16* b, float* c);
  void (*u8s8)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
               const int8_t* b, int32_t* c);
  void (*release)();  // releases the tiles; to be called on each thread, after its last product
};

// Null without PyTorch, or if it has other functions.
FASTFORMER_API const Brgemm* brgemm();

}  // namespace fastformer
