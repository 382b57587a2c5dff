"""ModernBERT (Warner et al. 2024): a pre-norm `BERT` with rotary positions, gated layers, and windows in most of them.

Its first layer has no norm before the attention. Layers with a window see 64 neighbours on each side
(local_attention // 2), and their rotary positions have another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints.hf.bert import check_only
from fastformer.checkpoints.hf.common import activation_of, flag_of, number_of
from fastformer.checkpoints.hf.decoder import BOTH, EMBEDDING, check_form, kinds_of, layer_names
from fastformer.checkpoints.hf.encoder import EncoderForm
from fastformer.models import BERTConfig

GATED = {
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "silu": "swiglu",
    "swish": "swiglu",
}
GATED_THERE = {"geglu": "gelu", "geglu_tanh": "gelu_new", "swiglu": "silu"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASES = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}
_MODULES = {
    "self_attn.in_proj": ("attn.Wqkv",),
    "self_attn.out_proj": ("attn.Wo",),
    "norm1": ("attn_norm",),
    "linear1": ("mlp.Wi",),
    "linear2": ("mlp.Wo",),
    "norm2": ("mlp_norm",),
}
_FREE = (
    *("d_ff", "layer_norm_eps", "bias", "attention_bias", "rotary_base", "local_rotary_base", "window_size"),
    *("window_layers", "max_len", "activation_dropout", "head_dropout", "head_pooling", "num_labels"),
)


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    check_only(settings)
    if settings.get("classifier_activation", "gelu") != "gelu":
        raise ValueError(f"expected a classifier_activation of 'gelu', got {settings['classifier_activation']!r}")
    for name in ("embedding_dropout", "attention_dropout"):  # these dropouts act in other places than a `BERT`'s
        if settings.get(name, 0.0):
            raise ValueError(f"expected {name} to be 0, got {settings[name]!r}")
    biases = {name: flag_of(settings, name, False) for name in ("mlp_bias", "norm_bias", "classifier_bias")}
    if len({*biases.values()}) > 1:
        raise ValueError(f"expected mlp_bias, norm_bias and classifier_bias to be equal, got {biases}")
    bias, attention_bias = biases["mlp_bias"], flag_of(settings, "attention_bias", False)
    layers = number_of(settings, "num_hidden_layers")
    windows = _windows(settings, layers)
    base, local = (_base(settings, kind) for kind in (_FULL, _SLIDING))
    window = number_of(settings, "local_attention") if "local_attention" in settings else 128
    options: dict[str, Any] = {
        "d_model": number_of(settings, "hidden_size"),
        "num_heads": number_of(settings, "num_attention_heads"),
        "num_layers": layers,
        "d_ff": number_of(settings, "intermediate_size"),
        "layer_norm_eps": settings.get("norm_eps", 1e-5),
        "activation": activation_of(settings, "hidden_activation", "gelu", GATED),
        "norm_first": True,
        "first_norm": False,
        "bias": bias,
        "attention_bias": None if attention_bias == bias else attention_bias,
        "positions": "rotary",
        "rotary_base": base,
        "max_len": number_of(settings, "max_position_embeddings"),
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": settings.get("mlp_dropout", 0.0),
        "head": "modernbert",
        "head_pooling": settings.get("classifier_pooling", "cls"),
        "head_dropout": settings.get("classifier_dropout", 0.0),
    }
    if any(windows):
        options |= {"window_size": window // 2, "window_layers": None if all(windows) else windows}
        options["local_rotary_base"] = None if local == base else local
    return options


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has a window."""
    kinds = settings.get("layer_types")
    if kinds is None:
        every = settings.get("global_attn_every_n_layers", 3)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"expected global_attn_every_n_layers to be an integer of at least 1, got {every!r}")
        return tuple(bool(layer % every) for layer in range(layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or {*kinds} - {_FULL, _SLIDING}:
        raise ValueError(f"expected layer_types to name {layers} kinds, {_FULL} or {_SLIDING}, got {kinds!r:.80}")
    return tuple(kind == _SLIDING for kind in kinds)


def _base(settings: Mapping[str, Any], kind: str) -> Any:
    """Returns the base of the rotary positions in layers of one kind."""
    name, usual = _BASES[kind]
    whole, scaling = settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}
    own = whole.get(kind) or {} if isinstance(whole, Mapping) else whole
    if not isinstance(own, Mapping) or not isinstance(scaling, Mapping):
        raise ValueError(f"expected rope_parameters and rope_scaling to be objects, got {own!r:.60}, {scaling!r:.60}")
    parameters = {**own, **scaling}
    if (rope_type := parameters.get("rope_type", parameters.get("type", "default"))) != "default":
        raise ValueError(f"expected a rope_type of 'default', got {rope_type!r}")
    theta = settings.get(name)
    return parameters.get("rope_theta", usual if theta is None else theta)


def _settings(config: BERTConfig) -> dict[str, Any]:
    expected = {
        "activation": (*GATED_THERE,),
        "head_dim": (None, config.d_model // config.num_heads),
        **dict.fromkeys(("norm_bias", "linear1_bias"), (None, config.bias)),
        "norm_first": True,
        "first_norm": False,
        "positions": "rotary",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "head": "modernbert" if config.num_labels else ("modernbert", "bert"),
    }
    check_form(config, expected, _FREE, "ModernBERT")
    local = config.rotary_base if config.local_rotary_base is None else config.local_rotary_base
    parameters = {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in ((_FULL, config.rotary_base), (_SLIDING, local))
    }
    return {
        "model_type": "modernbert",
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.d_ff,
        "norm_eps": config.layer_norm_eps,
        "hidden_activation": GATED_THERE[config.activation],
        "norm_bias": config.bias,
        "mlp_bias": config.bias,
        "classifier_bias": config.bias,
        "attention_bias": config.bias if config.attention_bias is None else config.attention_bias,
        "max_position_embeddings": config.max_len,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "mlp_dropout": config.activation_dropout,
        "classifier_dropout": config.head_dropout,
        "classifier_pooling": config.head_pooling,
        "local_attention": 128 if config.window_size is None else max(1, 2 * config.window_size),  # 1 is a window of 0
        "layer_types": [_SLIDING if has_window else _FULL for has_window in config.windows],
        "rope_parameters": parameters,
        **_before_version_5(config, local),
    }


def _before_version_5(config: BERTConfig, local: float) -> dict[str, Any]:
    """Returns the settings that version 4 of transformers reads instead of layer_types and rope_parameters."""
    layers = range(config.num_layers)
    periods = range(1, config.num_layers + 2)
    every = next((n for n in periods if config.windows == tuple(bool(layer % n) for layer in layers)), None)
    own = {} if every is None else {"global_attn_every_n_layers": every}
    return {**own, "global_rope_theta": config.rotary_base, "local_rope_theta": local}


def _names(config: BERTConfig) -> dict[str, tuple[str, ...]]:
    norm = kinds_of(config.bias)
    attention_bias = config.bias if config.attention_bias is None else config.attention_bias
    biases = {"self_attn.in_proj": attention_bias, "self_attn.out_proj": attention_bias}
    return {
        EMBEDDING: ("embeddings.tok_embeddings.weight",),
        **{f"embedding_norm.{kind}": (f"embeddings.norm.{kind}",) for kind in norm},
        **layer_names(config, "layers", _MODULES, lambda name: biases.get(name, config.bias)),
        **{f"encoder.norm.{kind}": (f"final_norm.{kind}",) for kind in norm},
    }


def _head(config: BERTConfig) -> dict[str, str]:
    names = {
        f"head.{part}.{kind}": f"head.{part}.{kind}" for part in ("dense", "norm") for kind in kinds_of(config.bias)
    }
    return {**names, **{f"head.out.{kind}": f"classifier.{kind}" for kind in BOTH}}


FORM = EncoderForm("ModernBERT", "model.", "ModernBert", 50283, _options, _settings, _names, _head, pooler=None)
