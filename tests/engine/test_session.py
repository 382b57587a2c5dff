"""Rows join, fork, shrink and leave a session in little memory, and each decodes as it would alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.generation.engines.cpp import pack
from fastformer.models import GPT, Transformer
from fastformer.ops import _extension
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn

pytestmark = needs_cpp

VOCAB, BLOCK = 19, 16


class Group:
    """The expected contents of a group: the tokens of each row."""

    def __init__(self, source: list[int], tokens: list[int]) -> None:
        self.source, self.rows, self.is_new = source, [tokens[:-1]], True
        self.last = tokens[-1]


def small(kind: type[Transformer] | type[GPT], **options: Any) -> Any:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2} if kind is Transformer else {"num_layers": 2}
    sizes = {"vocab_size": VOCAB, "d_model": 12, "num_heads": 2, "d_ff": 8, "max_len": 120}
    return drawn(kind, **sizes, **layers, **options)


@torch.inference_mode()
def alone(wide: Any, groups: Sequence[Group]) -> np.ndarray:
    """Returns the fp64 model's log-probabilities of the next token of each row, (rows, VOCAB), without a cache."""
    rows = [(group.source, row) for group in groups for row in group.rows]
    width, source_width = max(len(row) for _, row in rows), max(len(source) for source, _ in rows)
    tokens = torch.tensor([row + [0] * (width - len(row)) for _, row in rows])
    if isinstance(wide, GPT):
        logits = wide(tokens)
    else:
        logits = wide(torch.tensor([source + [0] * (source_width - len(source)) for source, _ in rows]), tokens)
    ends = torch.tensor([len(row) - 1 for _, row in rows])
    found: np.ndarray = logits[torch.arange(len(rows)), ends].log_softmax(-1).numpy()
    return found


# Slow: more draws of the same.
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize(
    ("kind", "options"), [(Transformer, {}), (GPT, {"num_kv_heads": 1}), (GPT, {"window_size": 7})]
)
def test_each_row_decodes_as_if_alone_in_little_memory(kind, options, seed) -> None:
    model, dice = small(kind, **options), random.Random(seed)
    wide = copy.deepcopy(model).double()
    blocks = dice.choice([6, 9, 14])
    session = _extension.module().Session(pack(model, "fp32"), blocks * BLOCK)
    groups: list[Group] = []
    swept = full = 0

    def release(places: list[int]) -> None:
        session.release(places)
        for place in sorted(places, reverse=True):
            del groups[place]

    for _ in range(130):
        if dice.random() < 0.3 and sum(len(group.rows) for group in groups) < 9:
            new = []
            for _ in range(dice.randint(1, 2)):
                source = [dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 20))]
                tokens = [dice.randrange(3, VOCAB) for _ in range(dice.choice([1, 2, 16, 17, 18, 33]))]
                new.append(Group(source if kind is Transformer else [], tokens))
            before = session.free_tokens()
            try:
                session.admit([one.source for one in new], [one.rows[0] for one in new], 1)
            except ValueError:
                full += 1
                assert session.free_tokens() >= before  # nothing of them stayed
            else:
                groups += new
        if groups and max(len(group.rows[0]) for group in groups) > 100:
            release([i for i, group in enumerate(groups) if len(group.rows[0]) > 100])
        before = session.free_tokens()
        while session.step_tokens() > session.free_tokens():
            release([dice.randrange(len(groups))])
            before = session.free_tokens()
        swept += session.free_tokens() > before
        if not groups:
            continue
        given = []
        for group in groups:
            for row in group.rows:
                row.append(group.last if group.is_new else dice.randrange(VOCAB))
                given.append(row[-1])
            group.is_new = False
        promised, before = session.step_tokens(), session.free_tokens()
        ids, values = session.step(given, VOCAB, True, [], None, 1)
        assert session.free_tokens() >= before - promised
        found = np.empty_like(values)
        np.put_along_axis(found, ids.astype(np.int64), values, 1)
        assert np.abs(found - alone(wide, groups)).max() < 2e-5
        if dice.random() < 0.7:
            narrow = dice.random() < 0.3
            parents = []
            for group in groups:
                count = 1 if narrow else dice.randint(1, 4)
                parents.append([dice.randrange(len(group.rows)) for _ in range(count)])
                group.rows = [list(group.rows[parent]) for parent in parents[-1]]
            session.reorder(parents)
        if groups and dice.random() < 0.06:
            release(dice.sample(range(len(groups)), dice.randint(1, len(groups))))
    assert full and swept  # memory was little: what no row names any more had to be found
    release(list(range(len(groups))))
    assert session.free_tokens() == blocks * BLOCK and session.step_tokens() == 0


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
        found, due = (one.step([token], VOCAB, True, [], None, 1) for one in (session, quiet))
        assert (found[0] == due[0]).all() and (found[1] == due[1]).all()
    assert session.free_tokens() == quiet.free_tokens()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_row_takes_a_block_when_its_last_one_is_full(length) -> None:
    model = small(GPT)
    session = _extension.module().Session(pack(model, "bf16"), 10 * BLOCK)
    session.admit([[]], [[5] * length], 1)
    taken = -(-length // BLOCK)
    assert session.free_tokens() == (10 - taken) * BLOCK
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
    model = drawn(
        GPT,
        vocab_size=vocab,
        d_model=12 if vocab < 5000 else 80,
        num_heads=2,
        d_ff=8,
        num_layers=1,
        tie_embeddings=False,
    )
    weight = model.output_weight.data
    weight[vocab // 2 :] = weight[: vocab - vocab // 2].clone()
    session = _extension.module().Session(pack(model, "fp32"), 20 * BLOCK)
    for k in (1, 2, 5, min(vocab, 70)):
        said = []
        for count in (vocab, k):
            session.admit([[]] * 3, [[3, 4], [1], []], 1)
            said.append(session.step([k % 5, 1, 2], count, False, [], None, threads))
            session.release([0, 1, 2])
        (ids, values), found = said
        assert np.array_equal(found[0], ids[:, :k]) and np.array_equal(found[1], values[:, :k])
        for row, own in zip(ids, values, strict=True):
            assert sorted(row.tolist()) == list(range(vocab)) and (np.diff(own) <= 0).all()
            same = np.diff(own) == 0
            assert (np.diff(row)[same] > 0).all() and same.sum() >= vocab // 2 - 1
