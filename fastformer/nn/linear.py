"""x W^T + b as `F.linear` computes it, by the library that is fast at it on this CPU, and so its gradients.

PyTorch leaves a product in fp32 to MKL, which uses half of the vectors' width on CPUs that Intel didn't make. oneDNN,
which PyTorch has too, uses all of it. The weight's gradient is our own kernel's. On Intel's CPUs MKL keeps them all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn import fusing
from fastformer.nn.fusing import is_plain, is_traced, is_written_as_known
from fastformer.ops import _eager, _extension
from fastformer.ops._common import needs_gradient
from fastformer.ops._library import unviewed

_FEWEST_ROWS = 16  # below, reading the weight is what takes time
# Multiplications; below, a call of oneDNN's takes longer than it spares. In learning Python adds to that.
_FEWEST, _FEWEST_TO_LEARN = 2**22, 2**24
# A weight of more elements, a vocabulary's, is read in slices of so many features, which a cache holds.
_LARGE, _SLICE = 2**23, 2048
_LINEAR = F.linear
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`; in fp32 on a CPU that doesn't suit MKL, where autograd alone has a say, by oneDNN.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features), or the transpose of a contiguous one.
        bias: (out_features,), or None.
    """
    if not _goes_to_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    if not needs_gradient(x, weight, bias):
        return _by_onednn(x, weight, bias)
    out: Tensor = _Learning.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class Linear(nn.Linear):
    """torch.nn's, by `linear`: the class that `fastformer.accelerate` gives to those of models that it knows."""

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn."""
        if not is_written_as_known(Linear):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


LINEARS = (*fusing.LINEARS, Linear)


def project(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, which is `linear` where that is all that the module does."""
    if is_plain(module, *LINEARS):
        assert isinstance(module, nn.Linear)
        return linear(x, module.weight, module.bias)
    return module(x)


class _Learning(torch.autograd.Function):
    """The product and its gradients, which are products as well, differentiable in their turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x_learns, weight_learns, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_learns else None, weight if x_learns else None)
        ctx.set_materialize_grads(False)
        ctx.is_transposed = not weight.is_contiguous()
        out: Tensor = unviewed(_by_onednn(x, weight, bias))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None
        x_learns, weight_learns, bias_learns = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        # As the forward pass was, whatever surrounds this one.
        with torch.autocast("cpu", enabled=False):
            if x_learns:
                dx = linear(dout, weight.t())
            dout = dout.reshape(-1, dout.shape[-1])
            if weight_learns:
                x = x.reshape(-1, x.shape[-1])
                dweight = _transposed_product(x, dout).t() if ctx.is_transposed else _transposed_product(dout, x)
            if bias_learns:
                dbias = dout.sum(0)
        return dx, dweight, dbias


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b for a (rows, m) and b (rows, n); oneDNN would read transposed copies of both."""
    b = b.contiguous()
    if torch.is_grad_enabled() or not _goes_to_onednn(a.t(), b.t(), None):
        return linear(a.t(), b.t())
    ours = _extension.function("linear_weight_grad")  # only here: torch.compile can't follow how it is found
    product: Tensor = linear(a.t(), b.t()) if ours is None else ours(a, b)
    return product


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise
    if weight.numel() <= _LARGE or weight.is_contiguous() or weight.shape[1] <= _SLICE:
        return product(x, weight, bias, "none", [], "")
    slices = zip(x.split(_SLICE, dim=-1), weight.split(_SLICE, dim=1), strict=True)
    out = product(*next(slices), bias, "none", [], "")
    for each in slices:
        out += product(*each, None, "none", [], "")
    return out


def _goes_to_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # First what most calls that stay are told by: on a GPU, of half dtypes, of a step's few rows.
    if torch.compiler.is_compiling() or x.dtype != torch.float32 or x.device.type != "cpu" or _suits_mkl():
        return False
    if weight.dim() != 2 or not x.numel() >= _FEWEST_ROWS * weight.shape[1] > 0:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if x.numel() * weight.shape[0] < (_FEWEST_TO_LEARN if needs_gradient(*tensors) else _FEWEST):
        return False
    if any(type(t) not in _PLAIN_TENSORS for t in tensors):
        return False
    return (
        all(t.dtype == x.dtype and t.device == x.device and t.layout == torch.strided for t in tensors)
        and x.shape[-1] == weight.shape[1]
        and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN has slow code alone for all else
        and (bias is None or bias.shape == weight.shape[:1])
        and F.linear is _LINEAR
        and _has_onednn()
        and not torch.is_autocast_enabled("cpu")
        and not (torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack())
        and not (_eager.is_transformed() or is_traced() or torch._C._functorch.is_legacy_batchedtensor(x))
    )


@cache
def _suits_mkl() -> bool:
    # There MKL is as fast as oneDNN forward, and faster than oneDNN and our kernel in learning.
    if not torch.backends.mkl.is_available():
        return False
    is_intel = _extension.host_function("is_intel_cpu")
    return is_intel is not None and is_intel()


def _has_onednn() -> bool:
    return torch._C._get_mkldnn_enabled() and _IS_THERE


_IS_THERE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
