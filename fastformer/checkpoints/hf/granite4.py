"""Granite 4: layers that attend or are a `Mamba`, with experts beside a network for all tokens, or that alone.

Its factors are those of Granite, in `llama_kin.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.decoder import MisfitError
from fastformer.checkpoints.hf.llama import FULL, MODULES, Names, Variant
from fastformer.checkpoints.hf.llama_kin import folded, granite_options, granite_settings
from fastformer.checkpoints.hf.mixtures import Experts
from fastformer.models import GPTConfig

_EXPERTS = Experts("block_sparse_moe", "router", total="num_local_experts", usual_count=8, norm_topk_prob=True)
_USUAL = {
    "num_local_experts": 8, "shared_intermediate_size": 1024, "intermediate_size": 11008, "mamba_n_heads": 128,
    "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
# A Granite 4's sizes of layers that are a `Mamba`.
_SIZES = {
    "mamba_n_heads": "mamba_heads", "mamba_d_state": "mamba_state_dim", "mamba_n_groups": "mamba_groups",
    "mamba_d_conv": "mamba_conv_size",
}  # fmt: skip
_UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # in memory, and as transformers writes it
_MAMBA, _ATTENDS = ("linear_attention", "mamba"), (FULL, "attention")  # in version 5, and before


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Granite 4. Beside experts, its network is one that all tokens go through."""
    depth = number_of(settings, "num_hidden_layers")
    listed = settings.get("layer_types", settings.get("layers_block_type")) or [_MAMBA[0]] * depth
    if not isinstance(listed, list | tuple) or len(listed) != depth or {*map(str, listed)} - {*_MAMBA, *_ATTENDS}:
        raise ValueError(f"expected layer_types of {depth} {_MAMBA[0]!r} and {FULL!r}, got {listed!r:.60}")
    shared = number_of(settings, "shared_intermediate_size")
    options = granite_options(settings)
    if number_of(settings, "num_local_experts", 0):
        options |= {**_EXPERTS.options(settings), "shared_expert_d_ff": shared, "shared_expert_gate": False}
    else:
        options["d_ff"] = shared
    layers = tuple(kind in _MAMBA for kind in listed)
    if any(layers):
        options |= {"mamba_layers": layers, **_mamba_options(settings)}
    is_rotary = settings.get("position_embedding_type") == "rope"
    return options if is_rotary else {**options, "rotary_layers": (False,) * depth}


def _mamba_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    if flag_of(settings, "mamba_proj_bias", False):
        raise ValueError("expected mamba_proj_bias to be False, got True")
    limit = settings.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list | tuple) or [*limit] not in _UNLIMITED):
        raise ValueError(f"expected a time_step_limit of 0 and infinity, got {limit!r:.60}")
    sizes = {ours: number_of(settings, theirs) for theirs, ours in _SIZES.items()}
    width = number_of(settings, "mamba_expand") * number_of(settings, "hidden_size")
    head = settings["mamba_d_head"]
    head = width // sizes["mamba_heads"] if head == "auto" else number_of(settings, "mamba_d_head")
    if head * sizes["mamba_heads"] != width:
        raise ValueError(f"expected mamba_n_heads * mamba_d_head of {width}, got {sizes['mamba_heads']} * {head}")
    return {**sizes, "mamba_head_dim": head, "mamba_conv_bias": flag_of(settings, "mamba_conv_bias", True)}


