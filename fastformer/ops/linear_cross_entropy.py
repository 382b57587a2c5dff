"""The last linear map and the cross-entropy in one op, in chunks of rows: the logits are never in memory as a whole.

For a row with logits z = x weight^T + bias, a target y and V classes

    loss = lse(z) - a z_y - b sum(z) + z_loss lse(z)^2        dz = (1 + 2 z_loss lse(z)) softmax(z) - b - a [j = y]

with b = e / V, a = 1 - e (Szegedy et al. 2016 and torch: smoothing e over all classes) or with b = e / (V - 1),
a = 1 - e - b (tensor2tensor, `padded_cross_entropy`: over the others; its constant, the entropy of the smoothed target,
is omitted). The z-loss is PaLM's (Chowdhery et al. 2022, section 5). With a soft cap c (Gemma Team 2024, section 2) z
is c tanh(u / c) of u = x weight^T + bias, and du = (1 - (z / c)^2) dz.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    INTEGERS,
    accumulation_dtype,
    check_linear,
    check_number,
    check_range,
    cpp_unsupported_dtype,
    described,
    resolve_softcap,
    soft_capped,
)
from fastformer.ops._dispatch import autocast, is_plain, is_readable, needs_gradient
from fastformer.ops._library import define_op

# Enough rows for the matrix products to run at full rate, and few enough for a chunk of logits to stay in a CPU's
# caches, or at least in memory that is used again. With 2,048 rows the pages of each chunk were new, and the loss took
# twice as long as PyTorch's for all logits at once; with 256 it takes as long as PyTorch's.
CHUNK_ROWS = 256


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_ROWS) for start in range(0, rows, CHUNK_ROWS))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    return soft_capped(F.linear(x, weight, bias).to(accumulation_dtype(x.dtype)), softcap)


def _through_cap_(dlogits: Tensor, logits: Tensor, softcap: float) -> Tensor:
    """Overwrites the gradient of capped logits with that of the uncapped products."""
    return dlogits.mul_(1.0 - (logits / softcap).square()) if softcap else dlogits


class _Loss:
    """The losses of rows with these targets and options.

    Attributes:
        target: the targets, 0 for ignored rows, (rows,).
        valid: which rows count, (rows,).
        z_loss: the option.
    """

    def __init__(
        self,
        target: Tensor,
        vocab_size: int,
        ignore_index: int,
        label_smoothing: float,
        smooth_others: bool,
        z_loss: float,
    ) -> None:
        self.valid, self.z_loss = target != ignore_index, z_loss
        self.target = target.long().masked_fill(~self.valid, 0)
        check_range(self.target, vocab_size, f"targets in [0, {vocab_size}) or {ignore_index} (ignored)")
        # The weights of the target's logit and of the sum of all logits, a and b.
        self._on_all = label_smoothing / (vocab_size - 1 if smooth_others else vocab_size) if label_smoothing else 0.0
        self._on_target = 1.0 - label_smoothing - (self._on_all if smooth_others else 0.0)

    def of(self, log_probs: Tensor, lse: Tensor | None, chunk: slice = slice(None)) -> Tensor:
        """Computes the losses of a chunk of rows; lse is only read for a z_loss."""
        # Computed from log-probabilities: in lse(z) - a z_y - b sum(z), large logits would cancel. (a + b V = 1.)
        losses = -self._on_target * log_probs.gather(1, self.target[chunk, None]).squeeze(1)
        if self._on_all:
            losses = losses - self._on_all * log_probs.sum(-1)
        if self.z_loss and lse is not None:
            losses = losses + self.z_loss * lse.square()
        return losses.masked_fill(~self.valid[chunk], 0.0)

    def dlogits_(self, log_probs: Tensor, lse: Tensor | None, chunk: slice, row_scale: Tensor) -> Tensor:
        """Overwrites the log-probabilities of a chunk with the logits' gradient, each row times its row_scale."""
        target, dlogits = self.target[chunk, None], log_probs.exp_()
        if self.z_loss and lse is not None:
            dlogits.mul_((1.0 + 2.0 * self.z_loss * lse)[:, None])
        if self._on_all:
            dlogits.sub_(self._on_all)
        dlogits.scatter_add_(1, target, dlogits.new_full((1, 1), -self._on_target).expand(len(target), 1))
        return dlogits.mul_(row_scale[chunk, None])


