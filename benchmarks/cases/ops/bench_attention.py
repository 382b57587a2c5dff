"""Attention beside the materialised softmax and PyTorch's fused attention: dense, with masks, and of packed sequences.

Masked sequences end in padding, packed ones have none. A provider without packing pads, computes and packs again, and
all
of this is timed: inputs and outputs are the same for all. With a causal mask, padding at the end needs no mask.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape, beside_eager
from fastformer.ops import attention, varlen_attention


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes q, k, v (batch, seqlen, heads, head_dim)."""
    size = (shape["batch"], shape["seqlen"], shape["heads"], shape["head_dim"])
    inputs = {name: torch.randn(size, device=device, requires_grad=True) for name in ("q", "k", "v")}
    return inputs | {"seed": torch.tensor([1, 2], device=device)}


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.attention."""
    return attention(
        x["q"], x["k"], x["v"], is_causal=shape["causal"], dropout_p=shape["dropout_p"], dropout_seed=x["seed"]
    )


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Computes scores, mask, softmax and dropout, each in memory."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if shape.get("causal"):
        n = q.shape[2]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if "mask" in x:
        mask = x["mask"]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (F.dropout(scores.softmax(-1), shape.get("dropout_p", 0.0)) @ v).transpose(1, 2)


def sdpa(backend: str | None = None) -> Provider:
    """Makes the provider of torch's scaled_dot_product_attention: one of its backends, or (None) its own choice."""

    def run(x: Inputs, shape: Shape) -> torch.Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        with contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend)):
            out = F.scaled_dot_product_attention(
                q, k, v, x.get("mask"), is_causal=shape.get("causal", False), dropout_p=shape.get("dropout_p", 0.0)
            )
        return out.transpose(1, 2)

    return run


