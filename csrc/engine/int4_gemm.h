// Products with weights of 4 bits: what packed_gemm.h's functions do for Precision::int4.

#pragma once

#include "engine/packed_gemm.h"

namespace fastformer {

// The bytes of a panel: its groups, and its tail.
int64_t int4_group_bytes(bool has_zeros);
int64_t int4_panel_bytes(int64_t k, bool has_zeros);

// Packs the columns of a weight into panels that are zero so far. bias: n floats, or null.
void pack_int4(const Int4Matrix& weight, const float* bias, char* panels);

// Copies a column of a panel of k inputs into another panel.
void copy_int4_column(int64_t k, bool has_zeros, const char* from_panel, int64_t from, char* to_panel, int64_t to);

void gemm_int4(const PackedRows& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out,
               int64_t ld);

}  // namespace fastformer
