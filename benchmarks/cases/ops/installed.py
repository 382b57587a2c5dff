"""Kernels of other packages, on NVIDIA GPUs, as providers of the cases in bench_*.py, if the packages are installed.

A missing package becomes a row that says how to install it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Need, Provider, Shape

_NEEDS = {
    "flash-attn": Need("flash_attn", "pip install flash-attn --no-build-isolation"),
    "xformers": Need("xformers", "pip install xformers"),
    "liger": Need("liger_kernel", "pip install liger-kernel"),
}


def flash_attn(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls flash-attn's attention; fp16 and bf16 only."""
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(x["q"], x["k"], x["v"], dropout_p=shape["dropout_p"], causal=shape["causal"])
    return out


def xformers(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls xformers' memory-efficient attention."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    mask = LowerTriangularMask() if shape["causal"] else None
    out: torch.Tensor = memory_efficient_attention(x["q"], x["k"], x["v"], attn_bias=mask, p=shape["dropout_p"])
    return out


def liger_layer_norm(x: Inputs, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls Liger's LayerNorm after PyTorch's dropout and sum."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    s = x["residual"] + F.dropout(x["x"], shape["dropout_p"])
    return LigerLayerNormFunction.apply(s, x["weight"], x["bias"], 1e-5), s


def liger_linear_cross_entropy(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls Liger's fused linear cross-entropy."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: torch.Tensor = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)(x["weight"], x["x"], x["target"])
    return loss


_PROVIDERS: dict[str, dict[str, Provider]] = {  # by benchmark
    "attention": {"flash-attn": flash_attn, "xformers": xformers},
    "add_layer_norm": {"liger": liger_layer_norm},
    "linear_cross_entropy": {"liger": liger_linear_cross_entropy},
}


def with_installed(benchmark: Benchmark) -> Benchmark:
    """Returns the benchmark with the providers of these packages that compute the same."""
    others = _PROVIDERS.get(benchmark.name, {})
    return dataclasses.replace(
        benchmark,
        providers={**benchmark.providers, **others},
        only_on={**benchmark.only_on, **dict.fromkeys(others, "cuda")},
        needs={**benchmark.needs, **{name: _NEEDS[name] for name in others}},
    )
