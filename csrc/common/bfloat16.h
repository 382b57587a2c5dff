// bfloat16 in memory. The header leaves no symbol of PyTorch in what includes it.

#pragma once

#include <torch/headeronly/util/BFloat16.h>

namespace fastformer {

using bfloat16 = c10::BFloat16;

}  // namespace fastformer
