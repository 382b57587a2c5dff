"""A session takes blocks as rows need them, and no more; its best tokens are the first of all."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastformer.generation.engines.cpp import pack
from fastformer.models import GPT, Transformer
from fastformer.ops import _extension
from tests.covering import by_turns, each
from tests.generation.small import needs_cpp
from tests.generation.weights import CONFIGS, drawn

pytestmark = needs_cpp

VOCAB, BLOCK = 19, 16


def small(kind: type[Transformer] | type[GPT], **options: Any) -> Any:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2} if kind is Transformer else {"num_layers": 2}
    sizes = {"vocab_size": VOCAB, "d_model": 12, "num_heads": 2, "d_ff": 8, "max_len": 120}
    return drawn(kind, **sizes, **layers, **options)


@pytest.mark.parametrize("kind", [Transformer, GPT])
def test_a_step_without_room_leaves_the_rows_as_they_were(kind) -> None:
    model = small(kind)
    source = [[5, 6, 7]] if kind is Transformer else [[]]
    blocks, prompts = (4 if kind is Transformer else 2), [[5, 6, 7], [8] * 16]

    def session_of(tokens: list[list[int]]) -> Any:
        session = _extension.module().Session(pack(model, "fp32"), blocks * BLOCK)
        session.admit(source * len(tokens), tokens, 1)
        return session

    session, quiet = session_of(prompts), session_of(prompts[:1])
    for _ in range(2):  # the first row would find its place; the second one's block is full
        with pytest.raises(ValueError, match=r"\broom\b"):
            session.step([4, 4], 1, True, [], None, 1)
    session.release([1])
    for token in (6, 11):
        actual, due = (s.step([token], VOCAB, True, [], None, 1) for s in (session, quiet))
        assert (actual[0] == due[0]).all() and (actual[1] == due[1]).all()
    assert session.free_tokens() == quiet.free_tokens()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_row_takes_a_block_when_its_last_one_is_full(length) -> None:
    model = small(GPT)
    session = _extension.module().Session(pack(model, "bf16"), 10 * BLOCK)
    session.admit([[]], [[5] * length], 1)
    blocks = -(-length // BLOCK)
    assert session.free_tokens() == (10 - blocks) * BLOCK
    for used in range(length, length + 20):
        due = BLOCK if used % BLOCK == 0 else 0
        assert session.step_tokens() == due
        before = session.free_tokens()
        session.step([6], 1, False, [], None, 1)
        assert session.free_tokens() == before - due
    # Forks share what is behind them, and each writes to a block of its own.
    before = session.free_tokens()
    session.reorder([[0, 0, 0]])
    rest = (length + 20) % BLOCK
    assert session.step_tokens() == (2 if rest else 3) * BLOCK
    session.step([6, 7, 8], 1, False, [], None, 1)
    assert session.free_tokens() == before - (2 if rest else 3) * BLOCK
    session.release([0])
    assert session.free_tokens() == 10 * BLOCK


def test_an_unnamed_block_is_found_if_it_is_the_missing_one() -> None:
    session = _extension.module().Session(pack(small(GPT), "fp32"), 2 * BLOCK)
    session.admit([[]], [[]], 1)
    session.reorder([[0, 0]])
    for _ in range(BLOCK):
        session.step([4, 5], 1, False, [], None, 1)
    assert session.step_tokens() > session.free_tokens() == 0  # both go on
    session.reorder([[1]])
    assert session.step_tokens() == session.free_tokens() == BLOCK
    session.step([4], 1, False, [], None, 1)


@pytest.mark.parametrize(("vocab", "threads"), [(5, 1), (64, 1), (257, 1), (1100, 1), (5000, 1), (5000, 2), (5000, 3)])
def test_the_best_k_are_the_first_of_all(vocab, threads) -> None:
    # Equal ones too, in the order of their ids, wherever the parts of the vocabulary begin and whoever looks at them;
    # the largest is large enough for a second thread.
    width = 12 if vocab < 5000 else 80
    model = drawn(GPT, vocab_size=vocab, d_model=width, num_heads=2, d_ff=8, num_layers=1, tie_embeddings=False)
    weight = model.output_weight.data
    weight[vocab // 2 :] = weight[: vocab - vocab // 2].clone()
    session = _extension.module().Session(pack(model, "fp32"), 20 * BLOCK)
    for k in (1, 2, 5, min(vocab, 70)):
        steps = []
        for count in (vocab, k):
            session.admit([[]] * 3, [[3, 4], [1], []], 1)
            steps.append(session.step([k % 5, 1, 2], count, False, [], None, threads))
            session.release([0, 1, 2])
        (ids, values), best = steps
        assert np.array_equal(best[0], ids[:, :k]) and np.array_equal(best[1], values[:, :k])
        for row, row_values in zip(ids, values, strict=True):
            assert sorted(row.tolist()) == list(range(vocab)) and (np.diff(row_values) <= 0).all()
            same = np.diff(row_values) == 0
            assert (np.diff(row)[same] > 0).all() and same.sum() >= vocab // 2 - 1


@pytest.mark.parametrize(
    ("name", "precision", "cache_dtype"),
    by_turns(
        [*CONFIGS],
        [("fp32", None), ("bf16", None), ("int8", None), ("int4", None), ("fp32", "int8"), ("int8", "int8")],
    ),
)
def test_drafts_have_the_bits_of_single_steps_and_can_be_cut(name, precision, cache_dtype) -> None:
    kind, options = CONFIGS[name]
    model, dice = drawn(kind, **options), random.Random(2)
    vocab, has_source = model.config.vocab_size, isinstance(model, Transformer)

    def ids(count: int) -> list[int]:
        return [dice.randrange(3, min(vocab, 33)) for _ in range(count)]

    packed = pack(model.quantize("int4") if precision == "int4" else model, precision)
    sources, prompts = [ids(5) if has_source else [] for _ in range(3)], [ids(n) for n in (1, 15, 21)]
    forked = [[0], [0, 0], [0]]
    drafting, single = (_extension.module().Session(packed, 30 * BLOCK, cache_dtype) for _ in range(2))
    for session in (drafting, single):
        session.admit(sources, prompts, 1)
        session.reorder(forked)
    for kept, cut in [((1, 1, 1), (0, 0, 0)), ((3, 1, 1), (0, 0, 4)), ((2, 0, 2), (17, 0, 1)), ((1, 1, 12), (1, 0, 6))]:
        counts = [a + b for a, b in zip(kept, cut, strict=True)]
        rows = [ids(counts[group]) for group, parents in enumerate(forked) for _ in parents]
        of_group = [group for group, parents in enumerate(forked) for _ in parents]
        ids_found, values = drafting.step(sum(rows, []), vocab, True, [], None, 1, None, None, counts)
        drafting.cut(list(cut))
        at = np.cumsum([0, *map(len, rows)])
        for step in range(max(kept)):
            now = [row[step] for row, group in zip(rows, of_group, strict=True) if step < kept[group]]
            one = [int(step < n) for n in kept]
            due_ids, due = single.step(now, vocab, True, [], None, 1, None, None, one)
            here = [at[i] + step for i, group in enumerate(of_group) if step < kept[group]]
            assert np.array_equal(ids_found[here], due_ids) and np.array_equal(values[here], due)
        # A row may keep a block that drafts began, for the tokens that come next.
        assert drafting.free_tokens() - drafting.step_tokens() == single.free_tokens() - single.step_tokens()


def test_only_tokens_of_steps_but_the_first_can_be_cut() -> None:
    session = _extension.module().Session(pack(small(GPT), "fp32"), 4 * BLOCK)
    session.admit([[]], [[5] * 3], 1)
    session.step([6, 7, 8], 1, False, [], None, 1, None, None, [3])
    for counts in ([3], [-1], [], [0, 0]):
        with pytest.raises(ValueError, match=r"\bcounts\b"):
            session.cut(counts)
    session.cut([1])
    session.step([9], 1, False, [], None, 1)
    for call in (lambda: session.cut([3]), lambda: session.step([6, 7], 1, False, [], None, 1, None, None, [3])):
        with pytest.raises(ValueError, match="counts|tokens"):
            call()
    session.cut([2])
    with pytest.raises(ValueError, match="max_len"):
        session.step([6] * 117, 1, False, [], None, 1, None, None, [117])
    with pytest.raises(ValueError, match=r"\broom\b"):
        session.step([6] * 61, 1, False, [], None, 1, None, None, [61])
    assert session.free_tokens() == 3 * BLOCK


@each("vocab, shortlist, threads", itertools.product([19, 300], [[], [2, 3, 5, 7, 11, 13, 17]], [1, 2]))
def test_masked_rows_choose_among_the_allowed_ids(threads, shortlist, vocab) -> None:
    sizes = {"vocab_size": vocab, "d_model": 12, "num_heads": 2, "d_ff": 8, "max_len": 120, "num_layers": 1}
    module, model = _extension.module(), drawn(GPT, **sizes)

    def step(rows: list[int], masks: npt.NDArray[np.uint8] | None, shown: list[int]) -> Any:
        session = module.Session(pack(model, "fp32"), 20 * BLOCK)
        session.set_shortlist(shortlist)
        session.admit([[]] * 4, [[3], [4], [5], [6]], 1)
        logits = np.zeros((len(shown), vocab), np.float32)
        found = session.step([7, 8, 9, 10], vocab, True, shown, logits, threads, rows, masks)
        return (*found, logits)

    _, _, free = step([], None, [0, 1, 2, 3])
    draw = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        allowed = draw.random((2, vocab)) < share
        masks = np.zeros((2, -(-vocab // 32) * 4), np.uint8)
        packed = np.packbits(allowed, axis=1, bitorder="little")
        masks[:, : packed.shape[1]] = packed
        ids, values, logits = step([1, 3], masks, [0, 1, 3])
        expected = free.copy()
        expected[[1, 3]] = np.where(allowed, free[[1, 3]], -np.inf)
        assert (logits == expected[[0, 1, 3]]).all()
        for row in range(4):
            finite = int(np.isfinite(expected[row]).sum())
            best = np.argsort(-expected[row], kind="stable")[:finite]
            assert ids[row, :finite].tolist() == best.tolist() and (values[row, finite:] == -np.inf).all()
            if finite:
                total = np.logaddexp.reduce(expected[row][np.isfinite(expected[row])].astype(np.float64))
                np.testing.assert_allclose(values[row, :finite], expected[row][best] - total, atol=2e-5)
    wide = np.zeros((1, -(-vocab // 32) * 4), np.uint8)
    for rows, wrong in (([0], None), ([0, 1], wide), ([4], wide), ([-1], wide), ([0], wide[:, :1]), ([1, 0], wide)):
        with pytest.raises(ValueError, match="mask"):
            step(rows, wrong, [])
