"""The ops: documented functions over fused kernels, with plain PyTorch as the reference. The only layer that knows backends."""

from fastformer.ops._dropout import draw_seed as draw_seed
from fastformer.ops._library import use_backend as use_backend
