"""The C++ encoder equals plain PyTorch, is bit-identical in any batch, and rejects invalid input."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastformer.ops import _extension
from tests.checks import assert_accurate
from tests.covering import by_turns, each
from tests.engine.plain_encoder import CONFIGS, POOLINGS, drawn, packed, pooled, states
from tests.engine.test_boundary import ERRORS, FEW, MANY, arrays, ints, odd
from tests.generation.small import needs_cpp

pytestmark = needs_cpp

EXT: Any = _extension.module()


def texts_of(dice: random.Random, o: dict[str, Any], t: dict[str, Tensor], lengths: list[int]) -> tuple[Any, Any]:
    vocab = len(t["source_embedding"])
    ids = [[dice.randrange(vocab) for _ in range(length)] for length in lengths]
    if "source_types" not in t:
        return ids, None
    return ids, [[dice.randrange(len(t["source_types"])) for _ in text] for text in ids]


def distance(rows: Tensor, due: Tensor) -> float:
    return ((rows - due).square().mean().sqrt() / due.std()).item()


@pytest.mark.parametrize("name", CONFIGS)
def test_each_option_is_honoured(name: str) -> None:
    o, t = drawn(**CONFIGS[name])
    ids, types = texts_of(random.Random(0), o, t, [5, 1, 33, 70, 260])
    exact, plain = (
        [states(o, t, text, types[i] if types else None, dtype) for i, text in enumerate(ids)]
        for dtype in (torch.float64, torch.float32)
    )
    rows = torch.from_numpy(packed(EXT, o, t).encode(ids, types, "none", False, 1))
    assert_accurate(rows, torch.cat(plain), torch.cat(exact))
    for precision, bound in (("bf16", 0.03), ("int8", 0.1)):
        rows = torch.from_numpy(packed(EXT, {**o, "precision": precision}, t).encode(ids, types, "none", False, 1))
        assert distance(rows, torch.cat(exact)) < bound, precision


@each("kind, normalize", itertools.product(POOLINGS, [False, True]))
def test_pooling_is_in_fp32_whatever_the_precision(kind: str, normalize: bool) -> None:
    o, t = drawn(types=2)
    ids, types = texts_of(random.Random(0), o, t, [5, 1, 33, 70])
    for precision in ("fp32", "int8"):
        encoder = packed(EXT, {**o, "precision": precision}, t)
        hidden = torch.from_numpy(encoder.encode(ids, types, "none", False, 1)).split([len(text) for text in ids])
        rows = torch.from_numpy(encoder.encode(ids, types, kind, normalize, 1))
        plain, exact = (torch.stack([pooled(kind, h.to(dtype)) for h in hidden]) for dtype in (None, torch.float64))
        if normalize:
            plain, exact = F.normalize(plain), F.normalize(exact)
        assert_accurate(rows, plain, exact)


@pytest.mark.parametrize(
    "name, precision",
    by_turns(["bert", "pre-norm, t5", "modernbert", "wide", "heads of panels"], ["fp32", "bf16", "int8"]),
)
def test_bits_of_a_text_depend_on_nothing_else(name: str, precision: str) -> None:
    wide = {"d_model": 264, "heads": 6, "head_dim": 44, "d_ff": 700, "layers": 2, "types": 2}
    panels = {"d_model": 128, "heads": 2, "head_dim": 64, "windows": (-1, 70)}  # AMX multiplies all of their attention
    o, t = drawn(precision=precision, **({"wide": wide, "heads of panels": panels} | CONFIGS)[name])
    encoder, dice = packed(EXT, o, t), random.Random(1)
    ids, types = texts_of(dice, o, t, [5, 1, 33, 70, 200, 2, 64, 65, 17] + [dice.randrange(1, 40) for _ in range(20)])
    single = [
        encoder.encode([text], types and [types[i]], "mean", True, 1 + i % 3)[0].tobytes() for i, text in enumerate(ids)
    ]
    for threads in (1, 2, 3, 7):
        for _ in range(3):
            order = dice.sample(range(len(ids)), dice.randrange(2, len(ids) + 1))
            rows = encoder.encode([ids[i] for i in order], types and [types[i] for i in order], "mean", True, threads)
            assert [row.tobytes() for row in rows] == [single[i] for i in order], threads
            hidden = encoder.encode([ids[order[0]]], types and [types[order[0]]], "none", False, threads)
            assert hidden.shape == (len(ids[order[0]]), o["d_model"])
    ids, types = texts_of(dice, o, t, [320, 301, 310])  # long ones, the last of which all threads share
    rows = [encoder.encode(ids, types, "mean", True, threads).tobytes() for threads in (1, 2, 7)]
    assert rows[1:] == rows[:1] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_bits_of_a_causal_text_do_not_depend_on_what_follows(precision: str) -> None:
    o, t = drawn(precision=precision, d_model=128, heads=2, head_dim=64)
    encoder, ids = packed(EXT, o | {"causal_encoder": True}, t), [i * 7 % 70 for i in range(600)]
    whole = encoder.encode([ids], None, "none", False, 1)
    for length in (1, 33, 34, 70, 100, 129, 513):
        rows = encoder.encode([ids[:length]], None, "none", False, 1)
        assert rows.tobytes() == whole[:length].tobytes(), length


@pytest.mark.parametrize("name", ["mpnet", "modernbert", "windows of one"])
def test_gaps_between_tokens_equal_hidden_tokens_of_a_longer_text(name: str) -> None:
    o, t = drawn(**CONFIGS[name])
    encoder = packed(EXT, o, t)
    places = [[0, 3, 4, 9, 30, 31, 77], [], [*range(2, 300, 3)]]
    ids, types = texts_of(random.Random(0), o, t, [7, 5, 100])
    # A window of one shows a token nothing but itself.
    gaps = (places if "source_positions" in t else None, places, [int(name != "windows of one"), 0, 0])
    rows = encoder.encode(ids, types, "none", False, 1, *gaps)
    exact, plain = (
        torch.cat(
            [
                states(o, t, text, types[i] if types else None, dtype, places[i] or None, gaps[2][i])
                for i, text in enumerate(ids)
            ]
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_accurate(torch.from_numpy(rows), plain, exact)
    for threads in (1, 2, 3):
        alone = [
            encoder.encode([text], types and [types[i]], "none", False, threads, *(g and [g[i]] for g in gaps))
            for i, text in enumerate(ids)
        ]
        assert np.concatenate(alone).tobytes() == rows.tobytes()


@pytest.mark.parametrize(("window", "length", "unseen"), [(4, 100, 4), (16, 200, 16), (64, 300, 16)])
def test_unseen_tokens_may_have_places_behind_the_others(window: int, length: int, unseen: int) -> None:
    o, t = drawn(**CONFIGS["modernbert"])
    o["encoder_windows"] = [-1, window]
    (text,), _ = texts_of(random.Random(0), o, t, [length + unseen])
    places = [*range(length, length + unseen), *range(length)]
    rows = packed(EXT, o, t).encode([text], None, "none", False, 1, None, [places], [unseen])
    exact, plain = (states(o, t, text, None, dtype, places, unseen) for dtype in (torch.float64, torch.float32))
    assert_accurate(torch.from_numpy(rows), plain, exact)


def test_the_widest_window_shows_everything() -> None:
    o, t = drawn(**CONFIGS["modernbert"])
    ids, types = texts_of(random.Random(0), o, t, [7])
    for places in (None, [[0, 3, 4, 9, 30, 31, 77]]):
        results = [
            packed(EXT, {**o, "encoder_windows": [-1, window]}, t).encode(
                ids, types, "none", False, 1, None, places, None
            )
            for window in (1000, 2**63 - 1)
        ]
        assert np.array_equal(*results)


@each(
    "gaps, named",
    [
        (([[0, 600]], None, None), "positions"),
        (([[-1, 0]], None, None), "positions"),
        (([[0]], None, None), "positions"),
        (([[0, 1], [0]], None, None), "positions"),
        ((None, [[1, 1]], None), "places"),
        ((None, [[2, 1]], None), "places"),
        ((None, [[0, 2**40]], None), "places"),
        ((None, [[0]], None), "places"),
        ((None, [[0, 1]], [2]), "unseen"),
        ((None, [[0, 1]], [-1]), "unseen"),
        ((None, None, [1]), "unseen"),
        ((None, [[0, 1]], [0, 0]), "unseen"),
    ],
)
def test_gaps_that_do_not_fit_get_an_error(gaps: Any, named: str) -> None:
    encoder = packed(EXT, *drawn())
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        encoder.encode([[1, 2]], None, "none", False, 1, *gaps)
    with pytest.raises(ValueError, match=r"\bunseen\b"):
        encoder.encode([[1, 2]], None, "mean", False, 1, None, [[0, 5]], [1])
    assert encoder.encode([[1, 2]], None, "none", False, 1, [[599, 0]], [[0, 5]], [1]).shape == (2, 32)


def test_other_wrong_calls_get_an_error() -> None:
    o, t = drawn()
    encoder = packed(EXT, o, t)
    with pytest.raises(ValueError, match=r"\btoken_types\b"):
        encoder.encode([[1]], [[1]], "mean", False, 1)
    with pytest.raises(ValueError, match=r"\bpooling\b"):
        encoder.encode([[1]], None, "median", False, 1)
    with pytest.raises(ValueError, match=r"\bthread\b"):
        encoder.encode([[1]], None, "mean", False, 0)
    for windows in ([], [-1], [-1] * 3):
        with pytest.raises(ValueError, match=r"\bwindow\b"):
            packed(EXT, {**o, "encoder_windows": windows}, t)
    with pytest.raises(ValueError, match=r"\bshape\b"):
        packed(EXT, o, {**t, "source_types": torch.zeros(2, 33)})
    with pytest.raises(ValueError, match=r"\bdecoder\b"):
        EXT.Session(EXT.PackedModel(o, {name: tensor.numpy() for name, tensor in t.items()}), 32)


def test_nan_stays_nan() -> None:
    o, t = drawn()
    t["source_embedding"][3] = torch.nan
    for kind in POOLINGS:
        rows = packed(EXT, o, t).encode([[1, 3, 2], [1, 2]], None, kind, True, 2)
        assert np.isnan(rows[0]).all() and not np.isnan(rows[1]).any()
    # Without layers, no other token's state is NaN.
    o, t = drawn(layers=0)
    t["source_embedding"][3] = torch.nan
    encoder, ids = packed(EXT, o, t), [[3, 1, 2], [1, 3, 2], [1, 2, 3]]
    hidden = torch.from_numpy(encoder.encode(ids, None, "none", False, 1)).split(3)
    for kind in POOLINGS:
        due = torch.stack([pooled(kind, states).isnan() for states in hidden])
        assert np.array_equal(np.isnan(encoder.encode(ids, None, kind, False, 1)), due) and due.any(), kind


def test_other_python_threads_run_meanwhile() -> None:
    o, t = drawn(d_model=264, heads=6, head_dim=44, d_ff=700)
    encoder, ids = packed(EXT, o, t), [[1] * 100] * 40
    caller = threading.Thread(target=lambda: encoder.encode(ids, None, "mean", False, 1))
    caller.start()
    turns = 0
    while caller.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 3


@pytest.mark.parametrize("left_out", ["source_embedding", "encoder.layers.1.linear2.weight", "local_sin", "sin"])
def test_a_model_without_one_of_its_tensors_is_refused(left_out: str) -> None:
    o, t = drawn(**CONFIGS["modernbert"])
    with pytest.raises(ValueError):
        packed(EXT, o, {name: tensor for name, tensor in t.items() if name != left_out})


def test_a_text_is_as_long_as_the_shorter_of_two_tables() -> None:
    o, t = drawn(**CONFIGS["one base"])
    for rows in (20, 700):
        encoder = packed(EXT, o, {**t, "source_positions": torch.zeros(rows, 32)})
        assert encoder.max_len == min(rows, 600)
        encoder.encode([[1] * encoder.max_len], None, "mean", False, 1)
        with pytest.raises(ValueError, match=r"\bids\b"):
            encoder.encode([[1] * (encoder.max_len + 1)], None, "mean", False, 1)


def encodes_or_says_why_not(
    name: str,
    precision: str,
    wrong: dict[str, Any],
    other: dict[int, Any],
    ids: Any,
    types: Any,
    call: tuple[Any, ...],
    gaps: tuple[Any, ...],
) -> None:
    o, t = drawn(precision=precision, **CONFIGS[name] | {"max_len": 9})
    tensors: dict[str, Any] = {key: tensor.numpy() for key, tensor in t.items()}
    names = sorted(tensors)
    tensors |= {names[place % len(names)]: value for place, value in other.items()}
    try:
        encoder = EXT.Encoder(EXT.PackedModel(o | wrong, tensors))
        encoder.encode([[1, 2], [3]], None, "mean", False, 2)
        encoder.encode(ids, types, *call)
        encoder.encode(ids, types, *call, *gaps)
    except ERRORS:
        return


lists = st.lists(st.lists(ints, max_size=11), max_size=4)
calls = given(
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.dictionaries(st.sampled_from(sorted(drawn()[0])), odd | st.lists(ints, max_size=3), max_size=1),
    st.dictionaries(st.integers(0, 60), arrays, max_size=1),
    lists | odd,
    lists | odd,
    st.tuples(st.sampled_from(["none", *POOLINGS]), st.booleans(), st.integers(-1, 3)),
    st.tuples(lists | odd, lists | odd, st.lists(ints, max_size=4) | odd),
)
test_a_text_is_encoded_or_it_is_said_why_not = settings(FEW, max_examples=40)(calls(encodes_or_says_why_not))
test_many_texts_are_encoded_or_it_is_said_why_not = pytest.mark.slow(MANY(calls(encodes_or_says_why_not)))


def bare(precision: str = "fp32", **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes layers without embeddings, whose input is states."""
    o, t = drawn(precision=precision, **options)
    arrays = {name: tensor.numpy() for name, tensor in t.items() if not name.startswith("source_")}
    return o | {"is_bare": True}, arrays


