"""`generate` of transformers' Marian: unchanged, accelerated, and converted to fastformer's model.

Random weights, 6 + 6 layers with d_model 512. All give the same tokens, except at near-ties of beams; int8 gives those
of the converted model in int8. The peers' case `llama` compares a Llama model with transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.case import Benchmark, Inputs, Need, Shape
from fastformer.generation import generate
from fastformer.generation.config import Precision
from fastformer.integrations import accelerate, from_huggingface

_START, _END = 0, 1


@functools.cache
def models() -> tuple[Any, Any, Any, Any]:
    """Makes the model four times: unchanged, accelerated, accelerated in int8, and converted."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))}  # fmt: skip
    ids = {"pad_token_id": _START, "eos_token_id": _END, "decoder_start_token_id": _START}
    copies = []
    for _ in range(3):
        torch.manual_seed(0)
        model = MarianMTModel(MarianConfig(vocab_size=32_000, d_model=512, scale_embedding=True, **sizes, **ids)).eval()
        model.generation_config.forced_eos_token_id = None
        model.final_logits_bias[0, _END] = -1e4  # so that all outputs have the same length
        copies.append(model)
    plain, accelerated, rounded = copies
    return plain, accelerate(accelerated), accelerate(rounded, precision="int8"), from_huggingface(plain)


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes sources without padding."""
    return {"source": torch.randint(3, 32_000, (shape["batch"], shape["source"]), device=device)}


def as_it_is(x: Inputs, shape: Shape) -> Tensor:
    """Calls transformers' generate."""
    return _generated(models()[0], x, shape)


def accelerated(x: Inputs, shape: Shape) -> Tensor:
    """Makes the same call with the accelerated model."""
    return _generated(models()[1], x, shape)


def accelerated_int8(x: Inputs, shape: Shape) -> Tensor:
    """Makes the same call with the model that is accelerated in int8."""
    return _generated(models()[2], x, shape)


def _generated(model: Any, x: Inputs, shape: Shape) -> Tensor:
    options = {"max_new_tokens": shape["new_tokens"], "num_beams": shape["num_beams"], "do_sample": False}
    tokens: Tensor = model.generate(x["source"], **options)
    return tokens[:, 1:]


def converted(x: Inputs, shape: Shape) -> Tensor:
    """Decodes with the engine, without transformers."""
    return _of_converted(x, shape, None)


def converted_int8(x: Inputs, shape: Shape) -> Tensor:
    """Decodes with the engine in int8."""
    return _of_converted(x, shape, "int8")


def _of_converted(x: Inputs, shape: Shape, precision: Precision | None) -> Tensor:
    tokens = generate(
        models()[3],
        x["source"],
        max_new_tokens=shape["new_tokens"],
        num_beams=shape["num_beams"],
        beam_rules="transformers",
        precision=precision,
    )
    assert isinstance(tokens, Tensor)
    return tokens


BENCHMARKS = [
    Benchmark(
        name="accelerated_generate",
        suite="decoding",
        shapes={
            "cpu": [
                {"batch": batch, "source": 24, "new_tokens": 32, "num_beams": beams}
                for batch, beams in ((1, 1), (1, 4))
            ],
        },
        make_inputs=make_inputs,
        providers={
            "accelerated": accelerated,
            "accelerated, int8": accelerated_int8,
            "converted": converted,
            "transformers": as_it_is,
        },
        baseline="transformers",
        modes=("fwd",),
        dtypes=("float32",),
        tokens=lambda shape: shape["batch"] * shape["new_tokens"],
        agreement={"accelerated": 0.9, "converted": 0.9},
        checked=lambda shape: {**shape, "new_tokens": 8},  # transformers' is slow
        oracles={"accelerated, int8": converted_int8},
        needs={"transformers": Need("transformers", "pip install transformers")},
    )
]
