"""Families that add a little to Llama or GPT-NeoX, such as SmolLM3, Granite, Phi and EXAONE 4.

Granite multiplies embeddings, the outputs of sub-layers, scores and logits by factors. Those of embeddings and scores
are options of a `GPT`. The others are multiplied into the weights that they follow: of a sub-layer's last matrix, and
of the last norm. An fp32 weight is rounded once by that, and one of factor 2**n not at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import ACTIVATIONS, flag_of, number_of
from fastformer.checkpoints.hf.decoder import MisfitError
from fastformer.checkpoints.hf.llama import (
    FULL,
    MODULES,
    OLMO_MODULES,
    SLIDING,
    Variant,
    all_but_each,
    everywhere,
    uses_window,
)
from fastformer.checkpoints.hf.rope import LENGTH, kind_of, parameters_of, with_alpha, with_rope, write_rope
from fastformer.models import GPTConfig

logger = logging.getLogger(__name__)
# The ends of the names of what is added to the residual stream; a tensor of all experts has no kind.
_SUB_LAYERS = (".o_proj.weight", ".o_proj.bias", ".down_proj.weight", ".down_proj.bias", ".down_proj",
               ".shared_mlp.output_linear.weight", ".mamba.out_proj.weight")  # fmt: skip
_PHI = {
    "self_attn.in_proj": MODULES["self_attn.in_proj"],
    "self_attn.out_proj": ("self_attn.dense",),
    "norm1": ("input_layernorm",),
    "linear1": ("mlp.fc1",),
    "linear2": ("mlp.fc2",),
}


# ---- SmolLM3 ----


def _rotates(settings: Mapping[str, Any], depth: int) -> list[bool]:
    """Returns for each layer whether it has rotary positions."""
    listed = settings.get("no_rope_layers")
    if listed is None:
        each = number_of({"no_rope_layer_interval": 4, **settings}, "no_rope_layer_interval")
        return [(layer + 1) % each != 0 for layer in range(depth)]
    if not isinstance(listed, list | tuple) or len(listed) < depth or any(each not in (0, 1) for each in listed):
        raise ValueError(f"expected no_rope_layers to have a 0 or a 1 for each of {depth} layers, got {listed!r:.60}")
    return [bool(each) for each in listed[:depth]]


def _smollm3_types(settings: Mapping[str, Any], depth: int) -> list[str]:
    if not uses_window(settings):
        return [FULL] * depth
    return [FULL if rotates else SLIDING for rotates in _rotates(settings, depth)]


def _smollm3(settings: Mapping[str, Any]) -> dict[str, Any]:
    depth = number_of(settings, "num_hidden_layers")
    rotates = _rotates(settings, depth)
    return {} if all(rotates) else {"rotary_layers": tuple(rotates)}


def _smollm3_settings(config: GPTConfig) -> dict[str, Any]:
    return {"no_rope_layers": [*map(int, config.rotary_layers or (True,) * config.num_layers)]}


# ---- EXAONE 4 ----

_exaone4_types = all_but_each(4, "sliding_window_pattern")


def _windows_unless_null(settings: Mapping[str, Any], depth: int) -> list[str]:
    return [FULL] * depth if settings.get("sliding_window") is None else [*_exaone4_types(settings, depth)]


def _exaone4(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which layers rotate: those with a window, or all if the settings have none."""
    depth = number_of(settings, "num_hidden_layers")
    types = settings.get("layer_types") or _windows_unless_null(settings, depth)
    rotates = tuple(kind == SLIDING or settings.get("sliding_window") is None for kind in types)
    return {} if all(rotates) else {"rotary_layers": rotates}


def _exaone4_settings(config: GPTConfig) -> dict[str, Any]:
    rotates = config.rotary_layers or (True,) * config.num_layers
    if all(rotates) and not any(config.windows):
        return {"sliding_window": None}
    if rotates != config.windows:
        raise MisfitError(
            "rotary_layers", f"expected an EXAONE 4, whose layers rotate if they have a window, got {rotates}"
        )
    return {}


# ---- Granite ----


def _factor(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"expected {name} to be a number above 0, got {value!r:.60}")
    return float(value)


