"""The layers of a Granite 4 in GGUF files that are a `Mamba`, and the numbers of key heads where only some attend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.checkpoints.gguf.linear_attention import FULL, LINEAR, check_negative

_SIZES = {
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size", "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}  # fmt: skip


def key_heads(values: Any) -> list[int]:
    """Returns the number of key heads of each layer, 0 in those that don't attend.

    Args:
        values: the `_Values` of the file.

    Raises:
        ValueError: it isn't one number, or that and 0.
    """
    depth, listed = int(values.number("block_count")), values.raw("attention.head_count_kv")
    heads = listed if isinstance(listed, list) else [listed] * depth
    if len(heads) != depth or not all(isinstance(each, int) for each in heads) or len({*heads} - {0}) != 1:
        raise ValueError(f"expected attention.head_count_kv of {depth} layers, one number or 0, got {listed!r:.60}")
    return heads


def mamba_settings(file: Any, values: Any) -> dict[str, Any]:
    """Returns the settings of a Granite 4.

    Args:
        file: the `GGUF`.
        values: its `_Values`.

    Raises:
        ValueError: the values contradict each other, or one is missing.
    """
    heads, width = key_heads(values), int(values.number("embedding_length"))
    settings: dict[str, Any] = {name: int(values.number(key)) for name, key in _SIZES.items()}
    count, inner = settings["mamba_n_heads"], int(values.number("ssm.inner_size"))
    if min(count, width) < 1 or inner % count or inner % width:
        raise ValueError(f"expected an ssm.inner_size that {count} heads and {width} divide, got {inner}: {file.path}")
    layer = heads.index(0) if 0 in heads else 0
    network = "ffn_gate_shexp" if values.number("expert_count", 0) else "ffn_gate"
    shared = file.tensors.get(f"blk.0.{network}.weight")
    return {
        **settings,
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if each else LINEAR for each in heads],
        "mamba_d_head": inner // count,
        "mamba_expand": inner // width,
        "mamba_conv_bias": f"blk.{layer}.ssm_conv1d.bias" in file.tensors,
        "shared_intermediate_size": 0 if shared is None else shared.shape[0],
        "num_local_experts": int(values.number("expert_count", 0)),
        "position_embedding_type": None if values.raw("rope.scaling.finetuned") is False else "rope",
    }


def mamba_tensor(stem: str, kind: str, tensor: Any) -> Tensor:
    """Returns a tensor of the family, of a stem and a kind of the file, "weight" or "bias"."""
    if stem == "ssm_conv1d" and kind == "weight":
        tensor = tensor[:, None]
    if stem in ("ssm_a", "ssm_d", "ssm_norm"):
        tensor = tensor.flatten()
    return check_negative(stem, tensor).log() if stem == "ssm_a" else tensor
