"""The decoding engines, from the plainest to the fastest, beside the plainest one. All of them give the same tokens.

recompute, encode_once, cross_cache   recompute much for each token: see `recompute_engines`
kv_cache   all keys and values are cached: a step computes one token
graph      kv_cache, with a step and its search as one launch of a CUDA graph (on a GPU)
cpp        kv_cache, with a step as one call of C++; cpp_bf16, cpp_int8: with weights in these formats (on a CPU)

Rounded weights give other tokens at near-ties, of which random weights have many: half of the tokens have to agree.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.cases.models.recompute_engines import RECOMPUTING
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from fastformer.generation import generate
from fastformer.generation.config import Precision
from fastformer.generation.engines import ENGINES as OURS
from fastformer.models import GPT, Transformer

ENGINES = (*OURS, *(engine.name for engine in RECOMPUTING))
GREEDY = {"preset": "base", "source": 24, "new_tokens": 16, "num_beams": 1}


@functools.cache
def model(preset: str, device: str) -> Transformer:
    """Makes a model with random weights that never generates EOS: its logit is 0, and the best logits are far above."""
    torch.manual_seed(0)
    transformer = Transformer.from_preset(preset, vocab_size=8000, device=device).eval()
    with torch.no_grad():
        transformer.output_weight[transformer.config.special_ids.first_eos] = 0.0
    return transformer


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes padded sources of mixed lengths."""
    source = torch.randint(3, 8000, (shape["batch"], shape["source"]), device=device)
    for row in range(shape["batch"]):
        source[row, shape["source"] // 2 + row % (shape["source"] // 2) + 1 :] = 0
    return {"source": source}


def decoded(
    model: Transformer | GPT, ids: torch.Tensor, shape: Shape, engine: str, precision: Precision | None = None
) -> torch.Tensor:
    """Decodes sources, or prompts, with an engine."""
    sizes = {"max_new_tokens": shape["new_tokens"], "num_beams": shape["num_beams"]}
    tokens = generate(model, ids, engine=engine, precision=precision, **sizes)
    assert isinstance(tokens, torch.Tensor)
    return tokens


def engine(name: str, precision: Precision | None = None) -> Provider:
    """Makes the provider of an engine."""
    return lambda x, shape: decoded(
        model(shape["preset"], str(x["source"].device)), x["source"], shape, name, precision
    )


ROUNDED = ("cpp_bf16", "cpp_int8")
# The engines that can decode a Transformer, with one that every machine has first.
STAGES = {
    **{name: engine(name) for name in ("kv_cache", *ENGINES) if name != "recurrent"},
    "cpp": engine("cpp", "fp32"),
    "cpp_bf16": engine("cpp", "bf16"),
    "cpp_int8": engine("cpp", "int8"),
}
ONLY_ON = {**dict.fromkeys(("cpp", *ROUNDED), "cpu"), "graph": "cuda"}

COMMON: dict[str, Any] = {
    "suite": "decoding",
    "compares_stages": True,
    "make_inputs": make_inputs,
    "modes": ("fwd",),
    "dtypes": ("float32",),
    "tokens": lambda shape: shape["batch"] * shape["new_tokens"],
    "only_on": ONLY_ON,
    "agreement": dict.fromkeys(ROUNDED, 0.5),
}

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
        providers=STAGES,
        baseline="recompute",
        **COMMON,
    ),
    # Without the engines that recompute, which take minutes here. The tokens of kv_cache are checked above.
    Benchmark(
        name="decoding_batches",
        shapes={
            "cpu": [{**GREEDY, "batch": n, "threads": t} for n in (1, 4, 16, 64) for t in (1, 2)],
            "cuda": [{**GREEDY, "new_tokens": 64, "batch": n} for n in (1, 4, 16, 64)],
        },
        providers={name: call for name, call in STAGES.items() if name == "kv_cache" or name in ONLY_ON},
        baseline="kv_cache",
        quick=2,
        **COMMON,
    ),
]
