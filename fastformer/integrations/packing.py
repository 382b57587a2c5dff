"""Packed runs: layers that work on the tokens of a batch without its padding.

A call passes information to the modules inside of it by one record, `Call`, in one ContextVar. Its fields, in the order
in which they are set:

1. `grant`, set by the owner of the stacks (`padding.Owner`): the stacks that may omit padding in this call. A stack
   reads it in `PackingStack.may_leave_out`.
2. `unread`, set by a head with a fused loss (`fused_loss`): the positions whose output has no influence on the loss. A
   causal stack omits them like padding.
3. `run`, set by a stack that omits padding: a `Packing`. Its first layer packs (`entered`), its attentions ask for the
   layout of the tokens (`packed_layouts`, `entered_memory`), and its layers for replacements of the cache and the
   positions (`entered_cache`, `entered_positions`). The stack or its last layer pads the output again (`left`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fastformer.engine.checks import is_traced
from fastformer.nn.layout import Padding, SequenceLayout, read_padding
from fastformer.ops import attention, varlen_attention


class Grant(NamedTuple):
    """A permission for stacks to omit padding."""

    rule: object  # the `padding.Rule` of the owner and these stacks
    causal: bool  # whether stacks with a causal mask may, too
    stacks: frozenset[int]  # their ids


class Call(NamedTuple):
    """The information that a call passes to the modules inside of it; see above."""

    grant: Grant | None = None
    unread: Tensor | None = None  # (batch, seqlen), bool, True for the last positions of each row, if any
    run: Packing | None = None


_NOTHING_TOLD = Call()
_call: ContextVar[Call] = ContextVar("fastformer_call", default=_NOTHING_TOLD)


@contextlib.contextmanager
def telling(**told: Any) -> Iterator[None]:
    """Sets fields of the record inside the block."""
    token = _call.set(_call.get()._replace(**told))
    try:
        yield
    finally:
        _call.reset(token)


def told() -> Call:
    """Returns the record of the running call."""
    return _call.get()


@dataclass(eq=False)
class Packing:
    """One run of a stack that may omit padding: the first layer packs, and the stack's output is padded again.

    Attributes:
        known: the padding, if the stack knows it; None: it is read from the first layer's mask.
        last: the layer after which the tokens are padded again; None: the stack itself pads them.
        memory: the padding of the encoder's output to which the layers attend.
        padding: the omitted padding, from the first layer on; None while nothing is omitted.
        crosses: whether the layers are attending to the memory now.
    """

    known: Padding | None = None
    last: nn.Module | None = None
    memory: Padding | None = None
    padding: Padding | None = None
    crosses: bool = False
    _has_begun: bool = False
    _packed_memory: Tensor | None = None

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout] | None:
        """Returns the current layouts of queries and keys; None while nothing is packed."""
        if self.padding is None:
            return None
        keys = self.memory if self.crosses else self.padding
        assert keys is not None
        return self.padding.layout, keys.layout

    def enter_memory(self, memory: Tensor) -> Tensor:
        """Returns the memory (batch, seqlen, dim) as (1, total, dim), packed once for all layers."""
        if self._packed_memory is None:
            assert self.memory is not None
            self._packed_memory = self.memory.pack(memory)[None]
        return self._packed_memory

    def leave_memory(self, x: Tensor) -> Tensor:
        """Pads a tensor computed from the packed memory like the memory: (batch, seqlen, ...)."""
        assert self.memory is not None
        return self.memory.unpack(x[0])

    def enter(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns a layer's input x (batch, seqlen, dim) and its mask, or once packed (1, total, dim) and None."""
        if not self._has_begun:
            self._has_begun = True
            self.padding = padding_of(x, mask) if self.known is None else self.known
            if self.padding is not None:
                x = self.padding.pack(x)[None]
        return x, mask if self.padding is None else None

    def leave(self, x: Tensor) -> Tensor:
        """Pads the last layer's output as the first layer's input was."""
        return x if self.padding is None else self.padding.unpack(x[0])


