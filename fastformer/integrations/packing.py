"""Packed runs: layers that work on the tokens of a batch without its padding.

What one call tells the modules inside of it stands in one record, `Call`, in one ContextVar. In the order of setting:

1. `grant`, by the owner of the stacks (`padding.Owner`): which stacks may leave padding out in this call. A stack asks
   for it in `PackingStack.may_leave_out`.
2. `unread`, by a head with a fused loss (`fused_loss`): the positions whose output has no influence on the loss. A
   causal stack leaves them out like padding.
3. `run`, by a stack that leaves padding out: a `Packing`. Its first layer packs (`entered`), its attentions ask how
   the tokens lie (`packed_layouts`, `entered_memory`), its layers what stands for a cache or for positions
   (`entered_cache`, `entered_positions`). The stack pads its output again, or its last layer does (`left`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fastformer.nn.guards import is_traced
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.padding import Padding, read_padding
from fastformer.ops import attention, varlen_attention


class Grant(NamedTuple):
    """Which stacks may leave padding out."""

    rule: object  # the `padding.Rule` of the owner and these stacks
    causal: bool  # whether stacks with a causal mask may, too
    stacks: frozenset[int]  # their ids


class Call(NamedTuple):
    """What a call has told the modules inside of it; see above."""

    grant: Grant | None = None
    unread: Tensor | None = None
    run: Packing | None = None


_NOTHING_TOLD = Call()
_call: ContextVar[Call] = ContextVar("fastformer_call", default=_NOTHING_TOLD)


@contextlib.contextmanager
def _within(**told: Any) -> Iterator[None]:
    token = _call.set(_call.get()._replace(**told))
    try:
        yield
    finally:
        _call.reset(token)


def granting(grant: Grant | None) -> contextlib.AbstractContextManager[None]:
    """In the block these stacks, and no others, may leave padding out."""
    return _within(grant=grant)


def granted() -> Grant | None:
    """The grant of the call that is running."""
    return _call.get().grant


def leaving_unread(positions: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """In the block nothing reads the output of causal stacks at these positions.

    Args:
        positions: (batch, seqlen), bool, in each row a number of the last ones; None: all are read.
    """
    return _within(unread=positions)


def unread(shape: torch.Size) -> Tensor | None:
    """The positions of `leaving_unread`, for a batch of this shape."""
    positions = _call.get().unread
    return None if positions is None or positions.shape != shape else positions


class Packing:
    """One run of a stack that may leave padding out: the first layer packs, and the stack's output is padded again.

    Args:
        known: the padding, if the stack knows it; None: the first layer's mask tells.
        last: the layer behind which the tokens are padded again, if it isn't the stack that does so.
        memory: the padding of the encoder's output that the layers attend to.

    Attributes:
        padding: what was left out, from the first layer on; None while nothing is.
        last: see above.
        crosses: whether the memory is being attended to now.
    """

    def __init__(
        self, known: Padding | None = None, last: nn.Module | None = None, memory: Padding | None = None
    ) -> None:
        self.padding: Padding | None = None
        self.last = last
        self.crosses = False
        self._known = known
        self._has_begun = False
        self._memory_padding = memory
        self._packed_memory: Tensor | None = None

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout] | None:
        """How queries and keys lie now; None while nothing is packed."""
        if self.padding is None:
            return None
        keys = self._memory_padding if self.crosses else self.padding
        assert keys is not None
        return self.padding.layout, keys.layout

    def enter_memory(self, memory: Tensor) -> Tensor:
        """The memory (batch, seqlen, dim) as (1, total, dim), packed once for all layers."""
        if self._packed_memory is None:
            assert self._memory_padding is not None
            self._packed_memory = self._memory_padding.pack(memory)[None]
        return self._packed_memory

    def leave_memory(self, x: Tensor) -> Tensor:
        """What was computed from the packed memory, padded like the memory: (batch, seqlen, ...)."""
        assert self._memory_padding is not None
        return self._memory_padding.unpack(x[0])

    def enter(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A layer's input x (batch, seqlen, dim) and its mask; once packed (1, total, dim) and None."""
        if not self._has_begun:
            self._has_begun = True
            self.padding = padding_of(x, mask) if self._known is None else self._known
            if self.padding is not None:
                x = self.padding.pack(x)[None]
        return x, mask if self.padding is None else None

    def leave(self, x: Tensor) -> Tensor:
        """The last layer's output, padded as the first layer's input was."""
        return x if self.padding is None else self.padding.unpack(x[0])


@contextlib.contextmanager
def packing(
    known: Padding | None = None, last: nn.Module | None = None, memory: Padding | None = None
) -> Iterator[Packing]:
    """In the block layers take part in a `Packing`, which has the same arguments."""
    run = Packing(known, last, memory)
    _count(1)
    try:
        with _within(run=run):
            yield run
    finally:
        _count(-1)


