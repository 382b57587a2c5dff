"""x W^T + b as `F.linear` computes it, by the library that is fast at it on this CPU.

PyTorch leaves a product in fp32 to MKL, which uses half of the vectors' width on CPUs that Intel didn't make. oneDNN,
which PyTorch has too, uses all of it: 2.2 times the speed on a Zen 5, from 16 rows to 4,096.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.fusing import LINEARS, is_plain, is_traced
from fastformer.ops import _eager

_FEWEST_ROWS = 16  # below, reading the weight is what takes time
_LINEAR = F.linear
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`; where it is for inference in fp32 on a CPU, through oneDNN.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,), or None.
    """
    if _goes_to_onednn(x, weight, bias):
        return _by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def project(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, which is `linear` where that is all that the module does."""
    if is_plain(module, *LINEARS):
        assert isinstance(module, nn.Linear)
        return linear(x, module.weight, module.bias)
    return module(x)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _goes_to_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # First what most calls that stay are told by: on a GPU, of half dtypes, of a step's few rows.
    if torch.compiler.is_compiling() or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if weight.dim() != 2 or not x.numel() >= _FEWEST_ROWS * weight.shape[1] > 0:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(type(t) not in _PLAIN_TENSORS for t in tensors):
        return False
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return (
        not needs_gradient
        and all(t.dtype == x.dtype and t.device == x.device and t.layout == torch.strided for t in tensors)
        and x.shape[-1] == weight.shape[1]
        and weight.is_contiguous()
        and (bias is None or bias.shape == weight.shape[:1])
        and F.linear is _LINEAR
        and _has_onednn()
        and not torch.is_autocast_enabled("cpu")
        and not (torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack())
        and not (_eager.is_transformed() or is_traced())
    )


def _has_onednn() -> bool:
    return torch._C._get_mkldnn_enabled() and _IS_THERE


_IS_THERE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