@contextlib.contextmanager
def packing(**options: Any) -> Iterator[Packing]:
    """Makes layers take part in a `Packing` with these options inside the block."""
    run = Packing(**options)
    _count(1)
    try:
        with telling(run=run):
            yield run
    finally:
        _count(-1)


# The number of runs in all threads. A layer's forward may be compiled alone, and the compiled code must then know
# whether a run is active: torch.compile can read and guard a number, but not a ContextVar.
_num_runs = 0
_lock = threading.Lock()


def _count(more: int) -> None:
    global _num_runs
    with _lock:
        _num_runs += more


def current_run() -> Packing | None:
    """Returns the run in which a layer takes part; None outside of a run."""
    return None if _num_runs == 0 else _call.get().run


def entered(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Applies `Packing.enter` of the current run; outside of a run, returns x and mask unchanged."""
    run = current_run()
    return (x, mask) if run is None else run.enter(x, mask)


@contextlib.contextmanager
def entered_memory(memory: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Marks the block in which a layer attends to a memory; yields the memory and its mask, packed in a packed run."""
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
    """Returns the layouts of the queries and the keys of an attention; None for a padded batch."""
    run = current_run()
    return None if run is None else run.layouts


class PackedCache:
    """A wrapper of an empty cache: layers use packed keys and values, and the cache stores padded ones."""

    def __init__(self, cache: Any, padding: Padding) -> None:
        self._cache = cache
        self._padding = padding

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores k and v, each (1, num_kv_heads, total, head_dim), as padded tensors, and returns them packed."""
        self._cache.update(self._padded(k), self._padded(v), *args, **kwargs)
        return k, v

    def _padded(self, x: Tensor) -> Tensor:
        return self._padding.unpack(x[0].transpose(0, 1)).transpose(1, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def entered_cache(cache: Any) -> Any:
    """Returns the cache that a layer uses: a `PackedCache` in a packed run."""
    run = current_run()
    return cache if cache is None or run is None or run.padding is None else PackedCache(cache, run.padding)


def writes_plainly(cache: Any) -> bool:
    """Returns whether a cache needs only the layer's number to store keys and values."""
    return cache is None or type(cache) in (DynamicCache, PackedCache)


def entered_positions(embeddings: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """Returns embeddings of positions, each (batch or 1, seqlen, head_dim), for a layer: packed in a packed run."""
    run = current_run()
    if embeddings is None or run is None or (padding := run.padding) is None:
        return embeddings
    return tuple(padding.pack(each.expand(padding.shape[0], -1, -1))[None] for each in embeddings)


def left(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns a layer's output, padded again if the layer is the last of a packed run."""
    run = current_run()
    return x if run is None or run.last is not layer else run.leave(x)


def key_padding_of(mask: Tensor | None) -> Tensor | None:
    """Returns a mask as (batch, seqlen_k), True = ignore, if it is the same for all queries and heads; else None.

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
    """Returns the padding of x (batch, seqlen, dim) that a mask (see `key_padding_of`) marks; None if it marks none."""
    if mask is None or type(x) is not Tensor or x.dim() != 3 or is_traced():
        return None
    key_padding_mask = key_padding_of(mask)
    if key_padding_mask is None or key_padding_mask.shape != x.shape[:2]:
        return None
    return worth_packing(read_padding(x, key_padding_mask, True))


def worth_packing(padding: Padding | None) -> Padding | None:
    """Returns the padding if there is both padding and at least one token; else None."""
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
    """Computes attention of (batch, seqlen, num_heads, head_dim), or of (1, total, ...) in a packed run.

    Args:
        q, k, v: see above; k and v may have fewer heads.
        mask: transformers' (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k), bool (True = attend) or additive.
        dropout_p, scale: as in `ops.attention`.
        is_causal: whether query i sees only keys up to its own position.
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
