"""Attention over packed sequences: sequences of many lengths in one tensor, without padding or computation for it.

It computes `attention` sequence by sequence. Queries and keys are packed separately, so it also supports
cross-attention. Its kernels are in the same files as those of `attention`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastformer.ops._attention_reference import AttentionOptions, attend, attend_backward
from fastformer.ops._attention_torch import attend_torch, attend_torch_backward, unsupported
from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    accumulation_dtype,
    check_heads,
    described,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from fastformer.ops._dispatch import autocast, is_readable
from fastformer.ops._dropout import resolve_dropout
from fastformer.ops._library import define_op
from fastformer.ops.attention import ScoreOptions, cpp_unsupported
from fastformer.ops.attention_sinks import with_sinks


class _Packing:
    """Moves rows between packed (total, ...) and padded (batch, max_seqlen, ...) tensors, without a host sync."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, total: int) -> None:
        starts = cu_seqlens[:-1].long()
        self.seqlens = cu_seqlens.diff()
        position = torch.arange(max_seqlen, device=cu_seqlens.device)
        self.rows = (starts[:, None] + position).clamp(max=max(total - 1, 0))  # (batch, max_seqlen)
        self.padding = position >= self.seqlens[:, None]
        row = torch.arange(total, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
        self.real = sequence < starts.numel()
        self.sequence = sequence.clamp(max=starts.numel() - 1)  # (total,)
        self.position = (row - starts[self.sequence]).clamp(max=max_seqlen - 1)

    def pad(self, x: Tensor) -> Tensor:
        """Converts (total, ...) to (batch, max_seqlen, ...); rows after a sequence are 0, not the next one's."""
        return x[self.rows].masked_fill(self.padding.view(*self.padding.shape, *(1,) * (x.dim() - 1)), 0.0)

    def pack(self, padded: Tensor, fill: float = 0.0) -> Tensor:
        """Converts (batch, max_seqlen, ...) to (total, ...); rows after the last sequence are `fill`."""
        rows = padded[self.sequence, self.position]
        return rows.masked_fill(~self.real.view(-1, *(1,) * (rows.dim() - 1)), fill)


def _prepare(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[_Packing, _Packing, AttentionOptions]:
    """Returns the packings of queries and of keys, and the options; the arguments are the schema's."""
    queries = _Packing(cu_seqlens_q, max_seqlen_q, q.shape[0])
    keys = _Packing(cu_seqlens_k, max_seqlen_k, k.shape[0])
    diagonal = keys.seqlens - queries.seqlens
    return queries, keys, AttentionOptions(*options, diagonal=diagonal, keys=keys.seqlens, queries=queries.seqlens)


def _is_empty(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> bool:
    """Returns whether no query has a visible key."""
    return 0 in (q.shape[0], k.shape[0], cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k)


def varlen_attention_reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Returns (out, lse); the arguments are the schema's."""
    return _padded(attend, q, k, v, *options)


def _padded(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionOptions], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) with a function for padded sequences."""
    if _is_empty(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k):
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
        return q.new_zeros(q.shape), lse
    queries, keys, scores = _prepare(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
    out, lse = attend(queries.pad(q), keys.pad(k), keys.pad(v), scores)
    return queries.pack(out), queries.pack(lse.transpose(1, 2), -torch.inf).T.contiguous()


def _padded_backward(
    attend_backward: Callable[..., tuple[Tensor, ...]],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (dq, dk, dv) with a function for padded sequences."""
    if _is_empty(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    queries, keys, scores = _prepare(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
    padded_lse = queries.pad(lse.T).transpose(1, 2)
    dq, dk, dv = attend_backward(
        queries.pad(dout), queries.pad(q), keys.pad(k), keys.pad(v), queries.pad(out), padded_lse, scores
    )[:3]
    return queries.pack(dq), keys.pack(dk), keys.pack(dv)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))


def _bwd_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_fwd = define_op(
    "varlen_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float softmax_scale, int? window_left, int? window_right, float dropout_p, "
    "Tensor? dropout_seed, float softcap=0.0) -> (Tensor out, Tensor lse)",
    varlen_attention_reference,
    stem="attention",
    fake=_fwd_fake,
    cpp_unsupported=cpp_unsupported,
    torch_function=functools.partial(_padded, attend_torch),
    torch_unsupported=unsupported,
    formula=varlen_attention_reference,
)
_bwd = define_op(
    "varlen_attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, int? window_left, "
    "int? window_right, float dropout_p, Tensor? dropout_seed, float softcap=0.0) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    functools.partial(_padded_backward, attend_backward),
    stem="attention",
    fake=_bwd_fake,
    cpp_unsupported=cpp_unsupported,
    torch_function=functools.partial(_padded_backward, attend_torch_backward),
    torch_unsupported=unsupported,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options, dropout_seed, ctx.softcap = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dropout_seed)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *tensors, dropout_seed = ctx.saved_tensors
    return *_bwd(dout, *tensors, *ctx.options, dropout_seed, ctx.softcap), *(None,) * 10


def _differentiable_backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, _, _, *cu_seqlens, dropout_seed = ctx.saved_tensors

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention_reference(q, k, v, *cu_seqlens, *ctx.options, dropout_seed, ctx.softcap)[0]

    return *differentiate(formula, (q, k, v), ctx.needs_input_grad[:3], dout), *(None,) * 10


register_autograd(
    "varlen_attention_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("varlen_attention_bwd")


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[ScoreOptions],
) -> Tensor: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention within each of the sequences that are concatenated in q, k and v.

    Sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of q and [cu_seqlens_k[b], cu_seqlens_k[b + 1]) of k; its
    query i is aligned with its key i + seqlen_k - seqlen_q. Dropout drops the same weights as in a padded batch.

    Args:
        q: (total_q, num_heads, head_dim), floating point.
        k: (total_k, num_kv_heads, head_dim), q's dtype.
        v: the same shape and dtype as k.
        cu_seqlens_q: (batch + 1,) int32, ascending from 0. The results of rows after the last entry are zeros.
        cu_seqlens_k: (batch + 1,) int32.
        max_seqlen_q: the length of the longest sequence of q, or more.
        max_seqlen_k: the length of the longest sequence of k, or more.
        is_causal, window_size, softmax_scale, dropout_p, dropout_seed, return_lse, softcap, sinks: as in `attention`.

    Returns:
        (total_q, num_heads, head_dim) in q's dtype; with return_lse also lse, (num_heads, total_q).

    Raises:
        ValueError: shapes or dtypes don't agree, dropout_p is outside [0, 1], or cu_seqlens decreases, doesn't begin
            with 0, exceeds the rows or has a sequence longer than the maximum (checked if cu_seqlens is on a CPU).
    """

    def check_sequences() -> None:
        _check_sequences("q", cu_seqlens_q, max_seqlen_q, q.shape[0])
        # In self-attention the sequences of k are those of q.
        if not (cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q and k.shape[0] == q.shape[0]):
            _check_sequences("k", cu_seqlens_k, max_seqlen_k, k.shape[0])

    # With the usual options nothing has to be resolved but the scale.
    is_bare = window_size == (None, None) and softmax_scale is None and isinstance(is_causal, bool)
    is_bare = is_bare and sinks is None and not torch.compiler.is_compiling()
    if is_bare and type(q) is Tensor and q.dim() == 3 and q.shape[2] > 0:
        dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, q.device)
        scale, right = q.shape[2] ** -0.5, 0 if is_causal else None
        outputs = _fwd.repeat(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, None, right, dropout_p,
            dropout_seed, softcap, check_values=check_sequences,
        )  # fmt: skip
        if outputs is not None:
            return outputs if return_lse else outputs[0]
    q, k, v = autocast("varlen_attention", q, k, v)
    check_heads(q, k, v, 3, "(total, num_heads, head_dim)")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if (
            not isinstance(cu_seqlens, Tensor)
            or cu_seqlens.dim() != 1
            or cu_seqlens.dtype != torch.int32
            or cu_seqlens.numel() == 0
        ):
            raise ValueError(f"expected {name} int32 of shape (batch + 1,), got {described(cu_seqlens)}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"expected as many sequences in q as in k, got {cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )
    check_sequences()
    left, right = resolve_window(is_causal, window_size)
    dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, q.device)
    scale = resolve_scale(softmax_scale, q.shape[-1])
    cap = resolve_softcap(softcap)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    args = (q, k, v, *sequences, scale, left, right, dropout_p, dropout_seed, cap)
    if is_bare:
        _fwd.settle(args)
    if sinks is None:
        out, lse = _fwd(*args)
    else:
        options = args[3:]
        out, lse = with_sinks(
            *(q, k, v, sinks),
            lambda q, k, v: _fwd(q, k, v, *options),
            lambda *tensors: _bwd(*tensors, *options),
            lambda q, k, v: varlen_attention_reference(q, k, v, *options),
        )
    return (out, lse) if return_lse else out


def _check_sequences(name: str, cu_seqlens: Tensor, max_seqlen: int, rows: int) -> None:
    """Raises ValueError unless the bounds of q's or k's sequences are consistent; values are read only on a CPU."""
    if isinstance(max_seqlen, bool | float | str) or max_seqlen is None or max_seqlen < 0:
        raise ValueError(f"expected max_seqlen_{name} to be an integer of at least 0, got {max_seqlen!r}")
    if not is_readable(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    lengths = [*map(operator.sub, ends[1:], ends)]
    longest = max(lengths, default=0)
    if ends[0] != 0 or ends[-1] > rows or min(lengths, default=0) < 0:
        raise ValueError(f"expected cu_seqlens_{name} rising from 0 to at most {rows}, got {_shown(ends)}")
    if longest > max_seqlen:
        raise ValueError(f"expected max_seqlen_{name} of at least the longest sequence, {longest}, got {max_seqlen}")


def _shown(ends: list[int]) -> str:
    return str(ends) if len(ends) < 9 else f"{ends[:8]}..."
