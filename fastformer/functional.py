"""Functions under PyTorch's names: `scaled_dot_product_attention`, the kinds of its `attn_mask`, and `activate`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant

from fastformer.engine.checks import is_traced
from fastformer.locks import ForkSafeLock
from fastformer.ops import attention, varlen_attention
from fastformer.ops._common import expand_mask, resolve_scale
from fastformer.ops.attention import why_no_kernel


@dataclass(frozen=True)
class Window:
    """A mask of the keys that a query sees, counted from its own key on the diagonal that ends at the bottom right.

    Attributes:
        left: the number of keys before its own; None = all.
        right: the number of keys after its own; None = all.
    """

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class BlockDiagonal:
    """A mask of several sequences in a batch of one, each of which sees only itself.

    Attributes:
        seqlens_q: the number of queries of each sequence.
        seqlens_k: the number of keys of each sequence; None: that of its queries.
        window: within each sequence, counted from its own bottom right.
    """

    seqlens_q: Sequence[int]
    seqlens_k: Sequence[int] | None = None
    window: Window = Window()


def causal_lower_right() -> Window:
    """Returns the mask of decoding with a cache: no keys beyond the diagonal that ends at the bottom right."""
    return Window(None, 0)


AttentionBias = Tensor | Window | BlockDiagonal | None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AttentionBias = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes `torch.nn.functional.scaled_dot_product_attention`, with fastformer's kernels if they support the call.

    Other calls, and calls for which `torch.nn.attention.sdpa_kernel` names backends, run on PyTorch's kernels. A query
    that sees no key results in zeros.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim), floating point; PyTorch computes other ranks.
        key, value: (batch, num_heads, seqlen_k, head_dim); with enable_gqa of fewer heads.
        attn_mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k), bool (True = attend) or added to the scores.
            With is_causal as well, PyTorch decides. If a long mask on a CPU is a triangle or a window for all batches
            and heads, the keys that it hides are skipped. Or a `torch.nn.attention.bias.CausalBias`, a `Window`, or a
            `BlockDiagonal` for a batch of one.
        dropout_p: the probability that an attention weight is dropped, rounded to a multiple of 1/256. As in PyTorch,
            it applies in evaluation, too.
        is_causal: query i sees keys 0 to i (from the top left).
        scale: factor of the scores; head_dim ** -0.5 by default.
        enable_gqa: key and value may have fewer heads, each for num_heads / num_kv_heads query heads.

    Returns:
        (batch, num_heads, seqlen_q, head_dim). Its strides are in the order of query's, as in PyTorch's fused
        attention on CPUs: contiguous for a contiguous query; transposed from (batch, seqlen_q, num_heads, head_dim) for
        a query that is. With dropout as well, where PyTorch's output is contiguous.

    Raises:
        ValueError: key and value of different lengths; a bias along with is_causal; blocks that don't fit. For calls
            that PyTorch computes, PyTorch's errors.
    """
    return attend_heads(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lies_as_query=True)


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AttentionBias,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    lies_as_query: bool,
) -> Tensor:
    """Computes `scaled_dot_product_attention`; without `lies_as_query` the output has the fastest strides.

    For fastformer's kernels those are transposed from (batch, seqlen_q, num_heads, head_dim).
    """
    if not (key.is_nested or value.is_nested) and key.shape[-2:-1] != value.shape[-2:-1]:
        # PyTorch's kernel for CPUs doesn't check this, and reads past the keys if there are more values.
        raise ValueError(
            f"expected key and value of one length, got key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if attn_mask is not None and is_causal:
        if type(attn_mask) is not Tensor:
            raise ValueError(f"expected a {type(attn_mask).__name__} or is_causal, got both")
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if isinstance(attn_mask, CausalBias):
        right = 0 if attn_mask.variant == CausalVariant.LOWER_RIGHT else query.shape[-2] - key.shape[-2]
        attn_mask = Window(None, right)
    if isinstance(attn_mask, BlockDiagonal):
        return _block_diagonal(query, key, value, attn_mask, dropout_p, scale)
    if not _is_supported(query, key, value, attn_mask if isinstance(attn_mask, Tensor) else None, scale, enable_gqa):
        if isinstance(attn_mask, Window):
            attn_mask = _as_mask(attn_mask, query, key)
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    window = Window(None, query.shape[-2] - key.shape[-2]) if is_causal else Window()
    if isinstance(attn_mask, Tensor) and (band := _band_of(attn_mask, query, key)) is not None:
        attn_mask = band
    if isinstance(attn_mask, Window):
        window, attn_mask = attn_mask, None
    by_head = lies_as_query and _is_head_major(query, key, value, attn_mask)
    q, k, v = (x.flatten(0, 1).unsqueeze(2) if by_head else x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        window_size=(window.left, window.right),
        softmax_scale=scale,
        dropout_p=dropout_p,
    )
    if by_head:
        return out.view(query.shape)
    return _like_query(query, out) if lies_as_query else out.transpose(1, 2)


def _is_head_major(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Returns whether the heads can be passed as a batch. fastformer's output has a token's heads side by side."""
    return (
        all(x.is_contiguous() for x in (query, key, value))
        and key.shape[1] == query.shape[1]
        and (attn_mask is None or attn_mask.shape[:-2].numel() == 1)
    )


def _like_query(query: Tensor, out: Tensor) -> Tensor:
    """Gives an output (batch, seqlen_q, num_heads, head_dim) PyTorch's shape, with the order of query's strides."""
    strides = query.stride()
    order = sorted(range(3), key=lambda dim: -strides[dim]) if strides[3] == 1 else [0, 1, 2]
    out = out.transpose(1, 2)
    if order == [0, 2, 1]:  # the usual query: a linear map's output, split into heads
        return out
    return out.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)


def _block_diagonal(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockDiagonal, dropout_p: float, scale: float | None
) -> Tensor:
    seqlens = (blocks.seqlens_q, blocks.seqlens_q if blocks.seqlens_k is None else blocks.seqlens_k)
    queries, keys = map(sum, seqlens)
    if query.dim() != 4 or query.shape[0] != 1 or (queries, keys) != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"expected a batch of one with {queries} queries and {keys} keys, as the blocks have, got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}"
        )
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32).to(query.device)
        for lengths in seqlens
    )
    out = varlen_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q,
        cu_seqlens_k,
        *map(max, seqlens),
        window_size=(blocks.window.left, blocks.window.right),
        softmax_scale=scale,
        dropout_p=dropout_p,
    )
    return _like_query(query, out[None])


def _as_mask(window: Window, query: Tensor, key: Tensor) -> Tensor:
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if window.right is not None:
        mask = mask.tril(seqlen_k - seqlen_q + window.right)
    return mask if window.left is None else mask.triu(seqlen_k - seqlen_q - window.left)


# An attention of this many multiplications takes much longer than reading its mask.
_WORTH_READING = 2**24


def _band_of(mask: Tensor, query: Tensor, key: Tensor) -> Window | None:
    """Returns the window that a mask is for all batches and heads, whose hidden keys are then skipped; None: no window.

    Each call reads the mask, since writes to it can go unnoticed. So this is done only on a CPU, and only for an
    attention that takes much longer.
    """
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    shared = all(size == 1 or step == 0 for size, step in zip(mask.shape[:-2], mask.stride()[:-2], strict=True))
    if mask.device.type != "cpu" or mask.requires_grad or is_traced() or not shared:
        return None
    if mask.shape[-2:] != (seqlen_q, seqlen_k) or query.numel() * seqlen_k < _WORTH_READING:
        return None
    rows = mask[(0,) * (mask.dim() - 2)]
    seen = rows if rows.dtype == torch.bool else rows == 0
    # The first row gives the band's end, the last row its start.
    ends, begins = int(seen[0].sum()), int(seen[-1].int().argmax())
    right = None if ends == seqlen_k else ends - 1 - (seqlen_k - seqlen_q)
    window = Window(seqlen_k - 1 - begins if begins else None, right)
    expected = _as_mask(window, query, key)
    if not torch.equal(seen, expected) or not bool(expected.any(-1).all()):
        return None
    # The lowest number hides a key as -inf does, if the row has another key.
    if rows.dtype != torch.bool and not torch.equal(rows <= torch.finfo(rows.dtype).min, ~expected):
        return None
    return window


def _is_supported(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> bool:
    """Returns whether fastformer's kernels compute a call, and not PyTorch."""
    if not _is_plain_call(query, key, value, attn_mask) or not _have_shapes(query, key, value, attn_mask, enable_gqa):
        return False
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    try:
        return why_no_kernel(q, k, v, expand_mask(attn_mask, q, k), resolve_scale(scale, q.shape[-1])) is None
    except ValueError:  # the mask doesn't fit, and PyTorch has an error for that
        return False


def _is_plain_call(*inputs: Tensor | None) -> bool:
    """Returns whether a call with such tensors can run on fastformer's kernels in this context, whatever the shapes."""
    tensors = [x for x in inputs if x is not None]
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested for x in tensors)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        # Else `sdpa_kernel` names other backends.
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.math_sdp_enabled()
        and len({x.device for x in tensors}) == 1
    )


