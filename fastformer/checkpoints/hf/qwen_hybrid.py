"""Qwen3-Next and Qwen3.5, for text alone: most of their layers are gated DeltaNets, and attention has a gate.

As in Gemma, norms multiply by 1 + weight, but for the one within a gated DeltaNet. The folder of a model that also sees
pictures has the text's settings within the others, and a prefix of its own; the tensors of its vision tower, and those
that predict several tokens at once, are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import number_of
from fastformer.checkpoints.hf.decoder import kinds_of
from fastformer.checkpoints.hf.llama import FULL, MODULES, QK_NORMS, Names, Variant, biases_of
from fastformer.checkpoints.hf.mixtures import SHARED, Experts
from fastformer.models import GPTConfig

logger = logging.getLogger("fastformer")

LINEAR = "linear_attention"
_INSIDE = "model.language_model."  # the prefix of the text's tensors in a model that also sees pictures
_GATE = "self_attn.q_proj_gate"  # here, the rows of q_proj that are gates
_SIZES = {
    "linear_num_key_heads": "linear_key_heads",
    "linear_num_value_heads": "linear_value_heads",
    "linear_key_head_dim": "linear_key_dim",
    "linear_value_head_dim": "linear_value_dim",
    "linear_conv_kernel_dim": "linear_conv_size",
}
_USUAL = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "head_dim": 256,
}  # fmt: skip
_EXPERTS = {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
# The tensors of a gated DeltaNet, ours and those of Qwen3.5.
_TENSORS = {
    "in_proj.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
    "gates.weight": ("in_proj_b.weight", "in_proj_a.weight"),
    "conv_weight": ("conv1d.weight",),
    "A_log": ("A_log",),
    "dt_bias": ("dt_bias",),
    "norm.weight": ("norm.weight",),
    "out_proj.weight": ("out_proj.weight",),
}
Rows = list[tuple[int, int]]


def _order(spans: Rows) -> Tensor:
    """Returns the numbers of rows, by which they are taken from a matrix in a file without reading it."""
    return torch.cat([torch.arange(*span) for span in spans])


def _spans(count: int, sizes: tuple[int, ...]) -> Iterator[Rows]:
    """Yields the rows of each part of a matrix that has the parts of one head after those of another."""
    step, begin = sum(sizes), 0
    for size in sizes:
        yield [(head * step + begin, head * step + begin + size) for head in range(count)]
        begin += size


def _is_layer(name: str, kind: str) -> re.Match[str] | None:
    return re.fullmatch(rf"(.*layers\.\d+\.){kind}", name)


def _opened(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the text's tensors by their names in a model without pictures, with gates apart from queries."""
    inside = any(name.startswith(_INSIDE) for name in state)
    opened: dict[str, Tensor] = {}
    pictures = 0
    for name, tensor in state.items():
        if name.startswith(("mtp.", "model.visual.", "visual.")):
            pictures += not name.startswith("mtp.")
            continue
        name = name.replace(_INSIDE, "model.") if inside else name
        if (match := _is_layer(name, r"self_attn\.q_proj\.(weight|bias)")) is None:
            opened[name] = tensor
            continue
        heads, size = number_of(settings, "num_attention_heads"), number_of({**_USUAL, **settings}, "head_dim")
        if tensor.shape[0] != 2 * heads * size:
            raise ValueError(f"expected {2 * heads * size} rows of queries and gates in {name}, got {tensor.shape[0]}")
        opened[name], opened[f"{match[1]}{_GATE}.{match[2]}"] = (
            tensor[_order(rows)] for rows in _spans(heads, (size, size))
        )
    if pictures:
        logger.warning("The model reads text alone: %d tensors for pictures are left out", pictures)
    return opened


