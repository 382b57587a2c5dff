"""vmap over ids, gradients of each sequence, and programs of any length, of each kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fastformer.models import BERT, GPT, Transformer
from tests.nn.comparing import assert_same

V, PAD = 23, 0
SIZES: dict[str, Any] = {"vocab_size": V, "d_model": 16, "num_heads": 4, "d_ff": 24, "max_len": 16}
EXPERTS = {"activation": "swiglu", "num_experts": 4, "num_experts_per_tok": 2, "expert_d_ff": 12}
ROTARY = {"positions": "rotary", "norm": "rms", "activation": "swiglu"}
MODELS = {
    "gpt": lambda: GPT.from_preset("tiny", **SIZES, num_layers=2, dropout=0.0),
    "experts": lambda: GPT.from_preset("tiny", **SIZES, **ROTARY | EXPERTS, num_layers=2, dropout=0.0),
    "bert": lambda: BERT.from_preset("tiny", **SIZES, num_layers=2, dropout=0.0),
    "transformer": lambda: Transformer.from_preset(
        "tiny", **SIZES, num_encoder_layers=1, num_decoder_layers=2, dropout=0.0
    ),
}
each = pytest.mark.parametrize("kind", MODELS)


def model_of(kind: str) -> Any:
    torch.manual_seed(2)
    model = MODELS[kind]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


def inputs_of(kind: str, length: int = 7) -> tuple[Tensor, ...]:
    ids = torch.randint(3, V, (3, length), generator=torch.Generator().manual_seed(1))
    if kind != "transformer":
        return (ids,)
    source = ids.flip(1).clone()
    source[1, 4:] = PAD
    return source, ids


def states(model: Any, *ids: Tensor) -> Tensor:
    """Computes the logits, or a BERT's states."""
    found = model(*ids)
    return found if isinstance(found, Tensor) else found[0]


@each
def test_vmap_over_ids(kind):
    model, ids = model_of(kind), inputs_of(kind)
    with torch.no_grad():
        found = vmap(lambda *row: states(model, *(one[None] for one in row))[0])(*ids)
        assert_same(found, states(model, *ids), "states")


@each
def test_gradients_of_each_sequence(kind):
    model, ids = model_of(kind), inputs_of(kind)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    directions = torch.randn(states(model, *ids).shape, dtype=torch.float64)

    def loss(values: dict[str, Tensor], direction: Tensor, *row: Tensor) -> Tensor:
        out = functional_call(model, values, tuple(one[None] for one in row))
        return ((out if isinstance(out, Tensor) else out[0])[0] * direction).sum()

    found = vmap(grad(loss), in_dims=(None, 0, *[0] * len(ids)))(values, directions, *ids)
    for row, direction in enumerate(directions):
        model.zero_grad()
        (states(model, *(one[row : row + 1] for one in ids))[0] * direction).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:  # a BERT's states don't need its pooler
                assert not found[name][row].any(), name
            else:
                assert_same(found[name][row], parameter.grad, name)


@pytest.mark.parametrize("kind", ["experts"])
def test_an_exported_program_takes_other_lengths(kind):
    model, ids = model_of(kind), inputs_of(kind)
    length = torch.export.Dim("length", min=2, max=16)
    program = torch.export.export(model, ids, dynamic_shapes=({1: length},)).module()
    longer = inputs_of(kind, 12)
    with torch.no_grad():
        assert_same(program(*longer), model(*longer), "logits")
