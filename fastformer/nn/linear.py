"""x W^T + b as `F.linear` computes it, and so its gradients, by our own kernels where they are ahead on this CPU.

In fp32 that is where Intel didn't make the CPU: PyTorch's MKL uses half of AVX-512's width there, and less than AVX2
has. (oneDNN's products in fp32, which PyTorch has, too, err by more than the rule allows that ours are held to.) In
bf16 it is where oneDNN has no products, and PyTorch plain loops.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn import guards
from fastformer.nn.guards import is_plain, is_traced, is_written_as_known
from fastformer.ops import _eager, _extension
from fastformer.ops._common import needs_gradient
from fastformer.ops._library import unviewed

# Multiplications; below, a call takes longer than it spares. In learning Python adds to that.
_FEWEST, _FEWEST_TO_LEARN = 2**22, 2**24
_FEWEST_IN_BF16 = 2**18  # of what PyTorch's loops take so long for
_LINEAR = F.linear
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`; where autograd alone has a say, by the kernel that suits the CPU.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features), or the transpose of a contiguous one.
        bias: (out_features,), or None.
    """
    out = own_product(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def own_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`linear` where it isn't F.linear's to compute; else None."""
    if _is_cast_for_us(x, weight, bias):
        # As autocast would hand them to F.linear.
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            return linear(x, weight, bias)
    if not _is_led(x, weight, bias):
        return None
    if not needs_gradient(x, weight, bias):
        return _product(x, weight, bias)
    out: Tensor = _Learning.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class Linear(nn.Linear):
    """torch.nn's, by `linear`: the class that `fastformer.accelerate` gives to those of models that it knows."""

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn."""
        if not is_written_as_known(Linear):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


LINEARS = (*guards.LINEARS, Linear)


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
        out: Tensor = unviewed(_product(x, weight, bias))
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
    """a^T b for a (rows, m) and b (rows, n); as a product of x and a weight it would be of transposed copies."""
    b = b.contiguous()
    if torch.is_grad_enabled() or not _is_led(a.t(), b.t(), None):
        return linear(a.t(), b.t())
    return _weight_gradient(a, b)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.fastformer_cpp.linear(x, weight, bias)
    return out


def _weight_gradient(dout: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.fastformer_cpp.linear_weight_grad(dout, x)
    return out


def _is_led(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):  # torch.fx has others in its place
        return False
    # First what most calls that stay are told by: on a GPU, of half dtypes, of a step's few rows.
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    if weight.dim() != 2 or (size := x.numel() * weight.shape[0]) < _FEWEST_IN_BF16:
        return False
    if not _suits_kernel(x.dtype):
        return False
    is_bf16 = x.dtype == torch.bfloat16
    # With fewer rows, reading the weight is what takes time.
    if not x.numel() >= (2 if is_bf16 else 4) * weight.shape[1] > 0:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not is_bf16 and size < (_FEWEST_TO_LEARN if needs_gradient(*tensors) else _FEWEST):
        return False
    return (
        _has_no_other_say(*tensors)
        and all(t.dtype == x.dtype for t in tensors)
        and x.shape[-1] == weight.shape[1]
        and (weight.is_contiguous() or weight.t().is_contiguous())  # all else would be copied
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def _is_cast_for_us(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would have bf16 of what our kernel is the one to multiply."""
    if not torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or not _suits_kernel(torch.bfloat16):
        return False
    # Autocast keeps what it has cast until it ends; for few rows, casting the weight once more is what would take time.
    if weight.dim() != 2 or x.numel() < 16 * weight.shape[1]:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return _has_no_other_say(*tensors) and all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)


def _has_no_other_say(*tensors: Tensor) -> bool:
    """Whether nobody but autograd and autocast would see a call of F.linear with these tensors."""
    return (
        all(type(t) in _PLAIN_TENSORS for t in tensors)
        and all(t.device.type == "cpu" and t.layout == torch.strided for t in tensors)
        and F.linear is _LINEAR
        and not (torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack())
        and not (_eager.is_transformed() or is_traced())
    )


def _suits_kernel(dtype: torch.dtype) -> bool:
    # One that was built before the kernel was written lacks it.
    if _extension.instruction_set() is None or _extension.function("linear") is None:
        return False
    return not (_has_bf16_in_onednn() if dtype == torch.bfloat16 else _suits_mkl())


@cache
def _suits_mkl() -> bool:
    # There MKL uses whole vectors; in learning it is faster than our kernel.
    if not torch.backends.mkl.is_available():
        return False
    is_intel = _extension.host_function("is_intel_cpu")
    return is_intel is not None and is_intel()


@cache
def _has_bf16_in_onednn() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())