@functools.cache
def _flex(seqlen: int, causal: bool) -> Callable[..., torch.Tensor]:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen) if causal else None
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def flex(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls torch's flex attention, compiled."""
    if shape["dropout_p"]:
        raise NotImplementedError("flex attention has no dropout")
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return _flex(shape["seqlen"], shape["causal"])(q, k, v).transpose(1, 2)


def flops(shape: Shape, mode: str) -> float:
    """Counts two products forward and five backward over the visible scores."""
    scores = shape["batch"] * shape["heads"] * shape["seqlen"] ** 2 * (0.5 if shape["causal"] else 1.0)
    return scores * shape["head_dim"] * {"fwd": 4, "bwd": 10, "fwdbwd": 14}[mode]


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts q, k, v and out once; the backward pass reads them and dout, and writes three gradients."""
    tensor = shape["batch"] * shape["heads"] * shape["seqlen"] * shape["head_dim"] * itemsize
    return tensor * {"fwd": 4, "bwd": 8, "fwdbwd": 12}[mode]


# Masks.


def lengths_of(shape: Shape) -> list[int]:
    """Returns the lengths of the sequences in a batch with padding, from half of the longest to the longest."""
    return [shape["seqlen"] - shape["seqlen"] // 2 * i // shape["batch"] for i in range(shape["batch"])]


def make_masked_inputs(shape: Shape, device: str) -> Inputs:
    """Makes q, k, v (batch, seqlen, heads, head_dim) and a mask: of the keys, or added to the scores of each head."""
    seqlen = shape["seqlen"]
    inputs = make_inputs(shape, device)
    if shape["mask"] == "bool_keys":  # (batch, 1, 1, seqlen), True: attend
        inputs["mask"] = key_mask(shape, device)
    else:
        inputs["mask"] = torch.randn(1, shape["heads"], seqlen, seqlen, device=device) / 2
    return inputs


def key_mask(shape: Shape, device: str) -> torch.Tensor:
    """Makes a mask (batch, 1, 1, seqlen), True at tokens."""
    lengths = torch.tensor(lengths_of(shape), device=device)
    return (torch.arange(shape["seqlen"], device=device) < lengths[:, None])[:, None, None]


def ours_masked(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.attention with the mask."""
    return attention(x["q"], x["k"], x["v"], attn_mask=x["mask"])


def masked_flops(shape: Shape, mode: str) -> float:
    """Counts as `flops`, without the keys that a mask hides."""
    visible = sum(lengths_of(shape)) / (shape["batch"] * shape["seqlen"]) if shape["mask"] == "bool_keys" else 1.0
    return visible * flops({**shape, "causal": False}, mode)


def masked_moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts as `moved`, and the mask once a pass."""
    seqlen = shape["seqlen"]
    mask = shape["batch"] * seqlen if shape["mask"] == "bool_keys" else shape["heads"] * seqlen**2 * itemsize
    return moved(shape, mode, itemsize) + mask * (2 if mode == "fwdbwd" else 1)


# Packed sequences.


def make_packed_inputs(shape: Shape, device: str) -> Inputs:
    """Makes q, k, v (tokens, heads, head_dim), the start of each sequence, and its tokens' places in a padded batch."""
    lengths = torch.tensor(lengths_of(shape))
    size = (int(lengths.sum()), shape["heads"], shape["head_dim"])
    inputs = {name: torch.randn(size, device=device, requires_grad=True) for name in ("q", "k", "v")}
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    places = (torch.arange(shape["seqlen"]) < lengths[:, None]).flatten().nonzero()[:, 0]
    inputs |= {"cu_seqlens": cu_seqlens.to(device), "places": places.to(device)}
    return inputs if shape["causal"] else inputs | {"mask": key_mask(shape, device)}


def ours_packed(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.varlen_attention."""
    cu_seqlens, longest = x["cu_seqlens"], shape["seqlen"]
    return varlen_attention(x["q"], x["k"], x["v"], cu_seqlens, cu_seqlens, longest, longest, is_causal=shape["causal"])


def padded(provider: Provider) -> Provider:
    """Converts a provider for padded sequences to one for packed sequences."""

    def run(x: Inputs, shape: Shape) -> torch.Tensor:
        batch, seqlen, places = shape["batch"], shape["seqlen"], x["places"]
        inputs = {
            name: x[name].new_zeros(batch * seqlen, *x[name].shape[1:]).index_copy(0, places, x[name])
            for name in ("q", "k", "v")
        }
        inputs = {name: tokens.unflatten(0, (batch, seqlen)) for name, tokens in inputs.items()}
        inputs |= {"mask": x["mask"]} if "mask" in x else {}
        return provider(inputs, shape).flatten(0, 1).index_select(0, places)

    return run


def varlen_packed(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls torch.nn.attention.varlen, if this PyTorch has it."""
    from torch.nn.attention.varlen import varlen_attn

    if shape.get("dropout_p"):
        raise NotImplementedError("torch's varlen attention has no dropout")
    window: dict[str, Any] = {"window_size": (-1, 0)} if shape["causal"] else {}
    cu_seqlens, longest = x["cu_seqlens"], shape["seqlen"]
    out = varlen_attn(x["q"], x["k"], x["v"], cu_seqlens, cu_seqlens, longest, longest, **window)
    assert isinstance(out, torch.Tensor)
    return out


def varlen(x: Inputs, shape: Shape) -> torch.Tensor:
    """Makes the same call with a batch of sequences of one length, as packed sequences."""
    batch, seqlen = shape["batch"], shape["seqlen"]
    inputs = {name: x[name].flatten(0, 1) for name in ("q", "k", "v")}
    inputs["cu_seqlens"] = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=x["q"].device)
    return varlen_packed(inputs, shape).unflatten(0, (batch, seqlen))


def packed_flops(shape: Shape, mode: str) -> float:
    """Counts as `flops`, for each sequence separately."""
    return sum(flops({**shape, "batch": 1, "seqlen": length}, mode) for length in lengths_of(shape))


def packed_moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts as `moved`, for the real tokens."""
    return moved({**shape, "batch": 1, "seqlen": sum(lengths_of(shape))}, mode, itemsize)


LARGEST_CHECKED = 2**28  # scores: 2 GiB in fp64, of which the materialised softmax and its gradient hold several


def checked(shape: Shape) -> Shape:
    """Returns a shape with the same sequences and options, but fewer heads, or one sequence, if all are too many."""
    planes = max(1, LARGEST_CHECKED // shape["seqlen"] ** 2)
    heads = min(shape["heads"], planes)
    return {**shape, "heads": heads, "batch": min(shape["batch"], planes // heads)}


def _shapes(
    *sizes: tuple[int, int, int, int], causal: tuple[bool, ...] = (True, False), dropout_p: float = 0.0
) -> list[dict[str, Any]]:
    return [
        {"batch": b, "seqlen": n, "heads": h, "head_dim": d, "causal": causal_, "dropout_p": dropout_p}
        for b, n, h, d in sizes
        for causal_ in causal
    ]


def _charts(*seqlens: int, head_dim: int) -> list[tuple[int, int, int, int]]:
    """Returns the shapes of the published charts: 16k tokens, heads * head_dim = 2048."""
    return [(16384 // seqlen, seqlen, 2048 // head_dim, head_dim) for seqlen in seqlens]


SDPA = {
    "sdpa flash": sdpa("FLASH_ATTENTION"),
    "sdpa cudnn": sdpa("CUDNN_ATTENTION"),
    "sdpa efficient": sdpa("EFFICIENT_ATTENTION"),
}

BENCHMARKS = [
    Benchmark(
        name="attention",
        shapes={
            "cpu": [
                *_shapes((4, 512, 8, 64), (32, 64, 8, 64), (2, 2048, 8, 64)),
                *_shapes((4, 512, 8, 64), dropout_p=0.1),
            ],
            # The most important shapes come first: a GPU may be available for minutes only.
            "cuda": [
                *_shapes(*_charts(8192, 2048, 512, head_dim=64), *_charts(8192, 2048, 512, head_dim=128)),
                *_shapes(*_charts(2048, head_dim=64), *_charts(2048, head_dim=128), causal=(True,), dropout_p=0.1),
                *_shapes(*_charts(64, 128, 256, 16, head_dim=64)),
                *_shapes(*_charts(64, 256, head_dim=64), dropout_p=0.1),
            ],
        },
        make_inputs=make_inputs,
        modes=("fwd", "bwd", "fwdbwd"),
        quick=2,
        flops=flops,
        moved=moved,
        only_on=dict.fromkeys((*SDPA, "flex", "torch varlen"), "cuda"),
        checked=checked,
        **beside_eager(ours, eager, sdpa=sdpa(), **SDPA, flex=flex, **{"torch varlen": varlen})
        | {"compiled": ("torch.compile", "flex")},
    ),
    Benchmark(
        name="masked_attention",
        shapes={
            "cuda": [
                {"batch": 8, "seqlen": 2048, "heads": 2048 // head_dim, "head_dim": head_dim, "mask": mask}
                for head_dim in (64, 128)
                for mask in ("bool_keys", "additive")
            ]
        },
        make_inputs=make_masked_inputs,
        modes=("fwd", "bwd", "fwdbwd"),
        flops=masked_flops,
        moved=masked_moved,
        only_on=dict.fromkeys(SDPA, "cuda"),
        checked=checked,
        **beside_eager(ours_masked, eager, sdpa=sdpa(), **SDPA),
    ),
    Benchmark(
        name="packed_attention",
        shapes={
            "cuda": [
                {"batch": 32, "seqlen": 512, "heads": 2048 // head_dim, "head_dim": head_dim, "causal": causal}
                for head_dim in (64, 128)
                for causal in (True, False)
            ]
        },
        make_inputs=make_packed_inputs,
        modes=("fwd", "bwd", "fwdbwd"),
        flops=packed_flops,
        moved=packed_moved,
        only_on=dict.fromkeys((*SDPA, "torch varlen"), "cuda"),
        checked=checked,
        **beside_eager(
            ours_packed,
            padded(eager),
            sdpa=padded(sdpa()),
            **{name: padded(provider) for name, provider in SDPA.items()},
            **{"torch varlen": varlen_packed},
        ),
    ),
]
