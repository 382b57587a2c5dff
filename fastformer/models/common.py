"""Helpers that the models share: the choices of a config, checks of sizes and ids, and a cache's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fastformer.cache.kv_cache import KVCache
from fastformer.engine.checks import is_traced
from fastformer.models.rotary_scaling import RotaryScaling, RotarySpeeds
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.embedding import PositionalEncoding, RelativePositionBias, RotaryEmbedding, RotaryPositions
from fastformer.nn.feed_forward import is_gated
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.mixture import Router, StackedLinear
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.state_mixing import StateMixing
from fastformer.settings import shown

IGNORE_INDEX = -100
_ROWS = 256  # the rows whose logits `chosen_log_probs` holds at a time

Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh", "clamped_swiglu"]
# The options of rotary positions, and their values in models with others.
_OF_ROTARY = {"rotary_fraction": 1.0, "rotary_scaling": None, "local_rotary_base": None, "rotary_layers": None,
              "query_growth": 0.0}  # fmt: skip


def as_flags(name: str, value: Any) -> tuple[bool, ...] | None:
    """Returns a setting with a flag for each layer as a tuple; None stays None.

    Raises:
        ValueError: anything but a list of booleans.
    """
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(flag, bool) for flag in value):
        raise ValueError(f"expected {name} to be a list of true and false, one for each layer, got {shown(value)}")
    return tuple(value)


class StackConfig:
    """The base of the settings of a model with one stack of layers."""

    d_model: int
    num_heads: int
    num_layers: int
    head_dim: int | None
    window_size: int | None
    window_layers: tuple[bool, ...] | None
    max_len: int
    positions: Any
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    local_rotary_base: float | None

    @property
    def rotary_dim(self) -> int:
        """The number of a head's features that are rotated."""
        return int(self.size_of_head * getattr(self, "rotary_fraction", 1.0))

    @property
    def global_rotary_dim(self) -> int:
        """The number of rotated features of a head in layers without a window, if these rotate differently."""
        size = getattr(self, "global_head_dim", None)
        return self.rotary_dim if size is None else int(size * getattr(self, "rotary_fraction", 1.0))

    @property
    def scaling(self) -> RotaryScaling | None:
        """The checked rotary_scaling, a `RotaryScaling`."""
        return cast("RotaryScaling | None", self.rotary_scaling)

    @property
    def size_of_head(self) -> int:
        """The size of a head: head_dim or its default."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def windows(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it has a window."""
        if self.window_size is None or self.window_layers is None:
            return (self.window_size is not None,) * self.num_layers
        return self.window_layers

    def check_windows(self) -> None:
        """Raises ValueError for window_layers without a window_size, or with another number of flags than layers."""
        if self.window_layers is not None and self.window_size is None:
            raise ValueError("expected a window_size for the window_layers, got None")
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"expected window_layers to have a bool for each of the {self.num_layers} layers, got "
                f"{len(self.windows)}"
            )

    def check_rotary(self) -> None:
        """Raises ValueError for options of rotary positions that the model doesn't have, or that don't fit it."""
        if self.positions != "rotary":
            for name, plain in _OF_ROTARY.items():
                if (value := getattr(self, name, plain)) != plain:
                    raise ValueError(f"expected positions 'rotary' for {name}, got {self.positions!r} and {value}")
            return
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"expected heads with an even number of rotated features (rotary rotates pairs), got {self.rotary_dim} "
                f"of {self.size_of_head} (d_model {self.d_model}, num_heads {self.num_heads})"
            )
        if (scaling := self.scaling) is not None:
            scaling.check(self.global_rotary_dim, self.rotary_base, self.max_len)
        if self.local_rotary_base is not None and not any(self.windows):
            raise ValueError("expected a window_size, and layers with this window, for local_rotary_base")


