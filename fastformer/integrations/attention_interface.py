"""Our attention under a name that transformers looks up: `config._attn_implementation = "fastformer"`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from fastformer.integrations.hugging_face import attend, packed_layout
from fastformer.integrations.sdpa import scaled_dot_product_attention

NAME = "fastformer"
# What a call may bring along that a function without it does not compute.
_OTHERS = ("softcap", "position_bias", "cache", "s_aux", "output_attentions")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa_attention_forward`, on our ops where they have what is asked for.

    Args:
        module: the attention; `is_causal` and `num_key_value_groups` are read of it.
        query: (batch, num_heads, seqlen_q, head_dim); key, value: of num_kv_heads and seqlen_k.
        attention_mask: (batch, 1 or num_heads, seqlen_q, seqlen_k), bool (True = attend) or additive.
        dropout, scaling, is_causal: as in transformers.

    Returns:
        (batch, seqlen_q, num_heads, head_dim), and None for the weights.
    """
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if packed_layout() is not None:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        return attend(q, k, v, None, dropout_p=dropout, scale=scaling, is_causal=is_causal), None
    if any(kwargs.get(name) is not None and kwargs[name] is not False for name in _OTHERS):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    grouped = key.shape[1] != query.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal, scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def lead(model: nn.Module) -> list[str]:
    """Gives each part of a model that attends by "sdpa" our name for it; returns the names of these parts."""
    led = []
    for name, config in _configs(model):
        if config._attn_implementation == "sdpa":
            config._attn_implementation = NAME
            led.append(name)
    return led


def lead_back(model: nn.Module) -> list[str]:
    """Undoes `lead`."""
    led = []
    for name, config in _configs(model):
        if config._attn_implementation == NAME:
            config._attn_implementation = "sdpa"
            led.append(name)
    return led


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield name, module.config
