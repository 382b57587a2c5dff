"""Stacks of layers that omit padding: encoders, decoders with a memory, decoder-only models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fastformer.engine.checks import is_traced, is_written_as_known
from fastformer.integrations.attention_interface import is_patched, masks_as_known
from fastformer.integrations.known import CACHE, CACHE_NAMES, cache_of, gives_tuple, nothing_else, take_cache
from fastformer.integrations.packing import entered, entered_cache, packing, told, worth_packing, writes_plainly
from fastformer.integrations.padding import PackingStack
from fastformer.nn.layout import Padding, read_padding


class Stack(PackingStack):
    """The base of the stacks: a model with a list of layers.

    Attributes:
        layers_name: the name of the attribute that holds the layers.
        kinds: the exact classes of a layer and of its attentions; see `is_known_layer`.
        attentions: the names of a layer's attentions.
        crossing: the name of the attention to an encoder's output.
    """

    layers_name: ClassVar[str] = "layers"
    kinds: ClassVar[tuple[type[nn.Module], ...]]
    attentions: ClassVar[tuple[str, ...]] = ("self_attn",)
    crossing: ClassVar[str | None] = None
    config: Any

    def has_known_layers(self) -> bool:
        return all(map(self.is_known_layer, getattr(self, self.layers_name)))

    def is_known_layer(self, layer: Any) -> bool:
        """Returns whether a layer accepts packed tokens.

        A layer with a wrapper around its attention doesn't: the wrapper may call the attention again after the stack
        has ended, as a checkpoint does. Nor does one whose attention was made causal, or no longer is: packed tokens
        have no mask, which otherwise overrules that.
        """
        return type(layer) in self.kinds and all(
            type(attention := getattr(layer, name, None)) in self.kinds
            and bool(getattr(attention, "is_causal", False)) == (self.is_causal_stack() and name != self.crossing)
            for name in self.attentions
        )


class Encoder(Stack):
    """An encoder whose layers see packed tokens. Its output is zeros at padding."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asked = (kwargs.get(name) for name in ("output_hidden_states", "output_attentions", "is_causal"))
        if any(asked) or not self._may_pack():
            return super().forward(*args, **kwargs)
        with packing() as run:
            out = super().forward(*args, **kwargs | {"return_dict": True})
        if run.padding is not None:
            out.last_hidden_state = run.leave(out.last_hidden_state)
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out

    def _may_pack(self) -> bool:
        config = self.config
        asked = (config.output_hidden_states, config.output_attentions, getattr(config, "is_causal", False))
        return is_patched(self) and not any(asked) and self.may_leave_out()


# Arguments that don't change what a layer computes here, or are among what it reads.
_HARMLESS_TO_LAYERS = frozenset(
    {
        *("attention_mask", "use_cache", "position_ids", "cache_position", "position_embeddings", "num_items_in_batch"),
        *CACHE_NAMES,
    }
)
# Arguments of a stack that don't decide whether its tokens can be packed.
_HARMLESS = frozenset(
    {
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "cache_position"),
        *("use_cache", "return_dict", "num_items_in_batch", "is_causal"),
        *CACHE_NAMES,
    }
)


