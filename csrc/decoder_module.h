#pragma once

#include <pybind11/pybind11.h>

namespace fastformer {

// The classes of the decoding engine: PackedModel and Session.
void bind_decoder(pybind11::module_& m);

}  // namespace fastformer