def rotary_embeddings(
    config: StackConfig, factory: dict[str, Any]
) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """Builds the rotary positions of a model, if it has such, and those of layers with a window, if they are others."""
    if config.positions != "rotary":
        return None, None
    size, base, local = config.global_rotary_dim, config.rotary_base, config.local_rotary_base
    scaling = RotarySpeeds(None) if config.scaling is None else config.scaling.speeds(size, base)
    growth = {name: getattr(config, name) for name in ("query_growth", "query_growth_length") if hasattr(config, name)}
    everywhere = RotaryEmbedding(
        size, config.max_len, base, speeds=scaling.speeds, scale=scaling.scale, **growth, **factory
    )
    own = None if local is None else RotaryEmbedding(config.rotary_dim, config.max_len, local, **factory)
    return everywhere, own


def rotations(
    everywhere: RotaryEmbedding | None,
    local: RotaryEmbedding | None,
    windows: Sequence[bool],
    positions: Tensor | None,
    rotates: Sequence[bool] | None = None,
) -> RotaryPositions | list[RotaryPositions | None] | None:
    """Returns the rotary tables for all layers, or one for each if they differ.

    Args:
        everywhere: the positions of all layers.
        local: those of layers with a window; None: the same.
        windows: for each layer, whether it has a window.
        positions: the positions of the tokens; None: one after another.
        rotates: for each layer, whether it has positions; None: all have.
    """
    if everywhere is None or (local is None and rotates is None):
        return None if everywhere is None else everywhere(positions)
    table = everywhere(positions)
    of_windows = table if local is None else local(positions)
    flags = [True] * len(windows) if rotates is None else rotates
    return [(of_windows if window else table) if flag else None for window, flag in zip(windows, flags, strict=True)]


def inner_size(d_model: int, activation: str) -> int:
    """Returns the default d_ff; for a gated network, which has three matrices instead of two, about as many weights."""
    wide = 4 * d_model
    return math.ceil(wide * 2 / 3 / 64) * 64 if is_gated(activation) else wide


def layer_options(config: Any, factory: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a layer that have the names of the settings of all models, and those of its parameters."""
    names = ("dropout", "attention_dropout", "activation_dropout", "activation", "norm", "layer_norm_eps", "bias")
    return {"batch_first": True, **{name: getattr(config, name) for name in names}, **factory}


def norm_of(config: Any, size: int, factory: dict[str, Any]) -> AddLayerNorm:
    """Builds a norm of vectors of a size, as the settings say."""
    own = getattr(config, "norm_bias", None)
    bias = config.bias if own is None else own
    return AddLayerNorm(size, config.layer_norm_eps, bias=bias, rms_norm=config.norm == "rms", **factory)


def init_weights(module: nn.Module, std: float) -> None:
    """Initialises a module's own parameters: N(0, std) for matrices, 0 for biases, its default for the rest."""
    if isinstance(module, nn.Linear | StackedLinear):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=std)
        if module.in_proj_bias is not None:
            nn.init.zeros_(module.in_proj_bias)
        if module.has_sinks:
            nn.init.zeros_(module.sinks)
    elif isinstance(module, nn.Embedding | Router):
        nn.init.normal_(module.weight, std=std)
        for added in (module.bias, module.choice_bias) if isinstance(module, Router) else ():
            if added is not None:
                nn.init.zeros_(added)
    elif isinstance(module, nn.LayerNorm | PositionalEncoding | RelativePositionBias | StateMixing):
        module.reset_parameters()


def check_heads(d_model: int, num_heads: int, num_kv_heads: int | None) -> None:
    """Checks that the heads share the model's size evenly.

    Raises:
        ValueError: they do not.
    """
    if d_model % num_heads:
        raise ValueError(f"expected d_model to be a multiple of num_heads, got {d_model} and {num_heads}")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"expected num_heads to be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")


def cache_of(model: Any, max_rows: int, max_seqlen: int, **options: Any) -> KVCache:
    """Creates a `KVCache` of a model's sizes without rows, in the dtype of autocast if it is on, or of the weights.

    Args:
        model: has `decoder` and `output_weight`.
        max_rows, max_seqlen, options: see `KVCache`.
    """
    decoder, weight = model.decoder, model.output_weight
    device, dtype = weight.device, weight.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    own = getattr(decoder, "key_layers", None)
    layers = [*decoder.layers] if own is None else [decoder.layers[i] for i in sorted(set(own))]
    heads = [(layer.self_attn.num_kv_heads, layer.self_attn.head_dim) for layer in layers]
    if len(set(heads)) > 1:
        options["layer_heads"] = heads
    return KVCache(len(layers), max_rows, max_seqlen, *heads[0], device=device, dtype=dtype, **options)


