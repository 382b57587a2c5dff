#include "engine/warping.h"

#include <algorithm>
#include <limits>

namespace fastformer {

std::vector<std::pair<int64_t, int64_t>> warp(const float* matrix, int64_t rows, int64_t columns) {
  enum Step : uint8_t { kBoth, kRow, kColumn };
  constexpr float kFar = std::numeric_limits<float>::infinity();
  std::vector<Step> steps((rows + 1) * (columns + 1), kRow);
  std::vector<float> before(rows + 1, kFar), here(rows + 1);  // costs of the paths to the cells of two columns
  before[0] = 0;
  for (int64_t j = 1; j <= columns; ++j) {
    here[0] = kFar;
    for (int64_t i = 1; i <= rows; ++i) {
      const float both = before[i - 1], row = here[i - 1], column = before[i];
      const Step step = both < row && both < column ? kBoth : row < both && row < column ? kRow : kColumn;
      steps[i * (columns + 1) + j] = step;
      here[i] = (step == kBoth ? both : step == kRow ? row : column) - matrix[(i - 1) * columns + j - 1];
    }
    before.swap(here);
  }
  std::vector<std::pair<int64_t, int64_t>> path;
  for (int64_t i = rows, j = columns; i > 0 || j > 0;) {
    path.emplace_back(i - 1, j - 1);
    const Step step = i == 0 ? kColumn : j == 0 ? kRow : steps[i * (columns + 1) + j];
    if (step != kColumn) --i;
    if (step != kRow) --j;
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace fastformer
