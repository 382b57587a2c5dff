// The module of what is bound to one version of PyTorch and of Python. It is optional: without it Python does the same,
// and products do not reach AMX.

#include "host/host.h"

PYBIND11_MODULE(FASTFORMER_MODULE, m) {
  m.doc() = "what fastformer reads of PyTorch's own objects";
  fastformer::bind_eager_call(m);
}
