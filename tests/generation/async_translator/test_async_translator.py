"""Many tasks share a batch; each gets its result as if alone, and a cancelled task frees its memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from fastformer import AsyncTranslator
from tests.generation.async_translator.front import (
    BIG,
    FEW,
    LONG,
    MANY,
    opened,
    options_of,
    play,
    rounded,
    text_of,
    until,
    watched,
)


async def test_many_tasks_get_the_results_of_each_alone(translator) -> None:
    expected = [translator.translate(text_of(n), **options_of(n)) for n in range(50)]
    async with opened(translator) as (front, engine):

        async def one(number: int):
            await asyncio.sleep(random.Random(number).random() * 0.05)
            return await front.translate(text_of(number), **options_of(number))

        found = await asyncio.gather(*(one(number) for number in range(50)))
        assert rounded(found) == rounded(expected)
        assert engine.rows > 8  # together, not one after another
        await until(lambda: engine.is_empty)


async def test_streams_of_many_tasks(translator) -> None:
    async with AsyncTranslator(translator) as front:

        async def one(number: int) -> list[str]:
            options = {"do_sample": number % 2 == 0, "seed": number, "target_prefix": "z" * (number % 3)}
            pieces = [piece async for piece in front.stream(text_of(number), max_new_tokens=20, **options)]
            assert "".join(pieces) == translator.translate(text_of(number), max_new_tokens=20, **options)
            return pieces

        found = await asyncio.gather(*(one(number) for number in range(12)))
        assert max(map(len, found)) > 3


async def test_pieces_come_before_the_end(translator) -> None:
    async with opened(translator, held=True) as (front, engine):
        engine.gate.release(3)
        letters = [i for i in range(259) if i not in range(100, 120)]
        pieces = front.stream("a", max_new_tokens=6, suppress_tokens=letters)
        found = [await anext(pieces) for _ in range(3)]
        assert all(len(piece) == 1 for piece in found)
        engine.gate.release(3)
        found += [piece async for piece in pieces]
        assert "".join(found) == translator.translate("a", max_new_tokens=6, suppress_tokens=letters)


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_tasks_leave_nothing_behind(translator, seed) -> None:
    chance = random.Random(seed)
    async with opened(translator, held=True, max_waiting=5) as (front, engine):

        async def one(number: int):
            return await front.translate(text_of(number), **options_of(number))

        async def leaves(number: int) -> str:
            count = chance.randrange(4)
            with contextlib.suppress(StopAsyncIteration):
                stream = front.stream(text_of(number), max_new_tokens=30)
                for _ in range(count):
                    await anext(stream)
            return "left"

        tasks = [asyncio.create_task((leaves if n % 4 == 0 else one)(n)) for n in range(40)]
        gone = {n for n in range(40) if n % 4 and chance.random() < 0.6}
        for number in gone:
            engine.gate.release(chance.randint(1, 2))
            await asyncio.sleep(chance.random() * 0.004)
            tasks[number].cancel()
        engine.gate.release(MANY)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: engine.is_empty)
        assert front.num_queued == front.num_blocked == 0
    cancelled = 0
    for number, answer in enumerate(found):
        if isinstance(answer, asyncio.CancelledError):
            assert number in gone
            cancelled += 1
        elif number % 4:
            expected = translator.translate(text_of(number), **options_of(number))
            assert rounded(answer) == rounded(expected)
    assert cancelled > 3


async def test_the_cancelled_leave_at_once(translator) -> None:
    async with opened(translator, held=True) as (front, engine):
        task = asyncio.create_task(front.translate("a", **LONG))
        await until(lambda: engine.entered == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.release(3)
        await until(lambda: engine.is_empty)
        assert engine.entered == 1
        async for piece in front.stream("a", **LONG):
            assert len(piece) == 1
            break
        engine.gate.release(20)
        await until(lambda: engine.is_empty)
        assert engine.entered <= 5


async def test_the_queue_is_bounded_and_fair(translator) -> None:
    ended: list[int] = []
    async with opened(translator, held=True, max_waiting=2) as (front, engine):

        async def one(number: int) -> None:
            await front.translate("a", **BIG)
            ended.append(number)  # each fills the batch, so they run in turn

        tasks = [asyncio.create_task(one(0))]
        await until(lambda: engine.entered == 1)
        tasks += [asyncio.create_task(one(number)) for number in range(1, 8)]
        await asyncio.sleep(0.01)
        # One is on its way into the batch and counts until it has begun; of the others one more may wait.
        assert front.num_queued == 2 and front.num_blocked == 6
        tasks[4].cancel()
        await asyncio.sleep(0.01)
        assert front.num_blocked == 5
        engine.gate.release(MANY)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert ended == [0, 1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("cancel", [False, True])
async def test_closing_waits_or_cancels(translator, cancel) -> None:
    front, engine = watched(translator, held=True, max_waiting=2)
    await front.__aenter__()
    tasks = [asyncio.create_task(front.translate(t, **BIG)) for t in "abcdef"]
    await until(lambda: front.num_blocked == 4 and engine.entered == 1)
    closing = asyncio.create_task(front.close(cancel=cancel))
    await asyncio.sleep(0)  # it begins
    with pytest.raises(RuntimeError, match=r"\bopen\b"):
        await front.translate("late")
    assert not closing.done()
    engine.gate.release(MANY)
    await closing
    found = await asyncio.gather(*tasks, return_exceptions=True)
    if not cancel:
        assert found == [translator.translate(t, **BIG) for t in "abcdef"]
    else:
        assert all(isinstance(error, RuntimeError) and "closed" in str(error) for error in found)
        assert [str(error)[:9] for error in found] == [f"text '{t}':" for t in "abcdef"]
    assert engine.is_empty
    await front.close()  # again: nothing happens
    with pytest.raises(RuntimeError, match="async with"):
        await front.translate("late")


def test_a_second_loop_and_two_at_once(translator) -> None:
    front = AsyncTranslator(translator, max_waiting=1)

    async def main() -> list[str]:
        async with front:
            with pytest.raises(RuntimeError, match=r"\bopen\b"):
                await front.__aenter__()
            return list(await asyncio.gather(*(front.translate(t, **FEW) for t in "abcd")))

    expected = translator.translate(list("abcd"), **FEW)
    assert play(main()) == expected == play(main())

    async def guest() -> list[str]:
        return list(await asyncio.gather(*(front.translate(t, **FEW) for t in "abcd")))

    async def host() -> None:
        async with front:
            ours, theirs = await asyncio.gather(guest(), asyncio.to_thread(asyncio.run, guest()))
            assert ours == theirs == expected

    play(host())


async def test_the_model_is_in_evaluation_mode_only_while_it_decodes(translator) -> None:
    model, modes = translator.model, []

    def processor(input_ids, scores):
        modes.append(model.training)
        return scores

    model.train()
    try:
        async with AsyncTranslator(translator) as front:
            await front.translate("a", logits_processor=processor, **FEW)
        assert modes and not any(modes) and model.training
    finally:
        model.eval()


async def test_max_time_counts_from_the_call(translator) -> None:
    async with opened(translator, held=True) as (front, engine):
        late = asyncio.create_task(front.translate("a", max_time=0.01, max_new_tokens=60))
        await until(lambda: engine.entered == 1)
        time.sleep(0.02)
        engine.gate.release(MANY)
        assert len(await late) <= 1


async def test_max_time_counts_while_a_task_waits_for_a_place(translator) -> None:
    async with opened(translator, held=True, max_waiting=1) as (front, engine):
        first = asyncio.create_task(front.translate("a", **FEW))
        await until(lambda: engine.entered == 1)
        calls = [front.translate(text, max_time=0.01 * i, **FEW) for i, text in enumerate("bc", 1)]
        late, later = (asyncio.create_task(call) for call in calls)
        patient = asyncio.create_task(front.translate("d", max_time=100.0, **FEW))
        assert [await late, await later] == ["", ""]  # while the first is still held up
        assert engine.entered == 1 and front.num_blocked == 1 and not patient.done()
        engine.gate.release(MANY)
        assert [await first, await patient] == [translator.translate(t, **FEW) for t in "ad"]


async def test_a_running_request_is_ended_by_the_scheduler(translator) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with opened(translator, held=True, max_waiting=1) as (front, engine):
        first = asyncio.create_task(front.translate("a", **FEW))
        await until(lambda: engine.entered == 1)
        second = asyncio.create_task(front.translate("b", max_time=0.1, **FEW))
        await until(lambda: front.num_blocked == 1)
        engine.gate.release()
        await until(lambda: front.num_blocked == 0)
        await asyncio.sleep(0.12)
        assert not second.done()
        engine.gate.release(MANY)
        assert await first == translator.translate("a", **FEW)
        assert len(await second) <= 1
    assert errors == []


def test_the_id_that_ends_may_be_the_one_that_fills(translator) -> None:
    texts = ["one", "two words", "x" * 20]
    options = {**FEW, "eos_token_id": [1, 110], "num_beams": 2, "return_scores": True}
    expected = rounded(translator.translate(texts, **options))
    for pad in (1, 110):
        assert rounded(translator.translate(texts, pad_token_id=pad, **options)) == expected
        assert rounded(list(translator.stream(texts, pad_token_id=pad, **options))) == expected

    async def together() -> list[object]:
        async with AsyncTranslator(translator) as served:
            return list(await asyncio.gather(*(served.translate(t, pad_token_id=1, **options) for t in texts)))

    assert rounded(play(together())) == expected
