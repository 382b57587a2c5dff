"""Weights that are cast together give the same bits as weights that autocast casts one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.models import BERT, GPT, BERTConfig, GPTConfig, Transformer
from fastformer.nn.copied_weights import copied_weights
from fastformer.nn.linear import Linear

SIZES: dict[str, Any] = {"d_model": 32, "num_heads": 2, "d_ff": 64, "max_len": 32}
IDS = torch.arange(5, 29).view(2, 12)


def translator(**options: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Transformer.from_preset(
        "base", vocab_size=40, num_encoder_layers=2, num_decoder_layers=2, **SIZES, **options
    )
    return model, lambda: model.loss(IDS, IDS, IDS + 1)


def decoder() -> tuple[nn.Module, Callable[[], Tensor]]:
    config = GPTConfig(
        vocab_size=40, num_layers=2, num_kv_heads=1, activation="swiglu", qk_norm="head", tie_embeddings=False, **SIZES
    )
    model = GPT(config)
    return model, lambda: model.loss(IDS, IDS + 1)


def shared_layers() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = BERT(BERTConfig(vocab_size=40, num_layers=3, layer_groups=1, num_labels=2, pooler=True, **SIZES))
    return model, lambda: model.loss(IDS, torch.tensor([0, 1]))


def gradients(model: nn.Module, loss: Callable[[], Tensor], copies: Any, **autocast: Any) -> tuple[list[Tensor], int]:
    """Returns the loss and the gradients, and how often tensors were cast together."""
    torch.manual_seed(0)
    model.zero_grad()
    with torch.profiler.profile() as found:
        with torch.autocast("cpu", **{"dtype": torch.bfloat16, **autocast}), copies:
            total = loss()
        total.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    together = sum(event.name == "aten::_foreach_copy_" for event in found.events() or ())
    return [total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)], together


@pytest.mark.parametrize(("make", "casts"), [(translator, 2), (decoder, 2), (shared_layers, 0)])
def test_weights_are_cast_together_with_the_same_results(make: Callable[[], Any], casts: int) -> None:
    torch.manual_seed(0)
    model, loss = make()
    model.train()
    expected, none = gradients(model, loss, contextlib.nullcontext())
    found, together = gradients(model, loss, copied_weights(model))
    assert (none, together) == (0, casts)
    for (name, _), ours, theirs in zip([("", None), *model.named_parameters()], found, expected, strict=True):
        if "embedding" in name:  # the gradients of embeddings and of the output weight are added in another order
            assert (ours - theirs).abs().max() <= 2**-22 * theirs.abs().max()
        else:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("options", "changes"),
    [({"enabled": False}, {}), ({}, {"gradient_checkpointing": True}), ({}, {"dtype": torch.float64})],
    ids=["fp32", "checkpointing", "fp64"],
)
def test_weights_that_need_no_cast_or_are_computed_with_again_are_left(options: Any, changes: Any) -> None:
    torch.manual_seed(0)
    model, loss = translator()
    model.to(changes.pop("dtype", torch.float32))
    for name, value in changes.items():
        setattr(model.encoder, name, value)
    expected, _ = gradients(model, loss, contextlib.nullcontext(), **options)
    found, together = gradients(model, loss, copied_weights(model), **options)
    assert together == 0
    assert all(map(torch.equal, found, expected))


def test_a_part_without_autocast_or_of_another_dtype_uses_the_weights() -> None:
    model, x = Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16), copied_weights(model):
        assert model(x).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model(x), F.linear(x, model.weight, model.bias))
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(model(x), F.linear(x.half(), model.weight.half(), model.bias.half()))
