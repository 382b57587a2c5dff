// Products with 4-bit weights: the implementation of packed_gemm.h for Precision::int4.

#pragma once

#include "engine/packed_gemm.h"

namespace fastformer {

// The size in bytes of a group, and of a whole panel with its tail.
int64_t int4_group_bytes(bool has_zeros);
int64_t int4_panel_bytes(int64_t k, bool has_zeros);

// Packs the columns of a weight into zero-initialised panels. bias: n floats, or null.
void pack_int4(const Int4Matrix& weight, const float* bias, char* panels);

// Copies a column of a panel of k inputs into another panel.
void copy_int4_column(int64_t k, bool has_zeros, const char* from_panel, int64_t from, char* to_panel, int64_t to);

void gemm_int4(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
               int64_t ld);

}  // namespace fastformer