def _closed(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Joins gates with queries, head by head."""
    closed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (match := _is_layer(name, rf"{re.escape(_GATE)}\.(weight|bias)")) is not None:
            continue
        if (match := _is_layer(name, r"self_attn\.q_proj\.(weight|bias)")) is not None:
            size, gate = len(state[f"{match[1]}self_attn.q_norm.weight"]), state[f"{match[1]}{_GATE}.{match[2]}"]
            tensor = torch.cat([x.unflatten(0, (-1, size)) for x in (tensor, gate)], 1).flatten(0, 1)
        closed[name] = tensor
    return closed


def _is_norm(name: str) -> bool:
    return "norm" in name.rsplit(".", 2)[-2] and not name.endswith(".self_attn.norm.weight")


def _with_one(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    return tensor.double() + 1 if _is_norm(name) else tensor


def _without_one(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    return (tensor.double() - 1).to(tensor.dtype) if _is_norm(name) else tensor


def _rows_by_head(name: str, tensor: Tensor, config: GPTConfig) -> Rows | None:
    """Returns where the rows of one of our matrices are in one of Qwen3-Next, which has one key head after another."""
    if not name.endswith((".self_attn.in_proj.weight", ".self_attn.gates.weight")):
        return None
    heads = config.linear_key_heads
    shared = (config.linear_value_heads or heads) // heads
    value = shared * config.linear_value_dim
    sizes = (config.linear_key_dim,) * 2 + (value, value) if ".in_proj." in name else (shared, shared)
    if tensor.shape[0] != heads * sum(sizes):
        raise ValueError(f"expected {heads * sum(sizes)} rows for {name}, got {tensor.shape[0]}")
    return [span for spans in _spans(heads, sizes) for span in spans]


def _from_heads(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    if (rows := _rows_by_head(name, tensor, config)) is None:
        return _with_one(name, tensor, config)
    return tensor[_order(rows)]


def _to_heads(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    if (rows := _rows_by_head(name, tensor, config)) is None:
        return _without_one(name, tensor, config)
    return torch.empty_like(tensor).index_copy_(0, _order(rows).to(tensor.device), tensor)


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of layers of linear attention."""
    depth = number_of(settings, "num_hidden_layers")
    types = settings.get("layer_types")
    if types is None:
        each = number_of({"full_attention_interval": 4, **settings}, "full_attention_interval")
        types = [LINEAR if (layer + 1) % each else FULL for layer in range(depth)]
    if not isinstance(types, list | tuple) or len(types) != depth or any(kind not in (LINEAR, FULL) for kind in types):
        raise ValueError(f"expected layer_types of {depth} layers, {LINEAR!r} or {FULL!r}, got {types!r:.80}")
    if LINEAR not in types:
        return {}
    sizes = {ours: number_of(settings, theirs) for theirs, ours in _SIZES.items()}
    return {"linear_layers": tuple(kind == LINEAR for kind in types), **sizes}


def _settings(config: GPTConfig) -> dict[str, Any]:
    values = config.linear_value_heads or config.linear_key_heads
    return {
        "layer_types": [LINEAR if is_linear else FULL for is_linear in config.linear],
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "linear_num_value_heads": values,
    }


def _rename(tensors: Mapping[str, tuple[str, ...]]) -> Callable[[Names, GPTConfig], Names]:
    def rename(names: Names, config: GPTConfig) -> Names:
        for layer, is_linear in enumerate(config.linear):
            own, place = f"decoder.layers.{layer}.self_attn.", f"layers.{layer}."
            if not is_linear:
                for kind in kinds_of(biases_of(config)[0]):
                    names[f"{own}gate_proj.{kind}"] = (f"{place}{_GATE}.{kind}",)
                continue
            for name in [name for name in names if name.startswith(own)]:
                del names[name]
            for ours, theirs in tensors.items():
                names[own + ours] = tuple(f"{place}linear_attn.{name}" for name in theirs)
        return names

    return rename


_HYBRID: dict[str, Any] = {
    "modules": {**MODULES, **QK_NORMS},
    "fixed": {"norm": "rms", "qk_norm": "head", "attention_gate": True},
    "biases": ("attention_bias", "attention_bias", False),
    "activations": {"silu": "swiglu", "swish": "swiglu"},  # also that of the convolution
    "partial": True,
    "fraction": 0.25,
    "open": _opened,
    "close": _closed,
}
_FREE = ("linear_layers", *_SIZES.values())


def _dense(kind: str, name: str) -> Variant:
    return Variant(
        kind,
        name,
        usual={**_USUAL, "num_key_value_heads": 4},
        more=_options,
        more_settings=_settings,
        free=_FREE,
        rename=_rename(_TENSORS),
        convert=_with_one,
        revert=_without_one,
        **_HYBRID,
    )


def _mixed(kind: str, name: str, experts: Experts, usual: Mapping[str, Any], **options: Any) -> Variant:
    rename = _rename(options.pop("tensors", _TENSORS))
    return Variant(
        kind,
        name,
        usual={**_USUAL, **_EXPERTS, **usual},
        more=lambda settings: {**_options(settings), **experts.options(settings)},
        more_settings=lambda config: {**_settings(config), **experts.settings(config)},
        free=(*_FREE, *experts.free),
        rename=lambda names, config: experts.names(rename(names, config), config),
        **{**_HYBRID, "open": lambda state, settings: experts.opened(_opened(state, settings), settings), **options},
    )


VARIANTS = (
    _dense("qwen3_5_text", "Qwen3.5"),
    _mixed(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE",
        Experts(usual_count=256, d_ff="moe_intermediate_size", shared=SHARED, norm_topk_prob=True),
        {"num_experts_per_tok": 8},
        convert=_with_one,
        revert=_without_one,
    ),
    _mixed(
        "qwen3_next",
        "Qwen3-Next",
        Experts(usual_count=512, d_ff="moe_intermediate_size", shared=SHARED, may_be_dense=True),
        {"num_experts_per_tok": 10, "norm_topk_prob": True},
        convert=_from_heads,
        revert=_to_heads,
        tensors={
            **_TENSORS,
            "in_proj.weight": ("in_proj_qkvz.weight",),
            "gates.weight": ("in_proj_ba.weight",),
        },
    ),
)
FORMS = {variant.kind: variant.form for variant in VARIANTS}