# The number of runs in all threads. A layer's forward may be compiled alone, and then compiled code has to know whether
# there is a run: torch.compile can read a number and guard it, but no ContextVar.
_num_runs = 0
_lock = threading.Lock()


def _count(more: int) -> None:
    global _num_runs
    with _lock:
        _num_runs += more


def current_run() -> Packing | None:
    """The run that a layer takes part in, if there is one."""
    return None if _num_runs == 0 else _call.get().run


def entered(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`Packing.enter` of the current run; x and mask as they are if there is none."""
    run = current_run()
    return (x, mask) if run is None else run.enter(x, mask)


@contextlib.contextmanager
def entered_memory(memory: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """In the block a layer attends to a memory: yields the memory and its mask as the current run has them."""
    run = current_run()
    if run is None or run.padding is None:
        yield memory, mask
        return
    run.crosses = True
    try:
        yield run.enter_memory(memory), None
    finally:
        run.crosses = False


def packed_layouts() -> tuple[SequenceLayout, SequenceLayout] | None:
    """How the queries and the keys of an attention lie; None for a padded batch."""
    run = current_run()
    return None if run is None else run.layouts


class PackedCache:
    """Stands for a cache that was empty: layers use packed keys and values, and the cache keeps padded ones."""

    def __init__(self, cache: Any, padding: Padding) -> None:
        self._cache = cache
        self._padding = padding

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """k, v: (1, num_kv_heads, total, head_dim)."""
        self._cache.update(self._padded(k), self._padded(v), *args, **kwargs)
        return k, v

    def _padded(self, x: Tensor) -> Tensor:
        return self._padding.unpack(x[0].transpose(0, 1)).transpose(1, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def entered_cache(cache: Any) -> Any:
    """The cache that a layer uses: a `PackedCache` in a packed run."""
    run = current_run()
    return cache if cache is None or run is None or run.padding is None else PackedCache(cache, run.padding)


def writes_plainly(cache: Any) -> bool:
    """Whether keys and values can be put into a cache with no more than the layer's number."""
    return cache is None or type(cache) in (DynamicCache, PackedCache)


def entered_positions(embeddings: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """Embeddings of positions, each (batch or 1, seqlen, head_dim), as a layer uses them: packed in a packed run."""
    run = current_run()
    if embeddings is None or run is None or (padding := run.padding) is None:
        return embeddings
    return tuple(padding.pack(each.expand(padding.shape[0], -1, -1))[None] for each in embeddings)


def left(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer's output, padded again if the layer is the last of a packed run."""
    run = current_run()
    return x if run is None or run.last is not layer else run.leave(x)


def key_padding_of(mask: Tensor | None) -> Tensor | None:
    """A mask that is the same for all queries and heads as (batch, seqlen_k), True = ignore; None for any other mask.

    Args:
        mask: transformers' (batch, 1, seqlen_q or 1, seqlen_k), bool (True = attend) or added to the scores. An added
            mask ignores a key by the lowest number of its dtype, or -inf.
    """
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1 or mask.requires_grad or mask.shape[2] == 0:
        return None
    rows = mask[:, 0]
    first = rows[:, 0]
    if rows.shape[1] > 1 and rows.stride(1) != 0 and not bool((rows == first[:, None]).all()):
        return None
    if first.dtype == torch.bool:
        return ~first
    ignored = first <= torch.finfo(first.dtype).min
    return ignored if bool((ignored | (first == 0)).all()) else None


def padding_of(x: Tensor, mask: Tensor | None) -> Padding | None:
    """The padding of x, (batch, seqlen, dim), that a mask (see `key_padding_of`) names; None if it names none."""
    if mask is None or type(x) is not Tensor or x.dim() != 3 or is_traced():
        return None
    key_padding_mask = key_padding_of(mask)
    if key_padding_mask is None or key_padding_mask.shape != x.shape[:2]:
        return None
    return worth_packing(read_padding(x, key_padding_mask, True))


def worth_packing(padding: Padding | None) -> Padding | None:
    """The padding, if there is any and there are tokens beside it."""
    return None if padding is None or padding.is_none or not padding.tokens.numel() else padding


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of (batch, seqlen, num_heads, head_dim), or of (1, total, ...) in a packed run.

    Args:
        q, k, v: see above; k and v may have fewer heads.
        mask: transformers' (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k), bool (True = attend) or additive.
        dropout_p, scale: as in `ops.attention`.
        is_causal: query i sees no key after its own.
    """
    layouts = packed_layouts()
    if layouts is not None:
        queries, keys = layouts
        assert mask is None and queries.cu_seqlens is not None and keys.cu_seqlens is not None and q.shape[0] == 1
        out = varlen_attention(
            q[0], k[0], v[0], queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen,
            is_causal=is_causal, softmax_scale=scale, dropout_p=dropout_p,
        )  # fmt: skip
        return out[None]
    return attention(q, k, v, attn_mask=mask, is_causal=is_causal, softmax_scale=scale, dropout_p=dropout_p)
