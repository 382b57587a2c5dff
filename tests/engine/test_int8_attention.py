"""Attention over whole numbers of 8 bits, by which encoders of int8 read long texts on some CPUs."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.engine.plain_encoder import CONFIGS, drawn, packed, states
from tests.engine.test_encoder import EXT, distance, texts_of
from tests.generation.small import needs_cpp

pytestmark = needs_cpp

SHORT, LONG = 255, 256  # the most tokens that attend in bf16, and the fewest that attend in int8


@pytest.mark.parametrize("name", ["bert", "pre-norm, t5", "modernbert", "windows of one", "odd sizes"])
def test_it_adds_little_to_the_error_of_a_text(name: str) -> None:
    o, t = drawn(**CONFIGS[name])
    encoder, squares = packed(EXT, {**o, "precision": "int8"}, t), []
    for length in (SHORT, LONG):
        ids, types = texts_of(random.Random(0), o, t, [LONG] * 4)
        errors = []
        for i, text in enumerate(ids):
            of_text = types and types[i][:length]
            rows = torch.from_numpy(encoder.encode([text[:length]], types and [of_text], "none", False, 1))
            errors.append(distance(rows, states(o, t, text[:length], of_text, torch.float64)) ** 2)
        squares.append(sum(errors))
    assert squares[1] < 1.4 * squares[0], squares


@pytest.mark.parametrize("length", [SHORT, LONG, 600])
def test_many_small_weights_count_beside_a_large_one(length: int) -> None:
    # A token attends to itself 1,800 times as much as to any other one: more than 8 bits can tell from nothing.
    o, t = drawn(placement="pre", distances=1, layers=1)
    t["encoder.layers.0.self_attn.in_proj_weight"][: 2 * o["d_model"]] = 0
    t["encoder.layers.0.self_attn.in_proj_bias"][2 * o["d_model"] :] += 2  # so that values don't add up to nothing
    t["encoder_position_bias"][:] = torch.tensor([0, 7.5 * o["head_dim"] ** 0.5, 0])
    encoder = packed(EXT, {**o, "precision": "int8"}, t)
    (ids,), _ = texts_of(random.Random(0), o, t, [length])
    rows = torch.from_numpy(encoder.encode([ids], None, "none", False, 1))
    assert distance(rows, states(o, t, ids, None, torch.float64)) < 0.02


def test_an_offset_of_all_keys_costs_no_more_than_in_bf16() -> None:
    o, t = drawn(placement="pre")
    ids, _ = texts_of(random.Random(0), o, t, [300])
    for layer in range(2):
        bias = t[f"encoder.layers.{layer}.self_attn.in_proj_bias"]
        bias[o["d_model"] : 2 * o["d_model"]] += 200 * torch.tensor([1.0, -1.0] * 16)
    exact, errors = states(o, t, ids[0], None, torch.float64), {}
    for precision in ("bf16", "int8"):
        rows = packed(EXT, {**o, "precision": precision}, t).encode(ids, None, "none", False, 1)
        errors[precision] = distance(torch.from_numpy(rows), exact)
    assert errors["int8"] < 1.2 * errors["bf16"], errors


def test_weights_below_half_of_a_step_add_up() -> None:
    # All values are 1, and so is their mean, of which 8,000 tokens that see themselves 160,000 times as much have 5 %.
    o, t = drawn(placement="pre", layers=1, d_model=8, heads=1, head_dim=8, d_ff=4, distances=1, max_len=8000)
    t["encoder.layers.0.self_attn.in_proj_weight"][:] = 0
    t["encoder.layers.0.self_attn.in_proj_bias"][:] = torch.tensor([0.0] * 16 + [1.0] * 8)
    t["encoder_position_bias"][:] = torch.tensor([0, math.log(160_000) * o["head_dim"] ** 0.5, 0])
    encoder = packed(EXT, {**o, "precision": "int8"}, t)
    due, rows = (
        torch.from_numpy(encoder.encode([[i % 70 for i in range(count)]], None, "none", False, 2))[:SHORT]
        for count in (SHORT, 8000)
    )
    assert distance(rows, due) < 0.005


def test_a_token_that_is_no_number_spoils_its_own_text_alone() -> None:
    o, t = drawn(precision="int8")
    t["source_embedding"][3] = torch.nan
    texts = [[1, 2] * 150, [1, 3] * 150]
    rows = torch.from_numpy(packed(EXT, o, t).encode(texts, None, "none", False, 2)).split(300)
    assert rows[0].isfinite().all() and rows[1].isnan().all()


def test_tokens_that_see_nothing_read_nothing() -> None:
    # They come behind the window of the last of 256 tokens, where the memory still has the bytes of a longer text.
    o, t = drawn(placement="pre", layers=1, rotary=True, local=False, windows=(4,), max_len=1024)
    value = torch.tensor([1, *[-1 / 127] * 7])  # as bytes 127 and -1; four of -1 are NaN as a float
    t["encoder.layers.0.self_attn.in_proj_weight"][2 * o["d_model"] :] = 0
    t["encoder.layers.0.self_attn.in_proj_bias"][2 * o["d_model"] :] = value.repeat(o["num_heads"])
    encoder = packed(EXT, {**o, "precision": "int8"}, t)
    (long, ids), _ = texts_of(random.Random(0), o, t, [1024, LONG + 20])
    encoder.encode([long], None, "none", False, 1)
    places = [*range(LONG + 10, LONG + 30), *range(LONG)]
    rows = torch.from_numpy(encoder.encode([ids], None, "none", False, 1, None, [places], [20]))
    assert distance(rows, states(o, t, ids, None, torch.float64, places, 20)) < 0.1


@pytest.mark.slow  # 10 s
def test_sums_over_very_many_tokens_fit() -> None:
    # With equal weights and values, bytes of 70,000 tokens add up to more than 32 bits hold.
    o, t = drawn(placement="pre", layers=1, d_model=8, heads=1, head_dim=8, d_ff=4, rotary=True, max_len=70_000)
    t["encoder.layers.0.self_attn.in_proj_weight"][:] = 0
    t["encoder.layers.0.self_attn.in_proj_bias"][:] = torch.tensor([0.0] * 16 + [1.0] * 8)
    encoder = packed(EXT, {**o, "precision": "int8"}, t)
    few, many = ([i % 70 for i in range(count)] for count in (SHORT, 70_000))
    due = torch.from_numpy(encoder.encode([few], None, "none", False, 2))
    rows = torch.from_numpy(encoder.encode([many], None, "none", False, 2))[: len(few)]
    assert distance(rows, due) < 0.01