class _Gradients:
    """dx, dweight and dbias, filled chunk by chunk; the sums over rows are fp32 (fp64 for fp64).

    Gradients that output_mask excludes are empty, of shape (0,).
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]) -> None:
        dtype = accumulation_dtype(x.dtype)
        self.x, self.weight = x, weight
        self.needs_dx, self.needs_dweight, needs_dbias = output_mask
        self.dx = x.new_empty(x.shape if self.needs_dx else 0)
        self.dweight = torch.zeros(weight.shape if self.needs_dweight else 0, dtype=dtype, device=x.device)
        self.dbias = self.dweight.new_zeros(0 if bias is None or not needs_dbias else len(bias))

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        if len(self.dbias):
            self.dbias += dlogits.sum(0)
        dlogits = dlogits.to(self.x.dtype)
        if self.needs_dx:
            torch.mm(dlogits, self.weight, out=self.dx[chunk])
        if not self.needs_dweight:
            return
        if self.dweight.dtype == self.x.dtype:
            self.dweight.addmm_(dlogits.T, self.x[chunk])
        else:
            self.dweight += dlogits.T @ self.x[chunk]

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.x.dtype
        return self.dx, self.dweight.to(dtype), self.dbias.to(dtype)


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Returns (losses, lse), both fp32 (rows,) (fp64 for fp64); the loss of an ignored row is 0.

    The arguments are the schema's.
    """
    *terms, softcap = options
    loss = _Loss(target, weight.shape[0], *terms)
    losses = x.new_empty(len(x), dtype=accumulation_dtype(x.dtype))
    lse = torch.empty_like(losses)
    for chunk in _chunks(len(x)):
        logits = _logits(x[chunk], weight, bias, softcap)
        lse[chunk] = logits.logsumexp(-1)
        losses[chunk] = loss.of(logits.log_softmax(-1), lse[chunk], chunk)
    return losses, lse


def linear_cross_entropy_formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Computes the reference's result with all logits at once."""
    *terms, softcap = options
    logits = _logits(x, weight, bias, softcap)
    lse = logits.logsumexp(-1)
    return _Loss(target, weight.shape[0], *terms).of(logits.log_softmax(-1), lse), lse


