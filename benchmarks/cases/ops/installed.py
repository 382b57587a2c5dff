"""Kernels of other packages, on NVIDIA GPUs, as providers of the cases in bench_*.py, if the packages are installed.

A missing package becomes a row that says how to install it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Need, Provider, Shape

_NEEDS = {
    "flash-attn": Need("flash_attn", "pip install flash-attn --no-build-isolation"),
    "fa3": Need("fa3_fwd_interface", "pip install fa3-fwd==0.0.3, on sm_90 with CUDA 13"),
    "xformers": Need("xformers", "pip install xformers"),
    "liger": Need("liger_kernel", "pip install liger-kernel"),
}


def flash_attn(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls flash-attn's attention; fp16 and bf16 only."""
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(x["q"], x["k"], x["v"], dropout_p=shape["dropout_p"], causal=shape["causal"])
    return out


def fa3(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls FlashAttention-3, from a wheel without the backward pass and fp16; bf16 only."""
    if torch.is_grad_enabled() or shape.get("dropout_p"):
        raise NotImplementedError("this wheel of FlashAttention-3 has no backward pass and no dropout")
    from fa3_fwd_interface import flash_attn_func

    out: torch.Tensor = flash_attn_func(x["q"], x["k"], x["v"], causal=shape["causal"])
    return out


def fa3_packed(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls FlashAttention-3 for packed sequences."""
    if torch.is_grad_enabled():
        raise NotImplementedError("this wheel of FlashAttention-3 has no backward pass")
    from fa3_fwd_interface import flash_attn_varlen_func

    starts, longest = x["cu_seqlens"], shape["seqlen"]
    out: torch.Tensor = flash_attn_varlen_func(
        x["q"], x["k"], x["v"], starts, starts, longest, longest, causal=shape["causal"]
    )
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


def liger_embedding(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls Liger's embedding before PyTorch's product, sum and dropout."""
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    rows = LigerEmbeddingFunction.apply(x["weight"], x["ids"])
    return F.dropout(rows * shape["dim"] ** 0.5 + x["table"], shape["dropout_p"])


class _LigerRotary(torch.autograd.Function):
    """Liger's rotary positions. It rotates queries and keys in place: here, the two halves of a batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops.rope import rope_forward

        ctx.save_for_backward(cos, sin)
        rope_forward(*(half.transpose(1, 2) for half in x.chunk(2)), cos, sin, rotary_dim=x.shape[-1])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        from liger_kernel.ops.rope import rope_backward

        dx = douts[0].contiguous()
        rope_backward(*(half.transpose(1, 2) for half in dx.chunk(2)), *ctx.saved_tensors, rotary_dim=dx.shape[-1])
        return dx, None, None


def liger_rotary(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls Liger's rotary positions, which overwrite x and, in the backward pass, the gradient of the output."""
    out: torch.Tensor = _LigerRotary.apply(x["x"], x["cos"], x["sin"])  # type: ignore[no-untyped-call]
    return out


_PROVIDERS: dict[str, dict[str, Provider]] = {  # by benchmark
    "attention": {"flash-attn": flash_attn, "fa3": fa3, "xformers": xformers},
    "packed_attention": {"fa3": fa3_packed},
    "add_layer_norm": {"liger": liger_layer_norm},
    "linear_cross_entropy": {"liger": liger_linear_cross_entropy},
    "embedding": {"liger": liger_embedding},
    "rotary": {"liger": liger_rotary},
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
