"""The checks of a stack before it runs its layers with a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from fastformer.cache import KVCache
from fastformer.errors import InputError
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.layout import SequenceLayout


def next_tokens(
    cache: KVCache,
    x: Tensor,
    layers: nn.ModuleList,
    layout: SequenceLayout | None,
    key_layers: Sequence[int] | None = None,
) -> tuple[int, Tensor | None, bool]:
    """Returns the arguments of `KVCache.begin` for a stack's input, which is checked.

    Args:
        cache: the cache to which the input is appended.
        x: the stack's input, padded, or the packed prompts of rows that are empty.
        layers: the layers of the stack.
        layout: the layout of x.
        key_layers: see `TransformerEncoder`.

    Raises:
        InputError: the number of layers or of rows differs from the cache's; the shapes don't fit; there are more
            tokens than free positions; the input is packed prompts, but rows already have tokens.
    """
    check_layers(cache, layers, key_layers)
    packed = layout is not None and layout.is_packed
    if x.dim() != (2 if packed else 3):
        expected = "packed tokens (the layout is packed)" if packed else "a padded batch, or a packed layout,"
        raise InputError(f"expected {expected} along with a cache, got a tensor of shape {tuple(x.shape)}")
    if packed and layout is not None:
        batch, num_tokens = layout.batch_size, layout.max_seqlen
        if cache.length_bound > 0:
            raise InputError("expected packed prompts for rows that are empty, got rows with tokens (KVCache.tail)")
    else:
        batch, num_tokens = x.shape[:2] if _attention(layers).batch_first else (x.shape[1], x.shape[0])
    cache.check_rows(batch)
    cache.check_room(num_tokens)
    return num_tokens, None if layout is None else layout.read_seqlens(), packed


def check_layers(cache: KVCache, layers: nn.ModuleList, key_layers: Sequence[int] | None = None) -> None:
    """Raises InputError if the cache is another model's: if its layers or heads differ from the stack's."""
    modules: Any = layers if key_layers is None else [layers[i] for i in sorted(set(key_layers))]
    if cache.num_layers != len(modules):
        raise InputError(f"expected a cache of {len(modules)} layers, got one of {cache.num_layers}")
    for layer, heads in zip(modules, cache.layer_heads, strict=True):
        expected = (layer.self_attn.num_kv_heads, layer.self_attn.head_dim)
        if heads != expected:
            raise InputError(f"expected a cache of num_kv_heads and head_dim {expected}, got one of {heads}")


def _attention(layers: nn.ModuleList) -> MultiheadAttention:
    return cast(MultiheadAttention, layers[0].self_attn)


def check_masks(mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool) -> None:
    """Raises InputError for masks other than the causal one, since cached attention is causal."""
    if key_padding_mask is not None or (mask is not None and not is_causal):
        raise InputError(
            "expected no mask but the causal one along with a cache; `layout=` tells which tokens are padding"
        )
