// Tensors of integers: indices, lengths and offsets.

#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "common/tensor.h"

namespace fastformer {

// Returns the indices as contiguous int64. Throws unless each is in [0, size) or equals `ignored`; `what` names them in
// the error message.
inline Tensor checked_indices(const Tensor& indices, int64_t size, const char* what,
                              std::optional<int64_t> ignored = std::nullopt) {
  const Tensor wide = indices.to(kLong).contiguous();
  const int64_t* index = wide.const_data_ptr<int64_t>();
  int64_t low = 0, high = 0;
  for (int64_t i = 0; i < wide.numel(); ++i) {
    if (ignored && index[i] == *ignored) continue;
    low = std::min(low, index[i]);
    high = std::max(high, index[i]);
  }
  if (wide.numel() == 0 || (low >= 0 && high < size)) return wide;
  const int64_t bad = low < 0 ? low : high;
  if (ignored) fail<std::out_of_range>("expected ", what, " in [0, ", size, ") or ", *ignored, " (ignored), got ", bad);
  fail<std::out_of_range>("expected ", what, " in [0, ", size, "), got ", bad);
}

// Copies a small vector of integers with any stride, for example lengths that are a column of a larger tensor.
template <typename I>
std::vector<I> integers(const Tensor& t) {
  std::vector<I> elements(t.numel());
  const I* from = t.const_data_ptr<I>();
  for (int64_t i = 0; i < t.numel(); ++i) elements[i] = from[i * t.stride(0)];
  return elements;
}

}  // namespace fastformer
