"""Llama (Touvron et al. 2023) and the families that differ from it in a few options, each a line of `FORMS`.

They are `GPT`s with rotary positions, RMSNorm and a gated feed-forward network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.decoder import EMBEDDING, Form, check_form, layer_names
from fastformer.checkpoints.hf.rope import longest, read_rope, write_rope
from fastformer.models import GPTConfig

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"}
_THEIR_ACTIVATIONS = {"swiglu": "silu", "geglu_tanh": "gelu_pytorch_tanh"}
_MODULES = {
    "self_attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj": ("self_attn.o_proj",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "linear1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear2": ("mlp.down_proj",),
}
_BOTH = ("weight", "bias")
# What the settings of each of these families say.
_FREE = ("d_ff", "num_kv_heads", "max_len", "layer_norm_eps", "attention_dropout", "rotary_base", "rotary_scaling")


class Variant(NamedTuple):
    """What a family has that Llama doesn't.

    Attributes:
        kind: the model_type of transformers.
        name: in messages.
        eps: of the norms, if the settings don't say.
        biases: the settings that say whether attention and the feed-forward network have biases; or what there always
            is: of queries, keys and values, of the map back from the heads, of the feed-forward network.
        has_head_dim: whether heads may have a size of their own.
    """

    kind: str
    name: str
    eps: float = 1e-6
    biases: tuple[str | bool, str | bool, str | bool] = (False, False, False)
    has_head_dim: bool = True


def _form(variant: Variant) -> Form:
    def options(settings: Mapping[str, Any]) -> dict[str, Any]:
        return _options(settings, variant)

    def settings(config: GPTConfig) -> dict[str, Any]:
        return _settings(config, variant)

    return Form(variant.name, "model.", options, settings, _names, is_tied=False, unread=(".rotary_emb.inv_freq",))


def _options(settings: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    activation = settings.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"expected a hidden_act out of {(*_ACTIVATIONS,)}, got {activation!r}")
    d_model, heads = number_of(settings, "hidden_size"), number_of(settings, "num_attention_heads")
    qkv, out, bias = (flag_of(settings, b, False) if isinstance(b, str) else b for b in variant.biases)
    rope = read_rope(settings)
    options = {
        "d_model": d_model,
        "num_heads": heads,
        "num_kv_heads": _or(settings, "num_key_value_heads", heads),
        "num_layers": number_of(settings, "num_hidden_layers"),
        "d_ff": number_of(settings, "intermediate_size"),
        "norm": "rms",
        "layer_norm_eps": settings.get("rms_norm_eps", variant.eps),
        "activation": _ACTIVATIONS[activation],
        "attention_dropout": settings.get("attention_dropout") or 0.0,
        "positions": "rotary",
        "bias": bias,
        "max_len": longest(settings, rope),
        **rope,
    }
    if qkv != bias:
        options["qkv_bias"] = qkv
    if out != bias:
        options["out_bias"] = out
    head_dim = _or(settings, "head_dim", d_model // heads)
    if head_dim * heads != d_model:
        options["head_dim"] = head_dim
    return options


def _or(settings: Mapping[str, Any], name: str, default: int) -> int:
    """An integer setting; `default` if it is missing or null."""
    return default if settings.get(name) is None else number_of(settings, name)


def _settings(config: GPTConfig, variant: Variant) -> dict[str, Any]:
    expected: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": (*_THEIR_ACTIVATIONS,)}
    expected |= {"dropout": 0.0, "activation_dropout": 0.0}
    check_form(config, expected, (*_FREE, "bias", "qkv_bias", "out_bias", "head_dim"), variant.name)
    qkv, out = biases_of(config)
    return {
        "model_type": variant.kind,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.d_ff,
        "head_dim": config.size_of_head,
        "rms_norm_eps": config.layer_norm_eps,
        "hidden_act": _THEIR_ACTIVATIONS[config.activation],
        "attention_dropout": config.attention_dropout,
        "max_position_embeddings": config.max_len,
        "attention_bias": qkv,
        "mlp_bias": config.bias,
        **write_rope(config),
    }


def biases_of(config: GPTConfig) -> tuple[bool, bool]:
    """Whether the maps to queries, keys and values, and the map back from the heads have biases."""
    qkv, out = config.qkv_bias, config.out_bias
    return config.bias if qkv is None else qkv, config.bias if out is None else out


def _names(config: GPTConfig) -> dict[str, tuple[str, ...]]:
    qkv, out = biases_of(config)
    biased = {"self_attn.in_proj": qkv, "self_attn.out_proj": out, "linear1": config.bias, "linear2": config.bias}
    kinds = {name: _BOTH for name, has_bias in biased.items() if has_bias}
    return {
        EMBEDDING: ("embed_tokens.weight",),
        "decoder.norm.weight": ("norm.weight",),
        **layer_names(config, "layers", _MODULES, kinds),
    }


# By the model_type of transformers.
FORMS = {
    variant.kind: _form(variant)
    for variant in (Variant("llama", "Llama", biases=("attention_bias", "attention_bias", "mlp_bias")),)
}
