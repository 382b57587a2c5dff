"""Encoders in plain PyTorch, from the tensors and options that the C++ engine packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIZES: dict[str, Any] = {"vocab": 70, "d_model": 32, "heads": 4, "head_dim": 8, "d_ff": 52, "layers": 2, "max_len": 600}

# Each option away from its default at least once, and sizes that fill no vector and no panel.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"types": 2},
    "pre-norm, t5": {"placement": "pre", "rms": True, "distances": 20, "activation": "geglu_tanh", "scale": 5.5},
    "mpnet": {"distances": 33, "activation": "gelu_tanh", "types": 0},
    "modernbert": {
        "placement": "pre", "rotary": True, "windows": (-1, 3), "activation": "geglu", "skips_first_norm": True,
    },
    "one base": {"placement": "pre", "rotary": True, "rms": True, "activation": "swiglu", "local": False},
    "windows of one": {"windows": (0, 200), "activation": "relu"},
    "odd sizes": {"d_model": 60, "heads": 3, "head_dim": 20, "d_ff": 67, "vocab": 129, "types": 3},
    "electra": {"width": 20, "types": 2},
    "no layers": {"layers": 0, "types": 2},
}  # fmt: skip


def drawn(seed: int = 0, precision: str = "fp32", **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns options for the engine, and fp32 tensors in which every number matters."""
    o = SIZES | {"placement": "sum", "rms": False, "types": 0, "distances": 0, "rotary": False, "local": True} | options
    generator = torch.Generator().manual_seed(seed)
    dim, inner, all_heads = o["d_model"], o["d_ff"], o["heads"] * o["head_dim"]
    tensors: dict[str, Tensor] = {}

    def add(name: str, *shape: int, size: float = 1.0, around: float = 0.0) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * size + around

    def add_norm(name: str, size: int = dim) -> None:
        add(f"{name}.weight", size, size=0.3, around=1.0)
        if not o["rms"]:
            add(f"{name}.bias", size, size=0.3)

    def add_linear(weight: str, bias: str, n: int, k: int) -> None:
        add(weight, n, k, size=1.5 * k**-0.5)
        add(bias, n, size=0.3)

    activation = o.get("activation", "gelu")
    gates = 2 if activation in ("swiglu", "geglu", "geglu_tanh") else 1
    width = o.get("width", dim)
    add("source_embedding", o["vocab"], width)
    if o["rotary"]:
        for name, base in (("", 1e4), ("local_", 100.0)) if o["local"] else (("", 1e4),):
            speed = base ** (-torch.arange(0, o["head_dim"], 2) / o["head_dim"])
            angles = torch.arange(o["max_len"])[:, None] * speed
            tensors[f"{name}cos"], tensors[f"{name}sin"] = angles.cos(), angles.sin()
    elif o["distances"]:
        add("encoder_position_bias", o["heads"], 2 * o["distances"] + 1)
    else:
        add("source_positions", o["max_len"], width)
    if o["types"]:
        add("source_types", o["types"], width)
    add_norm("source_embedding_norm", width)
    if width != dim:
        add_linear("source_projection.weight", "source_projection.bias", dim, width)
    for i in range(o["layers"]):
        layer = f"encoder.layers.{i}"
        attention = f"{layer}.self_attn"
        add_linear(f"{attention}.in_proj_weight", f"{attention}.in_proj_bias", 3 * all_heads, dim)
        add_linear(f"{attention}.out_proj.weight", f"{attention}.out_proj.bias", dim, all_heads)
        add_linear(f"{layer}.linear1.weight", f"{layer}.linear1.bias", gates * inner, dim)
        add_linear(f"{layer}.linear2.weight", f"{layer}.linear2.bias", dim, inner)
        add_norm(f"{layer}.norm1")
        add_norm(f"{layer}.norm2")
    if o["placement"] == "pre":
        add_norm("encoder.norm")
    return {
        "precision": precision,
        "d_model": dim,
        "num_heads": o["heads"],
        "num_kv_heads": o["heads"],
        "head_dim": o["head_dim"],
        "num_encoder_layers": o["layers"],
        "norm_placement": o["placement"],
        "rms_norm": o["rms"],
        "skips_first_norm": o.get("skips_first_norm", False),
        "eps": 1e-5,
        "scale": o.get("scale", 1.0),
        "attention_scale": o["head_dim"] ** -0.5,
        "encoder_windows": [*o.get("windows", [-1] * o["layers"])],
        "max_len": o["max_len"],
        "activation": activation,
    }, tensors