def encodes_states_or_says_why_not(
    name: str, precision: str, wrong: dict[str, Any], other: dict[int, Any], states: Any, lengths: Any, threads: Any
) -> None:
    o, tensors = bare(precision, **CONFIGS[name] | {"max_len": 9, "d_model": 12, "heads": 2, "head_dim": 6})
    names = sorted(tensors) or ["encoder.norm.weight"]
    tensors |= {names[place % len(names)]: value for place, value in other.items()}
    try:
        encoder = EXT.Encoder(EXT.PackedModel(o | wrong, tensors))
        encoder.encode_states(np.ones((5, 12), np.float32), [2, 3], 2)
        encoder.encode_states(states, lengths, threads)
    except ERRORS:
        return


rows = st.builds(
    lambda count, columns, dtype: np.ones((count, columns), dtype),
    *(st.integers(0, 13), st.sampled_from([12, 12, 12, 0, 11, 24]), st.sampled_from([np.float32] * 3 + [np.float64])),
)
stacks = given(
    st.sampled_from(["bert", "pre-norm, t5", "modernbert", "one base", "windows of one", "no layers"]),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.dictionaries(st.sampled_from(sorted(bare()[0])), odd | st.lists(ints, max_size=3), max_size=1),
    st.dictionaries(st.integers(0, 60), arrays, max_size=1),
    rows | arrays | odd,
    st.lists(ints, max_size=4) | odd,
    st.integers(-1, 3) | odd,
)
test_states_are_encoded_or_it_is_said_why_not = settings(FEW, max_examples=40)(stacks(encodes_states_or_says_why_not))
test_many_states_are_encoded_or_it_is_said_why_not = pytest.mark.slow(MANY(stacks(encodes_states_or_says_why_not)))


