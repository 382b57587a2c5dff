"""The engines that decode, from the plainest to the fastest, against the plainest. The same tokens come out of each.

recompute     encoder and decoder run over everything for each new token
encode_once   the encoder runs once
cross_cache   and the keys and values of cross-attention are computed once
kv_cache      and those of self-attention are kept: a step computes one token
"""

from __future__ import annotations

import functools

import torch

from benchmarks.case import Benchmark, Inputs, Provider, Shape
from fastformer.generation import generate
from fastformer.models import Transformer


@functools.cache
def model(preset: str, device: str) -> Transformer:
    """A model with random weights; it never says EOS early enough to matter, and all engines decode the same."""
    torch.manual_seed(0)
    return Transformer.from_preset(preset, vocab_size=8000, device=device).eval()


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Sources of mixed lengths, padded."""
    source = torch.randint(3, 8000, (shape["batch"], shape["source"]), device=device)
    for row in range(shape["batch"]):
        source[row, shape["source"] // 2 + row % (shape["source"] // 2) + 1 :] = 0
    return {"source": source}


def engine(name: str) -> Provider:
    """The provider of an engine."""

    def provider(x: Inputs, shape: Shape) -> torch.Tensor:
        tokens = generate(
            model(shape["preset"], str(x["source"].device)),
            x["source"],
            max_new_tokens=shape["new_tokens"],
            min_new_tokens=shape["new_tokens"],
            num_beams=shape["num_beams"],
            engine=name,
        )
        assert isinstance(tokens, torch.Tensor)
        return tokens

    return provider


BENCHMARKS = [
    Benchmark(
        name="decoding",
        shapes={
            device: [
                {"preset": preset, "batch": batch, "source": 24, "new_tokens": 24, "num_beams": beams}
                for preset, batch, beams in sizes
            ]
            for device, sizes in {
                "cpu": (("tiny", 16, 1), ("tiny", 16, 4), ("base", 8, 1)),
                "cuda": (("base", 64, 1), ("base", 64, 4)),
            }.items()
        },
        make_inputs=make_inputs,
        providers={name: engine(name) for name in ("kv_cache", "cross_cache", "encode_once", "recompute")},
        baseline="recompute",
        modes=("fwd",),
        dtypes=("float32",),
        tokens=lambda shape: shape["batch"] * shape["new_tokens"],
    )
]