def _fwd_fake(x: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    losses = x.new_empty(x.shape[0], dtype=accumulation_dtype(x.dtype))
    return losses, torch.empty_like(losses)


def linear_cross_entropy_backward_reference(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dx, dweight, dbias), and computes the logits again for them; the arguments are the schema's.

    A gradient is (0,) if output_mask is False; dbias also without a bias.
    """
    *terms, output_mask, softcap = options
    loss = _Loss(target, weight.shape[0], *terms)
    row_scale = dlosses.masked_fill(~loss.valid, 0.0)
    gradients = _Gradients(x, weight, bias, output_mask)
    for chunk in _chunks(len(x)):
        # exp(z - lse) would suffice, but a large lse has few digits after the point.
        logits = _logits(x[chunk], weight, bias, softcap)
        dlogits = loss.dlogits_(logits.log_softmax(-1), lse[chunk], chunk, row_scale)
        gradients.add(chunk, _through_cap_(dlogits, logits, softcap))
    return gradients.result()


def _gradients_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    needs_dx, needs_dweight, needs_dbias = output_mask
    return (
        x.new_empty(x.shape if needs_dx else 0),
        weight.new_empty(weight.shape if needs_dweight else 0),
        x.new_empty(0 if bias is None or not needs_dbias else bias.shape[0]),
    )


def _bwd_fake(dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(x, weight, bias, options[-2])


def linear_cross_entropy_with_gradients_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (loss, dx, dweight, dbias), computed in one pass; the arguments are the schema's.

    The loss is the sum or the mean over the rows that count. A gradient is (0,) if output_mask is False.
    """
    *terms, mean, output_mask, softcap = options
    losses = _Loss(target, weight.shape[0], *terms)
    row_scale = losses.valid.to(accumulation_dtype(x.dtype))
    if mean:
        row_scale = row_scale / losses.valid.sum().clamp(min=1)
    loss = row_scale.new_zeros(())
    gradients = _Gradients(x, weight, bias, output_mask)
    for chunk in _chunks(len(x)):
        logits = _logits(x[chunk], weight, bias, softcap)
        lse = logits.logsumexp(-1) if losses.z_loss else None
        log_probs = logits.log_softmax(-1)
        loss += (losses.of(log_probs, lse, chunk) * row_scale[chunk]).sum()
        dlogits = losses.dlogits_(log_probs, lse, chunk, row_scale)
        gradients.add(chunk, _through_cap_(dlogits, logits, softcap))
    return loss, *gradients.result()


def _formula_with_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the loss with operations that PyTorch differentiates; the op's own gradients are empty."""
    *terms, mean, _output_mask, softcap = options
    loss = linear_cross_entropy_formula(x, weight, bias, target, ignore_index, *terms, softcap)[0].sum()
    if mean:
        loss = loss / (target != ignore_index).sum().clamp(min=1)
    return loss, x.new_empty(0), x.new_empty(0), x.new_empty(0)


def _fwd_bwd_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    return x.new_empty((), dtype=accumulation_dtype(x.dtype)), *_gradients_fake(x, weight, bias, options[-2])


def _cpp_masked(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> Any:
    """Calls the C++ function, which makes all three gradients, per tile while the logits' gradient is in the cache."""
    *args_of_cpp, output_mask, softcap = args
    *results, dx, dweight, dbias = function(*args_of_cpp, softcap)
    gradients = zip((dx, dweight, dbias), output_mask, strict=True)
    return *results, *(gradient if is_needed else gradient.new_empty(0) for gradient, is_needed in gradients)


_OPTIONS = "int ignore_index, float label_smoothing, bool smooth_others, float z_loss"
_fwd = define_op(
    f"linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}, "
    "float softcap=0.0) -> (Tensor losses, Tensor lse)",
    linear_cross_entropy_reference,
    fake=_fwd_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    formula=linear_cross_entropy_formula,
)
_bwd = define_op(
    "linear_cross_entropy_bwd(Tensor dlosses, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse, "
    f"{_OPTIONS}, bool[3] output_mask, float softcap=0.0) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    linear_cross_entropy_backward_reference,
    fake=_bwd_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    cpp_call=_cpp_masked,
)
_fwd_bwd = define_op(
    f"linear_cross_entropy_fwd_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}, bool mean, "
    "bool[3] output_mask, float softcap=0.0) -> (Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
    linear_cross_entropy_with_gradients_reference,
    fake=_fwd_bwd_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    cpp_call=_cpp_masked,
    formula=_formula_with_gradients,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.options, ctx.softcap = inputs
    ctx.save_for_backward(x, weight, bias, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dlosses: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, lse = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    gradients = _bwd(dlosses, x, weight, bias, target, lse, *(*ctx.options, needed, ctx.softcap))
    return *(gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True)), *(
        None,
    ) * 6


def _setup_context_with_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *_, output_mask, _softcap = inputs
    ctx.output_mask = [is_needed and t is not None for t, is_needed in zip((x, weight, bias), output_mask, strict=True)]
    # The gradients are outputs with a gradient of their own, which is an error: so autograd finds this op between a
    # gradient and x, the weight or the bias, where it would leave out a node without a way to them, silently.
    ctx.save_for_backward(*output[1:])


def _scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """Computes gradient * dloss, in place if the gradient isn't used again: it may be as large as the weight."""
    gradient = gradient.detach()
    if torch._C._autograd._get_current_graph_task_keep_graph() or not (is_plain(gradient) and is_plain(dloss)):
        return gradient * dloss
    if is_readable(dloss) and dloss == 1:
        return gradient
    return gradient.mul_(dloss)


def _multiplied(
    ctx: Any, dloss: Tensor, second: tuple[Tensor | None, ...], multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor | None, ...]:
    if any(gradient is not None for gradient in second):
        raise NotImplementedError(
            'linear_cross_entropy has no double backward with reduction "mean" or "sum", which keeps gradients instead '
            'of inputs: take the sum of reduction="none"'
        )
    # dloss is a scalar tensor in fp32, so the products have each gradient's dtype.
    gradients = (
        multiply(gradient, dloss) if is_needed else None
        for gradient, is_needed in zip(ctx.saved_tensors, ctx.output_mask, strict=True)
    )
    return *gradients, *(None,) * 8


def _backward_with_gradients(ctx: Any, dloss: Tensor, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    return _multiplied(ctx, dloss, second, _scaled)


def _differentiable_backward(ctx: Any, dlosses: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, _lse = ctx.saved_tensors

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy_formula(x, weight, bias, target, *(*ctx.options, ctx.softcap))[0]

    return *differentiate(formula, (x, weight, bias), ctx.needs_input_grad[:3], dlosses), *(None,) * 6


def _differentiable_backward_with_gradients(
    ctx: Any, dloss: Tensor, *second: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _multiplied(ctx, dloss, second, torch.mul)


register_autograd(
    "linear_cross_entropy_fwd",
    _backward,
    setup_context=_setup_context,
    differentiable_backward=_differentiable_backward,
)
register_autograd(
    "linear_cross_entropy_fwd_bwd",
    _backward_with_gradients,
    setup_context=_setup_context_with_gradients,
    differentiable_backward=_differentiable_backward_with_gradients,
)
forbid_double_backward("linear_cross_entropy_bwd")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smooth_others: bool = False,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Computes cross_entropy(x @ weight.T + bias, target) without ever holding the (rows, vocab_size) logits.

    With reduction "mean" or "sum", and if a gradient is needed, the gradients are computed along with the loss: the
    backward pass only scales them.

    Args:
        x: (..., dim), floating point.
        weight: (vocab_size, dim) as in nn.Linear, x's dtype.
        target: (...,) int64 or int32, in [0, vocab_size) or ignore_index.
        bias: (vocab_size,), x's dtype, or None.
        ignore_index: the target whose rows are ignored. If all rows are, the loss and the gradients are 0.
        label_smoothing: e: the target gets 1 - e.
        smooth_others: spread e over the other vocab_size - 1 classes (tensor2tensor) instead of over all (torch).
        reduction: "mean" over the rows that count, "sum", or "none".
        z_loss: adds z_loss * lse^2 to each row's loss, which keeps the logits from drifting.
        softcap: c of c * tanh(logit / c), which is applied to the logits, bias included; 0 = no cap.

    Returns:
        fp32 (fp64 for fp64): a scalar, or target's shape for "none". Under autocast the matrix products run in the
        autocast dtype and the loss stays fp32.

    Raises:
        ValueError: shapes or dtypes don't agree, the reduction is unknown, label_smoothing is outside [0, 1], or
            softcap is below 0.
        IndexError: a target is outside the vocabulary (on a CPU; a GPU asserts on the device).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'expected reduction "mean", "sum" or "none", got {reduction!r}')
    if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"expected label_smoothing in [0, 1], got {label_smoothing!r}")
    if not isinstance(ignore_index, int):
        raise ValueError(f"expected ignore_index to be an integer, got {ignore_index!r}")
    check_number("z_loss", z_loss)
    cap = resolve_softcap(softcap)
    x, weight = autocast("linear_cross_entropy", x, weight)
    (bias,) = autocast("linear_cross_entropy", bias)
    check_linear(x, weight, bias, "vocab_size")
    if not isinstance(target, Tensor) or target.shape != x.shape[:-1] or target.dtype not in INTEGERS:
        raise ValueError(f"expected an integer target of shape {tuple(x.shape[:-1])}, got {described(target)}")
    if smooth_others and label_smoothing > 0.0 and weight.shape[0] == 1:
        raise ValueError("expected at least 2 classes to smooth over the others, got 1")

    rows, flat_target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    options = (ignore_index, label_smoothing, smooth_others, z_loss)
    needed = [needs_gradient(t) for t in (x, weight, bias)]
    if reduction == "none" or not any(needed):
        losses = _fwd(rows, weight, bias, flat_target, *options, cap)[0]
        if reduction == "none":
            return losses.view(target.shape)
        loss = losses.sum()
    else:
        # fp16 gradients of a mean over thousands of rows would underflow before a gradient scaler could scale them up.
        # So for fp16 the sum's loss is divided by the count, which scales the gradients in the backward pass.
        mean = reduction == "mean" and x.dtype != torch.float16
        loss = _fwd_bwd(rows, weight, bias, flat_target, *options, mean, needed, cap)[0]
        if mean:
            return loss
    return loss if reduction == "sum" else loss / (flat_target != ignore_index).sum().clamp(min=1)
