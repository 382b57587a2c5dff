"""Records the distributions of attention modules while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.nn.attention import MultiheadAttention


def record_attention(
    groups: dict[str, list[MultiheadAttention]], run: Callable[[], object], average_heads: bool
) -> dict[str, Tensor]:
    """Runs a model and returns the distributions of its attentions.

    Args:
        groups: attention modules that the run calls once each, by name and layer.
        run: runs the model.
        average_heads: average over the heads.

    Returns:
        For each name the distributions of its layers, (num_layers, batch, num_heads, seqlen_q, seqlen_k), without
        num_heads when averaged.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in groups}

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": average_heads}

    with contextlib.ExitStack() as hooks:
        for name, attentions in groups.items():
            for module in attentions:
                hooks.enter_context(module.register_forward_pre_hook(ask, with_kwargs=True))
                keep = lambda _module, _args, output, name=name: found[name].append(output[1])  # noqa: E731
                hooks.enter_context(module.register_forward_hook(keep))
        run()
    return {name: torch.stack(weights) for name, weights in found.items()}
