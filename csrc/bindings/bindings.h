// The parts of the Python module, each bound in the file of its name.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_eager_call(pybind11::module_& m);
void bind_launcher(pybind11::module_& m);  // host/launcher.cpp
void bind_packed_gemm(pybind11::module_& m);
void bind_decoder(pybind11::module_& m);
void bind_encoder(pybind11::module_& m);
void bind_search(pybind11::module_& m);

}  // namespace fastformer
