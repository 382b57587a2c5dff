// bfloat16 in memory. The header adds no symbol of PyTorch to the files that include it.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

namespace fastformer {

using bfloat16 = c10::BFloat16;

}  // namespace fastformer
