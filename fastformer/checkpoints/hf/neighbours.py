"""Families whose rotations turn neighbouring features, where Llama's turn the halves of a head: ERNIE 4.5, Helium, GLM.

The rows of their projections to queries and keys are reordered, head by head, so that both features of a pair are half
a head apart. Scores are the same, since queries and keys are reordered alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import number_of
from fastformer.checkpoints.hf.decoder import MisfitError
from fastformer.checkpoints.hf.llama import MODULES, Variant
from fastformer.models import GPTConfig

_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")


def _of_neighbours(variant: Variant) -> Variant:
    """Returns a family that stores queries and keys in the order of rotations of neighbours."""

    def moved(state: Mapping[str, Tensor], settings: Mapping[str, Any], *, back: bool) -> dict[str, Tensor]:
        rotated = {name: tensor for name, tensor in state.items() if _ROTATED.fullmatch(name)}
        size = variant.size_of_head(settings) if rotated else 1
        for name, tensor in rotated.items():  # before memory is taken for a head
            if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % size:
                raise ValueError(f"expected heads of {size} rows in {name}, got shape {(*tensor.shape,)}")
        if not rotated:
            return {**state}
        pairs = torch.arange(variant.rotated(settings) // 2 * 2).view(-1, 2).t().flatten()
        places = torch.cat([pairs, torch.arange(len(pairs), size)])  # of each row of a head, in the family's head
        places = places.argsort() if back else places
        return {**state, **{name: _by_heads(tensor, places) for name, tensor in rotated.items()}}

    return variant._replace(
        open=functools.partial(moved, back=False),
        close=functools.partial(moved, back=True),
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
