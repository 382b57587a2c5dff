"""Tests accelerated BERT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertForQuestionAnswering, BertModel

import fastformer
from fastformer.integrations.known import CACHE
from tests.integrations import families
from tests.integrations.families import (
    FUSED,
    IDS,
    PACKED,
    RIGHT,
    Wrapped,
    assert_all_same,
    before_and_after,
    gradients,
    ran,
)
from tests.nn.comparing import assert_same
from tests.nn.test_padding import Running

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def make(kind: Any = BertModel, **options: Any) -> Any:
    return families.make("bert", kind, **options)


@pytest.mark.parametrize("act", ["gelu_new", "relu", "silu", "mish"])
def test_activations(act):
    model = make(hidden_act=act)

    def step() -> list[Tensor]:
        out = model(IDS, attention_mask=RIGHT.long())
        hidden = out.last_hidden_state * RIGHT[..., None]
        return [hidden, *gradients(model, hidden.square().sum() + out.pooler_output.sum())]

    expected, found = before_and_after(model, step)
    assert_all_same(found, expected, "output or gradient")
    names = ran(step)
    assert not fastformer.report(model).left and PACKED in names and (FUSED in names) == (act != "mish")


@pytest.mark.parametrize("what", ["answers", "chunks", "other tokens", "no token"])
def test_padding_is_computed_if_it_is_read(what):
    """A softmax over the sequence, chunks of it, a module that mixes tokens, and a row without tokens read padding."""
    model = (
        make(BertForQuestionAnswering) if what == "answers" else make(chunk_size_feed_forward=3 * (what == "chunks"))
    )
    model.eval()
    if what == "other tokens":
        model.encoder.layer[0].attention.output.dense = Running(
            *model.encoder.layer[0].output.dense.weight.shape[:1] * 2
        )
        model.double()
    options: dict[str, Any] = {"attention_mask": (RIGHT & (what != "no token")).long()}
    if what == "answers":
        options |= {"start_positions": torch.tensor([0, 1, 2, 0]), "end_positions": torch.tensor([1, 2, 2, 0])}
    before, after = before_and_after(model, lambda: model(IDS, **options))
    assert_same(after[0], before[0], "loss or hidden states", 1e-9)
    assert_same(after[1], before[1], "logits or pooled", 1e-9)


class Mixing(torch.nn.Module):
    """A module like those of unknown families in transformers."""

    __module__ = "transformers.models.other.modeling_other"

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


@pytest.mark.parametrize("activation", [
    torch.nn.Softmax(-1), torch.nn.LogSoftmax(-1), torch.nn.Sigmoid(), torch.nn.PReLU(), torch.nn.LayerNorm(40),
    torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.0)),
], ids=str)  # fmt: skip
def test_modules_that_read_one_token_stay_packed(activation):
    assert PACKED in with_activation(activation)


@pytest.mark.parametrize("activation", [
    torch.nn.Softmax(1), torch.nn.Softmax(2), torch.nn.LogSoftmax(1), torch.nn.Softmax2d(), torch.nn.PReLU(9),
    torch.nn.LocalResponseNorm(3), torch.nn.CrossMapLRN2d(3), torch.nn.LayerNorm((9, 40)), torch.nn.GroupNorm(3, 9),
    torch.nn.Dropout1d(0.5), torch.nn.Sequential(torch.nn.Softmax(1)), Mixing(),
], ids=str)  # fmt: skip
def test_a_module_that_reads_other_positions_sees_the_batch(activation):
    if isinstance(activation, torch.nn.CrossMapLRN2d):
        activation = torch.nn.Sequential(torch.nn.Unflatten(2, (8, 5)), activation, torch.nn.Flatten(2))
    assert PACKED not in with_activation(activation)


def with_activation(activation: torch.nn.Module) -> set[str]:
    """Returns fastformer's ops that run in a model with another activation, which computes the same."""
    model = make()
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = activation.double()

    def run() -> Tensor:
        torch.manual_seed(0)
        return model(IDS, attention_mask=RIGHT.long()).last_hidden_state * RIGHT[..., None]

    before, after = before_and_after(model, run)
    assert_same(after, before, "hidden states", 1e-9)
    return ran(run)


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no mask", "right"])
def test_a_custom_scale(mask):
    model = make().eval()
    for layer in model.encoder.layer:
        layer.attention.self.scaling *= 0.25
    options = {} if mask is None else {"attention_mask": mask.long()}
    before, after = before_and_after(model, lambda: model(IDS, **options).last_hidden_state)
    real = 1 if mask is None else mask[..., None]
    assert_same(after * real, before * real, "hidden states", 1e-9)


def test_a_decoder_with_a_cache():
    model = make(is_decoder=True).eval()
    whole = model(IDS).last_hidden_state
    fastformer.accelerate(model)
    assert_same(model(IDS).last_hidden_state, whole, "causal", 1e-9)
    first = model(IDS[:, :5], use_cache=True)
    second = model(IDS[:, 5:], **{CACHE: first[CACHE]}, use_cache=True)
    assert_same(second.last_hidden_state, whole[:, 5:], "with a cache", 1e-9)


def test_adapters_and_restore():
    model = make().eval()
    run = lambda: model(IDS, attention_mask=RIGHT.long()).last_hidden_state * RIGHT[..., None]  # noqa: E731
    before = run()
    fastformer.accelerate(model)

    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for layer in model.encoder.layer:
        layer.intermediate.dense.__class__ = Doubled
    changed = run()
    # Those that were given another class are that.
    restored = fastformer.restore(model)
    assert len(restored) == 10 + 2 * 5 + 1 and "encoder.layer.0.intermediate.dense" not in restored
    assert_same(changed, run(), "adapter", 1e-9)
    assert not torch.allclose(changed, before)


@pytest.mark.parametrize("order", ["wrapped first", "accelerated first"])
@pytest.mark.parametrize("place", [".attention", ".attention.self", ".attention.output", ".intermediate", ".output"])
def test_a_wrapped_layer_is_called(place, order):
    model = make().eval()
    expected = model(IDS, attention_mask=RIGHT.long()).last_hidden_state
    if order == "accelerated first":
        fastformer.accelerate(model)
    layers, name = model.encoder.layer, f"0{place}"
    parent, _, own = name.rpartition(".")
    setattr(layers.get_submodule(parent), own, Wrapped(layers.get_submodule(name)))
    fastformer.accelerate(model)
    real = RIGHT[..., None]
    assert_same(model(IDS, attention_mask=RIGHT.long()).last_hidden_state * real, expected * real, place, 1e-9)
