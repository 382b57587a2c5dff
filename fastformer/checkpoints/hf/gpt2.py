"""GPT-2 (Radford et al. 2019): a pre-norm `GPT` with learned positions, LayerNorm, and a bias everywhere.

Its checkpoints hold the matrices as (in, out).

tokenizer.json               a byte-level BPE; older folders have vocab.json and merges.txt instead
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastformer.checkpoints.hf.common import THEIR_ACTIVATIONS, activation_of, flag_of, number_of
from fastformer.checkpoints.hf.decoder import EMBEDDING, Form, check_form, layer_names, same_dropout
from fastformer.models import GPTConfig

# Settings for which a `GPT` supports one value.
_ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_MODULES = {
    "self_attn.in_proj": ("attn.c_attn",),
    "self_attn.out_proj": ("attn.c_proj",),
    "norm1": ("ln_1",),
    "norm2": ("ln_2",),
    "linear1": ("mlp.c_fc",),
    "linear2": ("mlp.c_proj",),
}


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in _ONLY.items():
        if flag_of(settings, name, value) != value:
            raise ValueError(f"expected {name} to be {value}, got {settings[name]!r}")
    d_model = number_of(settings, "n_embd")
    return {
        "d_model": d_model,
        "num_heads": number_of(settings, "n_head"),
        "num_layers": number_of(settings, "n_layer"),
        "d_ff": 4 * d_model if settings.get("n_inner") is None else number_of(settings, "n_inner"),
        "layer_norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "activation": activation_of(settings, "activation_function", "gelu_new"),
        "dropout": same_dropout(settings, 0.1, "resid_pdrop", "embd_pdrop"),
        "attention_dropout": settings.get("attn_pdrop", 0.1),
        "max_len": number_of(settings, "n_positions"),
        "is_causal": settings.get("is_causal", True),
    }


def _settings(config: GPTConfig) -> dict[str, Any]:
    expected = {"positions": "learned", "norm": "layer", "bias": True, "activation": (*THEIR_ACTIVATIONS,)}
    expected |= {"num_kv_heads": (None, config.num_heads)}
    check_form(config, expected, ("d_ff", "layer_norm_eps", "dropout", "attention_dropout", "max_len"), "GPT-2")
    return {
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "n_inner": config.d_ff,
        "n_positions": config.max_len,
        "layer_norm_epsilon": config.layer_norm_eps,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _names(config: GPTConfig) -> dict[str, tuple[str, ...]]:
    return {
        EMBEDDING: ("wte.weight",),
        "embedding.position.table": ("wpe.weight",),
        "decoder.norm.weight": ("ln_f.weight",),
        "decoder.norm.bias": ("ln_f.bias",),
        **layer_names(config, "h", _MODULES),
    }


def _turned(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    """Transposes a layer's matrix."""
    return tensor.t() if name.startswith("decoder.layers.") and tensor.dim() == 2 else tensor


FORM = Form(
    name="GPT-2",
    prefix="transformer.",
    options=_options,
    settings=_settings,
    names=_names,
    is_tied=True,
    convert=_turned,
    revert=_turned,
    unread=(".attn.bias", ".attn.masked_bias"),
)
