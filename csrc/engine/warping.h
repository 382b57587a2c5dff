// Dynamic time warping of tokens to times.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace fastformer {

// Returns the monotonic path from the first to the last cell of a matrix (rows, columns) with the largest sum, as pairs
// of a row and a column. Ties prefer a step along the columns.
std::vector<std::pair<int64_t, int64_t>> warp(const float* matrix, int64_t rows, int64_t columns);

}  // namespace fastformer
