"""LFM2, also with experts: most layers mix tokens by a gated convolution over three of them, and the others attend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.llama import FULL, Names, Variant
from fastformer.checkpoints.hf.mixtures import Experts
from fastformer.models import GPTConfig

CONV = "conv"
_MODULES = {
    "self_attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj": ("self_attn.out_proj",),
    "self_attn.q_norm": ("self_attn.q_layernorm",),
    "self_attn.k_norm": ("self_attn.k_layernorm",),
    "norm1": ("operator_norm",),
    "norm2": ("ffn_norm",),
    "linear1": ("feed_forward.w1", "feed_forward.w3"),
    "linear2": ("feed_forward.w2",),
}


def _d_ff(settings: Mapping[str, Any]) -> int:
    """Returns the size of the feed-forward network: by default two thirds of the setting, rounded up."""
    size = number_of(settings, "intermediate_size" if settings.get("block_ff_dim") is None else "block_ff_dim")
    if not flag_of(settings, "block_auto_adjust_ff_dim", True):
        return size
    factor, multiple = settings["block_ffn_dim_multiplier"], number_of(settings, "block_multiple_of")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 1e6:
        raise ValueError(f"expected block_ffn_dim_multiplier to be a number above 0, got {factor!r:.60}")
    return -(-int(factor * (2 * size // 3)) // multiple) * multiple


def _is_conv(settings: Mapping[str, Any], depth: int) -> tuple[bool, ...]:
    types = settings.get("layer_types")
    if types is None:
        attending = settings.get("full_attn_idxs")
        attending = range(depth) if attending is None else attending
        if not isinstance(attending, list | tuple | range) or any(layer not in range(depth) for layer in attending):
            raise ValueError(f"expected full_attn_idxs to be numbers of {depth} layers, got {attending!r:.80}")
        return tuple(layer not in attending for layer in range(depth))
    if not isinstance(types, list | tuple) or len(types) != depth or any(kind not in (CONV, FULL) for kind in types):
        raise ValueError(f"expected layer_types of {depth} layers, {CONV!r} or {FULL!r}, got {types!r:.80}")
    return tuple(kind == CONV for kind in types)


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    layers = _is_conv(settings, number_of(settings, "num_hidden_layers"))
    options: dict[str, Any] = {}
    if any(layers):
        options |= {"conv_layers": layers, "conv_size": number_of(settings, "conv_L_cache")}
    # transformers then reads what the biases make of padding on the left.
    if flag_of(settings, "conv_bias", False):
        raise ValueError("expected conv_bias to be False, got True")
    return options


def _settings(config: GPTConfig) -> dict[str, Any]:
    return {
        "layer_types": [CONV if is_conv else FULL for is_conv in config.conv],
        "conv_L_cache": config.conv_size,
    }


def _rename(names: Names, config: GPTConfig) -> Names:
    for layer, is_conv in enumerate(config.conv):
        if not is_conv:
            continue
        own, place = f"decoder.layers.{layer}.self_attn.", f"layers.{layer}.conv."
        for name in [name for name in names if name.startswith(own)]:
            del names[name]
        for ours, theirs in (("in_proj.", "in_proj."), ("conv_", "conv."), ("out_proj.", "out_proj.")):
            names[f"{own}{ours}weight"] = (f"{place}{theirs}weight",)
    return names


def _variant(kind: str, name: str, usual: Mapping[str, Any], **options: Any) -> Variant:
    return Variant(
        kind,
        name,
        modules=_MODULES,
        usual={"num_key_value_heads": 8, "norm_eps": 1e-5, "conv_L_cache": 3, **usual},
        base=1_000_000.0,
        eps="norm_eps",
        activations={"silu": "swiglu"},
        activation_settings=(),
        norm="embedding_norm",
        is_tied=True,
        **options,
    )


_FIXED = {"norm": "rms", "qk_norm": "head", "attention_dropout": 0.0}
_FREE = ("conv_layers", "conv_size")
EXPERTS = Experts(
    "feed_forward",
    parts=("w1", "w3", "w2"),
    usual_count=32,
    d_ff="moe_intermediate_size",
    first_dense="num_dense_layers",
    scale="routed_scaling_factor",
    choice_bias=("expert_bias", "use_expert_bias"),
    has_loss=False,
)
VARIANTS = (
    _variant(
        "lfm2",
        "LFM2",
        {"intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        fixed=_FIXED,
        more=lambda settings: {"d_ff": _d_ff(settings), **_options(settings)},
        more_settings=lambda config: {"block_auto_adjust_ff_dim": False, **_settings(config)},
        free=_FREE,
        rename=_rename,
    ),
    _variant(
        "lfm2_moe",
        "LFM2-MoE",
        {
            "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts_per_tok": 4, "num_dense_layers": 2,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        },
        fixed={**_FIXED, "router_activation": "sigmoid", "norm_topk_eps": 1e-6},
        more=lambda settings: {**_options(settings), **EXPERTS.options(settings)},
        more_settings=lambda config: {**_settings(config), **EXPERTS.settings(config)},
        free=(*_FREE, *EXPERTS.free),
        rename=lambda names, config: EXPERTS.names(_rename(names, config), config),
        open=EXPERTS.opened,
    ),
)  # fmt: skip
FORMS = {variant.kind: variant.form for variant in VARIANTS}
