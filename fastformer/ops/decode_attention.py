"""Attention of one or a few new queries to a key-value cache, to which their own keys and values are appended first.

The cache has a fixed size, and the lengths stay on the device. A decode step therefore needs no host sync, and has
fixed shapes if its caller passes whole tables. If lengths can't be read, all columns of a table cost time. Beams that
decode one source share the row of its cross-attention cache through cache_batch_idx. If rows take tokens from a common
store, slot_table has the token of each position, and beams that continue one history share its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastformer.ops import _extension
from fastformer.ops._attention_reference import AttentionOptions, attend
from fastformer.ops._autograd import refuse_derivatives
from fastformer.ops._common import check_heads, described, resolve_bound, resolve_scale, resolve_softcap
from fastformer.ops._dispatch import autocast
from fastformer.ops._library import define_op
from fastformer.ops.attention import cpp_unsupported
from fastformer.ops.rotary import check_tables, rotary_reference


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_batch_idx: Tensor | None,
    slot_table: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_left: int | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Computes the op; the arguments are the schema's."""
    new = 0 if k is None else k.shape[1]
    cache_batch, max_seqlen = k_cache.shape[:2] if slot_table is None else slot_table.shape
    if cache_batch_idx is not None:
        _check_range("cache_batch_idx", cache_batch_idx, cache_batch)
        cache_seqlens = cache_seqlens[cache_batch_idx]
    _check_range("cache_seqlens", cache_seqlens, max_seqlen - new + 1)
    if cos is not None and sin is not None and k is not None:
        q, k = _rotate_to_positions(rotary_reference, q, k, cache_seqlens, cos, sin, interleaved)
    total = cache_seqlens + new
    used = max_seqlen
    if q.device.type == "cpu" and total.numel():
        # Reading a number is free here, and the cache may be far longer than its contents.
        used = int(total.max())

    fresh = cache_seqlens[:, None].long() + torch.arange(new, device=q.device)  # positions of k and v
    if slot_table is None:
        at: tuple[Tensor, ...] = torch.arange(len(fresh), device=q.device)[:, None], fresh
    else:
        table = slot_table if cache_batch_idx is None else slot_table[cache_batch_idx]
        position = torch.arange(used, device=q.device)
        unseen = position >= total[:, None]
        if window_left is not None:
            unseen |= position < total[:, None].long() - q.shape[1] - window_left
        # Hidden keys are not read: neither the entry of the table nor the slot that it may point to.
        slots = table[:, :used].long().masked_fill(unseen, 0)
        at = (table.gather(1, fresh).long(),)
        k_cache, v_cache = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        for entries in (*at, slots):
            _check_range("the slots that are written or read", entries, len(k_cache))
    if k is not None and v is not None:
        k_cache[at], v_cache[at] = k, v
    if slot_table is not None:
        keys, values = (cache[slots].masked_fill_(unseen[:, :, None, None], 0.0) for cache in (k_cache, v_cache))
    else:
        keys, values = k_cache[:, :used], v_cache[:, :used]
        if cache_batch_idx is not None:
            keys, values = keys[cache_batch_idx], values[cache_batch_idx]
    right = 0 if is_causal else None
    scores = AttentionOptions(
        softmax_scale, window_left, right, softcap=softcap, diagonal=total - q.shape[1], keys=total
    )
    return attend(q, keys, values, scores)[0]


def _check_range(name: str, integers: Tensor, end: int) -> None:
    """Raises ValueError unless all integers are in [0, end); only on a CPU, since a GPU would need a host sync."""
    if integers.device.type == "cpu" and bool((outside := (integers < 0) | (integers >= end)).any()):
        raise ValueError(f"expected {name} in [0, {end}), got {int(integers[outside][0])}")


