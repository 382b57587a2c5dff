"""GPT-NeoX (Black et al. 2022; Pythia), StarCoder2 (Lozhkov et al. 2024): rotary positions, LayerNorm, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import ACTIVATIONS, flag_of
from fastformer.checkpoints.hf.llama import MODULES, Variant, everywhere
from fastformer.models import GPTConfig

_NEOX = {
    "self_attn.in_proj": ("attention.query_key_value",),
    "self_attn.out_proj": ("attention.dense",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "linear1": ("mlp.dense_h_to_4h",),
    "linear2": ("mlp.dense_4h_to_h",),
}


def _by_kind(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    """Reorders rows from (head, query/key/value) to (query/key/value, head): all queries come first."""
    if ".self_attn.in_proj_" not in name:
        return tensor
    return tensor[torch.arange(len(tensor)).unflatten(0, (config.num_heads, 3, -1)).transpose(0, 1).flatten()]


def _by_head(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    if ".self_attn.in_proj_" not in name:
        return tensor
    return tensor.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)


def _neox(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"parallel_residual": flag_of(settings, "use_parallel_residual", True)}


def _neox_settings(config: GPTConfig) -> dict[str, Any]:
    if config.num_kv_heads not in (None, config.num_heads):
        raise ValueError(f"expected a GPT-NeoX, with num_kv_heads={config.num_heads}, got {config.num_kv_heads}")
    return {
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": config.rotary_fraction,
        "rotary_emb_base": config.rotary_base,
    }


VARIANTS = (
    Variant(
        "gpt_neox",
        "GPT-NeoX",
        modules=_NEOX,
        fixed={"norm": "layer"},
        biases=("attention_bias", "attention_bias", True),
        even_heads=True,
        own_heads=False,
        fraction=0.25,
        rope_names=("rotary_emb_base", "rotary_pct"),
        partial=True,
        eps="layer_norm_eps",
        usual={"layer_norm_eps": 1e-5, "attention_bias": True},
        activations={"gelu": "gelu", **ACTIVATIONS},
        dropouts=("hidden_dropout",),
        embedding="embed_in",
        norm="final_layer_norm",
        prefix="gpt_neox.",
        heads=("lm_head.weight", "embed_out.weight"),
        more=_neox,
        more_settings=_neox_settings,
        free=("parallel_residual",),
        convert=_by_kind,
        revert=_by_head,
    ),
    Variant(
        "starcoder2",
        "StarCoder2",
        modules={**MODULES, "linear1": ("mlp.c_fc",), "linear2": ("mlp.c_proj",)},
        fixed={"norm": "layer"},
        biases=(True, True, True),
        layer_types=everywhere,
        has_layer_types=False,
        eps="norm_epsilon",
        usual={"norm_epsilon": 1e-5, "num_key_value_heads": 2},
        activations={"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS},
        dropouts=("residual_dropout", "embedding_dropout"),
        is_tied=True,
    ),
)
FORMS = {variant.kind: variant.form for variant in VARIANTS}
