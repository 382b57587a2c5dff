"""Several tokens a step: drafts from the text itself, and by a smaller model, beside one token a step.

A model with random weights, of Llama's form, in int8. A processor makes it write a given text, so that drafts are
accepted as often as in such a text: an edit, which repeats its prompt except for every 20th token, or a text in which
nothing occurs twice. The smaller model has the larger one's first layer, and the other layers change little, so
that it is nearly always right: the ratio is the most that drafts by a model of this size can give.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.case import Benchmark, Inputs, Shape
from fastformer.generation import Generator
from fastformer.generation.processors import RowWise
from fastformer.models import GPT

_VOCAB = 32_000
_END = 2


@functools.cache
def models() -> tuple[GPT, GPT]:
    """Makes the model, and the smaller one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": _VOCAB, "d_model": 768, "num_heads": 12, "num_kv_heads": 4, "d_ff": 2048}
    sizes |= {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "max_len": 2048}
    model, small = (GPT(GPT.config_class(**sizes, num_layers=layers)).eval() for layers in (10, 1))
    for layer in list(model.decoder.layers)[1:]:
        for name, parameter in layer.named_parameters():
            parameter.data *= 0.03 if "out_proj" in name or "linear2" in name else 1.0
    own = small.state_dict()
    small.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in own})
    return model, small


@functools.cache
def generator(has_draft_model: bool) -> Generator:
    """Makes the object that decodes."""
    model, small = models()
    return Generator(model, precision="int8", max_bytes=2**27, draft_model=small if has_draft_model else None)


class Writes(RowWise):
    """A processor that makes the model write a text after a prompt."""

    def __init__(self, begun: int, text: list[int]) -> None:
        self._begun, self._text = begun, text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = torch.tensor([self._text[input_ids.shape[1] - self._begun]])
        return scores.index_fill(1, wanted, 1e4)


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes a prompt and the text after it."""
    ids = torch.randperm(_VOCAB - 3, device=device)[: 2 * shape["new_tokens"]] + 3
    prompt, new = ids.chunk(2)
    is_new = torch.arange(len(prompt), device=device) % 20 == 19
    return {"prompt": prompt, "text": new if shape["text"] == "new" else torch.where(is_new, new, prompt)}


def _written(x: Inputs, lookup: int | None) -> Tensor:
    prompt, text = x["prompt"].tolist(), x["text"].tolist()
    options: dict[str, Any] = {"max_new_tokens": len(text), "eos_token_id": _END, "prompt_lookup_num_tokens": lookup}
    found = generator(False).generate([prompt], logits_processor=Writes(len(prompt), text), **options)
    assert isinstance(found, Tensor)
    return found[0, len(prompt) :]


def _own_text(x: Inputs, shape: Shape, has_draft_model: bool) -> Tensor:
    options: dict[str, Any] = {"max_new_tokens": shape["new_tokens"], "eos_token_id": _END}
    found = generator(has_draft_model).generate([x["prompt"][:16].tolist()], **options)
    assert isinstance(found, Tensor)
    return found[0, 16:]


COMMON: dict[str, Any] = {
    "suite": "decoding",
    "make_inputs": make_inputs,
    "baseline": "plain",
    "modes": ("fwd",),
    "dtypes": ("float32",),
    "tokens": lambda shape: shape["new_tokens"],
    "compares_stages": True,
    "checked": lambda shape: {**shape, "new_tokens": 40},
}

BENCHMARKS = [
    Benchmark(
        name="prompt_lookup",
        shapes={"cpu": [{"text": text, "new_tokens": 300} for text in ("edit", "new")]},
        providers={"prompt lookup": lambda x, _: _written(x, 10), "plain": lambda x, _: _written(x, None)},
        **COMMON,
    ),
    Benchmark(
        name="draft_model",
        shapes={"cpu": [{"text": "own", "new_tokens": 200}]},
        providers={
            "draft model": lambda x, shape: _own_text(x, shape, True),
            "plain": lambda x, shape: _own_text(x, shape, False),
        },
        **COMMON,
    ),
]
