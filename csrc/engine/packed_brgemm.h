// Multiplies a block of rows by a panel of packed_gemm.h with oneDNN's brgemm, which uses AMX.

#pragma once

#include "engine/packed_gemm.h"

namespace fastformer {

constexpr int64_t kTileRows = 16;        // rows of an AMX tile; products always have whole tiles
constexpr int64_t kMostBrgemmRows = 64;  // rows of one product

// Whether products of the precision may use brgemm now (common/brgemm.h), which needs the panels of an AVX-512 build.
bool can_brgemm(Precision precision);

// Writes the products of `rows` rows from `left` on (a multiple of kTileRows) with `steps` steps of a panel from
// `right` on to sums[r * 64 + c]: int32 for u8 times s8, float for bf16. Each is a single sum over all steps.
void brgemm_panel(Precision precision, int64_t rows, const char* left, int64_t left_stride, const char* right,
                  int64_t steps, void* sums);

// Releases the AMX tiles. Each thread calls this after its last product.
void release_brgemm();

// The number of products that the calling thread has computed with brgemm, for tests.
int64_t num_brgemm_products();

}  // namespace fastformer
