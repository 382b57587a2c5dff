"""Gemma, Gemma 2 and Gemma 3 (Gemma Team 2024, 2025), for text without pictures.

Their norms multiply by 1 + weight. Here the weight is that sum, rounded once to the dtype that the model gets: in fp32
by less than 1e-7, but in bf16 and fp16, a number near 1 has fewer digits than one near 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastformer.checkpoints.hf.fields import BIDIRECTIONAL
from fastformer.checkpoints.hf.llama import MODULES, QK_NORMS, Variant, all_but_each
from fastformer.models import GPTConfig

ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "silu": "swiglu", "swish": "swiglu"}
FOUR_NORMS = {
    **MODULES,
    "norm2": ("pre_feedforward_layernorm",),
    "post_norm1": ("post_attention_layernorm",),
    "post_norm2": ("post_feedforward_layernorm",),
}


def _is_norm(name: str) -> bool:
    return "norm" in name.rsplit(".", 2)[-2]


def _with_one(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    return tensor.double() + 1 if _is_norm(name) else tensor


def _without_one(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    return (tensor.double() - 1).to(tensor.dtype) if _is_norm(name) else tensor


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("use_bidirectional_attention") and (
        settings.get("model_type") != BIDIRECTIONAL or not settings.get("is_causal", True)
    ):
        raise ValueError("expected use_bidirectional_attention only in a Gemma 3, without is_causal, got it in another")
    return {"embedding_scale": settings["hidden_size"] ** 0.5}


def _capped(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = _options(settings)
    scalar, cap = settings["query_pre_attn_scalar"], settings.get("final_logit_softcapping")
    if not isinstance(scalar, int | float) or scalar <= 0:
        raise ValueError(f"expected query_pre_attn_scalar to be a number above 0, got {scalar!r:.60}")
    if scalar != settings["head_dim"]:
        options["attention_scale"] = scalar**-0.5
    if cap is not None:
        options["logit_softcap"] = cap
    return options


def _gemma2(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = _capped({"final_logit_softcapping": 30.0, **settings})
    cap = settings.get("attn_logit_softcapping", 50.0)
    return options if cap is None else {**options, "attention_softcap": cap}


def _gemma3(settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("attn_logit_softcapping") is not None:  # some versions of transformers read it, others don't
        raise ValueError(f"expected no attn_logit_softcapping, got {settings['attn_logit_softcapping']}")
    return _capped(settings)


def _settings(config: GPTConfig) -> dict[str, Any]:
    expected = config.d_model**0.5
    if config.embedding_scale != expected:
        raise ValueError(f"expected a Gemma, with embedding_scale={expected}, got {config.embedding_scale}")
    return {}


def _capped_settings(config: GPTConfig) -> dict[str, Any]:
    scale = config.size_of_head**-0.5 if config.attention_scale is None else config.attention_scale
    scalar = round(scale**-2)
    if abs(scalar**-0.5 - scale) > 1e-12:
        raise ValueError(f"expected a Gemma, with attention_scale the root of 1 / n, got {config.attention_scale}")
    return {**_settings(config), "query_pre_attn_scalar": scalar, "final_logit_softcapping": config.logit_softcap}


def _gemma2_settings(config: GPTConfig) -> dict[str, Any]:
    return {**_capped_settings(config), "attn_logit_softcapping": config.attention_softcap}


_GEMMA: dict[str, Any] = {
    "fixed": {"norm": "rms"},
    "biases": ("attention_bias", "attention_bias", False),
    "usual": {"head_dim": 256, "num_key_value_heads": 16},
    "grows": False,
    "activations": ACTIVATIONS,
    "is_tied": True,
    "convert": _with_one,
    "revert": _without_one,
}
_NEWER: dict[str, Any] = {
    **_GEMMA,
    "fixed": {"norm": "rms", "norm_placement": "both"},
    "usual": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    "modules": FOUR_NORMS,
    "even_heads": True,
    "activation_settings": ("hidden_activation",),
}
_FREE = ("embedding_scale", "attention_scale", "logit_softcap")
VARIANTS = (
    Variant(
        "gemma",
        "Gemma",
        activation_settings=("hidden_activation", "hidden_act"),
        more=_options,
        more_settings=lambda config: {**_settings(config), "hidden_act": "gelu_pytorch_tanh"},
        free=_FREE[:1],
        # The first Gemma alone means the approximation by this name.
        **{**_GEMMA, "activations": {**ACTIVATIONS, "gelu": "geglu_tanh"}},
    ),
    Variant(
        "gemma2",
        "Gemma 2",
        layer_types=all_but_each(2),
        more=_gemma2,
        more_settings=_gemma2_settings,
        free=(*_FREE, "attention_softcap"),
        **_NEWER,
    ),
    Variant(
        "gemma3_text",
        "Gemma 3",
        layer_types=all_but_each(6, "sliding_window_pattern"),
        base=1_000_000.0,
        local_base=10_000.0,
        more=_gemma3,
        more_settings=_capped_settings,
        free=_FREE,
        **{**_NEWER, "modules": {**FOUR_NORMS, **QK_NORMS}, "fixed": {**_NEWER["fixed"], "qk_norm": "head"}},
    ),
)
FORMS = {variant.kind: variant.form for variant in VARIANTS}
