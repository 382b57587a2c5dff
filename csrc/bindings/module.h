// The parts of the engine's Python module. Each is defined in the file with its name.

#pragma once

#include "bindings/python.h"

namespace fastformer {

void bind_tensors(PyObject* module);
void bind_guards(PyObject* module);
void bind_packed_gemm(PyObject* module);
void bind_decoder(PyObject* module);
void bind_encoder(PyObject* module);
void bind_search(PyObject* module);
void bind_team(PyObject* module);
void bind_launcher(PyObject* module);

}  // namespace fastformer
