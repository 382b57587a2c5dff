"""Rotary position embedding: each pair of features is rotated by an angle that grows with the position.

Su et al. 2021, "RoFormer", section 3.2.2. A pair is (i, i + rotary_dim / 2), or (2i, 2i + 1) if interleaved; features
from rotary_dim on stay unchanged. The gradient of a rotation is the inverse rotation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastformer.ops._autograd import register_autograd
from fastformer.ops._common import INTEGERS, accumulation_dtype, check_range, cpp_unsupported_dtype, described
from fastformer.ops._library import define_op


def rotary_reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> Tensor:
    """Computes `rotary`, or the inverse rotation."""
    dtype = accumulation_dtype(x.dtype)
    if positions is None:
        cos, sin = cos[: x.shape[-3]], sin[: x.shape[-3]]
    else:
        check_range(positions, cos.shape[0], f"positions in [0, {cos.shape[0]})")
        cos, sin = cos[positions], sin[positions]
    # One rotation for all heads of a token.
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    if inverse:
        sin = -sin
    half = cos.shape[-1]
    even, odd = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = x[..., even], x[..., odd]  # so that the products with cos and sin have the same width
    turned = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return pairs if 2 * half == x.shape[-1] else torch.cat((pairs, x[..., 2 * half :]), -1)


def _fake(x: Tensor, *options: object) -> Tensor:
    return x.new_empty(x.shape)


_fwd = define_op(
    "rotary_fwd(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse) -> Tensor",
    rotary_reference,
    fake=_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    formula=rotary_reference,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    return _fwd(dout, cos, sin, positions, ctx.interleaved, not ctx.inverse), *(None,) * 5


register_autograd("rotary_fwd", _backward, setup_context=_setup_context)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """Rotates queries or keys by their positions.

    Args:
        x: (..., seqlen, num_heads, head_dim), or (total, num_heads, head_dim) with positions; floating point.
        cos, sin: (num_positions, rotary_dim // 2), from `rotary_tables`; no gradient flows to them.
        positions: integers of shape x.shape[:-2], the row of the tables for each token; None = the index along seqlen.
        interleaved: pairs (2i, 2i + 1) as in RoFormer, instead of (i, i + rotary_dim / 2) as in GPT-NeoX and Llama.

    Returns:
        The shape and dtype of x; computed in fp32 (fp64 for fp64), and autocast has no effect.

    Raises:
        ValueError: the shapes don't agree, or a sequence is longer than the tables.
        IndexError: a position is outside the tables (on a CPU; a GPU asserts on the device).
    """
    if not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
        raise ValueError(f"expected a floating-point x (..., seqlen, num_heads, head_dim), got {described(x)}")
    num_positions = check_tables(x, cos, sin)
    if positions is None:
        if x.shape[-3] > num_positions:
            raise ValueError(f"expected at most {num_positions} positions (cos, sin), got a sequence of {x.shape[-3]}")
    elif not isinstance(positions, Tensor) or positions.shape != x.shape[:-2] or positions.dtype not in INTEGERS:
        raise ValueError(f"expected integer positions of shape {tuple(x.shape[:-2])}, got {described(positions)}")
    return _fwd(x, cos, sin, positions, interleaved, False)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Returns the number of positions of cos and sin; raises ValueError unless they fit heads of x's size."""
    if (
        not (isinstance(cos, Tensor) and isinstance(sin, Tensor))
        or not (cos.is_floating_point() and sin.is_floating_point())
        or cos.dim() != 2
        or cos.shape != sin.shape
        or 2 * cos.shape[1] > x.shape[-1]
    ):
        raise ValueError(
            f"expected floating-point cos and sin (num_positions, at most {x.shape[-1] // 2}), "
            f"got {described(cos)} and {described(sin)}"
        )
    return cos.shape[0]


def rotary_tables(
    num_positions: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    speeds: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes cos and sin of position * base^(-2i / rotary_dim), each (num_positions, rotary_dim // 2), in fp64.

    Args:
        num_positions: the number of rows of the tables.
        rotary_dim: the number of features of a head that are rotated.
        base: see above.
        device, dtype: the device and the dtype of the tables.
        speeds: (rotary_dim // 2,) radians per position, which replace those of the base.
        scale: a factor of both tables, which also scales the rotated features.

    Raises:
        ValueError: rotary_dim is odd or below 1, num_positions is negative, the base is invalid, or speeds has another
            size.
    """
    whole = isinstance(rotary_dim, int) and isinstance(num_positions, int)
    if not whole or rotary_dim < 2 or rotary_dim % 2 or num_positions < 0:
        raise ValueError(
            f"expected an even rotary_dim >= 2 and num_positions >= 0, got {rotary_dim!r} and {num_positions!r}"
        )
    if not isinstance(base, int | float) or not 0 < base < math.inf:
        raise ValueError(f"expected base above 0, got {base!r}")
    if speeds is not None and speeds.shape != (rotary_dim // 2,):
        raise ValueError(f"expected {rotary_dim // 2} speeds, got {described(speeds)}")
    if device is not None and torch.device(device).type == "meta":  # avoids importing a compiler, which takes 1 s
        shape = num_positions, rotary_dim // 2  # torch.empty_like would import it, too
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
    if speeds is None:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        speeds = torch.exp(-math.log(base) * exponent)
    position = torch.arange(num_positions, dtype=torch.float64, device=device)[:, None]
    angle = position * speeds.to(device=device, dtype=torch.float64)
    return (scale * angle.cos()).to(dtype), (scale * angle.sin()).to(dtype)
