// The CPU's features beyond the instruction set that a module is compiled for, detected once at run time.
//
// For tests, the environment variable FASTFORMER_CPU_FEATURES limits them to a comma-separated list of field names:
// "" disables all of them, and "avx512_vnni" leaves only the int8 dot product. Features that the CPU lacks stay off.
// The variable is read once.

#pragma once

#include "common/export.h"

namespace fastformer {

struct CpuFeatures {
  bool avx512_vnni = false;  // vpdpbusd on 64 bytes
  bool avx512_bf16 = false;  // vcvtneps2bf16, and vdpbf16ps: see has_fast_bf16_dot()
  bool avx_vnni = false;     // vpdpbusd on 32 bytes, without AVX-512
  bool amx_int8 = false;
  bool amx_bf16 = false;
};

// Throws std::invalid_argument for an unknown name in FASTFORMER_CPU_FEATURES.
FASTFORMER_API const CpuFeatures& cpu_features();

// Returns whether vdpbf16ps multiplies faster than FMA on widened numbers. It does on AMD's CPUs. Intel's Emerald
// Rapids starts one in two cycles: 44e9 products a second beside 94e9 of FMA. FASTFORMER_CPU_FEATURES enables it
// anywhere by naming avx512_bf16.
FASTFORMER_API bool has_fast_bf16_dot();

// Returns whether some instructions multiply bf16 faster than fp32: AMX, or fast dot products.
FASTFORMER_API bool has_fast_bf16();

// Returns whether Intel made this CPU.
FASTFORMER_API bool is_intel_cpu();

}  // namespace fastformer
