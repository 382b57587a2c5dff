// The binding of the searches; see search_module.cpp.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_search(pybind11::module_& m);

}  // namespace fastformer
