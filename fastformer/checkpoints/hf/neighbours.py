"""Families whose rotations turn neighbouring features, where Llama's turn the halves of a head: ERNIE 4.5, Helium, GLM.

The rows of their projections to queries and keys are reordered, head by head, so that both features of a pair are half
a head apart. Scores are the same, since queries and keys are reordered alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.decoder import MisfitError
from fastformer.checkpoints.hf.llama import MODULES, Variant
from fastformer.checkpoints.hf.mixtures import Experts
from fastformer.models import GPTConfig

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")


def _of_neighbours(variant: Variant) -> Variant:
    """Returns a family that stores queries and keys in the order of rotations of neighbours."""

    def moved(state: Mapping[str, Tensor], settings: Mapping[str, Any], *, back: bool) -> dict[str, Tensor]:
        rotated = {name: tensor for name, tensor in state.items() if _ROTATED.fullmatch(name)}
        size = variant.size_of_head(settings) if rotated else 1
        for name, tensor in rotated.items():  # before memory is taken for a head
            if size < 1 or tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % size:
                raise ValueError(f"expected heads of {size} rows in {name}, got shape {(*tensor.shape,)}")
        if not rotated:
            return {**state}
        pairs = torch.arange(variant.rotated(settings) // 2 * 2).view(-1, 2).t().flatten()
        places = torch.cat([pairs, torch.arange(len(pairs), size)])  # of each row of a head, in the family's head
        places = places.argsort() if back else places
        return {**state, **{name: _by_heads(tensor, places) for name, tensor in rotated.items()}}

    return variant._replace(
        open=lambda state, settings: variant.open(moved(state, settings, back=False), settings),
        close=lambda state, settings: variant.close(moved(state, settings, back=True), settings),
    )


def _by_heads(tensor: Tensor, places: Tensor) -> Tensor:
    """Returns the rows of a tensor in another order, the same in each head."""
    heads = torch.arange(len(tensor) // len(places))
    return tensor[(heads[:, None] * len(places) + places).flatten()]


def _ernie(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns that attention has no dropout, which an ERNIE 4.5 has no setting for."""
    return {"attention_dropout": 0.0}


def _ernie_settings(config: GPTConfig) -> dict[str, Any]:
    if config.attention_dropout:
        raise MisfitError(
            "attention_dropout", f"expected an ERNIE 4.5, without attention_dropout, got {config.attention_dropout}"
        )
    return {}


_CHOICE = "moe_statics.e_score_correction_bias"
ERNIE_EXPERTS = Experts(
    total="moe_num_experts",
    usual_count=64,
    norm_topk_prob=True,
    d_ff="moe_intermediate_size",
    shared=("shared_experts", "", "moe_num_shared_experts"),
    first_dense="moe_layer_start_index",
    choice_bias=(_CHOICE,),
    per_token="moe_k",
    ones=("moe_layer_interval",),
    unread=("moe_layer_end_index", "moe_norm_min"),
)


def _ernie_moe(settings: Mapping[str, Any]) -> dict[str, Any]:
    last = number_of(settings, "num_hidden_layers") - 1
    if settings.get("moe_layer_end_index") not in (None, -1, last):
        raise ValueError(f"expected a moe_layer_end_index of {last}, got {settings['moe_layer_end_index']!r:.60}")
    # The least sum of a token's weights that they are divided by: a usual one is below all sums that occur.
    if not isinstance(least := settings.get("moe_norm_min", 0.0), int | float) or not 0 <= least <= 1e-9:
        raise ValueError(f"expected a moe_norm_min from 0 to 1e-9, got {least!r:.60}")
    if flag_of(settings, "use_bias", False):
        raise ValueError("expected use_bias to be False in an ERNIE 4.5 with experts, got True")
    return {**_ernie(settings), **ERNIE_EXPERTS.options(settings)}


def _opened_ernie(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a state with the names of files, of one that may have those of a model in memory."""
    further = re.compile(rf"model\.mtp_|model\.layers\.{settings.get('num_hidden_layers')}\.")
    named = {name.replace(f".gate.{_CHOICE}", f".{_CHOICE}"): tensor for name, tensor in state.items()}
    return ERNIE_EXPERTS.opened({name: x for name, x in named.items() if not further.match(name)}, settings)


def _helium(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns no options; refuses heads that its projection of their outputs, from d_model features, can't take."""
    width, heads = number_of(settings, "hidden_size"), number_of(settings, "num_attention_heads")
    size = width // heads if settings["head_dim"] is None else number_of(settings, "head_dim")
    if size * heads != width:
        raise ValueError(
            f"expected a Helium, with num_attention_heads * head_dim of {width}, as hidden_size, got {heads} * {size}"
        )
    return {}


def _helium_settings(config: GPTConfig) -> dict[str, Any]:
    """Returns no settings; refuses heads whose outputs are not as wide as the model."""
    if config.size_of_head * config.num_heads != config.d_model:
        raise MisfitError("head_dim", f"expected a Helium, with num_heads * head_dim = d_model, got {config.head_dim}")
    return {}


_GLM: dict[str, Any] = {
    "usual": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    "biases": ("attention_bias", False, False),
    "partial": True,
    "fraction": 0.5,
}
_GLM_MODULES = {**MODULES, "linear1": ("mlp.gate_up_proj",)}
VARIANTS = (
    Variant(
        "ernie4_5",
        "ERNIE 4.5",
        usual={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        biases=("use_bias", "use_bias", "use_bias"),
        base=500_000.0,
        is_tied=True,
        more=_ernie,
        more_settings=_ernie_settings,
    ),
    Variant(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE",
        usual={
            "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1536, "moe_k": 6,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "router_aux_loss_coef": 0.001,
        },
        fixed={"norm": "rms", "choice_bias": True},
        own_heads=False,
        base=500_000.0,
        is_tied=True,
        more=_ernie_moe,
        more_settings=lambda config: {**_ernie_settings(config), **ERNIE_EXPERTS.settings(config)},
        free=ERNIE_EXPERTS.free,
        rename=ERNIE_EXPERTS.names,
        open=_opened_ernie,
        convert=lambda name, tensor, config: tensor.flatten() if name.endswith(".choice_bias") else tensor,
        revert=lambda name, tensor, config: tensor[None] if name.endswith(".choice_bias") else tensor,
    ),
    Variant(
        "helium",
        "Helium",
        usual={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
        biases=("attention_bias", False, "mlp_bias"),
        base=100_000.0,
        more=_helium,
        more_settings=_helium_settings,
    ),
    Variant("glm", "GLM-4", modules=_GLM_MODULES, **_GLM),
    Variant(
        "glm4",
        "GLM-4-0414",
        modules={
            **_GLM_MODULES, "post_norm1": ("post_self_attn_layernorm",), "post_norm2": ("post_mlp_layernorm",),
        },
        fixed={"norm": "rms", "norm_placement": "both"},
        **_GLM,
    ),
)  # fmt: skip
FORMS = {variant.kind: _of_neighbours(variant).form for variant in VARIANTS}
