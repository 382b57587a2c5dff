"""Prompts with a common prefix share memory, are computed once, and are bit-identical to prompts alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastformer.generation.engines.cpp import pack
from fastformer.models import GPT, Transformer
from fastformer.ops import _extension
from tests.generation.small import needs_cpp
from tests.generation.weights import GEMMA4, drawn

pytestmark = needs_cpp

VOCAB, BLOCK = 19, 16


SIZES: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "num_heads": 2, "d_ff": 32, "max_len": 130}


def packed_gpt(precision: str = "fp32", **options: Any) -> Any:
    return pack(drawn(GPT, **(SIZES | {"num_layers": 2} | options)), precision)


def new_session(packed: Any, blocks: int = 100, cache_dtype: str | None = None) -> Any:
    return _extension.module().Session(packed, blocks * BLOCK, cache_dtype)


def step(session: Any, tokens: Sequence[int], threads: int = 1) -> np.ndarray:
    """Returns the log-probabilities of the next tokens, (rows, VOCAB)."""
    ids, values = session.step(tokens, VOCAB, True, [], None, threads)
    logits = np.empty_like(values)
    np.put_along_axis(logits, ids.astype(np.int64), values, 1)
    return logits


def alone(packed: Any, prompt: Sequence[int], blocks: int = 100, cache_dtype: str | None = None) -> np.ndarray:
    session = new_session(packed, blocks, cache_dtype)
    session.admit([[]], [prompt[:-1]], 1)
    return step(session, prompt[-1:])


def ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "precision", "threads", "cache_dtype"),
    [
        ({}, "fp32", 1, None),
        ({}, "bf16", 2, None),
        ({}, "int8", 3, None),
        ({}, "int4", 2, None),
        ({}, "fp32", 1, "int8"),
        ({}, "bf16", 2, "int8"),
        (GEMMA4, "fp32", 2, None),
        (GEMMA4, "int8", 2, "int8"),
    ],
)
def test_a_long_prefix_is_read_once_for_concurrent_and_later_prompts(options, precision, threads, cache_dtype) -> None:
    packed, dice = packed_gpt(precision, max_len=1100, **{"positions": "rotary"} | options), random.Random(0)
    common = ids(dice, 1000)
    prompts = [common + ids(dice, 1 + i % 5 * 9) for i in range(16)]
    session = new_session(packed, 200, cache_dtype)
    together, later = prompts[:12], prompts[12:]
    cached = session.admit([[]] * 12, [prompt[:-1] for prompt in together], threads)
    whole = len(common) // BLOCK * BLOCK
    assert cached[0] == 0 and all(whole <= count < len(p) for count, p in zip(cached[1:], together[1:], strict=True))
    assert session.shared_tokens() >= 11 * whole
    logits = step(session, [prompt[-1] for prompt in together], threads)
    for row, prompt in zip(logits, together, strict=True):
        assert np.array_equal(row, alone(packed, prompt, cache_dtype=cache_dtype)[0])
    session.release(range(12))  # nobody needs it now; it stays
    assert session.shared_tokens() == 0 and session.free_tokens() == 200 * BLOCK
    assert [session.known(prompt[:-1]) for prompt in later] == [(whole, 0)] * 4
    assert session.admit([[]] * 4, [prompt[:-1] for prompt in later], threads) == [whole] * 4
    logits = step(session, [prompt[-1] for prompt in later], threads)
    for row, prompt in zip(logits, later, strict=True):
        assert np.array_equal(row, alone(packed, prompt, cache_dtype=cache_dtype)[0])


@pytest.mark.parametrize(
    ("precision", "threads", "cache_dtype"),
    [("fp32", 1, None), ("bf16", 2, None), ("int8", 2, None), ("bf16", 2, "int8")],
)
def test_prompts_that_wait_for_a_step_are_read_before_anything_needs_them(precision, threads, cache_dtype) -> None:
    """The step after an admission computes its prompts as well, and any call before that needs them."""
    packed, dice = packed_gpt(precision), random.Random(3)
    stem, then = ids(dice, 40), ids(dice, 4)
    prompts = [stem + ids(dice, count) for count in (3, 9, 17, 1)]

    def quiet(prompt: Sequence[int]) -> list[np.ndarray]:
        session = new_session(packed, cache_dtype=cache_dtype)
        session.admit([[]], [prompt[:-1]], 1)
        return [step(session, [token])[0] for token in (prompt[-1], *then)]

    expected = [quiet(prompt) for prompt in prompts]
    session = new_session(packed, cache_dtype=cache_dtype)
    assert session.admit([[]], [prompts[0][:-1]], threads) == [0]
    assert session.admit([[]], [prompts[1][:-1]], threads) == [
        32
    ]  # the blocks of the first one, which no step followed
    session.reorder([[0, 0], [0]])
    session.admit([[]], [prompts[2][:-1]], threads)
    session.release([1])
    logits = step(session, [prompts[0][-1]] * 2 + [prompts[2][-1]], threads)
    for row, place in zip(logits, (0, 0, 2), strict=True):
        assert np.array_equal(row, expected[place][0])
    session.admit([[]], [prompts[3][:-1]], threads)  # beside rows that go on
    for number, token in enumerate(then):
        logits = step(session, [token] * 3 + [prompts[3][-1] if number == 0 else then[number - 1]], threads)
        for row, place in zip(logits, (0, 0, 2, 3), strict=True):
            assert np.array_equal(row, expected[place][number + (place != 3)]), (place, number)


def test_shared_blocks_of_an_admission_are_read_before_they_are_needed() -> None:
    packed, dice = packed_gpt(), random.Random(1)
    stem = ids(dice, 112)
    # Each needs what the one before it reads, but for the first and the last.
    prompts = [stem[:16] + ids(dice, 40), stem[:40], stem[:70] + ids(dice, 9), stem, ids(dice, 30)]
    for order in (range(5), range(5)[::-1], [3, 0, 4, 2, 1]):
        session, chosen = new_session(packed), [prompts[i] for i in order]
        cached = session.admit([[]] * 5, [prompt[:-1] for prompt in chosen], 1)
        assert sum(cached) >= 16 + 32 + 64
        logits = step(session, [prompt[-1] for prompt in chosen])
        assert all(np.array_equal(row, alone(packed, p)[0]) for row, p in zip(logits, chosen, strict=True)), order


def test_no_thread_reads_unwritten_blocks() -> None:
    packed, dice = packed_gpt(d_model=64, num_heads=8, max_len=400), random.Random(6)
    for _ in range(20):
        stem = ids(dice, 320)
        prompts = [stem[: 320 - 48 * i] + ids(dice, 2 + i) for i in range(6)]
        session = new_session(packed)
        assert sum(session.admit([[]] * 6, [prompt[:-1] for prompt in prompts], 3)) == 880
        logits = step(session, [prompt[-1] for prompt in prompts])
        assert np.array_equal(logits[1], alone(packed, prompts[1])[0])


def test_equal_tokens_after_different_prefixes_are_not_shared() -> None:
    packed, dice = packed_gpt(), random.Random(2)
    first, second, same = ids(dice, 16), ids(dice, 16), ids(dice, 32)
    session = new_session(packed)
    session.admit([[]], [first + same], 1)
    for prompt in (second + same, same, first[1:] + same, [*first[:-1], 18 if first[-1] != 18 else 17, *same]):
        assert session.known(prompt) == (0, 0)
    assert session.known(first + same) == (48, 48)
    assert session.known(first + same[:16] + second) == (32, 32)
    assert session.known((first + same)[:47]) == (32, 32)  # in whole blocks


def test_encoder_decoders_share_no_prefixes() -> None:
    session = new_session(pack(drawn(Transformer, **SIZES), "fp32"))
    prompt = ids(random.Random(3), 40)
    assert session.admit([[5, 6], [6, 5]], [prompt, prompt], 1) == [0, 0]
    assert session.known(prompt) == (0, 0) and session.shared_tokens() == 0


def test_a_failed_admission_leaves_no_cached_blocks() -> None:
    packed, dice = packed_gpt(), random.Random(4)
    old, stem = ids(dice, 33), ids(dice, 48)
    session = new_session(packed, 10)
    session.admit([[]], [old[:-1]], 1)
    session.release([0])
    prompts = [stem, stem + ids(dice, 5), old + ids(dice, 5), ids(dice, 120)]  # 3, 1, 1, and 8 blocks: two too many
    with pytest.raises(ValueError, match="room"):
        session.admit([[]] * 4, prompts, 1)
    assert session.free_tokens() == 10 * BLOCK and session.shared_tokens() == 0
    assert session.known(stem) == (0, 0)  # it was never read
    retried = [stem, old]
    session.admit([[]] * 2, [prompt[:-1] for prompt in retried], 1)
    logits = step(session, [prompt[-1] for prompt in retried])
    assert all(np.array_equal(row, alone(packed, p)[0]) for row, p in zip(logits, retried, strict=True))


def test_the_most_recently_used_stays_longest() -> None:
    packed, dice = packed_gpt(), random.Random(5)
    session = new_session(packed, 8)
    first, second, third = (ids(dice, 48) for _ in range(3))
    for prompt in (first, second, first):
        session.admit([[]], [prompt], 1)
        session.release([0])
    assert [session.known(p)[0] for p in (first, second)] == [48, 48]
    session.admit([[]], [third], 1)  # two blocks were free: the third is the end of the second prompt
    assert [session.known(p)[0] for p in (first, second, third)] == [48, 32, 48]
    session.admit([[]], [first], 1)
    assert session.admit([[]], [ids(dice, 32)], 1) == [0]
    assert [session.known(p) for p in (first, second, third)] == [(48, 48), (0, 0), (48, 48)]
    with pytest.raises(ValueError, match="room"):
        session.admit([[]], [ids(dice, 16)], 1)


class Mirrored:
    """A group, and a session in which it is alone."""

    def __init__(self, packed: Any, source: list[int], prompt: list[int]) -> None:
        self.session, self.prompt, self.rows, self.is_new = new_session(packed, 60), prompt, 1, True
        self.session.admit([source], [prompt[:-1]], 1)
        self.length = len(prompt) - 1


KINDS: list[dict[str, Any]] = [
    {},
    {"reads_source": True},
    {"window_size": 21, "window_layers": (True, False), "attention_softcap": 4.0, "qk_norm": "head", "head_dim": 64},
    {"window_size": 21},
    {"positions": "rotary", "num_kv_heads": 1},
]


# Slow: more draws of the same.
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 45))])
def test_each_row_decodes_as_if_alone_while_prefixes_come_and_go(seed) -> None:
    dice, options = random.Random(seed), dict(KINDS[seed % 5])
    precision = ("fp32", "bf16", "int8", "int4")[seed % 4]
    reads_source = options.pop("reads_source", False)
    packed = pack(drawn(Transformer, **SIZES), precision) if reads_source else packed_gpt(precision, **options)
    blocks = dice.choice([8, 10, 12])
    session, threads = new_session(packed, blocks), dice.randint(1, 3)
    groups: list[Mirrored] = []
    recent: list[list[int]] = [[]]
    reused = forgotten = full = 0

    def release(places: list[int]) -> None:
        session.release(places)
        for place in sorted(places, reverse=True):
            del groups[place]

    for _ in range(150):
        # Few at a time: the buffers of many sessions would fill the process's pool, whose own test comes later.
        if dice.random() < 0.4 and len(groups) < 2:
            new = []
            for _ in range(dice.randint(1, 2)):
                # Of two tokens, and going on from what there was before: many begin alike, whole blocks and less.
                begin = dice.choice(recent)
                prompt = begin[: dice.randint(0, len(begin))] if dice.random() < 0.3 else begin
                more = dice.choice([0, 1, 15, 16, 17, 40])
                prompt = [*prompt, *(dice.choice((4, 5)) for _ in range(more))][:100] or [4]
                new.append(prompt)
            recent = [*recent[-11:], *new]
            sources = [ids(dice, dice.randint(1, 20)) if reads_source else [] for _ in new]
            before, seen = session.free_tokens(), [session.known(prompt[:-1])[0] for prompt in new]
            try:
                cached = session.admit(sources, [prompt[:-1] for prompt in new], threads)
            except ValueError:
                full += 1
                assert session.free_tokens() >= before
            else:
                assert all(0 <= c < len(p) and c % BLOCK == 0 for c, p in zip(cached, new, strict=True))
                assert cached[0] == seen[0] and all(c >= 0 for c in cached)
                reused += sum(cached) > 0
                forgotten += not sum(cached)
                groups += [Mirrored(packed, *pair) for pair in zip(sources, new, strict=True)]
        if long := [i for i, group in enumerate(groups) if group.length > 110]:
            release(long)
        while session.step_tokens() > session.free_tokens():
            release([dice.randrange(len(groups))])
        if not groups:
            continue
        tokens_of = [[g.prompt[-1]] if g.is_new else [dice.choice((4, 5)) for _ in range(g.rows)] for g in groups]
        promised, before = session.step_tokens(), session.free_tokens()
        logits = step(session, [token for tokens in tokens_of for token in tokens], threads)
        assert session.free_tokens() >= before - promised
        expected = np.concatenate([step(g.session, tokens) for g, tokens in zip(groups, tokens_of, strict=True)])
        assert np.array_equal(logits, expected)
        for group in groups:
            group.is_new, group.length = False, group.length + 1
        if dice.random() < 0.6:
            parents = [[dice.randrange(g.rows) for _ in range(dice.randint(1, 3))] for g in groups]
            session.reorder(parents)
            for group, rows in zip(groups, parents, strict=True):
                group.session.reorder([rows])
                group.rows = len(rows)
        if dice.random() < 0.15:
            release(dice.sample(range(len(groups)), dice.randint(1, len(groups))))
    assert forgotten and bool(reused) != reads_source and (full or seed > 4)  # more memory may be enough
    release(list(range(len(groups))))
    assert session.free_tokens() == blocks * BLOCK and session.shared_tokens() == session.step_tokens() == 0
