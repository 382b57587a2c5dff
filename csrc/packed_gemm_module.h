// The products of packed_gemm.h, for Python's tests.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_packed_gemm(pybind11::module_& m);

}  // namespace fastformer
