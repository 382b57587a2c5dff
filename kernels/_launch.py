"""What the launchers share on the host: which device and dtypes a kernel takes, strides, the arguments of a dropout."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (seed, threshold, keep_scale): the argument that kernels call `dropout`; without a seed nothing is dropped.
Dropout = tuple[Tensor | None, int, float]


@triton.jit
def _probe():
    pass


# Whether kernels were imported under TRITON_INTERPRET=1, that is, whether they take CPU tensors and no others.
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)


def unsupported_device(x: Tensor) -> str | None:
    """Why no kernel takes tensors of this device, or None."""
    if x.device.type != "cuda" and not INTERPRETED:
        return "the tensors are on the CPU and TRITON_INTERPRET=1 was not set before the kernels were imported"
    return None


def unsupported_dtype(*dtypes: torch.dtype) -> str | None:
    """Why no kernel takes inputs of these dtypes, or None."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the inputs are {dtype}, not float16, bfloat16 or float32"
    return None


def architecture(x: Tensor) -> int:
    """The device's compute capability as in sm_90 -> 90; 0 under the interpreter."""
    if x.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


def dot_precision(x: Tensor) -> str:
    """How tl.dot multiplies fp32.

    Three TF32 products carry about 21 bits of fp32's 24; plain TF32 would carry 10. The interpreter is exact.
    """
    return "tf32x3" if x.device.type == "cuda" else "ieee"


def stride_unit(*tensors: Tensor | None) -> int:
    """8 where every stride but the last is a multiple of 8, else 1: kernels take strides in this unit.

    They multiply by it, so that the compiler sees that rows can be read 16 bytes at a time also where a stride is no
    multiple of 16 (head_dim 40), which is all that Triton tells it about an integer.
    """
    return 8 if all(stride % 8 == 0 for x in tensors if x is not None for stride in x.stride()[:-1]) else 1


def contiguous(x: Tensor | None) -> Tensor | None:
    """`x` as kernels read lengths, ids, seeds and parameters: by a pointer alone."""
    return None if x is None else x.contiguous()


def dropout_arguments(dropout_p: float, dropout_seed: Tensor | None) -> Dropout:
    """A dropout as kernels take it, by the rules of fastformer.ops._dropout."""
    threshold = round(dropout_p * 65536)
    if threshold == 0 or dropout_seed is None:
        return None, 0, 1.0
    return dropout_seed.contiguous(), threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0