def _mamba_settings(config: GPTConfig) -> dict[str, Any]:
    width = config.mamba_heads * config.mamba_head_dim
    if width % config.d_model:
        raise MisfitError(
            "mamba_head_dim", f"expected mamba_heads * mamba_head_dim to be a multiple of {config.d_model}, got {width}"
        )
    sizes = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    own = {"mamba_d_head": config.mamba_head_dim, "mamba_conv_bias": config.mamba_conv_bias}
    return {**sizes, **own, "mamba_expand": width // config.d_model}


def _rename(names: Names, config: GPTConfig) -> Names:
    if config.num_experts is not None:
        names = _EXPERTS.names(names, config)
        for layer in range(config.num_layers):
            own, place = f"decoder.layers.{layer}.mixture.shared", f"layers.{layer}.shared_mlp"
            names[f"{own}.linear1.weight"] = (f"{place}.gate_proj.weight", f"{place}.up_proj.weight")
            names[f"{own}.linear2.weight"] = (f"{place}.output_linear.weight",)
    for layer, is_mamba in enumerate(config.mamba):
        if not is_mamba:
            continue
        own, place = f"decoder.layers.{layer}.self_attn.", f"layers.{layer}.mamba."
        for name in [name for name in names if name.startswith(own)]:
            del names[name]
        names |= {f"{own}{name}.weight": (f"{place}{name}.weight",) for name in ("in_proj", "gates", "out_proj")}
        names |= {f"{own}{name}": (f"{place}{name}",) for name in ("A_log", "dt_bias", "D")}
        names |= {f"{own}norm_weight": (f"{place}norm.weight",), f"{own}conv_weight": (f"{place}conv1d.weight",)}
        if config.mamba_conv_bias:
            names[f"{own}conv_bias"] = (f"{place}conv1d.bias",)
    return names


_INPUT = ".input_linear.weight"  # of the network for all tokens: its gate, and the map beside it
_IN_PROJ = re.compile(r"(.*layers\.\d+\.mamba\.)in_proj\.weight")


def _opened(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a state with a tensor for each expert, and for each part of a matrix that a `GPT` has in several."""
    if settings.get("num_local_experts") != 0:
        state = _EXPERTS.opened(state, settings)
    opened: dict[str, Tensor] = {}
    for name, tensor in folded(state, settings).items():
        if name.endswith(_INPUT):
            if tensor.dim() != 2 or len(tensor) < 2:
                raise ValueError(f"expected {name} to have two maps, one below the other, got shape {(*tensor.shape,)}")
            place = name.removesuffix(_INPUT)
            opened[f"{place}.gate_proj.weight"], opened[f"{place}.up_proj.weight"] = tensor.chunk(2)
            continue
        if (match := _IN_PROJ.fullmatch(name)) is None:
            opened[name] = tensor
            continue
        heads = number_of({**_USUAL, **settings}, "mamba_n_heads")
        if tensor.dim() != 2 or len(tensor) <= heads:
            raise ValueError(f"expected {name} to have more than {heads} rows, got shape {(*tensor.shape,)}")
        opened[name], opened[f"{match[1]}gates.weight"] = tensor[:-heads], tensor[-heads:]
    return opened


def _closed(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Does the inverse of `_opened`, but for factors."""
    closed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (match := _IN_PROJ.fullmatch(name)) is not None:
            tensor = torch.cat([tensor, state[f"{match[1]}gates.weight"]])
        elif name.endswith((".mamba.gates.weight", ".shared_mlp.up_proj.weight")):
            continue
        elif name.endswith(".shared_mlp.gate_proj.weight"):
            name = name.replace(".gate_proj.weight", _INPUT)
            tensor = torch.cat([tensor, state[name.replace(_INPUT, ".up_proj.weight")]])
        closed[name] = tensor
    return closed


def _settings(config: GPTConfig) -> dict[str, Any]:
    rotates = {*(config.rotary_layers or (True,))}
    if len(rotates) > 1:
        raise MisfitError("rotary_layers", "expected a Granite, with positions in all layers or in none, got some")
    settings = {"shared_intermediate_size": config.d_ff, "num_local_experts": 0}
    if config.num_experts is not None:
        if config.shared_expert_d_ff is None or config.shared_expert_gate:
            raise MisfitError("shared_expert_d_ff", "expected a Granite 4, with a shared expert without a gate")
        settings |= _EXPERTS.settings(dataclasses.replace(config, shared_expert_d_ff=None, shared_expert_gate=True))
        settings["shared_intermediate_size"] = config.shared_expert_d_ff
    return {
        **granite_settings(config),
        **settings,
        "layer_types": [_MAMBA[0] if is_mamba else FULL for is_mamba in config.mamba],
        "position_embedding_type": "rope" if rotates == {True} else None,
        # Without layers of this kind, the number of heads has to divide a size.
        **(_mamba_settings(config) if any(config.mamba) else {"mamba_n_heads": 1}),
    }


VARIANTS = (
    Variant(
        "granitemoehybrid",
        "Granite 4",
        modules={
            **MODULES,
            "linear1": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
            "linear2": ("shared_mlp.output_linear",),
        },
        usual=_USUAL,
        biases=("attention_bias", "attention_bias", False),
        more=_options,
        more_settings=_settings,
        free=(
            "embedding_scale", "attention_scale", "rotary_layers", "mamba_layers", "mamba_head_dim", "mamba_conv_bias",
            *_SIZES.values(), *_EXPERTS.free, "shared_expert_d_ff", "shared_expert_gate",
        ),
        rename=_rename,
        open=_opened,
        close=_closed,
    ),
)  # fmt: skip
FORMS = {variant.kind: variant.form for variant in VARIANTS}
