"""The definition of dropout: Philox's published vectors, the counter's layout, the rate and the scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastformer.ops._dropout import draw_seed, drop, keep_mask, keep_scale, philox, resolve_dropout, threshold


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
    seed, offset = 0x1234567_89ABCDEF, 0x0FEDCBA9_F7654321
    mask = keep_mask(torch.tensor([seed, offset]), 0.3, rows=5, columns=21, planes=3)
    assert mask.shape == (3, 5, 21)
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    for plane, row, column in ((0, 0, 0), (2, 4, 20), (1, 3, 7), (1, 3, 8), (0, 2, 13)):
        counter = tuple(torch.tensor(c) for c in (column // 8, row, plane, offset & 0xFFFFFFFF))
        word = int(philox(counter, key)[column % 8 // 2])
        decision = word >> (16 * (column % 2)) & 0xFFFF
        assert bool(mask[plane, row, column]) == (decision >= threshold(0.3))


def test_rate_and_expectation() -> None:
    for dropout_p in (0.1, 0.5, 0.9):
        kept = keep_mask(draw_seed("cpu"), dropout_p, 1000, 512).double().mean()
        # Five standard deviations of a mean of half a million coin tosses.
        assert abs(float(kept) - (1 - dropout_p)) < 5 * (dropout_p * (1 - dropout_p) / 512_000) ** 0.5
        assert keep_scale(dropout_p) * (1 - threshold(dropout_p) / 65536) == pytest.approx(1, abs=1e-15)
    assert keep_mask(draw_seed("cpu"), 0.0, 3, 9).all() and not keep_mask(draw_seed("cpu"), 1.0, 3, 9).any()
    assert keep_scale(1.0) == 0.0


def test_drop_is_the_formula_on_flattened_rows() -> None:
    seed, values = draw_seed("cpu"), torch.randn(2, 3, 11)
    keep = keep_mask(seed, 0.4, 6, 11).view(2, 3, 11)
    assert torch.equal(drop(values, 0.4, seed), values * keep * keep_scale(0.4))
    assert drop(values, 0.0, None) is values


def test_resolve_dropout_draws_only_where_it_must() -> None:
    state = torch.get_rng_state()
    assert resolve_dropout(0.0, None, torch.device("cpu")) == (0.0, None)
    seed = draw_seed("cpu")
    assert resolve_dropout(0.5, seed, torch.device("cpu"))[1] is seed
    torch.set_rng_state(state)
    assert torch.equal(resolve_dropout(0.5, None, torch.device("cpu"))[1], seed)
