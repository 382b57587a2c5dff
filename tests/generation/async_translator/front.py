"""Helpers of the tests of AsyncTranslator."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

from fastformer.generation import AsyncTranslator, Translator
from fastformer.generation.engines.kv_cache import KVCacheBatch, KVCacheEngine

T = TypeVar("T")
FEW = {"max_new_tokens": 8}
BIG = {"do_sample": True, "num_return_sequences": 16, "seed": 1, **FEW}  # fills the batch
LONG = {"max_new_tokens": 60, "min_new_tokens": 60, "suppress_tokens": [i for i in range(259) if not 100 <= i <= 120]}
MANY = 10_000  # steps


def text_of(number: int) -> str:
    return "x" * (1 + number * 5 % 23) + chr(97 + number % 26)


def options_of(number: int) -> dict[str, object]:
    kinds: list[dict[str, object]] = [
        {},
        {"num_beams": 3, "return_scores": True},
        {"do_sample": True, "seed": number, "temperature": 0.8, "num_return_sequences": 2},
        {"target_prefix": "ab", "return_token_scores": True},
        {"num_beams": 4, "num_return_sequences": 2, "repetition_penalty": 1.3},
        {"min_new_tokens": 3, "no_repeat_ngram_size": 2},
    ]
    return {"max_new_tokens": 1 + number % 12 + 3, **kinds[number % len(kinds)]}


def rounded(answer):
    """Returns the answer with rounded numbers, because they depend slightly on the rest of the batch."""
    if isinstance(answer, float):
        return round(answer, 3)
    if isinstance(answer, list | tuple):
        return [rounded(part) for part in answer]
    return answer


def play(task: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine; after 20 seconds, raises an error."""
    return asyncio.run(asyncio.wait_for(task, 20))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the condition never held")


class Watched(KVCacheEngine):
    """Counts the rows and tokens in use, and waits or fails when a test tells it to."""

    rows = all_tokens = entered = 0
    gate: threading.Semaphore
    error: BaseException | None = None
    batch: KVCacheBatch | None = None

    def open(self, max_rows, num_tokens) -> KVCacheBatch:
        self.batch = super().open(max_rows, num_tokens)
        self.all_tokens, step = self.batch.free_tokens(), self.batch.step

        def watched_step(tokens, selection):
            self.entered += 1
            assert self.gate.acquire(timeout=10)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.rows = max(self.rows, len(tokens))
            return step(tokens, selection)

        self.batch.step = watched_step
        return self.batch

    @property
    def is_empty(self) -> bool:
        return self.batch is None or (self.batch.step_tokens() == 0 and self.batch.free_tokens() == self.all_tokens)


def watched(translator: Translator, *, held: bool = False, **options: Any) -> tuple[AsyncTranslator, Watched]:
    """Makes a front and its observable engine; if it is held, each release of its gate allows one step."""
    engine = Watched(translator.model)
    engine.gate = threading.Semaphore(0 if held else MANY)
    with mock.patch("fastformer.generation.async_translator.choose_engine", return_value=engine):
        return AsyncTranslator(translator, **options), engine


@contextlib.asynccontextmanager
async def opened(translator: Translator, **options: Any) -> AsyncIterator[tuple[AsyncTranslator, Watched]]:
    """The same, while the front is open."""
    front, engine = watched(translator, **options)
    async with front:
        yield front, engine