def _rotate_to_positions(
    rotate: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    cache_seqlens: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k to their positions in the cache, with a function that has the arguments of `rotary_fwd`."""
    seqlen_q, new = q.shape[1], k.shape[1]
    positions = cache_seqlens[:, None]
    if new != 1:
        positions = positions + torch.arange(new, device=q.device)
    q = rotate(q, cos, sin, positions[:, new - seqlen_q :], interleaved, False)
    return q, rotate(k, cos, sin, positions, interleaved, False)


def _cpp_call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    try:
        return _rotated_cpp_call(function, *args)
    except RuntimeError as error:
        # PyTorch 2.15 turns the function's std::invalid_argument into RuntimeError, earlier versions into ValueError.
        if str(error).startswith("expected "):
            raise ValueError(str(error)) from None
        raise


def _rotated_cpp_call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    *args_of_cpp, cos, sin, interleaved, softcap = args
    if cos is not None:
        # The C++ function has no rotary embedding of its own, which would save next to nothing there.
        rotate = cast("Callable[..., Tensor]", _extension.function("rotary_fwd"))
        q, k_cache, v_cache, cache_seqlens, k, *rest = args_of_cpp
        q, k = _rotate_to_positions(rotate, q, k, cache_seqlens, cos, sin, interleaved)
        return function(q, k_cache, v_cache, cache_seqlens, k, *rest, softcap)
    return function(*args_of_cpp, softcap)


def _cpp_unsupported(op_name: str, *, q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> str | None:
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        return "it reads caches that are contiguous in head_dim"
    return cpp_unsupported(op_name, q=q, **options)


_op = define_op(
    "decode_attention(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? k, Tensor? v, "
    "Tensor? cache_batch_idx, Tensor? slot_table, float softmax_scale, bool is_causal, int? window_left, Tensor? cos, "
    "Tensor? sin, bool interleaved, float softcap=0.0) -> Tensor",
    decode_attention_reference,
    fake=lambda q, *rest: q.new_empty(q.shape),
    cpp_unsupported=_cpp_unsupported,
    cpp_call=_cpp_call,
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    slot_table: Tensor | None = None,
    is_causal: bool = True,
    window_left: int | None = None,
    softmax_scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Appends k and v to the cache, then attends from q to it; the caller advances cache_seqlens. No gradients.

    With total = cache_seqlens + seqlen_new, query i is aligned with key total - seqlen_q + i.

    With a slot table the cache is a store of num_blocks * block_size tokens: position p of row b is token
    slot_table[b, p]. Rows may share tokens, except for those that they write. Entries that no query sees (after a row's
    length, or before its window) are not read, and may have any value.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), floating point.
        k_cache: (cache_batch, max_seqlen, num_kv_heads, head_dim), q's dtype; written in place if k is given. With a
            slot table (num_blocks, block_size, num_kv_heads, head_dim), with strides that let a view flatten the first
            two.
        v_cache: the same shape and dtype as k_cache.
        cache_seqlens: (cache_batch,) int32, how many positions of each row are filled, before k and v.
        k: (batch, seqlen_new, num_kv_heads, head_dim) to append, with v; then batch is cache_batch.
        v: the same shape and dtype as k.
        cache_batch_idx: (batch,) int32, the cache row of each query row; None = the same row.
        slot_table: (cache_batch, max_seqlen) int32, the token of each position; None = the cache's own rows.
        is_causal: hide the keys after a query's own.
        window_left: how many keys before its own a query sees; None = all.
        softmax_scale: head_dim ** -0.5 by default.
        cos, sin: (num_positions, rotary_dim // 2), from `rotary_tables`: q and k are first rotated by their positions
            in the cache, as in `rotary`, and the rotated keys are appended. Only together with k; q then has no more
            tokens.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        softcap: as in `attention`.

    Returns:
        (batch, seqlen_q, num_heads, head_dim), q's dtype. The rows of queries without visible keys are zeros.

    Raises:
        ValueError: shapes or dtypes don't agree, k is given without v or with cache_batch_idx, or a cache can't be
            flattened as a view. On a CPU also lengths, rows and slots outside of the cache; nothing has been written
            then. On a GPU, which would have to be waited for, a row with an invalid length, cache row or slot to write
            to gives NaN, as does a row with positions outside cos and sin; slots that are only read aren't checked.
        IndexError: on a CPU, a position is outside cos and sin; nothing has been written.
    """
    is_usual = type(q) is Tensor and q.dim() == 4 and q.shape[3] > 0 and not torch.compiler.is_compiling()
    if is_usual and softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    if is_usual:
        args = (
            q, k_cache, v_cache, cache_seqlens, k, v, cache_batch_idx, slot_table, softmax_scale, is_causal,
            window_left, cos, sin, interleaved, softcap,
        )  # fmt: skip
        # Autograd has to know what an op of torch.library writes.
        out = _op.repeat(*args, check_values=functools.partial(increment_version, (k_cache, v_cache)))
        if out is not None:
            return out
    refuse_derivatives("decode_attention", q, k_cache, v_cache, k, v)
    (q,) = autocast("decode_attention", q)
    k, v = autocast("decode_attention", k, v)
    check_heads(q, k_cache, v_cache, 4, "(batch, seqlen, num_heads, head_dim)", ("q", "k_cache", "v_cache"))
    cache_batch = k_cache.shape[0] if slot_table is None else _check_slot_table(slot_table, k_cache, v_cache)
    _check_integers("cache_seqlens", cache_seqlens, cache_batch)
    _check_appended(q, k, v, k_cache, v_cache, cache_batch_idx)
    if cache_batch_idx is not None:
        _check_integers("cache_batch_idx", cache_batch_idx, q.shape[0])
    elif q.shape[0] != cache_batch:
        raise ValueError(f"expected as many queries as cache rows, got {q.shape[0]} and {cache_batch}")
    _check_rotary(q, k, cos, sin)
    if window_left is not None and not isinstance(window_left, int):
        raise ValueError(f"expected window_left to be an integer or None, got {window_left!r}")
    scale = resolve_scale(softmax_scale, q.shape[-1])
    left = resolve_bound(window_left)
    resolved = (
        q, k_cache, v_cache, cache_seqlens, k, v, cache_batch_idx, slot_table, scale, is_causal, left, cos, sin,
        interleaved, resolve_softcap(softcap),
    )  # fmt: skip
    if is_usual:
        increment_version((k_cache, v_cache))
        if left == window_left:
            _op.settle(resolved)
    if not torch.is_grad_enabled():
        return _op(*resolved)
    # With gradients enabled, the result would seem to have a gradient, but its inputs in the cache are overwritten.
    with torch.no_grad():
        return _op(*resolved)


def _check_appended(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, cache_batch_idx: Tensor | None
) -> None:
    """Raises ValueError unless k and v are both None, or both can be appended to the caches."""
    if (k is None) != (v is None):
        raise ValueError("expected k and v together, got one of them")
    if k is None or v is None:
        return
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"expected a tensor {name} or None, got {described(tensor)}")
    if cache_batch_idx is not None:
        raise ValueError("expected no cache_batch_idx with k and v: rows that share a cache row can't append to it")
    expected = (q.shape[0], k.shape[1] if k.dim() == 4 else "seqlen_new", *k_cache.shape[2:])
    if k.shape != v.shape or tuple(k.shape) != expected:
        raise ValueError(f"expected k and v of shape {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError(f"expected k and v in the cache's dtype {k_cache.dtype}, got {k.dtype} and {v.dtype}")


def _check_rotary(q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raises ValueError unless cos and sin are both None, or both cover the positions of k, which q's tokens end."""
    if (cos is None) != (sin is None):
        raise ValueError("expected cos and sin together, got one of them")
    if cos is None or sin is None:
        return
    positions = check_tables(q, cos, sin)
    if k is None or not q.shape[1] <= k.shape[1] <= positions:
        raise ValueError(
            f"expected k of at least q's {q.shape[1]} tokens, and at most the {positions} positions of cos and "
            f"sin, got {'None' if k is None else f'{k.shape[1]} tokens'}"
        )


def _check_integers(name: str, integers: Tensor, size: int) -> None:
    """Raises ValueError unless a tensor is int32 (size,)."""
    if not isinstance(integers, Tensor) or integers.shape != (size,) or integers.dtype != torch.int32:
        raise ValueError(f"expected {name} int32 of shape ({size},), got {described(integers)}")


def _check_slot_table(slot_table: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Returns the number of the table's rows.

    Raises ValueError unless it is int32 (cache_batch, max_seqlen) and fits the caches.
    """
    if not isinstance(slot_table, Tensor) or slot_table.dim() != 2 or slot_table.dtype != torch.int32:
        raise ValueError(f"expected slot_table int32 of shape (cache_batch, max_seqlen), got {described(slot_table)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.is_contiguous():
            continue
        num_blocks, block_size = cache.shape[:2]
        if num_blocks > 1 and block_size > 1 and cache.stride(0) != block_size * cache.stride(1):
            raise ValueError(
                f"expected a {name} that flattens to tokens without a copy, got {tuple(cache.shape)} with strides "
                f"{cache.stride()}: the blocks are {cache.stride(0)} apart, not {block_size * cache.stride(1)}"
            )
    return slot_table.shape[0]
