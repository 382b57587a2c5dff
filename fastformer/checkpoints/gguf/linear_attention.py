"""The layers of linear attention in GGUF files of Qwen3.5.

llama.cpp stores the decay of a head as -exp(A_log). If several value heads share a key head, it stores them by their
places behind it: the first ones of all key heads, then the second ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LINEAR, FULL = "linear_attention", "full_attention"
# The tensors of whose modules nothing but this remains.
BARE = ("ssm_a", "ssm_d", "ssm_dt")
_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads":
    "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
}  # fmt: skip


def check_negative(stem: str, tensor: Tensor) -> Tensor:
    """Returns the numbers of a tensor times -1, in fp64.

    Raises:
        ValueError: one is not below 0.
    """
    if not bool((tensor < 0).all()):
        raise ValueError(f"expected negative numbers in {stem}")
    return -tensor.double()


def linear_settings(values: Any, depth: int) -> dict[str, Any]:
    """Returns the settings of the family in transformers.

    Args:
        values: the `_Values` of the file.
        depth: the number of layers.

    Raises:
        ValueError: the values contradict each other, or one is missing.
    """
    settings: dict[str, Any] = {name: int(values.number(key)) for name, key in _SIZES.items()}
    heads, inner = settings["linear_num_value_heads"], int(values.number("ssm.inner_size"))
    if heads < 1 or inner % heads or heads % max(1, settings["linear_num_key_heads"]):
        raise ValueError(f"expected an ssm.inner_size and key heads that divide {heads} value heads, got {settings}")
    settings["linear_value_head_dim"] = inner // heads
    flags = values.raw("attention.recurrent_layers")
    if flags is None:
        each = int(values.number("full_attention_interval", 4))
        flags = [bool((layer + 1) % max(1, each)) for layer in range(depth)]
    if not isinstance(flags, list) or len(flags) < depth:
        raise ValueError(f"expected attention.recurrent_layers of {depth} layers, got {flags!r:.60}")
    return {**settings, "layer_types": [LINEAR if flag else FULL for flag in flags[:depth]]}


def linear_tensors(settings: dict[str, Any]) -> Callable[[str, Any], Tensor]:
    """Returns a function from a tensor's name in the file, and the tensor, to that of the family."""
    key_heads, heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    value_dim, keys = settings["linear_value_head_dim"], 2 * key_heads * settings["linear_key_head_dim"]
    order = torch.arange(heads).view(heads // key_heads, key_heads).t().flatten()
    rows = (order[:, None] * value_dim + torch.arange(value_dim)).flatten()
    orders = {
        "attn_qkv": torch.cat([torch.arange(keys), keys + rows]), "attn_gate": rows, "ssm_alpha": order,
        "ssm_beta": order, "ssm_a": order, "ssm_dt": order, "ssm_out": rows,
    }  # fmt: skip
    orders["ssm_conv1d"] = orders["attn_qkv"]

    def converted(stem: str, tensor: Any) -> Tensor:
        result: Tensor = tensor
        if stem in orders:
            order, dim = orders[stem], 1 if stem == "ssm_out" else 0
            if tensor.shape[dim] != len(order):
                raise ValueError(f"expected {len(order)} of {stem} in dimension {dim}, got {tuple(tensor.shape)}")
            if heads > key_heads:
                result = tensor[:, order] if dim else tensor[order]
        if stem == "ssm_a":
            return check_negative(stem, result).log()
        return result[:, None] if stem == "ssm_conv1d" else result

    return converted
