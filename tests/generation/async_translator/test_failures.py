"""A failure in a request, the model, the thread or a loop reaches the affected callers only."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from unittest.mock import DEFAULT, Mock

import pytest

from fastformer.generation import AsyncTranslator, Translator
from tests.generation.async_translator.front import BIG, FEW, MANY, opened, play, text_of, until, watched
from tests.generation.small import Foreign


async def test_an_error_reaches_only_its_task(translator) -> None:
    def broken(input_ids, scores):
        if input_ids.shape[1] > 3:
            raise KeyError("broken on purpose")
        return scores

    async with AsyncTranslator(translator) as front:
        good = [front.translate(text_of(n), **FEW) for n in range(6)]
        bad = front.translate("the bad one", logits_processor=broken, **FEW)
        stream = front.stream("a bad stream", logits_processor=broken, **FEW)

        async def streamed() -> list[str]:
            return [piece async for piece in stream]

        *found, error, other = await asyncio.gather(*good, bad, streamed(), return_exceptions=True)
        assert found == [translator.translate(text_of(n), **FEW) for n in range(6)]
        for caught, name in ((error, "the bad one"), (other, "a bad stream")):
            assert type(caught) is RuntimeError and str(caught) == (f"text '{name}': KeyError: 'broken on purpose'")
            assert isinstance(caught.__cause__, KeyError)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), SystemExit(1)], ids=repr)
async def test_an_error_of_the_model_ends_only_running_requests(translator, error) -> None:
    async with opened(translator, held=True) as (front, engine):
        engine.error = error
        first = asyncio.create_task(front.translate("first", **BIG))
        await until(lambda: engine.entered == 1)
        second = asyncio.create_task(front.translate("second", **BIG))
        await until(lambda: front.num_queued == 2)
        engine.gate.release(MANY)
        with pytest.raises(RuntimeError, match=rf"text 'first': .*{type(error).__name__}"):
            await first
        assert await second == translator.translate("second", **BIG)
        assert await front.translate("third", **FEW) == translator.translate("third", **FEW)
        await until(lambda: engine.is_empty)


async def test_a_request_that_cannot_begin_fails_and_does_not_block_others(translator) -> None:
    async with opened(translator) as (front, engine):
        engine.open = Mock(wraps=engine.open, side_effect=[MemoryError("too much"), *[DEFAULT] * 9])
        found = await asyncio.gather(*(front.translate(t, **FEW) for t in "abc"), return_exceptions=True)
        assert isinstance(found[0], RuntimeError) and "MemoryError: too much" in str(found[0])
        assert found[1:] == [translator.translate(t, **FEW) for t in "bc"]


async def test_ids_that_the_model_does_not_have_are_an_error_of_their_own_task(translator) -> None:
    async with AsyncTranslator(Translator(translator.model, Foreign())) as front:
        texts = ["a", "b", "wrong!", "c"]
        *found, prefixed = await asyncio.gather(
            *(front.translate(text, **FEW) for text in texts),
            front.translate("d", target_prefix="!", **FEW),
            return_exceptions=True,
        )
        for error, name in ((found.pop(2), "source"), (prefixed, "target")):
            assert isinstance(error, ValueError) and f"{name} ids" in str(error)
        assert found == [translator.translate(text, **FEW) for text in "abc"]
        with pytest.raises(ValueError, match=r"\bsource ids\b.*\b258\b"):
            front.stream("wrong!")


async def test_after_a_model_error_the_device_is_not_queried_again(translator, calls_of) -> None:
    front, engine = watched(translator)
    made, starts = calls_of(translator, "new_scheduler"), calls_of(engine, "open")
    engine.error = RuntimeError("CUDA error")
    async with front:
        with pytest.raises(RuntimeError, match="RuntimeError: CUDA error"):
            await front.translate("a", **FEW)
        assert isinstance(await front.translate("b", **FEW), str)
    assert len(made) == 1, "a device that has failed can't say how much memory is free"
    assert len(starts) == 2 and starts[0].args == starts[1].args


async def test_no_task_waits_for_a_dead_thread(translator, monkeypatch) -> None:
    front, engine = watched(translator, held=True, max_waiting=2)
    engine.error = RuntimeError("broken")
    monkeypatch.setattr(
        "fastformer.generation.scheduler.Scheduler.renewed", Mock(side_effect=SystemExit("nothing works any more"))
    )
    await front.__aenter__()
    tasks = [asyncio.create_task(front.translate("a", **BIG))]
    await until(lambda: engine.entered == 1)
    tasks += [asyncio.create_task(front.translate(text, **BIG)) for text in "bc"]
    await until(lambda: front.num_queued == 2 and front.num_blocked == 1)
    assert front.stats().waiting == 3
    engine.gate.release(MANY)
    for task, words in zip(tasks, ("'a'.*broken", "'b'.*SystemExit", "'c'.*SystemExit"), strict=True):
        with pytest.raises(RuntimeError, match=words):
            await task
    with pytest.raises(RuntimeError, match="SystemExit"):
        await front.translate("late")
    await front.close()
    with pytest.raises(RuntimeError, match=r"\bopen\b"):
        await front.translate("late")
    monkeypatch.undo()
    async with front:
        assert await front.translate("a", **FEW) == translator.translate("a", **FEW)


async def test_no_task_waits_if_the_thread_dies_while_it_takes_requests(translator, monkeypatch) -> None:
    front, engine = watched(translator, held=True)
    async with front:
        tasks = [asyncio.create_task(front.translate("a", **BIG))]
        await until(lambda: engine.entered == 1)
        monkeypatch.setattr("fastformer.generation.scheduler.Scheduler.submit", Mock(side_effect=MemoryError))
        tasks += [asyncio.create_task(front.translate(text, **BIG)) for text in "bc"]
        tasks.append(asyncio.create_task(front.call(lambda: None)))
        await until(lambda: front.num_queued == 3)
        engine.gate.release(MANY)
        for task in tasks[1:]:
            with pytest.raises(RuntimeError, match="MemoryError"):
                await task


async def test_if_the_thread_cannot_start_each_caller_gets_an_error(translator, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(translator, "new_scheduler", Mock(side_effect=MemoryError("no device")))
        async with AsyncTranslator(translator) as front:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="MemoryError: no device"):
                    await front.translate("a", **FEW)


async def test_an_error_inside_the_block_cancels_running_requests(translator) -> None:
    with pytest.raises(KeyError):
        async with opened(translator, held=True) as (front, engine):
            task = asyncio.create_task(front.translate("a", max_new_tokens=60))
            await until(lambda: engine.entered == 1)
            threading.Timer(0.02, engine.gate.release, [MANY]).start()
            raise KeyError
    with pytest.raises(RuntimeError, match="text 'a': .*closed"):
        await task


def test_a_loop_that_is_gone_blocks_no_other_loop(translator) -> None:
    front, engine = watched(translator, held=True)
    orphans = []

    async def leaves() -> None:
        await front.__aenter__()
        orphans.append(asyncio.ensure_future(front.translate("a", max_new_tokens=50)))
        await until(lambda: engine.entered == 1)

    play(leaves())  # cancels its tasks
    engine.gate.release(MANY)

    async def comes() -> str:
        found = await front.translate("b", **FEW)
        await front.close()
        return found

    assert play(comes()) == translator.translate("b", **FEW)
    assert engine.is_empty


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the tasks, when they are deleted
def test_a_loop_that_is_closed_with_its_tasks_blocks_no_other_loop(translator) -> None:
    front, engine = watched(translator, held=True, max_waiting=1)
    orphans = []

    async def leaves() -> None:
        await front.__aenter__()
        orphans.append(asyncio.ensure_future(front.translate("a", **FEW)))
        await until(lambda: engine.entered == 1)
        orphans.extend(asyncio.ensure_future(front.translate(text, **FEW)) for text in "bc")
        await until(lambda: front.num_blocked == 2)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(leaves(), 20))
    engine.gate.release()
    for _ in range(2000):
        if front.num_blocked == 1:
            break
        time.sleep(0.002)
    loop.close()  # its tasks aren't cancelled: one runs, one has found a place and can't know it, one waits for one

    async def comes() -> str:
        found = asyncio.create_task(front.translate("d", **FEW))
        await until(lambda: front.num_blocked == 2)
        engine.gate.release(MANY)
        answer = await found
        await asyncio.wait_for(front.close(), 20)
        return answer

    assert play(comes()) == translator.translate("d", **FEW)
    assert engine.is_empty and len(orphans) == 3
    orphans.clear()
    gc.collect()  # here, where what they say is expected


async def test_malformed_calls(translator) -> None:
    for wrong, name in (
        ({"translator": None}, "NoneType"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_waiting": True}, "max_waiting"),
        ({"engine": "steam"}, "engine"),
    ):
        with pytest.raises(ValueError, match=name):
            AsyncTranslator(**{"translator": translator, **wrong})

    async with AsyncTranslator(translator, engine="recompute") as front:
        assert await front.translate("a", engine="recompute", **FEW) == translator.translate("a", **FEW)
        for text, options, words in (
            (7, {}, "int 7"),
            (" ", {}, "empty"),
            ("x" * 100, {}, "64.*101"),
            ("a", {"num_beam": 2}, "'num_beams'"),
            ("a", {"on_error": "skip"}, "'on_error'"),
            ("a", {"target_prefix": ["b"]}, "list"),
            ("a", {"target_prefix": "x" * 64}, "prefix"),
            ("a", {"engine": "kv_cache"}, r"\bengine\b"),
            ("a", {"precision": "bf16"}, r"\bprecision\b"),
            ("a", {"use_cache": False}, r"\buse_cache\b"),
            ("a", {"return_scores": 1}, r"\breturn_scores\b"),
        ):
            with pytest.raises(ValueError, match=words):
                await front.translate(text, **options)
            with pytest.raises(ValueError, match=words):
                front.stream(text, **options)
        for options in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
            with pytest.raises(ValueError, match="beams"):
                front.stream("a", **options)
