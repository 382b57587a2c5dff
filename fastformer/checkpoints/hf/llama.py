"""Llama (Touvron et al. 2023) and the families that differ from it in a few options: each is a `Variant`.

They are `GPT`s with rotary positions. Families with more differences are in `gemma.py` and `neox.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.checkpoints.hf.common import amount_of, flag_of, number_of
from fastformer.checkpoints.hf.decoder import (
    EMBEDDING,
    Form,
    MisfitError,
    as_it_is,
    as_saved,
    check_form,
    layer_names,
    same_dropout,
)
from fastformer.checkpoints.hf.fields import FIELDS, sees_later
from fastformer.checkpoints.hf.rope import ROPE_NAMES, longest, read_rope, write_lengths, write_rope
from fastformer.models import GPTConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"}
MODULES = {
    "self_attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj": ("self_attn.o_proj",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "linear1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear2": ("mlp.down_proj",),
}
QK_NORMS = {"self_attn.q_norm": ("self_attn.q_norm",), "self_attn.k_norm": ("self_attn.k_norm",)}
_POST = {"post_norm1": ("post_attention_layernorm",), "post_norm2": ("post_feedforward_layernorm",)}
_BIASES = ("qkv_bias", "out_bias", "bias")
# Options that every one of these families has in its settings.
_FREE = ("d_ff", "num_kv_heads", "max_len", "layer_norm_eps", "attention_dropout", "rotary_base", "rotary_scaling")

Names = dict[str, tuple[str, ...]]
LayerTypes = Callable[[Mapping[str, Any], int], Sequence[str]]


class Variant(NamedTuple):
    """A family.

    Attributes:
        kind: the model_type of transformers.
        name: the name in messages.
        modules: fastformer's names of a layer's modules, each with those of the family.
        usual: values of settings that config.json doesn't contain. A null in config.json stays null.
        fixed: options of `GPTConfig` that are the same in all models of the family.
        biases: for three groups of biases, the setting that enables them, or a constant: of the projections to queries,
            keys and values; of the attention's output projection; of the feed-forward network and of LayerNorms.
        layer_types: (settings, depth) -> the kind of each layer, if the settings have no layer_types; None: no layer
            has a window.
        has_layer_types: whether the settings may contain layer_types; else the kinds come from the function alone.
        own_heads: whether the settings may contain a head_dim.
        even_heads: whether d_model has to be a multiple of the number of heads even then.
        partial: whether only a part of each head may be rotated.
        fraction: that part, if the settings don't contain it.
        rope_names: the settings that contain base and part beside the others, in version 4.
        base: the base of the rotations, if the settings don't contain it.
        rope: the parameters of the rotations, as in rope_parameters, if the settings contain neither those nor
            rope_scaling.
        local_base: the same for layers with a window, in families that rotate these differently. 0: as in other layers.
        grows: whether some kinds of scaling give a model more positions than its settings say.
        eps: the setting that is the norms' eps.
        activations: the family's names of activations, each with fastformer's; the first is the default.
        activation_settings: the settings that may name the activation; the first that is present counts. (): none.
        dropouts: the settings that contain `GPTConfig.dropout`.
        embedding, norm: the family's names of the embedding and of the last norm.
        prefix, heads: see `Form`.
        is_tied: the value of tie_word_embeddings if the settings don't contain it.
        more: settings -> further options.
        more_settings: a config -> the settings that `more` reads.
        free: the options that `more` may return.
        rename: (names, config) -> the names of the tensors (see `Form`), changed.
        convert, revert, open, close: see `Form`.
    """

    kind: str
    name: str
    modules: Mapping[str, tuple[str, ...]] = MODULES
    usual: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {"norm": "rms"}
    biases: tuple[str | bool, str | bool, str | bool] = (False, False, False)
    layer_types: LayerTypes | None = None
    has_layer_types: bool = True
    own_heads: bool = True
    even_heads: bool = False
    partial: bool = False
    fraction: float = 1.0
    rope_names: tuple[str, str] = ROPE_NAMES
    base: float = 10_000.0
    rope: Mapping[str, Any] = {}
    local_base: float | None = None
    grows: bool = True
    eps: str = "rms_norm_eps"
    activations: Mapping[str, str] = _GATED
    activation_settings: tuple[str, ...] = ("hidden_act",)
    dropouts: tuple[str, ...] = ()
    embedding: str = "embed_tokens"
    norm: str = "norm"
    prefix: str = "model."
    heads: tuple[str, ...] = ("lm_head.weight",)
    is_tied: bool = False
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {}
    more_settings: Callable[[GPTConfig], dict[str, Any]] = lambda config: {}
    free: tuple[str, ...] = ()
    convert: Callable[[str, Tensor, GPTConfig], Tensor] = as_it_is
    revert: Callable[[str, Tensor, GPTConfig], Tensor] = as_it_is
    rename: Callable[[Names, GPTConfig], Names] = lambda names, config: names
    open: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = as_saved
    close: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = as_saved

    @property
    def form(self) -> Form:
        """The family's tables."""
        return Form(
            self.name,
            self.prefix,
            self._options,
            self._settings,
            self._names,
            is_tied=self.is_tied,
            convert=self.convert,
            revert=self.revert,
            open=self.open,
            close=self.close,
            heads=self.heads,
            unread=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
        )

    def _options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        settings = {**self.usual, **settings}
        d_model, heads = number_of(settings, "hidden_size"), number_of(settings, "num_attention_heads")
        depth = number_of(settings, "num_hidden_layers")
        qkv, out, bias = (flag_of(settings, b, False) if isinstance(b, str) else b for b in self.biases)
        windows = self._windows(settings, depth)
        rope = self._rope(settings, bool(windows))
        options = {
            "d_model": d_model,
            "num_heads": heads,
            "num_kv_heads": _or(settings, "num_key_value_heads", heads),
            "num_layers": depth,
            "d_ff": number_of(settings, "intermediate_size"),
            "layer_norm_eps": amount_of({self.eps: 1e-6, **settings}, self.eps),
            "activation": self._activation(settings),
            "attention_dropout": settings.get("attention_dropout") or 0.0,
            "positions": "rotary",
            "bias": bias,
            "max_len": longest(settings, rope, grows=self.grows),
            **self.fixed,
            **windows,
            **rope,
            **self.more(settings),
        }
        if sees_later(settings):
            options["is_causal"] = False
        if qkv != bias:
            options["qkv_bias"] = qkv
        if out != bias:
            options["out_bias"] = out
        head_dim = self.size_of_head(settings)
        if head_dim * heads != d_model:
            options["head_dim"] = head_dim
        if self.dropouts:
            options["dropout"] = same_dropout(settings, 0.0, *self.dropouts)
        return options

    def size_of_head(self, settings: Mapping[str, Any]) -> int:
        """Returns the size of a head."""
        settings = {**self.usual, **settings}
        usual = number_of(settings, "hidden_size") // number_of(settings, "num_attention_heads")
        return _or(settings, "head_dim", usual) if self.own_heads else usual

    def rotated(self, settings: Mapping[str, Any]) -> int:
        """Returns the number of a head's features that are rotated."""
        fraction = self._rope({**self.usual, **settings}, False).get("rotary_fraction", 1.0)
        return int(self.size_of_head(settings) * fraction)

    def _activation(self, settings: Mapping[str, Any]) -> str:
        for name in self.activation_settings:
            if (activation := settings.get(name)) is not None:
                if not isinstance(activation, str) or activation not in self.activations:
                    raise ValueError(f"expected a {name} in {(*self.activations,)}, got {activation!r}")
                return self.activations[activation]
        return next(iter(self.activations.values()))

    def _windows(self, settings: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Returns window_size, and window_layers unless all layers have a window."""
        if self.layer_types is None:
            return {}
        listed = settings.get("layer_types") if self.has_layer_types else None
        types = self.layer_types(settings, depth) if listed is None else listed
        if not isinstance(types, list | tuple) or len(types) != depth:
            raise ValueError(f"expected layer_types to have an entry for each of {depth} layers, got {types!r:.80}")
        if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
            raise ValueError(f"expected layer_types of {FULL!r} and {SLIDING!r}, got {unknown[0]!r}")
        if SLIDING not in types:
            return {}
        size = number_of(settings, "sliding_window")
        if not sees_later(settings):
            size -= 1  # sliding_window counts the token itself
        elif settings.get("is_causal", True):
            size //= 2  # Gemma 3's counts both sides
        layers = tuple(kind == SLIDING for kind in types)
        return {"window_size": size, **({} if all(layers) else {"window_layers": layers})}

    def _rope(self, settings: Mapping[str, Any], has_windows: bool) -> dict[str, Any]:
        if self.rope and settings.get("rope_parameters") is None and not settings.get("rope_scaling"):
            settings = {**settings, "rope_parameters": self.rope}
        rope = read_rope(settings, layers=FULL, base=self.base, fraction=self.fraction, names=self.rope_names)
        if "rotary_fraction" in rope and not self.partial:
            raise ValueError(
                f"expected a {self.name}, that rotates whole heads, got a partial_rotary_factor of "
                f"{rope['rotary_fraction']}"
            )
        if self.local_base is None or not has_windows:
            return rope
        base = settings.get("rope_local_base_freq") if self.local_base else None
        local = read_rope(
            {"rope_theta": base, "rope_parameters": settings.get("rope_parameters")},
            layers=SLIDING,
            base=self.local_base or rope["rotary_base"],
            is_nested=True,
        )
        if "rotary_scaling" in local:
            raise ValueError(
                f"expected layers with a window to have a rope_type of 'default', got {local['rotary_scaling']}"
            )
        if local["rotary_base"] == rope["rotary_base"] and "rotary_scaling" not in rope:
            return rope
        return {**rope, "local_rotary_base": local["rotary_base"]}

    def _settings(self, config: GPTConfig) -> dict[str, Any]:
        names = {here: there for there, here in reversed([*self.activations.items()])}
        expected: dict[str, Any] = {"positions": "rotary", **self.fixed, "activation": (*names,), "dropout": 0.0}
        free = [*_FREE, *self.free]
        if self.own_heads:
            free.append("head_dim")
        if self.dropouts:
            free.append("dropout")
            del expected["dropout"]
        if self.layer_types is not None:
            free += ["window_size", *(("window_layers",) if self.has_layer_types else ())]
        if self.partial:
            free.append("rotary_fraction")
        if self.local_base is not None:
            free.append("local_rotary_base")
        check_form(config, expected, (*free, *_BIASES), self.name)
        self._check_biases(config)
        scales_all = config.rotary_scaling is not None and config.local_rotary_base is None
        if self.local_base is not None and scales_all and any(config.windows):
            raise MisfitError(
                "local_rotary_base",
                f"expected a {self.name}, whose layers with a window don't scale positions, with a local_rotary_base "
                "next to rotary_scaling, got None",
            )
        if self.even_heads and config.d_model % config.num_heads:
            raise ValueError(
                f"expected a {self.name}, with d_model a multiple of num_heads, got {config.d_model} and "
                f"{config.num_heads}"
            )
        qkv, out = biases_of(config)
        settings = {
            "model_type": self.kind,
            "hidden_size": config.d_model,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads or config.num_heads,
            "num_hidden_layers": config.num_layers,
            "intermediate_size": config.d_ff,
            **({"head_dim": config.size_of_head} if self.own_heads else {}),
            self.eps: config.layer_norm_eps,
            **dict.fromkeys(self.activation_settings[:1], names[config.activation]),
            **({"attention_dropout": config.attention_dropout} if "attention_dropout" in FIELDS[self.kind] else {}),
            **dict.fromkeys(self.dropouts, config.dropout),
            **write_lengths(config, grows=self.grows),
            **write_rope(config, self.fraction, *((FULL, SLIDING) if self.local_base is not None else ())),
            **self.more_settings(config),
        }
        for setting, value in zip(self.biases, (qkv, out, config.bias), strict=True):
            if isinstance(setting, str):
                settings[setting] = value
        if self.layer_types is not None:
            settings |= self._window_settings(config)
        return settings

    def _check_biases(self, config: GPTConfig) -> None:
        """Raises ValueError for biases that the family doesn't have."""
        biases: dict[str, bool] = {}
        for setting, value, what in zip(self.biases, (*biases_of(config), config.bias), _BIASES, strict=True):
            expected = biases.setdefault(setting, value) if isinstance(setting, str) else setting
            if value != expected:
                raise ValueError(f"expected a {self.name}, with {what}={expected}, got {value}")

    def _window_settings(self, config: GPTConfig) -> dict[str, Any]:
        window = None if config.window_size is None else config.window_size + 1
        values: dict[str, Any] = {}
        # With layer_types, the window may be missing: no layer reads the usual one, and Gemma's masks refuse None.
        if window is not None or not self.has_layer_types:
            values["sliding_window"] = window
        if self.has_layer_types:
            values["layer_types"] = [SLIDING if has_window else FULL for has_window in config.windows]
        if "use_sliding_window" in FIELDS[self.kind]:
            values["use_sliding_window"] = window is not None
        return values

    def _names(self, config: GPTConfig) -> dict[str, tuple[str, ...]]:
        qkv, out = biases_of(config)
        biased = {"self_attn.in_proj": qkv, "self_attn.out_proj": out, "linear1": config.bias, "linear2": config.bias}
        norm_bias = config.norm == "layer" and (config.bias if config.norm_bias is None else config.norm_bias)
        biased |= dict.fromkeys(("norm1", "norm2", "post_norm1", "post_norm2"), norm_bias)
        names: Names = {EMBEDDING: (f"{self.embedding}.weight",), "decoder.norm.weight": (f"{self.norm}.weight",)}
        if norm_bias:
            names["decoder.norm.bias"] = (f"{self.norm}.bias",)
        modules = {name: parts for name, parts in self.modules.items() if name != "norm2" or not config.shared_norm}
        names |= layer_names(config, "layers", modules, lambda name: biased.get(name, False))
        return self.rename(names, config)


def biases_of(config: GPTConfig) -> tuple[bool, bool]:
    """Returns whether the query, key and value projections have biases, and whether the output projection has one."""
    qkv, out = config.qkv_bias, config.out_bias
    return config.bias if qkv is None else qkv, config.bias if out is None else out


def _or(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Returns an integer setting; `default` if it is missing or null."""
    return default if settings.get(name) is None else number_of(settings, name)


def everywhere(settings: Mapping[str, Any], depth: int) -> list[str]:
    """Gives all layers a window, if the settings have one."""
    return [FULL if settings.get("sliding_window") is None else SLIDING] * depth


def uses_window(settings: Mapping[str, Any]) -> bool:
    """Returns whether the settings of a family with use_sliding_window use it."""
    return flag_of(settings, "use_sliding_window", False) and settings.get("sliding_window") is not None


def _after_some(settings: Mapping[str, Any], depth: int) -> list[str]:
    """Gives the layers from max_window_layers on a window, as Qwen does."""
    if not uses_window(settings):
        return [FULL] * depth
    first = 28 if settings.get("max_window_layers") is None else number_of(settings, "max_window_layers", 0)
    return [SLIDING if layer >= first else FULL for layer in range(depth)]


def all_but_each(count: int, setting: str | None = None) -> LayerTypes:
    """Gives a window to all layers but each count-th; a setting of some families replaces the count."""

    def types(settings: Mapping[str, Any], depth: int) -> list[str]:
        each = count if setting is None else _or(settings, setting, count)
        return [SLIDING if (layer + 1) % each else FULL for layer in range(depth)]

    return types


def _phi3(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns no options; refuses dropout, which Phi-3 applies to the outputs of sub-layers but not to embeddings."""
    if settings.get("resid_pdrop"):
        raise ValueError(f"expected a resid_pdrop of 0, got {settings['resid_pdrop']}")
    return {}


def _phi3_settings(config: GPTConfig) -> dict[str, Any]:
    """Returns no settings; refuses kinds of rotary scaling that Phi-3 doesn't have."""
    kind = (config.rotary_scaling or {}).get("kind", "longrope")
    if kind != "longrope":
        raise MisfitError("rotary_scaling", f"expected a Phi-3, with rotary_scaling of 'longrope', got {kind!r}")
    return {}


_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
OLMO_MODULES = {**{name: parts for name, parts in MODULES.items() if not name.startswith("norm")}, **QK_NORMS, **_POST}
_OLMO: dict[str, Any] = {
    "modules": OLMO_MODULES,
    "fixed": {"norm": "rms", "norm_placement": "post", "qk_norm": "all"},
    "usual": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "biases": ("attention_bias", "attention_bias", False),
}
VARIANTS = (
    Variant("llama", "Llama", biases=("attention_bias", "attention_bias", "mlp_bias"), even_heads=True),
    Variant("mistral", "Mistral", usual=_MISTRAL, layer_types=everywhere, has_layer_types=False),
    Variant("ministral", "Ministral", usual=_MISTRAL, layer_types=everywhere),
    Variant("qwen2", "Qwen2", usual=_QWEN, biases=(True, False, False), layer_types=_after_some),
    Variant(
        "qwen3",
        "Qwen3",
        usual={**_QWEN, "head_dim": 128},
        modules={**MODULES, **QK_NORMS},
        fixed={"norm": "rms", "qk_norm": "head"},
        biases=("attention_bias", "attention_bias", False),
        layer_types=_after_some,
    ),
    Variant("olmo2", "OLMo 2", **_OLMO),
    Variant("olmo3", "OLMo 3", layer_types=all_but_each(4), base=500_000.0, local_base=0.0, **_OLMO),
    Variant(
        "cwm",
        "CWM",
        usual={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192},
        biases=(False, False, "mlp_bias"),
        layer_types=lambda settings, depth: [SLIDING if layer % 4 else FULL for layer in range(depth)],
        base=1_000_000.0,
        rope={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    # The rows of its fused matrices are in the same order as fastformer's.
    Variant(
        "phi3",
        "Phi-3",
        modules={**MODULES, "self_attn.in_proj": ("self_attn.qkv_proj",), "linear1": ("mlp.gate_up_proj",)},
        layer_types=everywhere,
        has_layer_types=False,
        partial=True,
        usual={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        more=_phi3,
        more_settings=_phi3_settings,
    ),
)
FORMS = {variant.kind: variant.form for variant in VARIANTS}
