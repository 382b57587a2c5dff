"""Models of transformers as wholes, unchanged and accelerated: BERT, GPT-2 and Llama, and a step of decoding in Llama.

They have the sizes of the base models and random weights. The step reads a cache of `seqlen` tokens, as in `generate`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.case import Benchmark, Inputs, Need, Provider, Shape
from fastformer.integrations import accelerate

VOCAB_SIZE = 8000


@functools.cache
def model(name: str, layers: int, is_accelerated: bool, device: str, dtype: torch.dtype) -> Any:
    """Makes a model in evaluation mode."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    made: Any
    torch.manual_seed(0)
    if name == "bert":
        made = BertModel(BertConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=layers))
    elif name == "gpt2":
        made = GPT2Model(GPT2Config(vocab_size=VOCAB_SIZE, n_layer=layers))
    else:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
        config = LlamaConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=layers, max_position_embeddings=65536, **sizes)
        made = LlamaModel(config)
    made = made.eval().to(device, dtype)
    return accelerate(made) if is_accelerated else made


@functools.lru_cache(maxsize=2)
def filled(
    name: str, layers: int, is_accelerated: bool, device: str, dtype: torch.dtype, batch: int, seqlen: int
) -> Any:
    """Returns the cache of a model that has read the same tokens as the others."""
    ids = torch.arange(seqlen, device=device).remainder(VOCAB_SIZE).expand(batch, -1)
    return model(name, layers, is_accelerated, device, dtype)(ids, use_cache=True).past_key_values


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes ids without padding, and a tensor that has the dtype of the model."""
    return {"ids": torch.randint(3, VOCAB_SIZE, (shape["batch"], shape["seqlen"]), device=device),
            "like": torch.zeros(1, device=device)}  # fmt: skip


def run(is_accelerated: bool) -> Provider:
    """Makes a provider."""

    @torch.no_grad()
    def call(x: Inputs, shape: Shape) -> Tensor:
        kind = shape["model"], shape["layers"], is_accelerated, x["ids"].device.type, x["like"].dtype
        if not shape["step"]:
            states: Tensor = model(*kind)(x["ids"]).last_hidden_state
            return states
        cache = filled(*kind, shape["batch"], shape["seqlen"])
        state: Tensor = model(*kind)(x["ids"][:, :1], past_key_values=cache, use_cache=True).last_hidden_state
        cache.crop(-1)
        return state

    return call


def _shape(model: str, batch: int, seqlen: int, layers: int = 12, *, step: bool = False) -> dict[str, Any]:
    return {"model": model, "batch": batch, "seqlen": seqlen, "layers": layers, "step": step}


BENCHMARKS = [
    Benchmark(
        name="accelerated",
        suite="modules",
        shapes={
            "cpu": [_shape("bert", 2, 64, 2), _shape("llama", 1, 64, 2, step=True)],
            "cuda": [
                _shape("bert", 32, 128),
                _shape("gpt2", 8, 1024),
                _shape("llama", 4, 2048),
                *(_shape("llama", 1, seqlen, step=True) for seqlen in (4096, 32768)),
            ],
        },
        make_inputs=make_inputs,
        providers={"fastformer": run(True), "transformers": run(False)},
        baseline="transformers",
        modes=("fwd",),
        dtypes=("bfloat16",),
        tokens=lambda shape: shape["batch"] * (1 if shape["step"] else shape["seqlen"]),
        needs={"transformers": Need("transformers", "pip install transformers")},
    )
]
