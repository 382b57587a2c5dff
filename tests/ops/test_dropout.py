"""Tests the definition of dropout: Philox's published vectors, the counter's layout, the rate and the scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch.utils.checkpoint import checkpoint

from fastformer.models import Transformer
from fastformer.ops import _dropout
from fastformer.ops._dropout import draw_seed, drop, keep_mask, keep_scale, philox, resolve_dropout, threshold
from tests.conftest import CallsOf
from tests.generation.small import tiny

DROPOUTS = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}


# Random123's known answers (kat_vectors, "philox4x32 7").
@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple, key: tuple, words: tuple) -> None:
    def tensors(values: tuple) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(value) for value in values)

    assert tuple(int(word) for word in philox(tensors(counter), tensors(key))) == words


def test_keep_mask_is_a_function_of_the_coordinates() -> None:
    """Tests each element by the written definition: all places of a group, a second group, and its cut end."""
    seed, offset = 0x1234567_89ABCDEF, 0x0FEDCBA9_F7654321
    mask = keep_mask(torch.tensor([seed, offset]), 0.3, rows=5, columns=101, planes=3)
    assert mask.shape == (3, 5, 101)
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    for plane, row in ((0, 0), (2, 4), (1, 3)):
        for column in range(101):
            group, in_group = divmod(column, 64)
            pair, in_pair = divmod(in_group, 8)
            call, odd = divmod(in_pair, 2)
            counter = tuple(torch.tensor(c) for c in (4 * group + call, row, plane, offset & 0xFFFFFFFF))
            call_bytes = b"".join(int(word).to_bytes(4, "little") for word in philox(counter, key))
            assert bool(mask[plane, row, column]) == (call_bytes[2 * pair + odd] >= 77), (plane, row, column)


def test_the_threshold_is_the_nearest_of_256ths_and_exact_at_0_and_1() -> None:
    thresholds = {
        0.0: 0,
        1e-9: 1,
        1 / 512: 1,
        0.0058: 1,
        0.0059: 2,
        0.1: 26,
        0.5: 128,
        0.9: 230,
        0.997: 255,
        1 - 1e-9: 255,
        1.0: 256,
    }
    assert {p: threshold(p) for p in thresholds} == thresholds
    assert threshold(1) == 256 and threshold(0) == 0  # integers are probabilities too


def test_rate_and_expectation() -> None:
    for dropout_p in (0.002, 0.1, 0.5, 0.9, 0.999):
        dropped = threshold(dropout_p) / 256
        rate = keep_mask(draw_seed("cpu"), dropout_p, 1000, 512).double().mean()
        # Five standard deviations of a mean of half a million coin tosses.
        assert abs(float(rate) - (1 - dropped)) < 5 * (dropped * (1 - dropped) / 512_000) ** 0.5
        assert abs(dropped - dropout_p) <= 1 / 256
        assert keep_scale(dropout_p) * (1 - dropped) == pytest.approx(1, abs=1e-15)
    assert keep_mask(draw_seed("cpu"), 0.0, 3, 9).all() and not keep_mask(draw_seed("cpu"), 1.0, 3, 9).any()
    assert keep_scale(0.0) == 1.0 and keep_scale(1.0) == 0.0


def test_dropout_equals_the_formula_on_flattened_rows() -> None:
    seed, values = draw_seed("cpu"), torch.randn(2, 3, 11)
    keep = keep_mask(seed, 0.4, 6, 11).view(2, 3, 11)
    assert torch.equal(drop(values, 0.4, seed), values * keep * keep_scale(0.4))
    assert drop(values, 0.0, None) is values


def test_resolve_dropout_draws_only_if_necessary() -> None:
    state = torch.get_rng_state()
    assert resolve_dropout(0.0, None, torch.device("cpu")) == (0.0, None)
    seed = draw_seed("cpu")
    assert resolve_dropout(0.5, seed, torch.device("cpu"))[1] is seed
    torch.set_rng_state(state)
    assert torch.equal(resolve_dropout(0.5, None, torch.device("cpu"))[1], seed)


def gradients(model: Transformer, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    tokens = torch.arange(4, 24).view(2, 10)
    model.zero_grad()
    model.loss(tokens, tokens, tokens).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_forward_pass_draws_its_seeds_at_once_on_a_gpu(calls_of: CallsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that behaves like a GPU: one launch draws the same seeds from the same state, and all are used."""
    draws, model = calls_of(torch, "randint"), tiny(**DROPOUTS).train()

    def taken() -> list[tuple[int, ...]]:
        shapes = [tuple(draw.result.shape) for draw in draws]
        draws.clear()
        return shapes

    apart = gradients(model)
    single = taken()
    assert set(single) == {(2,)} and len(single) > 15
    assert torch.equal(gradients(model), apart)
    taken()
    monkeypatch.setattr(_dropout, "_DEVICES", {"cpu"})
    together = gradients(model)
    assert taken() == [(64, 2)]
    assert torch.equal(gradients(model), together) and not torch.equal(gradients(model, seed=2), together)
    taken()
    monkeypatch.setattr(_dropout, "_TOGETHER", 8)  # a model may have more dropouts than that
    gradients(model)
    assert taken() == [(8, 2)] * -(-len(single) // 8)
    draw_seed("cpu")
    assert taken() == [(2,)]
    with torch.no_grad():
        gradients_of_none = model(torch.arange(4, 14)[None], torch.arange(4, 14)[None])
    assert gradients_of_none.isfinite().all() and taken() == single


@pytest.mark.parametrize("how", ["own", "not reentrant", "reentrant"])
def test_recomputed_layers_have_the_same_dropout(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer under activation checkpointing is among dropouts whose seeds were drawn together."""
    monkeypatch.setattr(_dropout, "_DEVICES", {"cpu"})
    seeds: list[Tensor] = []

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            seed = draw_seed("cpu")
            seeds.append(seed)
            return drop(self.linear(x), 0.5, seed)

    if how == "own":
        model = tiny(**DROPOUTS).train()
        model.encoder.gradient_checkpointing = True
        first = gradients(model)
        assert first.isfinite().all() and torch.equal(gradients(model), first)
    layers = [Layer(), Layer(), Layer()]

    @_dropout.draws_seeds_together
    def forward(x: Tensor) -> Tensor:
        x = layers[0](x)
        x = checkpoint(layers[1], x, use_reentrant=how == "reentrant")
        return layers[2](x)

    forward(torch.ones(4, 8, requires_grad=True)).sum().backward()
    _, inner, _, again = seeds
    assert torch.equal(inner, again)
