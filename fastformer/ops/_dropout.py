"""Dropout by counter: every backend drops the same elements, in forward and backward, and stores no mask.

Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; 7 rounds pass BigCrush).
One call returns four 32-bit words, that is sixteen decisions of 8 bits, and four calls serve 64 columns:

    column  = 64 * group + 8 * pair + 2 * call + odd             pair < 8, call < 4, odd < 2
    key     = (seed low 32 bits, seed high 32 bits)
    counter = (4 * group + call, row, plane, offset low 32 bits)  plane = batch * num_heads + head for attention, else 0
    decision(column) = byte 2 * pair + odd of the four words, the first word's lowest byte first
    kept           <=> decision >= threshold(p)

So the sixteen columns of a call are those of a row that one GPU thread holds after a matrix product.

p is rounded to the nearest multiple of 1/256, but to 0 and 1 only if p is 0 or 1. The scale of the kept elements uses
the rounded p, so that the expectation is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastformer.ops._common import described
from fastformer.ops._transforms import is_traced_for_onnx

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


P = ParamSpec("P")
T = TypeVar("T")

# The number of seeds that are drawn at once, and the devices where this happens: on a GPU each draw is a launch.
_TOGETHER = 64
_DEVICES = {"cuda"}
# During a forward pass: the seeds that are left, and for what they were drawn (see `_purpose`).
_drawn: ContextVar[tuple[list[Tensor], list[object]] | None] = ContextVar("fastformer_seeds", default=None)


def draw_seed(device: torch.device | str) -> Tensor:
    """Draws a fresh (seed, offset) for one dropout from the device's default generator: int64, shape (2,).

    The seed is drawn on the device, so that activation checkpointing, torch.compile and CUDA graphs replay it without a
    host sync. Inside `draws_seeds_together` it is one of many that are drawn at once.
    """
    drawn = None if torch.compiler.is_compiling() else _drawn.get()  # context variables can't be traced
    if drawn is not None and _may_share(torch.device(device)):
        seeds, where = drawn
        here = _purpose(torch.device(device))
        if not seeds or where != [here]:
            seeds[:] = torch.randint(0, 2**62, (_TOGETHER, 2), dtype=torch.int64, device=device).unbind(0)
            where[:] = [here]
        return seeds.pop()
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def _may_share(device: torch.device) -> bool:
    """Returns whether a seed may be drawn together with others.

    When activation checkpointing computes a pass again, it restores the generator, but not seeds that were drawn
    earlier. So each seed is drawn separately if autograd's hooks or disabled gradients indicate such a pass. Modes and
    transforms also need to see each draw.
    """
    return (
        device.type in _DEVICES
        and torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.maybe_current_level() is None
    )


def _purpose(device: torch.device) -> tuple[int | None, bool]:
    """Returns the device's index, and whether a graph is being captured: a captured graph may use no earlier seed."""
    return device.index, device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def draws_seeds_together(forward: Callable[P, T]) -> Callable[P, T]:
    """Wraps a model's forward pass so that on a GPU its dropouts draw 64 seeds in one launch.

    On a CPU, where a draw is a function call, each seed is drawn separately. Equal generator states mean equal seeds.
    """

    @functools.wraps(forward)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _drawn.get() is not None:
            return forward(*args, **kwargs)
        token = _drawn.set(([], []))
        try:
            return forward(*args, **kwargs)
        finally:
            _drawn.reset(token)

    return drawing


def resolve_dropout(dropout_p: float, dropout_seed: Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """Checks dropout_p and dropout_seed of an op, and draws a seed if one is needed and None was given.

    Raises:
        ValueError: dropout_p outside [0, 1], or a seed that is not int64 of shape (2,).
    """
    if not isinstance(dropout_p, int | float) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"expected dropout_p in [0, 1], got {dropout_p!r}")
    if dropout_p == 0.0:
        return 0.0, None
    if dropout_seed is None:
        return dropout_p, draw_seed(device)
    if not isinstance(dropout_seed, Tensor) or dropout_seed.dtype != torch.int64 or dropout_seed.shape != (2,):
        raise ValueError(f"expected dropout_seed int64 of shape (2,), got {described(dropout_seed)}")
    return dropout_p, dropout_seed


def threshold(dropout_p: float) -> int:
    """Returns the smallest decision that is kept: p * 256, rounded, but 1 to 255 unless p is 0 or 1."""
    if dropout_p in (0.0, 1.0):
        return int(dropout_p * 256)
    return min(max(round(dropout_p * 256), 1), 255)


def keep_scale(dropout_p: float) -> float:
    """Returns the factor of kept elements: 1 / (1 - p) with p as rounded by `threshold`; 0 if nothing is kept."""
    dropped = threshold(dropout_p)
    return 0.0 if dropped == 256 else 256 / (256 - dropped)


def drop(values: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    """Applies dropout to rows; returns `values` itself if p is 0.

    The row is the index in the flattened leading dimensions, the column that in the last dimension.
    """
    if dropout_p == 0.0:
        return values
    assert dropout_seed is not None
    columns = values.shape[-1]
    keep = keep_mask(dropout_seed, dropout_p, values.numel() // columns, columns)[0].reshape(values.shape)
    return (values * keep_scale(dropout_p)).masked_fill(~keep, 0.0)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Computes Philox4x32-7 on int64 tensors with 32-bit values; the shapes broadcast. Returns the four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2**64, which keeps all 64 bits of the 32 x 32 product.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ c1 ^ k0,
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def keep_mask(dropout_seed: Tensor, dropout_p: float, rows: int, columns: int, planes: int = 1) -> Tensor:
    """Computes the mask of the elements that dropout keeps.

    Args:
        dropout_seed: int64 (2,): seed and offset.
        dropout_p: the probability of being dropped.
        rows: number of rows (query positions, or flattened rows).
        columns: number of columns (key positions, or features).
        planes: number of planes (batch * num_heads for attention).

    Returns:
        bool (planes, rows, columns), True = kept.
    """
    device = dropout_seed.device
    if is_traced_for_onnx():  # the exporter has no bit operations, and its graph draws
        return torch.rand((planes, rows, columns), device=device) >= threshold(dropout_p) / 256
    seed, offset = dropout_seed[0], dropout_seed[1]
    groups = (columns + 63) // 64
    words = philox(
        (
            torch.arange(4 * groups, device=device).view(1, 1, 4 * groups),
            torch.arange(rows, device=device).view(1, rows, 1),
            torch.arange(planes, device=device).view(planes, 1, 1),
            offset & _MASK32,
        ),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    masks = [word >> shift & 0xFF >= threshold(dropout_p) for word in words for shift in (0, 8, 16, 24)]
    by_call = torch.stack(torch.broadcast_tensors(*masks), dim=-1).view(planes, rows, groups, 4, 8, 2)
    return by_call.transpose(-3, -2).flatten(-4)[..., :columns]  # (group, pair, call, odd) is the columns' order
