"""Attention of one or a few new queries against a key-value cache, which their own keys and values enter first.

The cache has a fixed size and the lengths live on the device, so a decoding step has fixed shapes and no host sync.
Beams that decode one source share the row of its cross-attention cache through cache_batch_idx.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastformer.ops._attention_reference import Scores, attend
from fastformer.ops._common import described
from fastformer.ops._library import autocast, define_op
from fastformer.ops.attention import check_heads, cpp_unsupported, resolve_scale


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_batch_idx: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_left: int | None,
) -> Tensor:
    """The arguments are the schema's."""
    total = cache_seqlens
    if k is not None and v is not None:
        position = cache_seqlens[:, None].long() + torch.arange(k.shape[1], device=k.device)
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        k_cache[row, position], v_cache[row, position] = k, v
        total = cache_seqlens + k.shape[1]
    if cache_batch_idx is not None:
        total = total[cache_batch_idx]
    keys, values = k_cache, v_cache
    if q.device.type == "cpu" and total.numel():
        # Reading a number costs nothing here, and the cache may be far longer than what is in it.
        used = max(int(total.max()), 0)
        keys, values = keys[:, :used], values[:, :used]
    if cache_batch_idx is not None:
        keys, values = keys[cache_batch_idx], values[cache_batch_idx]
    right = 0 if is_causal else None
    return attend(q, keys, values, Scores(softmax_scale, total - q.shape[1], window_left, right, keys=total))[0]


_op = define_op(
    "decode_attention(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? k, Tensor? v, "
    "Tensor? cache_batch_idx, float softmax_scale, bool is_causal, int? window_left) -> Tensor",
    decode_attention_reference,
    stem="decode_attention",
    fake=lambda q, *rest: q.new_empty(q.shape),
    cpp_unsupported=cpp_unsupported,
    reference_only={"triton": "there is no Triton kernel for it yet"},
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
    is_causal: bool = True,
    window_left: int | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Appends k and v to the cache, then attends from q to it. Without gradients; the caller advances cache_seqlens.

    With total = cache_seqlens + seqlen_new, query i is aligned with key total - seqlen_q + i.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), floating point.
        k_cache: (cache_batch, max_seqlen, num_kv_heads, head_dim), q's dtype; written in place when k is given.
        v_cache: as k_cache.
        cache_seqlens: (cache_batch,) int32, how many positions of each row are filled, before k and v.
        k: (batch, seqlen_new, num_kv_heads, head_dim) to append, with v; then batch is cache_batch.
        v: as k.
        cache_batch_idx: (batch,) int32, the cache row of each query row; None = the same row.
        is_causal: a query sees no key after its own.
        window_left: how many keys before its own a query sees; None = all.
        softmax_scale: head_dim ** -0.5 by default.

    Returns:
        (batch, seqlen_q, num_heads, head_dim), q's dtype. Queries that see no key give zeros.

    Raises:
        ValueError: shapes or dtypes that do not agree, k without v, k together with cache_batch_idx.
    """
    (q,) = autocast("decode_attention", q)
    k, v = autocast("decode_attention", k, v)
    check_heads(q, k_cache, v_cache, 4, "(batch, seqlen, num_heads, head_dim)")
    cache_batch = k_cache.shape[0]
    if (
        not isinstance(cache_seqlens, Tensor)
        or cache_seqlens.shape != (cache_batch,)
        or cache_seqlens.dtype != torch.int32
    ):
        raise ValueError(f"expected cache_seqlens int32 of shape ({cache_batch},), got {described(cache_seqlens)}")
    if (k is None) != (v is None):
        raise ValueError("expected k and v together, got one of them")
    if k is not None and v is not None:
        if cache_batch_idx is not None:
            raise ValueError("expected no cache_batch_idx with k and v: rows that share a cache row can't append to it")
        expected = (q.shape[0], k.shape[1] if k.dim() == 4 else "seqlen_new", *k_cache.shape[2:])
        if k.shape != v.shape or tuple(k.shape) != expected:
            raise ValueError(f"expected k and v of shape {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
        if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
            raise ValueError(f"expected k and v in the cache's dtype {k_cache.dtype}, got {k.dtype} and {v.dtype}")
    if cache_batch_idx is None and q.shape[0] != cache_batch:
        raise ValueError(f"expected as many queries as cache rows, got {q.shape[0]} and {cache_batch}")
    if cache_batch_idx is not None and (cache_batch_idx.shape != (q.shape[0],) or cache_batch_idx.dtype != torch.int32):
        raise ValueError(f"expected cache_batch_idx int32 of shape ({q.shape[0]},), got {described(cache_batch_idx)}")
    scale = resolve_scale(softmax_scale, q.shape[-1])
    return _op(q, k_cache, v_cache, cache_seqlens, k, v, cache_batch_idx, scale, is_causal, window_left)