def packed(extension: Any, options: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    arrays = {name: np.ascontiguousarray(tensor.float().numpy()) for name, tensor in tensors.items()}
    return extension.Encoder(extension.PackedModel(options, arrays))


def states(
    o: dict[str, Any],
    tensors: dict[str, Tensor],
    ids: list[int],
    types: list[int] | None,
    dtype: torch.dtype,
    places: list[int] | None = None,
    unseen: int = 0,
) -> Tensor:
    """Computes the states of one text, (len(ids), d_model).

    Its tokens may have places of their own, and no token attends to the first `unseen` ones.
    """
    t = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    count, heads = len(ids), o["num_heads"]
    place = torch.arange(count) if places is None else torch.tensor(places)

    def norm(x: Tensor, name: str) -> Tensor:
        if o["rms_norm"]:
            return F.rms_norm(x, x.shape[-1:], t[f"{name}.weight"], o["eps"])
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], o["eps"])

    def attention(x: Tensor, i: int) -> Tensor:
        name, window = f"encoder.layers.{i}.self_attn", o["encoder_windows"][i]
        projected = F.linear(x, t[f"{name}.in_proj_weight"], t[f"{name}.in_proj_bias"])
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in projected.chunk(3, -1))
        if "cos" in t:
            prefix = "local_" if window >= 0 and "local_cos" in t else ""
            q, k = (turned(part, t[f"{prefix}cos"][place], t[f"{prefix}sin"][place]) for part in (q, k))
        scores = q @ k.transpose(-1, -2)
        away = place - place[:, None]
        if "encoder_position_bias" in t:
            bias = t["encoder_position_bias"]
            reach = bias.shape[1] // 2
            scores = scores + bias[:, away.clamp(-reach, reach) + reach]
        scores = scores * o["attention_scale"]
        if window >= 0:
            scores = scores.masked_fill(away.abs() > window, -torch.inf)
        scores[..., :unseen] = -torch.inf
        weights = scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        context = (weights @ v).transpose(0, 1).flatten(1)
        return F.linear(context, t[f"{name}.out_proj.weight"], t[f"{name}.out_proj.bias"])

    def feed_forward(x: Tensor, i: int) -> Tensor:
        name = f"encoder.layers.{i}"
        inside = F.linear(x, t[f"{name}.linear1.weight"], t[f"{name}.linear1.bias"])
        inside = activate(o["activation"], inside)
        return F.linear(inside, t[f"{name}.linear2.weight"], t[f"{name}.linear2.bias"])

    x = t["source_embedding"][ids] * o["scale"]
    if "source_positions" in t:
        x = x + t["source_positions"][place]
    if "source_types" in t:
        x = x + t["source_types"][types or [0] * count]
    x = norm(x, "source_embedding_norm")
    if "source_projection.weight" in t:
        x = F.linear(x, t["source_projection.weight"], t["source_projection.bias"])
    for i in range(o["num_encoder_layers"]):
        if o["norm_placement"] == "sum":
            x = norm(x + attention(x, i), f"encoder.layers.{i}.norm1")
            x = norm(x + feed_forward(x, i), f"encoder.layers.{i}.norm2")
        else:
            skips = i == 0 and o["skips_first_norm"]
            x = x + attention(x if skips else norm(x, f"encoder.layers.{i}.norm1"), i)
            x = x + feed_forward(norm(x, f"encoder.layers.{i}.norm2"), i)
    return norm(x, "encoder.norm") if o["norm_placement"] == "pre" else x


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def activate(name: str, x: Tensor) -> Tensor:
    if name in ("swiglu", "geglu", "geglu_tanh"):
        x, gated = x.chunk(2, -1)
        return activate({"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[name], x) * gated
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[name](x)


POOLINGS = ("cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean")


def pooled(kind: str, hidden: Tensor) -> Tensor:
    """Pools the states of one text, (d_model,)."""
    count = len(hidden)
    if kind == "cls":
        return hidden[0]
    if kind == "lasttoken":
        return hidden[-1]
    if kind == "max":
        return hidden.amax(0)
    if kind == "weightedmean":
        weights = torch.arange(1, count + 1, dtype=hidden.dtype)
        return (hidden * weights[:, None]).sum(0) / weights.sum()
    return hidden.sum(0) / (count if kind == "mean" else count**0.5)
