// What an op asks of its arguments before it runs, for Python.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_call(pybind11::module_& m);

}  // namespace fastformer
