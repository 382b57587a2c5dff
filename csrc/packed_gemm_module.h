// packed_gemm.h and cpu_features.h for Python: for tests, and to say what the CPU has.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_packed_gemm(pybind11::module_& m);

}  // namespace fastformer