def granite_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the factors of embeddings and scores as options."""
    embedding = _factor(settings, "embedding_multiplier")
    options = {} if embedding == 1 else {"embedding_scale": embedding}
    return {**options, "attention_scale": _factor(settings, "attention_multiplier")}


def granite_settings(config: GPTConfig) -> dict[str, Any]:
    """Returns the settings of Granite's factors."""
    if config.embedding_scale is None and config.attention_scale is None:
        raise MisfitError("attention_scale", "expected a Granite, with an attention_scale, got None")
    return {
        "embedding_multiplier": 1.0 if config.embedding_scale is None else config.embedding_scale,
        "attention_multiplier": config.size_of_head**-0.5 if config.attention_scale is None else config.attention_scale,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def folded(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the state of a Granite whose factors of residuals and of logits are 1."""
    residual, logits = _factor(settings, "residual_multiplier"), 1 / _factor(settings, "logits_scaling")

    def scaled(name: str, tensor: Tensor) -> Tensor:
        is_last = name in ("norm.weight", "model.norm.weight")
        factor = logits if is_last else residual if name.endswith(_SUB_LAYERS) else 1.0
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return tensor if factor == 1 else (tensor.to(wide) * factor).to(tensor.dtype)

    return {name: scaled(name, tensor) for name, tensor in state.items()}


# ---- Phi and StableLM ----


def _phi(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns no options; refuses norms of queries and keys, which no saved Phi has."""
    _check_no_norms(settings)
    return {}


def _stablelm(settings: Mapping[str, Any]) -> dict[str, Any]:
    _check_no_norms(settings)
    if settings.get("hidden_dropout"):
        raise ValueError(f"expected a hidden_dropout of 0, got {settings['hidden_dropout']}")
    is_parallel = flag_of(settings, "use_parallel_residual", False)
    return {"norm_bias": True, "parallel_residual": is_parallel, "shared_norm": is_parallel}


def _stablelm_settings(config: GPTConfig) -> dict[str, Any]:
    if config.shared_norm != config.parallel_residual:
        raise MisfitError("shared_norm", f"expected a StableLM, with shared_norm={config.parallel_residual}, got "
                          f"{config.shared_norm}")  # fmt: skip
    return {"use_parallel_residual": config.parallel_residual}


def _check_no_norms(settings: Mapping[str, Any]) -> None:
    if flag_of(settings, "qk_layernorm", False):
        raise ValueError("expected queries and keys without a LayerNorm, got qk_layernorm true")


# ---- Seed-OSS ----


def _seed_oss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns that the embeddings have no dropout, where sub-layers have."""
    return {"embedding_dropout": 0.0} if settings["residual_dropout"] else {}


def _seed_oss_settings(config: GPTConfig) -> dict[str, Any]:
    rate = config.dropout if config.embedding_dropout is None else config.embedding_dropout
    if rate:
        raise MisfitError("embedding_dropout", f"expected a Seed-OSS, whose embeddings have no dropout, got {rate}")
    return {}


# ---- Hunyuan ----


class _Hunyuan(Variant):
    def _rope(self, settings: Mapping[str, Any], has_windows: bool) -> dict[str, Any]:
        own = with_alpha(settings, layers=FULL, base=self.base, head_dim=self.size_of_head(settings))
        return super()._rope(own, has_windows)


# ---- Ministral 3 ----

_BETA = "llama_4_scaling_beta"
_UNREAD = "max_position_embeddings"  # which its rotary parameters have as well, and no pass reads

# In a model with pictures: its other parts, and the two places of its text.
_OF_PICTURES = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
_OF_TEXT = re.compile(r"^(?:(model\.)language_model\.|language_model\.)")


class _Ministral3(Variant):
    def _rope(self, settings: Mapping[str, Any], has_windows: bool) -> dict[str, Any]:
        """Returns the options of rotations, and those by which queries grow after the original length."""
        given = parameters_of(settings, FULL)
        rope = dict(given or self.rope)
        beta, limit = rope.pop(_BETA, None), settings.get("max_position_embeddings")
        rope.pop(_UNREAD, None)
        is_scaled = kind_of(rope) in ("llama3", "yarn", "longrope")
        length = settings.get(LENGTH) if is_scaled and settings.get(LENGTH) is not None else rope.get(LENGTH)
        length = limit if length is None and is_scaled else length
        if not isinstance(beta, int | float) or isinstance(beta, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"expected rope_parameters with numbers as {_BETA} and {LENGTH}, got {beta!r:.60} and {length!r:.60}"
            )
        options = super()._rope(with_rope(settings, rope), has_windows)
        return {**options, "query_growth": beta, "query_growth_length": length} if beta else options


def _without_pictures(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the text's tensors by their names in a model without pictures."""
    opened: dict[str, Tensor] = {}
    pictures = 0
    for name, tensor in state.items():
        if _OF_PICTURES.match(name):
            pictures += 1
        else:
            opened[_OF_TEXT.sub(r"\1", name)] = tensor
    if pictures:
        logger.warning("The model reads text alone: %d tensors for pictures are left out", pictures)
    return opened


def _ministral3_settings(config: GPTConfig) -> dict[str, Any]:
    """Returns the settings of rotations, with those of the growth of queries."""
    scaling = config.rotary_scaling or {}
    length = scaling.get(LENGTH, config.max_len)
    if config.query_growth:
        own = config.query_growth_length
        if scaling.get(LENGTH, own) != own:
            raise MisfitError(
                "query_growth_length", f"expected a Ministral 3, with a query_growth_length of {length}, got {own}"
            )
        length = own
    written = write_rope(config, 1.0)
    return {
        name: {**values, LENGTH: length, _BETA: config.query_growth}
        for name, values in written.items()
        if isinstance(values, Mapping)
    }


VARIANTS = (
    Variant(
        "smollm3",
        "SmolLM3",
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        layer_types=_smollm3_types,
        usual={"num_key_value_heads": 4},
        base=2_000_000.0,
        is_tied=True,
        more=_smollm3,
        more_settings=_smollm3_settings,
        free=("rotary_layers",),
    ),
    Variant(
        "exaone4",
        "EXAONE 4",
        modules=OLMO_MODULES,
        fixed={"norm": "rms", "norm_placement": "post", "qk_norm": "head"},
        usual={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        layer_types=_windows_unless_null,
        more=_exaone4,
        more_settings=_exaone4_settings,
        free=("rotary_layers",),
    ),
    Variant(
        "granite",
        "Granite",
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        more=granite_options,
        more_settings=granite_settings,
        free=("embedding_scale", "attention_scale"),
        open=folded,
    ),
    Variant(
        "phi",
        "Phi",
        modules=_PHI,
        fixed={"norm": "layer", "parallel_residual": True, "shared_norm": True, "output_bias": True},
        biases=(True, True, True),
        partial=True,
        fraction=0.5,
        eps="layer_norm_eps",
        usual={"layer_norm_eps": 1e-5},
        activations={"gelu_new": "gelu_tanh", **ACTIVATIONS},
        dropouts=("resid_pdrop", "embd_pdrop"),
        norm="final_layernorm",
        more=_phi,
    ),
    Variant(
        "stablelm",
        "StableLM",
        fixed={"norm": "layer", "norm_bias": True},
        biases=("use_qkv_bias", False, False),
        own_heads=False,
        even_heads=True,
        partial=True,
        fraction=0.25,
        eps="layer_norm_eps",
        usual={"layer_norm_eps": 1e-5, "num_key_value_heads": 32},
        more=_stablelm,
        more_settings=_stablelm_settings,
        free=("parallel_residual", "shared_norm"),
    ),
    Variant(
        "seed_oss",
        "Seed-OSS",
        usual={
            "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_dropout": 0.1,
            "residual_dropout": 0.1,
        },
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
        dropouts=("residual_dropout",),
        more=_seed_oss,
        more_settings=_seed_oss_settings,
        free=("embedding_dropout",),
    ),
    _Hunyuan(
        "hunyuan_v1_dense",
        "Hunyuan",
        modules={
            **MODULES, "self_attn.q_norm": ("self_attn.query_layernorm",), "self_attn.k_norm":
            ("self_attn.key_layernorm",),
        },
        fixed={"norm": "rms", "qk_norm": "rotated"},
        usual={"rms_norm_eps": 1e-5},
        biases=("attention_bias", "attention_bias", False),
    ),
    _Ministral3(
        "ministral3",
        "Ministral 3",
        usual={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        layer_types=everywhere,
        has_layer_types=False,
        grows=False,
        rope={
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, LENGTH: 16384, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1,
        },
        more_settings=_ministral3_settings,
        free=("query_growth", "query_growth_length"),
        open=_without_pictures,
    ),
)  # fmt: skip
FORMS = {variant.kind: variant.form for variant in VARIANTS}
