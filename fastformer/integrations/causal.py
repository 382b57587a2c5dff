"""What the decoder-only families of transformers have in common: packed tokens under a causal mask, and the cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.loss import loss_utils

from fastformer.integrations.attention_interface import is_led, masks_as_known
from fastformer.integrations.fused_loss import are_losses_known
from fastformer.integrations.hugging_face import gives_tuple, going_on, keeps_recording, nothing_else, packing
from fastformer.integrations.padding import Owner, PackingStack, unread
from fastformer.nn.guards import is_traced, is_written_in
from fastformer.nn.padding import Padding, read_padding

Model = TypeVar("Model", bound=type[nn.Module])

# What a stack may be given that doesn't change whether its tokens can be packed.
_HARMLESS = frozenset(
    {
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "cache_position"),
        *("past_key_values", "use_cache", "return_dict", "num_items_in_batch", "is_causal"),
    }
)


class PackedCache:
    """A cache that was empty when its stack began: layers go on with packed keys and values, it keeps padded ones."""

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
    """What the layers of a packed run are given in place of their cache; the cache itself elsewhere."""
    run = going_on()
    return cache if cache is None or run is None or run.padding is None else PackedCache(cache, run.padding)


def entered_positions(embeddings: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """Embeddings of positions, each (batch or 1, seqlen, head_dim), as the layers of a packed run read them."""
    run = going_on()
    if embeddings is None or run is None or (padding := run.padding) is None:
        return embeddings
    return tuple(padding.pack(each.expand(padding.shape[0], -1, -1))[None] for each in embeddings)


def left(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer gave, padded again if it was the last of a packed run."""
    run = going_on()
    return x if run is None or run.last is not layer else run.leave(x)


def writes_plainly(cache: Any) -> bool:
    """Whether keys and values can be put into a cache by the number of the layer, and nothing else."""
    return cache is None or type(cache) in (DynamicCache, PackedCache)


class Causal(PackingStack):
    """A stack that may leave padding out where no cache goes before."""

    config: Any

    def is_causal_stack(self) -> bool:
        """See `PackingStack`."""
        return True

    def has_known_layers(self) -> bool:
        """See `PackingStack`."""
        return all(map(self._is_ours, self._layers()))

    def _layers(self) -> Sequence[nn.Module]:
        raise NotImplementedError

    def _is_ours(self, layer: nn.Module) -> bool:
        raise NotImplementedError

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding | None:
        ids = args[0] if args else kwargs.get("input_ids")
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if is_traced() or type(ids) is not Tensor or len(args) > 1:
            return None
        if ids.dim() != (3 if ids.is_floating_point() else 2):
            return None
        left_out = self._left_out(ids.shape[:2], kwargs)
        cache = kwargs.get("past_key_values")
        if left_out is None or (cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() != 0)):
            return None
        config = self.config
        asked = (config.output_hidden_states, config.output_attentions, kwargs.get("is_causal") is False)
        other = (not getattr(config, "is_causal", True), getattr(config, "add_cross_attention", False))
        if any((*asked, *other)) or not nothing_else((), kwargs, _HARMLESS):
            return None
        layers = self._layers()
        # Where the last layer also comes earlier, tokens would be padded again there.
        if not layers or layers.count(layers[-1]) > 1:
            return None
        if not (is_led(self) and masks_as_known() and self.may_leave_out()):
            return None
        padding = read_padding(ids, left_out, True)
        return None if padding is None or padding.is_none or not padding.tokens.numel() else padding

    def _left_out(self, shape: torch.Size, kwargs: dict[str, Any]) -> Tensor | None:
        """Where in a batch (batch, seqlen) there is padding, or what nobody reads; None where nothing says so."""
        mask, left_out = kwargs.get("attention_mask"), None
        if mask is not None:
            if type(mask) is not Tensor or mask.shape != shape:
                return None
            left_out = mask == 0
        elif kwargs.get("position_ids") is not None:  # which transformers reads documents from that stand in one row
            return None
        behind = None if self._fills_cache(kwargs) else unread(shape)
        if behind is None:
            return left_out
        return behind if left_out is None else left_out | behind

    def _fills_cache(self, kwargs: dict[str, Any]) -> bool:
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(self.config, "use_cache", False) if use_cache is None else use_cache
        return bool(use_cache) or kwargs.get("past_key_values") is not None


