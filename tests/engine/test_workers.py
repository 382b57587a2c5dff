"""Decoding rows on several threads changes no tokens, and a failed request affects no other."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from fastformer.generation.engines.base import Limits, Prompt
from fastformer.generation.engines.cpp import CppBatch, CppEngine
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler
from fastformer.models import Transformer
from tests.engine.test_thread_team import in_child, until
from tests.generation.small import EOS, needs_cpp
from tests.generation.toy import finish
from tests.generation.weights import drawn

pytestmark = [needs_cpp, pytest.mark.usefixtures("torch_as_before")]

VOCAB, BAD_WORD, ROWS = 1100, 7, 54  # as many rows as three threads are given to themselves, and some more


@cache
def large_enough() -> Any:
    """Makes a model whose steps are worth more than one thread."""
    sizes = {"d_model": 264, "num_heads": 6, "d_ff": 700, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = drawn(Transformer, vocab_size=VOCAB, tie_embeddings=False, max_len=40, **sizes)
    model.source_embedding.weight.data[BAD_WORD] = torch.nan
    return model


def requests(num_beams: int, *, bad: Sequence[int] = ()) -> list[Request]:
    dice, batch = random.Random(num_beams), []
    for i in range(ROWS // num_beams):
        source = [dice.randrange(10, VOCAB) for _ in range(dice.randint(1, 30))]
        prefix = [dice.randrange(10, VOCAB) for _ in range(dice.choice([0, 0, 3]))]
        limit, ends = dice.randint(1, 16), frozenset([EOS, *range(100, 160)])
        search = partial(NativeSearch.greedy, limit, ends)
        if num_beams > 1 and i % 4:
            search = partial(NativeSearch.beams, limit, ends, num_beams, num_return=num_beams)
        batch.append(Request(Prompt([BAD_WORD, *source] if i in bad else source, [0, *prefix]), search))
    return batch


def decode(batch: list[Request], threads: int, *, max_bytes: int = 2**26, cancelled: Sequence[int] = ()) -> list[Any]:
    """Returns the outcome of each request."""
    torch.set_num_threads(threads)
    scheduler = Scheduler(CppEngine(large_enough()), max_rows=ROWS + 8, max_bytes=max_bytes)
    scheduler.submit(batch)
    scheduler.step()
    for index in cancelled:
        batch[index].cancel()
    finish(scheduler)
    return [(str(request.error), [(h.tokens, h.log_probs, h.score) for h in request.results]) for request in batch]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_and_scores_are_those_of_one_thread(num_beams) -> None:
    alone = decode(requests(num_beams), 1)
    assert len({len(results[0][0]) for _, results in alone}) >= 4
    for threads in (2, 3, 2):
        assert decode(requests(num_beams), threads) == alone


def test_results_are_the_same_in_little_memory() -> None:
    alone, token_bytes = decode(requests(3), 1), CppEngine(large_enough()).token_bytes
    for blocks in (60, 110):
        assert decode(requests(3), 2, max_bytes=blocks * 16 * token_bytes) == alone


def test_broken_and_cancelled_requests_do_not_affect_others() -> None:
    alone, bad = decode(requests(1), 1), (3, 40, 50)
    for threads in (1, 2, 3):
        outcomes = decode(requests(1, bad=bad), threads)
        for index, (outcome, due) in enumerate(zip(outcomes, alone, strict=True)):
            if index in bad:
                assert "NaN or infinite" in outcome[0] and not outcome[1]
            else:
                assert outcome == due
    # Whether a request was done by then depends on the time.
    outcomes = decode(requests(1), 2, cancelled=(2, 45))
    for index, (outcome, due) in enumerate(zip(outcomes, alone, strict=True)):
        assert outcome == due or (index in (2, 45) and outcome == ("None", []))


def begun(prompts: Sequence[Prompt], limits: Sequence[int]) -> tuple[CppBatch, list[NativeSearch]]:
    batch = CppEngine(large_enough()).open(len(prompts), 4096)
    batch.prefill(prompts)
    return batch, [NativeSearch.greedy(limit, frozenset([EOS]), min_tokens=limit) for limit in limits]


def test_each_search_takes_at_least_one_step() -> None:
    torch.set_num_threads(2)
    limits = [2] * 20 + [30] * 20
    batch, searches = begun([Prompt([9, 10 + i], [0]) for i in range(40)], limits)
    steps = batch.run_searches(searches, [0] * 40, False, Limits(10**6, 0.0, 0))
    assert steps == [1] * 40
    for _ in range(60):
        going = [search for search in searches if not search.handle.is_done]
        if not going:
            break
        tokens = [token for search in going for token in search.last_tokens()]
        more = iter(batch.run_searches(going, tokens, False, Limits(10**6, 0.005, 0)))
        for index, search in enumerate(searches):
            if search in going:
                steps[index] += next(more)
        finished = [index for index, search in enumerate(going) if search.handle.is_done]
        assert all(len(search.handle.tokens(0)) == steps[searches.index(search)] for search in going
                   if not search.handle.is_done)  # fmt: skip
        batch.free(finished)
    assert steps == limits


@pytest.mark.parametrize("limits, min_rows", [([2] * 20 + [36] * 20, 0), ([2, 36] * 20, 40), ([2, 36] * 20, 22)])
def test_a_run_ends_when_half_is_done_or_others_may_join(limits, min_rows) -> None:
    torch.set_num_threads(2)

    def ends_early() -> bool:
        batch, searches = begun([Prompt([9, 10 + i], [0]) for i in range(40)], limits)
        steps = batch.run_searches(searches, [0] * 40, False, Limits(10**6, 60.0, min_rows))
        assert min(steps) >= 1 and max(steps) >= 2
        return max(steps) < 36

    assert until(ends_early)  # on a busy machine a half may be done before the other begins


@pytest.mark.parametrize("place", [0, 39])
def test_an_error_in_one_half_ends_the_run_and_leaves_the_session_usable(place) -> None:
    torch.set_num_threads(2)

    def ends_early() -> bool:
        prompts = [Prompt([9, 10 + i], [0] * (39 if i == place else 1)) for i in range(40)]
        batch, searches = begun(prompts, [30] * 40)
        error = None
        try:
            batch.run_searches(searches, [0] * 40, False, Limits(10**6, 60.0, 0))
        except ValueError as raised:
            error = raised
        batch.free(range(40))
        assert batch.free_tokens() == 4096
        assert error is None or re.search(r"\bmax_len\b", str(error))
        return error is not None and not any(search.handle.is_done for search in searches)

    assert until(ends_early)  # as above; the other half hears of it, or ends the run before this one has begun
    alone = decode(requests(1), 1)
    assert decode(requests(1), 2) == alone


def test_a_child_decodes_on_several_threads_too() -> None:
    alone = decode(requests(1), 2)

    def check() -> None:
        assert decode(requests(1), 2) == alone

    in_child(check)