def _have_shapes(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> bool:
    """Returns whether fastformer's kernels support tensors of these shapes and dtypes, and PyTorch accepts the mask."""
    return (
        query.dim() == 4
        and key.shape == value.shape
        and (query.shape[0], query.shape[-1]) == (key.shape[0], key.shape[-1])
        and (key.shape[1] == query.shape[1] or bool(enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0))
        and query.dtype == key.dtype == value.dtype
        and query.numel() > 0
        and (attn_mask is None or (attn_mask.dim() > 1 and attn_mask.dtype in (torch.bool, torch.float32, query.dtype)))
    )


def _torch_attention(*args: Any, **options: Any) -> Tensor:
    """Computes a call by PyTorch's own code, even while `activate` routes the name to fastformer's."""
    if _activation is None:
        return F.scaled_dot_product_attention(*args, **options)
    return torch.ops.aten.scaled_dot_product_attention.default.decompose(*args, **options)


_activation: torch.library.Library | None = None
_activated: set[_Activated] = set()  # the calls of `activate` that haven't ended
_lock = ForkSafeLock()


class _Activated(contextlib.AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        with _lock:
            _activated.discard(self)
            _end_if_unused()


def activate() -> contextlib.AbstractContextManager[None]:
    """Routes all eager calls of torch's `scaled_dot_product_attention` in this process to fastformer's kernels.

    That includes calls in other threads and through names imported before, on the CPU and on CUDA. Calls that
    fastformer's kernels don't support run on PyTorch's code, and compiled code doesn't change. It lasts until
    `deactivate`, or until the end of a block:

        with fastformer.activate():
            model(x)

    Blocks may overlap, inside of each other or in several threads: the last one to end ends it.

    Returns:
        A context manager that ends this activation on leaving.
    """
    global _activation
    block = _Activated()
    with _lock:
        _activated.add(block)
        if _activation is None:
            # Set before the name is routed to fastformer's, and until it no longer is: another thread may be calling
            # it.
            library = _activation = torch.library.Library("aten", "IMPL")
            for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA"):
                library.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
    return block


def deactivate() -> None:
    """Ends every activation, also those of blocks that are running; does nothing if there is none."""
    with _lock:
        _activated.clear()
        _end_if_unused()


def _end_if_unused() -> None:
    global _activation
    if _activation is not None and not _activated:
        _activation._destroy()
        _activation = None