def chosen_log_probs(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    """Computes the log-probability of a token at each position from the logits of a few rows at a time.

    Args:
        logits_of: hidden states (rows, d_model) -> (rows, vocab_size).
        hidden: (..., d_model).
        tokens: (...) ids, int64.

    Returns:
        (...), fp32 (fp64 for logits in fp64).
    """
    log_probs = []
    for rows, ids in zip(hidden.flatten(0, -2).split(_ROWS), tokens.flatten().split(_ROWS), strict=True):
        logits = logits_of(rows)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs.append(logits.gather(-1, ids[:, None]).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(log_probs).view(tokens.shape)


def check_ids(
    ids: Tensor, vocab_size: int, max_len: int, layout: SequenceLayout | None, name: str, before: int = 0
) -> None:
    """Checks ids against the vocabulary and the positions that a model has.

    The values are read on a CPU only: on a GPU that would be a host sync, and the loader has checked them there. They
    can't be read within a compiler, a tracer or a transform of functorch, such as vmap.

    Args:
        ids: (batch, seqlen), or (total,) with a packed layout.
        vocab_size: the exclusive upper bound of ids.
        max_len: the longest sequence.
        layout: the layout of the ids.
        name: the name of the ids, for the message.
        before: the number of tokens that a cache already holds.

    Raises:
        ValueError: another shape or dtype, ids out of the vocabulary, a sequence that is too long.
    """
    if not isinstance(ids, Tensor):
        raise ValueError(f"expected {name} ids as a tensor, got {type(ids).__name__}")
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise ValueError(f"expected a SequenceLayout of the {name}, got {type(layout).__name__}")
    packed = layout is not None and layout.is_packed
    if ids.dim() != (1 if packed else 2):
        shape = "(total,) with a packed layout" if packed else "(batch, seqlen), or a packed layout"
        raise ValueError(f"expected {name} ids of shape {shape}, got {tuple(ids.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"expected {name} ids of int64 or int32, got {ids.dtype}")
    if layout is not None and layout.positions is not None and layout.positions.shape != ids.shape:
        total = layout.positions.shape[0]
        raise ValueError(f"expected {total} packed {name} ids, as the layout has, got {ids.shape[0]}")
    if layout is not None and not packed and (layout.batch_size, layout.max_seqlen) != tuple(ids.shape):
        expected = (layout.batch_size, layout.max_seqlen)
        raise ValueError(f"expected {name} ids of shape {expected}, as the layout has, got {tuple(ids.shape)}")
    longest = layout.max_seqlen if packed and layout is not None else ids.shape[1]
    if longest + before > max_len:
        raise ValueError(
            f"expected {name} sequences of at most max_len = {max_len} tokens, got {longest + before}: "
            "cut them, or configure the model with a larger max_len"
        )
    if ids.numel() and ids.device.type == "cpu" and not is_traced():
        low, high = ids.aminmax()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"expected {name} ids from 0 to {vocab_size - 1}, got {int(low)} to {int(high)}: "
                "was another tokenizer used?"
            )


def trailing_padding(ids: Tensor, pad_id: int, name: str) -> SequenceLayout:
    """Returns the layout of (batch, seqlen) ids in which trailing PADs, and no other ones, are padding.

    As in `check_ids`, the values are read on a CPU only.

    Raises:
        ValueError: a PAD before a real token.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"expected {name} ids of shape (batch, seqlen), got {got}")
    if ids.device.type == "cpu" and not is_traced():
        real = ids != pad_id
        rows = (real[:, 1:] & ~real[:, :-1]).any(1)
        if bool(rows.any()):
            raise ValueError(
                f"expected {name} ids padded on the right, got id {pad_id} (PAD) before a token in row "
                f"{int(rows.nonzero()[0])}: move the padding after the tokens"
            )
    return SequenceLayout.from_ids(ids, pad_id)
