// The engine's Python module, which depends on neither PyTorch nor OpenMP. It is named after the instruction set that
// it is compiled for.

#include "bindings/module.h"

#define FASTFORMER_INIT(name) PyInit__engine_##name
#define FASTFORMER_INIT_OF(name) FASTFORMER_INIT(name)
#define FASTFORMER_TEXT(name) #name
#define FASTFORMER_TEXT_OF(name) FASTFORMER_TEXT(name)

PyMODINIT_FUNC FASTFORMER_INIT_OF(FASTFORMER_ISA)() {
  using namespace fastformer;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "fastformer._engine_" FASTFORMER_TEXT_OF(FASTFORMER_ISA),
                                   "fastformer's decoding engine, searches and encoders for the CPU",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  python::Object module(PyModule_Create(&definition));
  if (!module) return nullptr;
  try {
    if (PyModule_AddStringConstant(module.get(), "instruction_set", FASTFORMER_TEXT_OF(FASTFORMER_ISA)) != 0)
      return nullptr;
    bind_tensors(module.get());
    bind_guards(module.get());
    bind_packed_gemm(module.get());
    bind_decoder(module.get());
    bind_encoder(module.get());
    bind_search(module.get());
    bind_team(module.get());
    bind_launcher(module.get());
    return module.release();
  } catch (...) {
    python::set_error();
    return nullptr;
  }
}
