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
    """Element by element by the written definition: every place in a group, a second group, and its cut end."""
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


def test_each_coordinate_and_each_seed_draws_anew() -> None:
    """No plane, row, call or seed repeats another's mask, and none is its neighbour's shifted by a byte."""
    seed = torch.tensor([5, 6])
    mask = keep_mask(seed, 0.5, rows=8, columns=128, planes=4)
    calls = mask.view(4, 8, 2, 8, 4, 2).transpose(3, 4).reshape(-1, 16)
    assert len(calls.unique(dim=0)) > 0.99 * len(calls)
    for bit in (0, 31, 32, 61):
        for place in (0, 1):
            other = seed.clone()
            other[place] ^= 1 << bit
            same = (keep_mask(other, 0.5, rows=8, columns=128, planes=4) == mask).double().mean()
            # Of the offset the low 32 bits count.
            assert same == 1 if place == 1 and bit >= 32 else abs(float(same) - 0.5) < 5 * 0.5 / 4096**0.5


def test_threshold_is_the_nearest_of_256ths_and_ends_at_the_ends_alone() -> None:
    given = {
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
    assert {p: threshold(p) for p in given} == given
    assert threshold(1) == 256 and threshold(0) == 0  # integers are probabilities too


def test_rate_and_expectation() -> None:
    for dropout_p in (0.002, 0.1, 0.5, 0.9, 0.999):
        dropped = threshold(dropout_p) / 256
        kept = keep_mask(draw_seed("cpu"), dropout_p, 1000, 512).double().mean()
        # Five standard deviations of a mean of half a million coin tosses.
        assert abs(float(kept) - (1 - dropped)) < 5 * (dropped * (1 - dropped) / 512_000) ** 0.5
        assert abs(dropped - dropout_p) <= 1 / 256
        assert keep_scale(dropout_p) * (1 - dropped) == pytest.approx(1, abs=1e-15)
    assert keep_mask(draw_seed("cpu"), 0.0, 3, 9).all() and not keep_mask(draw_seed("cpu"), 1.0, 3, 9).any()
    assert keep_scale(0.0) == 1.0 and keep_scale(1.0) == 0.0


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
