// The Python module of the extension. Ops register themselves under torch.ops.fastformer_cpp, each in its own file; the
// module has the name of the instruction set that it was compiled for, and the objects that aren't ops.

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fastformer's ops for the CPU";
  m.attr("instruction_set") = FASTFORMER_ISA;
  fastformer::bind_eager_call(m);
  fastformer::bind_launcher(m);
  fastformer::bind_packed_gemm(m);
  fastformer::bind_decoder(m);
  fastformer::bind_encoder(m);
  fastformer::bind_search(m);
}
