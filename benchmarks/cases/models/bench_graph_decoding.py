"""Decoding with CUDA graphs, beside the cached modules, and Hugging Face's generate with a static, compiled cache.

All are in bf16 and have the same random weights, which never generate EOS. Their tokens differ after near-ties: half of
fastformer's tokens have to agree. Those of rounded weights and Hugging Face's are not compared here (`benchmarks.peers`
compares them in fp32).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from benchmarks.cases.models.bench_decoding import decoded
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from benchmarks.peers.cases import make_model
from benchmarks.peers.hugging_face import convert
from benchmarks.peers.job import Missing, Model
from fastformer.integrations import accelerate
from fastformer.models import GPT

_PROMPT = 32


@functools.cache
def model(name: str, device: str, precision: str | None = None) -> Model:
    """Makes one of the models of `benchmarks.peers`, in bf16, and rounds it to int8 or int4 if asked to."""
    made = make_model({"name": name}).to(device, torch.bfloat16)
    return made if precision is None else made.quantize(precision)


@functools.cache
def their_model(name: str, device: str) -> Any:
    """Makes Hugging Face's GPT-2 with the same weights."""
    gpt = make_model({"name": name})
    if not isinstance(gpt, GPT):
        raise Missing("a static cache is compared with a decoder-only model")
    return convert(gpt).to(device, torch.bfloat16)


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes prompts, or sources, of one length."""
    vocab_size = model(shape["model"], device).config.vocab_size
    return {"ids": torch.randint(3, vocab_size, (shape["batch"], _PROMPT), device=device)}


def engine(name: str, precision: str | None = None) -> Provider:
    """Makes the provider of an engine."""
    return lambda x, shape: decoded(model(shape["model"], x["ids"].device.type, precision), x["ids"], shape, name)


@functools.cache
def accelerated_model(name: str, device: str) -> Any:
    """Makes a copy of Hugging Face's model, and accelerates it."""
    return accelerate(copy.deepcopy(their_model(name, device)))


def accelerated(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls generate of Hugging Face's model after `accelerate`."""
    return _generated(accelerated_model(shape["model"], x["ids"].device.type), x, shape)


def transformers(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls Hugging Face's generate. With a static cache on a GPU, it compiles the step itself."""
    return _generated(their_model(shape["model"], x["ids"].device.type), x, shape, cache_implementation="static")


@torch.no_grad()
def _generated(model: Any, x: Inputs, shape: Shape, **options: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        input_ids=x["ids"],
        attention_mask=torch.ones_like(x["ids"]),
        num_beams=shape["num_beams"],
        max_new_tokens=shape["new_tokens"],
        min_new_tokens=shape["new_tokens"],
        do_sample=False,
        **options,
    )
    return tokens


BENCHMARKS = [
    Benchmark(
        name="graph_decoding",
        suite="decoding",
        shapes={
            "cpu": [{"model": "gpt-tiny", "batch": 2, "new_tokens": 12, "num_beams": 1}],
            "cuda": [
                {"model": name, "batch": batch, "new_tokens": 64, "num_beams": beams}
                for name, beams in (("gpt2", 1), ("base", 4))
                for batch in (1, 16)
            ],
        },
        make_inputs=make_inputs,
        providers={
            "graph": engine("graph"),
            "graph int8": engine("graph", "int8"),
            "graph int4": engine("graph", "int4"),
            "kv_cache": engine("kv_cache"),
            "accelerated": accelerated,
            "transformers": transformers,
        },
        baseline="kv_cache",
        also_ours=("graph int8", "graph int4", "kv_cache", "accelerated"),
        modes=("fwd",),
        dtypes=("bfloat16",),
        tokens=lambda shape: shape["batch"] * shape["new_tokens"],
        only_on=dict.fromkeys(("graph int8", "graph int4", "accelerated", "transformers"), "cuda"),
        agreement={"graph": 0.5, "graph int8": 0.0, "graph int4": 0.0, "accelerated": 0.0, "transformers": 0.0},
    )
]
