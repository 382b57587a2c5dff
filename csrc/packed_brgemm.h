// A block of rows against a panel of packed_gemm.h by oneDNN's brgemm, which reaches AMX.

#pragma once

#include "packed_gemm.h"

namespace fastformer {

constexpr int64_t kTileRows = 16;    // of an AMX tile: whole ones are multiplied, whatever the number of rows
constexpr int64_t kBrgemmRows = 64;  // of a block

// Whether the CPU has AMX for the precision. brgemm runs on AVX-512 too: FASTFORMER_BRGEMM=1 takes it there for tests.
bool can_brgemm(Precision precision);

// sums[r * 64 + c] = those of `rows` rows (a multiple of kTileRows) from `left` on, over the steps of a panel: int32 of
// u8 times s8, or floats of bf16.
void brgemm_panel(Precision precision, int64_t rows, const char* left, int64_t left_stride, const char* panel,
                  int64_t steps, void* sums);

// Gives the tiles back; after the last product on a thread.
void release_brgemm();

}  // namespace fastformer
