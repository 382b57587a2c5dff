// The Python module of the extension. Ops register themselves under torch.ops.fastformer_cpp, each in its own file; the
// module only says which instruction set it was compiled for, and gives Python something to import.

#include <pybind11/pybind11.h>

#include "packed_gemm_module.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fastformer's ops for the CPU";
  m.attr("instruction_set") = FASTFORMER_ISA;
  fastformer::bind_packed_gemm(m);
}
