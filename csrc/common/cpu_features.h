// The CPU's features beyond the instruction set that a module is compiled for, detected once at run time.
//
// The environment variable FASTFORMER_CPU_FEATURES, a comma-separated list, names the features that may be used;
// features that the CPU lacks stay off. It is read once, and is for tests: FASTFORMER_CPU_FEATURES="" uses the plain
// paths, and "avx512_vnni" only the int8 dot product. The names are those of the fields.

#pragma once

#include "common/export.h"

namespace fastformer {

struct CpuFeatures {
  bool avx512_vnni = false;  // vpdpbusd on 64 bytes
  bool avx512_bf16 = false;  // vdpbf16ps
  bool avx_vnni = false;     // vpdpbusd on 32 bytes, without AVX-512
  bool amx_int8 = false;
  bool amx_bf16 = false;
};

// Throws std::invalid_argument for an unknown name in FASTFORMER_CPU_FEATURES.
FASTFORMER_API const CpuFeatures& cpu_features();

// Returns whether Intel made this CPU.
FASTFORMER_API bool is_intel_cpu();

}  // namespace fastformer