@each(
    "states, lengths",
    [
        (np.ones((5, 32), np.float32), [3, 3]),
        (np.ones((5, 32), np.float32), [5, 0]),
        (np.ones((5, 32), np.float32), [-1, 6]),
        (np.ones((5, 32), np.float32), [2**62, 2**62]),
        (np.ones((5, 32), np.float32), []),
        (np.ones((5, 31), np.float32), [5]),
        (np.ones(160, np.float32), [5]),
        (np.ones((0, 32), np.float32), [1]),
    ],
)
def test_states_that_do_not_fit_get_an_error(states: Any, lengths: Any) -> None:
    encoder = EXT.Encoder(EXT.PackedModel(*bare()))
    with pytest.raises(ValueError):
        encoder.encode_states(states, lengths, 1)
    with pytest.raises(ValueError, match=r"\bembeddings\b"):
        encoder.encode([[1]], None, "none", False, 1)  # ids
    assert encoder.encode_states(np.ones((5, 32), np.float32), [3, 2], 1).shape == (5, 32)


def test_states_of_a_model_that_projects_embeddings_are_refused() -> None:
    encoder = packed(EXT, *drawn(**CONFIGS["electra"]))
    with pytest.raises(ValueError, match=r"\bids\b"):
        encoder.encode_states(np.ones((5, 32), np.float32), [5], 1)
    options, tensors = bare()
    tensors |= {"source_projection.weight": np.zeros((32, 0), np.float32)}  # which a model without embeddings ignores
    alone = EXT.Encoder(EXT.PackedModel(*bare()))
    other = EXT.Encoder(EXT.PackedModel(options, tensors))
    assert np.array_equal(*(e.encode_states(np.ones((5, 32), np.float32), [5], 1) for e in (alone, other)))
