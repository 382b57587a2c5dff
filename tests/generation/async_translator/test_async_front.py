"""An AsyncTranslator refuses requests when it is full, ends late requests with an error, and counts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fastformer.generation import AsyncTranslator
from fastformer.generation.jobs import QUEUE_BOUNDS, NotRunning, QueueFull, TooLate
from fastformer.generation.text_io import Item
from tests.generation.async_translator.front import BIG, FEW, LONG, MANY, opened, until


@pytest.mark.parametrize(
    ("limits", "least"), [({"max_waiting": 2}, 2), ({"max_waiting_tokens": 12, "max_waiting": 99}, 3)], ids=str
)
async def test_a_full_queue_refuses_at_once(translator, limits, least) -> None:
    async with opened(translator, held=True, when_full="refuse", **limits) as (front, engine):
        first = asyncio.create_task(front.translate("a", **BIG))
        await until(lambda: engine.entered == 1)
        tasks = [asyncio.create_task(front.translate(text, **BIG)) for text in "bcdefg"]
        done, _ = await asyncio.wait(tasks, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
        refused = [task for task in tasks if task.done()]
        assert done and len(tasks) - len(refused) <= least
        for task in refused:
            with pytest.raises(QueueFull) as caught:
                await task
            assert 1 <= caught.value.retry_after <= 30
        with pytest.raises(QueueFull):
            await front.begin(Item("h"), front.settings(FEW))
        assert front.stats().refused == len(refused) + 1
        engine.gate.release(MANY)
        kept = [task for task in tasks if task not in refused]
        for task, text in zip([first, *kept], "abcdefg", strict=False):
            assert await task == translator.translate(text, **BIG)
        await until(lambda: engine.is_empty)
        stats = front.stats()
        assert stats.running == stats.waiting == stats.waiting_tokens == 0
        assert stats.free_tokens == stats.capacity_tokens > 0


async def test_places_are_kept_for_requests_that_are_still_being_made(translator) -> None:
    async with opened(translator, held=True, max_waiting=3, when_full="refuse") as (front, engine):
        running = asyncio.create_task(front.translate("a", **BIG))
        await until(lambda: engine.entered == 1)
        with contextlib.ExitStack() as held:
            held.enter_context(front.place())
            waiting = asyncio.create_task(front.translate("b", **FEW))  # takes the place that is kept for it
            await until(lambda: front.stats().waiting == 2)  # with the one whose first step is under way
            with front.place():  # the last one
                with pytest.raises(QueueFull), front.place():
                    pass
                # What was never promised a place finds none, and one that is kept can be taken.
                stranger = contextvars.Context().run(asyncio.create_task, front.translate("c", **FEW))
                with pytest.raises(QueueFull):
                    await stranger
            with front.place():  # it is free again
                pass
        engine.gate.release(MANY)
        assert await running == translator.translate("a", **BIG)
        assert await waiting == translator.translate("b", **FEW)
    async with AsyncTranslator(translator, max_waiting=1) as patient:  # has its callers wait later, not here
        with patient.place(), patient.place():
            assert await patient.translate("a", **FEW) == translator.translate("a", **FEW)


async def test_the_waiting_time_of_requests_is_counted(translator) -> None:
    begun = time.monotonic()
    async with opened(translator, held=True) as (front, engine):
        tasks = [asyncio.create_task(front.translate("a", **BIG))]
        await until(lambda: engine.entered == 1)
        tasks.append(asyncio.create_task(front.translate("b", **BIG)))
        left = asyncio.create_task(front.translate("c", **BIG))
        await until(lambda: front.stats().waiting == 3)
        left.cancel()
        await asyncio.sleep(0.06)
        engine.gate.release(MANY)
        await asyncio.gather(*tasks)
        await until(lambda: engine.is_empty)
        stats = front.stats()
        assert sum(stats.queue_counts) == 2  # the third one never began
        beyond = next(place for place, bound in enumerate(QUEUE_BOUNDS) if bound >= 0.05)
        assert sum(stats.queue_counts[beyond + 1 :]) >= 1  # the second one; the first begins at once on an idle machine
        assert 0.05 < stats.queue_seconds < 2 * (time.monotonic() - begun)


@contextlib.asynccontextmanager
async def reading(translator, **options) -> AsyncIterator[tuple[Any, threading.Event]]:
    """Yields an open front that reads a text until the event is set."""
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(10)

    async with AsyncTranslator(translator, **options) as found:
        held = asyncio.create_task(found.aside(hold, 10**6))
        await until(begun.is_set)
        try:
            yield found, gate
        finally:
            gate.set()
            await held


async def test_texts_that_are_still_to_be_read_are_bounded_too(translator) -> None:
    async with reading(translator, max_waiting=2, when_full="refuse") as (front, gate):
        waiting = asyncio.create_task(front.aside(lambda: 1, 10**6))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await front.aside(lambda: 1, 10**6)
        assert await front.aside(lambda: 2, 10) == 2  # a short one is read at once
        waiting.cancel()
        await asyncio.sleep(0)
        left = asyncio.create_task(front.aside(lambda: 3, 10**6))  # has the place of the one that left
        gate.set()
        assert await left == 3 and front.stats().refused == 1


async def test_a_short_text_waits_for_few_long_ones(translator) -> None:
    order: list[str] = []
    async with reading(translator) as (front, gate):

        def ask(name: str, size: int) -> asyncio.Task[None]:
            return asyncio.create_task(front.aside(lambda: order.append(name), size, is_slow=True))

        tasks = [ask("long", 10**6), ask("longer", 10**7), ask("long again", 10**6), ask("early", 2_000)]
        await asyncio.sleep(0.05)  # in which a short text would have been read
        tasks += [ask("short", 1)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
    assert order == ["early", "short", "long", "long again", "longer"]


async def test_what_waits_for_a_thread_ends_at_its_deadline(translator) -> None:
    run: list[int] = []
    async with reading(translator) as (front, gate):
        held = asyncio.create_task(front.call(lambda: gate.wait(10)))
        soon = time.monotonic() + 0.05
        text = front.aside(lambda: run.append(1), 10**6, deadline=soon)
        for task in [asyncio.create_task(text), asyncio.create_task(front.call(lambda: run.append(2), deadline=soon))]:
            with pytest.raises(TooLate):
                await task
        assert front.stats().late == 2
        gate.set()
        assert await held and await front.aside(lambda: True, 10**6) and await front.call(lambda: not run)


async def test_texts_that_wait_when_the_front_closes_are_not_read(translator) -> None:
    gate, begun, run = threading.Event(), threading.Event(), []

    def hold() -> bool:
        begun.set()
        return gate.wait(10)

    async with AsyncTranslator(translator) as front:
        held = asyncio.create_task(front.aside(hold, 10**6))
        await until(begun.is_set)
        waiting = asyncio.create_task(front.aside(lambda: run.append(1), 10**6))
        await asyncio.sleep(0)
    with pytest.raises(NotRunning):
        await waiting
    gate.set()
    assert await held and not run


async def test_many_sentences_cost_the_event_loop_little(translator) -> None:
    text = "a\n" * 2000 + " " * 50_000  # a message that named all of it for each sentence would take seconds
    async with AsyncTranslator(translator, max_waiting=1, when_full="refuse") as front:
        config = front.settings({"max_new_tokens": 1})
        gc.disable()  # collecting the garbage of other tests may take as long
        try:
            began = time.thread_time()
            with pytest.raises(TooLate):
                await front.answers([Item(text)], config, split=True, deadline=time.monotonic())
            took = time.thread_time() - began
        finally:
            gc.enable()
        assert took < 0.5  # it takes a millisecond
        with pytest.raises(ValueError, match="sentences"):
            await front.answers([Item(text)] * 3, config, split=True, most_parts=1999)


async def test_sentences_of_a_text_are_queued_together(translator) -> None:
    text = "One. Two. Three. Four. Five."
    async with AsyncTranslator(translator, max_waiting=1, max_waiting_tokens=3, when_full="refuse") as front:
        assert await front.translate(text, split=True, **FEW) == translator.translate(text, split=True, **FEW)


async def test_texts_of_a_call_draw_other_numbers(translator) -> None:
    options = {"do_sample": True, "seed": 3, **FEW}
    async with AsyncTranslator(translator) as front:
        found = await front.answers([Item("a")] * 3, front.settings(options))
    texts = [answer.texts()[0] for [answer] in found]
    assert texts == translator.translate(["a"] * 3, **options) and len(set(texts)) > 1


async def test_late_requests_end_with_an_error(translator) -> None:
    async with opened(translator, held=True, max_waiting=1) as (front, engine):
        soon = time.monotonic() + 0.05
        config, items = front.settings(LONG), [Item("a")]
        running = asyncio.create_task(front.answers(items, config, deadline=soon))
        await until(lambda: engine.entered == 1)
        calls = [front.answers(items, config, deadline=soon) for _ in range(3)]
        stream = await front.begin(Item("b"), config, deadline=soon)
        waiting = [asyncio.create_task(call) for call in calls]
        for task in (running, *waiting):
            with pytest.raises(TooLate):
                await task
        with pytest.raises(TooLate):
            [piece async for piece in stream]
        assert front.num_blocked == 0 and front.stats().late == 5 and front.stats().cancelled == 0
        engine.gate.release(MANY)
        await until(lambda: engine.is_empty and front.num_queued == 0)
        assert engine.entered == 1
        assert await front.translate("a", **FEW) == translator.translate("a", **FEW)


async def test_a_stream_that_is_never_read_leaves_the_batch_when_it_is_deleted(translator) -> None:
    async with opened(translator, held=True) as (front, engine):
        stream = await front.begin(Item("a"), front.settings(LONG))
        await until(lambda: engine.entered == 1)
        del stream
        gc.collect()
        engine.gate.release(1)
        await until(lambda: engine.is_empty)
        assert engine.entered == 1 and front.stats().cancelled == 1


async def test_streams_of_sentences_come_in_order_and_piece_by_piece(translator) -> None:
    text = " One two. Three!\n\nFour five six? "
    async with AsyncTranslator(translator) as front:
        expected = translator.translate(text, split=True, max_new_tokens=20)
        pieces = [
            piece async for piece in await front.begin(Item(text), front.settings({"max_new_tokens": 20}), split=True)
        ]
        assert "".join(pieces) == expected and len(pieces) > 6
        beams = front.settings({"max_new_tokens": 20, "num_beams": 2})
        pieces = [piece async for piece in await front.begin(Item(text), beams, split=True)]
        assert "".join(pieces) == translator.translate(text, split=True, num_beams=2, max_new_tokens=20)


async def test_functions_run_in_the_thread_between_steps(translator) -> None:
    async with AsyncTranslator(translator) as front:
        task = asyncio.create_task(front.translate("a", **LONG))
        assert await front.call(lambda: threading.current_thread().name) == "AsyncTranslator"
        for function, error in ((lambda: {}["broken"], KeyError), (lambda: next(iter(())), RuntimeError)):
            with pytest.raises(error):
                await front.call(function)
            with pytest.raises(error):
                await front.aside(function, 10**6)
        assert await task == translator.translate("a", **LONG)
    with pytest.raises(NotRunning):
        await front.call(lambda: None)


async def test_an_open_session_decodes_in_its_own_thread_alone(translator) -> None:
    async with AsyncTranslator(translator) as front:
        with pytest.raises(RuntimeError, match="open"):
            front.run([])
    front.run([])


async def test_long_texts_are_read_beside_the_event_loop(translator, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.session._INLINE", 5)
    threads: list[str] = []
    encode = translator.encode

    def watched_encode(*arguments):
        threads.append(threading.current_thread().name)
        return encode(*arguments)

    monkeypatch.setattr(translator, "encode", watched_encode)
    async with AsyncTranslator(translator) as front:
        for text in ("short", "a longer one"):
            assert await front.translate(text, **FEW) == translator.translate(text, **FEW)
    assert threads[0] == threads[1] == threads[3] == threading.current_thread().name != threads[2]


async def test_a_front_is_alive_as_long_as_its_thread(translator) -> None:
    front = AsyncTranslator(translator)
    assert not front.is_alive
    async with front:
        assert front.is_alive
        begun, held = threading.Event(), threading.Event()

        def breaks() -> None:
            begun.set()
            held.wait(10)
            front._run = None  # the next turn of the thread fails

        calls = [asyncio.create_task(front.call(breaks))]
        await until(begun.is_set)
        calls += [asyncio.create_task(front.call(lambda: None)) for _ in range(2)]
        await asyncio.sleep(0)
        held.set()
        await calls[0]
        for call in calls[1:]:
            with pytest.raises(NotRunning):
                await call
        with pytest.raises(NotRunning):
            await front.translate("a", **FEW)
        assert not front.is_alive
        with pytest.raises(NotRunning):
            await front.translate("a", **FEW)
    assert not front.is_alive
