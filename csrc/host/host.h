// What of the host is bound to one PyTorch and one Python, each part in the file of its name.

#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

void bind_eager_call(pybind11::module_& m);

}  // namespace fastformer
