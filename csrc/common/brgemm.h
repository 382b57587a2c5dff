// Access to oneDNN's brgemm, by which the ops use AMX (the engine: engine/tiles.h). PyTorch contains it, in functions
// outside of its stable interface, which are looked up by their mangled names; these contain the types of all
// parameters. If a version of PyTorch has other functions or other parameters, it is treated as one without brgemm, and
// products use AVX.

#pragma once

#include <cstdint>

#include "common/bfloat16.h"
#include "common/export.h"

namespace fastformer {

struct Brgemm {
  // C = A * B, or C += A * B if `adds`. A is (m, k), and B (k, n) with rows interleaved in pairs.
  void (*bf16)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
               const bfloat16* b, float* c);
  void (*release)();  // releases the AMX tiles; each thread calls it after its last product
};

// Returns null if PyTorch is not loaded or has other functions.
FASTFORMER_API const Brgemm* brgemm();

// Whether products of bf16 may use brgemm now: the CPU has AMX for them, and oneDNN is switched on. brgemm also runs on
// AVX-512: FASTFORMER_BRGEMM=1 enables it on a CPU with dot products of bf16, for tests.
FASTFORMER_API bool can_brgemm_bf16();

}  // namespace fastformer
