"""The linear map x weight^T + bias, with the result of `F.linear`, and its gradients, which are products as well.

PyTorch's products are fast nearly everywhere. On a CPU, fastformer's C++ kernels are faster in two cases. The first is
fp32 on CPUs that aren't Intel's: MKL uses half of AVX-512's width there, and less than all of AVX2 (oneDNN, which
PyTorch also has, has a larger error than these kernels may have). The second is bf16 on CPUs without fast instructions
for it. There these kernels widen it and run nearly at the speed of fp32, while oneDNN emulates the instructions or uses
slow ones. On CPUs without AVX-512, oneDNN has no products of bf16, and PyTorch runs plain loops. Only `runs_as_op`
decides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.ops import _extension, _transforms
from fastformer.ops._autograd import forbid_double_backward, register_autograd
from fastformer.ops._common import check_linear, cpp_unsupported_dtype
from fastformer.ops._dispatch import autocast, copied, forced_backend, needs_gradient, note_backend, recorders
from fastformer.ops._library import define_op
from fastformer.ops.quantized_linear import acting_copy, quantized_linear

# The number of multiplications in the smallest product that C++ computes: below, a call costs more than the kernel
# saves. A training step adds the time of Python's autograd functions. In bf16 PyTorch's loops are slow at any size.
MIN_PRODUCT, MIN_PRODUCT_TRAINING, MIN_PRODUCT_BF16 = 2**22, 2**24, 2**18
# With fewer rows, the time goes into reading the weight; under autocast, also into casting it. oneDNN reads it faster.
_MIN_ROWS, _MIN_ROWS_BF16, _MIN_ROWS_ONEDNN, _MIN_ROWS_AUTOCAST = 4, 2, 16, 16
# With fewer outputs, most of a panel of the weight's gradient would be padding.
_MIN_OUT_FEATURES_TRAINING = 4
_F_LINEAR = F.linear
_PLAIN_TENSORS = (Tensor, nn.Parameter)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x weight^T + bias, contiguous."""
    return F.linear(x, weight, bias).contiguous()


def linear_weight_grad_reference(dout: Tensor, x: Tensor) -> Tensor:
    """Computes dout^T x, for dout (rows, out_features) and x (rows, in_features)."""
    return dout.T @ x


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _why_torch(device_type: str) -> str | None:
    if device_type != "cpu":
        return "products are PyTorch's own"
    if _mkl_is_faster():
        return f"MKL is faster on this CPU{'' if _onednn_is_faster() else ', except in bf16'}"
    return None


_NO_TRITON = {"triton": "cuBLAS multiplies on a GPU"}
_op = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    linear_reference,
    stem="linear",
    fake=_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    reference_only=_NO_TRITON,
    torch_function=linear_reference,
    torch_is_faster=_why_torch,
    formula=linear_reference,
)
_weight_grad = define_op(
    "linear_weight_grad(Tensor dout, Tensor x) -> Tensor",
    linear_weight_grad_reference,
    stem="linear",
    fake=lambda dout, x: x.new_empty(dout.shape[1], x.shape[1]),
    cpp_unsupported=cpp_unsupported_dtype,
    reference_only=_NO_TRITON,
    torch_function=linear_weight_grad_reference,
    torch_is_faster=_why_torch,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    x_learns, weight_learns = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if weight_learns else None, weight if x_learns else None)
    ctx.is_transposed = not weight.is_contiguous()


def _as_rows(dout: Tensor) -> Tensor:
    return dout.reshape(dout.shape[:-1].numel(), dout.shape[-1])  # -1 is no size for 0 features


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx = None if weight is None else _op(dout, weight.t(), None)
    rows = _as_rows(dout)
    dweight = None
    if x is not None:
        x = x.reshape(-1, x.shape[-1])
        # A gradient has the layout of its weight.
        dweight = _weight_grad(x, rows).t() if ctx.is_transposed else _weight_grad(rows, x)
    return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _differentiable_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx = None if weight is None else F.linear(dout, weight.t())
    rows = _as_rows(dout)
    dweight = None if x is None else rows.T @ x.reshape(-1, x.shape[-1])
    return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None