class Stack(Causal):
    """Its layers see packed tokens where there is padding. What comes out is zeros there."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        padding = self._padding(args, kwargs)
        if padding is None:
            return super().forward(*args, **kwargs)
        with packing(padding, self._layers()[-1]):
            out = super().forward(*args, **kwargs | {"return_dict": True})
        left_out = self._left_out(torch.Size(padding.shape), kwargs)
        assert left_out is not None
        out.last_hidden_state = out.last_hidden_state.masked_fill(left_out[..., None], 0)  # whose norm adds its bias
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out


def sees_padding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a language model is asked for depends on what the stack gives at padding.

    That is so for labels there, which transformers counts like others, and for the last logits of sequences that end
    with padding.
    """
    mask, labels, kept = (kwargs.get(name) for name in ("attention_mask", "labels", "logits_to_keep"))
    if len(args) > 1:
        return True
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    if isinstance(kept, Tensor):
        return True
    # Who brings a cache goes on from the last logits, as generate does, however many it asks for.
    last = max(kept or 0, int(kwargs.get("past_key_values") is not None))
    if last and not bool(mask[:, -last:].all()):
        return True
    if labels is None:
        return False
    if not isinstance(labels, Tensor) or labels.shape != mask.shape or "shift_labels" in kwargs:
        return True
    return bool(((labels[:, 1:] != -100) & (mask[:, :-1] == 0)).any())


def labels_count_at_padding(mask: Any, labels: Any) -> bool:
    """Whether labels, one for each token, count where a mask says that there is padding, or may do so."""
    if mask is None or labels is None:
        return False
    if not (isinstance(mask, Tensor) and isinstance(labels, Tensor)) or mask.shape != labels.shape:
        return True
    return bool(((labels != -100) & (mask == 0)).any())


class LanguageModel(Owner):
    """A head that reads what its causal stack gives at padding where labels or the last logits ask for it."""

    def reads_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See `Owner`."""
        return self._has_own_loss(args, kwargs) or self._sees_padding(args, kwargs)

    def _has_own_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a loss is asked for that isn't transformers': it may read whatever it likes."""
        if len(args) < 2 and kwargs.get("labels") is None:
            return False
        loss = getattr(self, "loss_function", None)
        is_theirs = getattr(loss, "__module__", None) == loss_utils.__name__ and is_written_in(loss, transformers)
        return not (is_theirs and are_losses_known())

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return sees_padding(args, kwargs)


class EncoderHead(LanguageModel):
    """The same of a stack that isn't causal."""

    READS_ENCODERS = True


class KeepsPadding(LanguageModel):
    """A head that reads what its stack gives at padding: a softmax over all tokens, the last one, labels anywhere."""

    ALWAYS_READS = True


class TokenLabels(LanguageModel):
    """A head with a label for each token, of which transformers counts those at padding like others."""

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = inspect.signature(self.forward).bind_partial(*args).arguments | kwargs if args else kwargs
        return labels_count_at_padding(given.get("attention_mask"), given.get("labels"))


def derive(module: str, original: type[nn.Module], *kinds: type[nn.Module], name: str | None = None) -> Any:
    """A class of ours for a model of transformers, under its name, whose forward has its signature.

    The name is saved with a model, and generate and trainers read the signature. `inspect.unwrap` and what goes by
    `__wrapped__`, as accelerate's `unwrap_model` does, stop at our forward.

    Args:
        module: where the class is kept, and pickle finds it.
        original: the class of transformers.
        kinds: what it is derived from before that.
        name: under which it is kept; by default the original's.
    """
    kept = name or original.__name__
    doc = f"transformers' {original.__name__}, on our ops."
    namespace = {"__module__": module, "__qualname__": kept, "__doc__": doc}
    return keeps_recording(signed_as(original)(type(original.__name__, (*kinds, original), namespace)))


def signed_as(original: type[nn.Module]) -> Callable[[Model], Model]:
    """Gives a derived class the original's name, which is saved with a model, and its forward the original's signature.

    generate and trainers read the signature.
    """

    def sign(derived: Model) -> Model:
        forward = derived.forward

        def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        functools.update_wrapper(signed, original.forward)
        del signed.__wrapped__  # type: ignore[attr-defined]
        signed.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
        derived.forward = signed
        derived.__name__ = original.__name__
        return derived

    return sign
