// A block of rows against a panel of packed_gemm.h by oneDNN's brgemm, which reaches AMX.

#pragma once

#include "engine/packed_gemm.h"

namespace fastformer {

constexpr int64_t kTileRows = 16;        // of an AMX tile: products have whole tiles, whatever the number of rows
constexpr int64_t kMostBrgemmRows = 64;  // of one product

// Whether products of the precision may use brgemm: the CPU has AMX for it, and oneDNN is switched on in torch. brgemm
// runs on AVX-512 too: FASTFORMER_BRGEMM=1 uses it on a CPU with dot products of the precision, for tests.
bool can_brgemm(Precision precision);

// sums[r * 64 + c] = those of `rows` rows (a multiple of kTileRows) from `left` on, over `steps` steps of a panel from
// `right` on: int32 of u8 times s8, or floats of bf16, in one run of additions.
void brgemm_panel(Precision precision, int64_t rows, const char* left, int64_t left_stride, const char* right,
                  int64_t steps, void* sums);

// Releases the tiles; to be called after the last product on a thread.
void release_brgemm();

// The number of products that the calling thread has computed with brgemm, for tests.
int64_t num_brgemm_products();

}  // namespace fastformer