register_autograd("linear", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward)
forbid_double_backward("linear_weight_grad")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x weight^T + bias, with the library that is faster for this call.

    If that is PyTorch, the call is `F.linear`, with its own backward pass. Under torch.compile it always is, so that
    the compiler may fuse it.

    Args:
        x: (..., in_features), floating point.
        weight: (out_features, in_features) as in nn.Linear, x's dtype. The transpose of a contiguous matrix is not
            copied.
        bias: (out_features,), x's dtype, or None.

    Returns:
        (..., out_features), x's dtype; under autocast the autocast dtype.

    Raises:
        ValueError: shapes or dtypes don't agree.
    """
    cast_x, cast_weight = autocast("linear", x, weight)
    (cast_bias,) = autocast("linear", bias)
    check_linear(cast_x, cast_weight, cast_bias, "out_features", at_least=0)
    return unchecked_linear(x, weight, bias)


def unchecked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `linear` for any arguments of `F.linear`, which raises its own errors for those that don't fit."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    weight, bias = copied(weight), copied(bias)
    if (copy := acting_copy(x, weight, bias)) is not None:
        return quantized_linear(x, copy, bias)
    if not runs_as_op(x, weight, bias):
        if recorders:
            note_backend("linear", "torch")
        return F.linear(x, weight, bias)
    x, weight = autocast("linear", x, weight)
    (bias,) = autocast("linear", bias)
    return _op(x, weight, bias)


def runs_as_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether the op computes the product instead of `F.linear`: C++ is faster, or `use_backend` forces it.

    C++ is faster for some sizes and dtypes on some CPUs. It doesn't run if anything but autograd and autocast would
    notice that `F.linear` isn't called: a mode, a subclass, a tracer, a functorch transform. The conditions that most
    calls fail come first: the device, and the size of the product. If "triton" is forced, `F.linear` computes products:
    there is no Triton kernel for them.
    """
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):  # torch.fx passes proxies
        return False
    forced = forced_backend.get()
    if forced is not None:
        return forced != "triton" and _fits(x, weight, bias)
    if x.device.type != "cpu" or weight.dim() != 2 or (size := x.numel() * weight.shape[0]) < MIN_PRODUCT_BF16:
        return False
    is_cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    is_bf16 = dtype == torch.bfloat16
    if not is_bf16 and (dtype != torch.float32 or size < MIN_PRODUCT):
        return False
    min_rows = _MIN_ROWS_AUTOCAST if is_cast else _MIN_ROWS_BF16 if is_bf16 else _MIN_ROWS
    if not x.numel() >= min_rows * weight.shape[1] > 0:
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if needs_gradient(*tensors) and not (
        weight.shape[0] >= _MIN_OUT_FEATURES_TRAINING and (is_bf16 or size >= MIN_PRODUCT_TRAINING)
    ):
        return False
    dtypes = (torch.float32, torch.bfloat16) if is_cast else (dtype,)
    return (
        not (_onednn_is_faster(x.numel() < _MIN_ROWS_ONEDNN * weight.shape[1]) if is_bf16 else _mkl_is_faster())
        # An extension from before this kernel was written lacks it. F.linear then runs without a warning.
        and _extension.instruction_set() is not None
        and _extension.function("linear") is not None
        and _only_autograd_watches(tensors)
        and all(t.dtype in dtypes for t in tensors)
        and _fits(x, weight, bias)
        and (weight.is_contiguous() or weight.t().is_contiguous())  # any other layout would be copied
    )


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1] > 0
        and x.is_floating_point()
        and (bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1]))
    )


def _only_autograd_watches(tensors: tuple[Tensor, ...]) -> bool:
    """Returns whether only autograd and autocast would notice a call of `F.linear` with these tensors."""
    return (
        all(type(t) in _PLAIN_TENSORS and t.device.type == "cpu" and t.layout == torch.strided for t in tensors)
        and F.linear is _F_LINEAR
        and not (torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack())
        and not _transforms.is_transformed()
        and torch._C._get_tracing_state() is None
        and not torch._C._functorch.is_legacy_batchedtensor(tensors[0])
    )


def _mkl_is_faster() -> bool:
    is_intel = _extension.host_function("is_intel_cpu")
    return torch.backends.mkl.is_available() and is_intel is not None and bool(is_intel())


def _onednn_is_faster(has_few_rows: bool = False) -> bool:
    """Returns whether oneDNN multiplies bf16, and does it with fast instructions, or needs none for a few rows."""
    has_fast = _extension.host_function("has_fast_bf16")
    return (has_few_rows or has_fast is None or bool(has_fast())) and _onednn_has_bf16()


def _onednn_has_bf16() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())