class Causal(Stack):
    """A stack with a causal mask. It may omit padding unless a filled cache precedes its tokens."""

    def is_causal_stack(self) -> bool:
        return True

    def _layers(self) -> Sequence[nn.Module]:
        """Returns the layers that a call runs, in order."""
        return list(getattr(self, self.layers_name))

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding | None:
        """Returns the padding that a call omits; None if it omits nothing."""
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if is_traced() or type(ids) is not Tensor or len(args) > 1:
            return None
        if ids.dim() != (3 if ids.is_floating_point() else 2):
            return None
        left_out = self._left_out(ids.shape[:2], kwargs)
        cache = cache_of(kwargs)
        if left_out is None or (cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() != 0)):
            return None
        config = self.config
        asked = (config.output_hidden_states, config.output_attentions, kwargs.get("is_causal") is False)
        other = (not getattr(config, "is_causal", True), getattr(config, "add_cross_attention", False))
        if any((*asked, *other)) or not nothing_else((), kwargs, _HARMLESS):
            return None
        layers = self._layers()
        # If the last layer also occurs earlier in the list, tokens would be padded again there.
        if not layers or layers.count(layers[-1]) > 1:
            return None
        if not (is_patched(self) and masks_as_known() and self.may_leave_out()):
            return None
        return worth_packing(read_padding(ids, left_out, True))

    def _left_out(self, shape: torch.Size, kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the positions (batch, seqlen) of padding and of unread output; None if no argument says so."""
        mask, left_out = kwargs.get("attention_mask"), None
        if mask is not None:
            if type(mask) is not Tensor or mask.shape != shape:
                return None
            left_out = mask == 0
        elif kwargs.get("position_ids") is not None:  # transformers uses them to find several documents in one row
            return None
        behind = None if self._fills_cache(kwargs) else told().unread
        if behind is None or behind.shape != shape:
            return left_out
        return behind if left_out is None else left_out | behind

    def _fills_cache(self, kwargs: dict[str, Any]) -> bool:
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.config, "use_cache", False) if use_cache is None else use_cache
        return bool(use_cache) or cache_of(kwargs) is not None


class CausalStack(Causal):
    """A decoder-only model's stack, whose layers see packed tokens. Its output is zeros at padding."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        padding = self._padding(args, kwargs)
        if padding is None:
            return super().forward(*args, **kwargs)
        with packing(known=padding, last=self._layers()[-1]):
            out = super().forward(*args, **kwargs | {"return_dict": True})
        left_out = self._left_out(torch.Size(padding.shape), kwargs)
        assert left_out is not None
        out.last_hidden_state = out.last_hidden_state.masked_fill(left_out[..., None], 0)  # the norm adds its bias
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out


class CausalLayer(nn.Module):
    """A layer of a `CausalStack`, for packed tokens or a padded batch.

    Attributes:
        names: the names of a layer's positional arguments after its hidden states.
    """

    names: ClassVar[tuple[str, ...]]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if not (
            is_written_as_known(type(self))
            and nothing_else((), given, _HARMLESS_TO_LAYERS)
            and writes_plainly(cache_of(given))
        ):
            return super().forward(hidden_states, *args, **kwargs)
        x, given["attention_mask"] = entered(hidden_states, given.get("attention_mask"))
        given[CACHE] = entered_cache(take_cache(given))
        return self._computed(x, given)

    def _computed(self, x: Tensor, given: dict[str, Any]) -> Any:
        """Returns the output for tokens that may be packed.

        Args:
            x: the hidden states.
            given: the other arguments by name, with the mask and the cache that belong to x.
        """
        raise NotImplementedError


_MEMORY = ("encoder_hidden_states", "encoder_attention_mask")


class Decoder(Causal):
    """A decoder whose layers see packed tokens, its own and the encoder's. Its output is zeros at its padding."""

    attentions = ("self_attn", "encoder_attn")
    crossing = "encoder_attn"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in kwargs.items() if name not in _MEMORY}
        padding = None if self._fills_cache(kwargs) else self._padding(args, own)
        if padding is None:
            return super().forward(*args, **kwargs)
        memory, mask = (kwargs.get(name) for name in _MEMORY)
        memory_padding = None if memory is None else _memory_padding(memory, mask, padding.shape[0])
        if memory is not None and memory_padding is None:
            return super().forward(*args, **kwargs)
        with packing(known=padding, memory=memory_padding) as run:
            out = super().forward(*args, **kwargs | {"return_dict": True})
        out.last_hidden_state = run.leave(out.last_hidden_state)
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out


def _memory_padding(memory: Any, mask: Any, batch: int) -> Padding | None:
    """Returns the padding of an encoder's output (batch, seqlen, dim); None if it can't be packed or a row is empty."""
    if type(memory) is not Tensor or memory.dim() != 3 or memory.shape[0] != batch:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.shape != memory.shape[:2]):
        return None
    padding = read_padding(memory, None if mask is None else mask == 0, True)
    # An empty row of a T5 attends to every token of the memory; packed, it would attend to none.
    return None if padding is None or not bool(padding.layout.read_seqlens().all()) else padding
