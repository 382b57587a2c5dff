"""Token embedding, its scale, the positions and dropout in one op.

    out = dropout(weight[id] * scale + position_table[position])        (a padding id counts as a row of zeros)

Vaswani et al. 2017, sections 3.4 (the scale sqrt(d_model)) and 3.5 (positions); padding rows that give zeros are
tensor2tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops._autograd import forbid_double_backward, register_autograd
from fastformer.ops._common import (
    INTEGERS,
    accumulation_dtype,
    check_number,
    check_range,
    described,
    is_matrix,
    no_cpp_code,
)
from fastformer.ops._dropout import drop, resolve_dropout
from fastformer.ops._library import define_op


def embedding_reference(
    ids: Tensor,
    weight: Tensor,
    position_table: Tensor | None,
    positions: Tensor | None,
    scale: float,
    padding_idx: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    atomics: bool,
) -> Tensor:
    """Computes `embedding`; padding_idx is -1 for no id. Only the backward pass uses `atomics`."""
    check_range(ids, weight.shape[0], f"token ids in [0, {weight.shape[0]})")
    out = F.embedding(ids, weight).to(accumulation_dtype(weight.dtype))
    if scale != 1.0:
        out = out * scale
    if padding_idx >= 0:
        out = out.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0)
    if position_table is not None:
        if positions is None:
            out = (out + position_table[: ids.shape[-1]]).to(out.dtype)
        else:
            check_range(positions, position_table.shape[0], f"positions in [0, {position_table.shape[0]})")
            out = (out + F.embedding(positions, position_table)).to(out.dtype)
    return drop(out, dropout_p, dropout_seed).to(weight.dtype)


def _fwd_fake(ids: Tensor, weight: Tensor, *options: object) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def embedding_backward_reference(
    dout: Tensor,
    ids: Tensor,
    positions: Tensor | None,
    num_embeddings: int,
    num_positions: int,
    scale: float,
    padding_idx: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dtype: torch.dtype,
    atomics: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (dweight, dposition_table); the latter is (0,) if num_positions is 0. Only kernels use `atomics`."""
    dim = dout.shape[-1]
    dsum = drop(dout.to(accumulation_dtype(dout.dtype)), dropout_p, dropout_seed)
    # This call omits the rows of the padding id.
    dweight = torch.ops.aten.embedding_dense_backward(dsum, ids, num_embeddings, padding_idx, False)
    dweight = (dweight * scale).to(dtype)
    if num_positions == 0:
        return dweight, dout.new_empty(0, dtype=dtype)
    if positions is None:
        seqlen = ids.shape[-1]
        dtable = dsum.reshape(ids.numel() // max(seqlen, 1), seqlen, dim).sum(0)
        dtable = F.pad(dtable, (0, 0, 0, num_positions - seqlen))
    else:
        dtable = dsum.new_zeros(num_positions, dim).index_add(0, positions.reshape(-1), dsum.reshape(-1, dim))
    return dweight, dtable.to(dtype)


def _bwd_fake(
    dout: Tensor, ids: Tensor, positions: Tensor | None, num_embeddings: int, num_positions: int, *options: Any
) -> tuple[Tensor, Tensor]:
    dim, dtype = dout.shape[-1], options[-2]
    return (
        dout.new_empty(num_embeddings, dim, dtype=dtype),
        dout.new_empty(*((num_positions, dim) if num_positions else (0,)), dtype=dtype),
    )


def _fwd_cpp_unsupported(op_name: str, *, weight: Tensor, **_: object) -> str | None:
    return no_cpp_code(weight.dtype)


def _bwd_cpp_unsupported(op_name: str, *, dout: Tensor, dtype: torch.dtype, **_: object) -> str | None:
    if dtype != dout.dtype:
        return f"no C++ code for a gradient in {dout.dtype} of a weight in {dtype}"
    return no_cpp_code(dtype)


_fwd = define_op(
    "embedding_fwd(Tensor ids, Tensor weight, Tensor? position_table, Tensor? positions, float scale, int padding_idx, "
    "float dropout_p, Tensor? dropout_seed, bool atomics) -> Tensor",
    embedding_reference,
    fake=_fwd_fake,
    cpp_unsupported=_fwd_cpp_unsupported,
    formula=embedding_reference,
)
_bwd = define_op(
    "embedding_bwd(Tensor dout, Tensor ids, Tensor? positions, SymInt num_embeddings, SymInt num_positions, "
    "float scale, int padding_idx, float dropout_p, Tensor? dropout_seed, ScalarType dtype, bool atomics) "
    "-> (Tensor dweight, Tensor dposition_table)",
    embedding_backward_reference,
    fake=_bwd_fake,
    cpp_unsupported=_bwd_cpp_unsupported,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight, position_table, positions, *ctx.options, dropout_seed, ctx.atomics = inputs
    ctx.save_for_backward(ids, positions, dropout_seed)
    table_learns = ctx.needs_input_grad[2]
    ctx.sizes = weight.shape[0], position_table.shape[0] if table_learns else 0
    ctx.dtype, ctx.table_dtype = weight.dtype, position_table.dtype if table_learns else None


def _backward(ctx: Any, dout: Tensor, function: Callable[..., tuple[Tensor, Tensor]] = _bwd) -> tuple[Any, ...]:
    ids, positions, dropout_seed = ctx.saved_tensors
    atomics = ctx.atomics and not torch.are_deterministic_algorithms_enabled()
    options = (*ctx.sizes, *ctx.options, dropout_seed, ctx.dtype, atomics)
    dweight, dtable = function(dout, ids, positions, *options)
    return None, dweight, None if ctx.table_dtype is None else dtable.to(ctx.table_dtype), *(None,) * 6


def _differentiable_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return _backward(ctx, dout, embedding_backward_reference)  # linear in dout, and depends on nothing else


register_autograd(
    "embedding_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("embedding_bwd")


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    padding_idx: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    atomics: bool = False,
) -> Tensor:
    """Fused token embedding: lookup, scaling, positions and dropout.

    Args:
        ids: (..., seqlen) int64 or int32.
        weight: (num_embeddings, dim), floating point.
        position_table: (num_positions, dim), fixed (`sinusoidal_positions`) or learned; None = no positions.
        positions: the shape of ids: the row of the table for each token; None = the index along the last dimension of
            ids.
        scale: the factor of the token's row: sqrt(dim) in a Transformer. The positions are not scaled.
        padding_idx: the id that counts as a row of zeros and gets no gradient (its position is added all the same);
            a negative one counts from the end, as in torch.nn; None = no such id.
        dropout_p: the probability that an element of the sum is dropped.
            It is rounded to a multiple of 1/256 (to 0 or 1 only if it is 0 or 1). Modules pass 0 in evaluation.
        dropout_seed: int64 (2,); drawn from the default generator when None. Row = flattened token, column = feature.
        atomics: on a GPU, sum gradients with fp32 atomics instead of sorting the ids first. The last bits then vary
            between runs, so torch.use_deterministic_algorithms overrides this option.

    Returns:
        (..., seqlen, dim), weight's dtype.

    Raises:
        ValueError: shapes or dtypes don't agree, there are more tokens than positions, or dropout_p is outside [0, 1].
        IndexError: an id or a position is outside its table (on a CPU; a GPU asserts on the device).
    """
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS or ids.dim() == 0:
        raise ValueError(f"expected ids (..., seqlen) in int64 or int32, got {described(ids)}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise ValueError(f"expected a floating-point weight (num_embeddings, dim), got {described(weight)}")
    num_embeddings, dim = weight.shape
    if position_table is not None:
        if not is_matrix(position_table, dim):
            raise ValueError(
                f"expected a floating-point position_table (num_positions, {dim}), got {described(position_table)}"
            )
        if positions is None and ids.shape[-1] > position_table.shape[0]:
            raise ValueError(f"expected at most {position_table.shape[0]} tokens (position_table), got {ids.shape[-1]}")
    if positions is not None:
        if position_table is None:
            raise ValueError("expected a position_table with positions, got None")
        if not isinstance(positions, Tensor) or positions.shape != ids.shape or positions.dtype not in INTEGERS:
            raise ValueError(f"expected integer positions of shape {tuple(ids.shape)}, got {described(positions)}")
    check_number("scale", scale)
    if padding_idx is None:
        padding_idx = -1
    elif not isinstance(padding_idx, int) or not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"expected padding_idx in [{-num_embeddings}, {num_embeddings}), got {padding_idx}")
    elif padding_idx < 0:
        padding_idx += num_embeddings
    dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, weight.device)
    return _fwd(ids, weight, position_table, positions, scale, padding_idx, dropout_p, dropout_seed, atomics)


def sinusoidal_positions(
    num_positions: int,
    dim: int,
    kind: str = "interleaved",
    *,
    max_timescale: float = 10000.0,
    first: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes a fixed table of sinusoidal positions.

    Args:
        num_positions: the number of rows.
        dim: the number of columns.
        kind: "interleaved" as in the paper (Vaswani et al. 2017, section 3.5): column 2i is sin(p / T^(2i / dim)),
            column 2i + 1 is cos of the same. "halves" as in Marian: the same columns, all sines first.
            "concatenated" as in tensor2tensor (`get_timing_signal_1d`): all sines, then all cosines, of
            p / T^(i / (dim // 2 - 1)), and a zero column if dim is odd.
        max_timescale: T.
        first: the position p of the first row.

    Returns:
        (num_positions, dim), computed in fp64.

    Raises:
        ValueError: an unknown kind, a negative num_positions or first, dim < 1, or an invalid max_timescale.
    """
    if kind not in ("interleaved", "halves", "concatenated"):
        raise ValueError(f'expected kind "interleaved", "halves" or "concatenated", got {kind!r}')
    whole = isinstance(num_positions, int) and isinstance(dim, int)
    if not whole or num_positions < 0 or dim < 1:
        raise ValueError(f"expected integers num_positions >= 0 and dim >= 1, got {num_positions!r} and {dim!r}")
    if not isinstance(first, int) or first < 0:
        raise ValueError(f"expected first to be an integer of at least 0, got {first!r}")
    if not isinstance(max_timescale, int | float) or not 0 < max_timescale < math.inf:
        raise ValueError(f"expected max_timescale above 0, got {max_timescale!r}")
    if device is not None and torch.device(device).type == "meta":  # avoids importing a compiler, which takes 1 s
        return torch.empty(num_positions, dim, dtype=dtype, device=device)
    position = torch.arange(first, first + num_positions, dtype=torch.float64, device=device)[:, None]
    if kind != "concatenated":
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    else:
        exponent = torch.arange(dim // 2, dtype=torch.float64, device=device) / max(dim // 2 - 1, 1)
    angle = position * torch.exp(-math.log(max_timescale) * exponent)
    table = torch.zeros(num_positions, dim, dtype=torch.float64, device=device)
    if kind == "interleaved":
        table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()[:, : dim // 2]
    else:
        half = angle.shape[1]
        table[:, :half], table[:, half : 2 * half] = angle.sin(), angle.cos()[:, : dim - half]
    return table.to(dtype)
