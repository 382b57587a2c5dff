"""Many tasks, one batch: each gets what it would get alone, and whoever leaves gives its memory back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch

import fastformer
from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncTranslator, Translator
from fastformer.generation.engines.kv_cache import KVCacheEngine
from fastformer.models import Transformer

T = TypeVar("T")
FEW = {"max_new_tokens": 8}
MANY = 10_000  # steps
SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer.from_preset("tiny", vocab_size=259, max_len=64, **SIZES)
    model.embedding.weight.data *= 3  # a fresh model is nearly uniform
    return model.eval()


@pytest.fixture(scope="module")
def translator(model) -> Translator:
    return Translator(model, ByteTokenizer(), max_batch_size=16, max_batch_bytes=2**20)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "AsyncTranslator"]


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
    """The answer, its numbers rounded: they depend a little on who else is in the batch."""
    if isinstance(answer, float):
        return round(answer, 3)
    if isinstance(answer, list | tuple):
        return [rounded(part) for part in answer]
    return answer


def play(task: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, and an error where nothing comes about any more."""
    return asyncio.run(asyncio.wait_for(task, 20))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it didn't come about")


class Watched(KVCacheEngine):
    """Says how many rows and tokens are in use, and waits or fails where it is told to."""

    rows = all_tokens = entered = 0
    gate: threading.Semaphore | None = None
    error: BaseException | None = None

    def start(self, max_rows, num_tokens) -> None:
        super().start(max_rows, num_tokens)
        self.all_tokens = self.free_tokens()

    def step(self, tokens, selection):
        self.entered += 1
        if self.gate is not None:
            assert self.gate.acquire(timeout=10)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.rows = max(self.rows, len(tokens))
        return super().step(tokens, selection)

    @property
    def is_empty(self) -> bool:
        if not self.all_tokens:  # it hasn't been started
            return True
        return self._cache.num_rows == 0 and self.free_tokens() == self.all_tokens


def watched(front: AsyncTranslator) -> Watched:
    """Puts an engine into a front that can be watched."""
    engine = Watched(front.translator.model)
    front._engine = engine
    return engine


def test_it_is_where_people_look_for_it() -> None:
    assert fastformer.AsyncTranslator is AsyncTranslator


def test_many_tasks_get_what_each_would_get_alone(translator) -> None:
    expected = [translator.translate(text_of(n), **options_of(n)) for n in range(50)]

    async def main() -> None:
        front = AsyncTranslator(translator)
        engine = watched(front)
        async with front:

            async def one(number: int):
                await asyncio.sleep(random.Random(number).random() * 0.05)
                return await front.translate(text_of(number), **options_of(number))

            found = await asyncio.gather(*(one(number) for number in range(50)))
            assert rounded(found) == rounded(expected)
            assert engine.rows > 8  # together, not one after another
            await until(lambda: engine.is_empty)

    play(main())


def test_streams_of_many_tasks(translator) -> None:
    async def main() -> None:
        async with AsyncTranslator(translator) as front:

            async def one(number: int) -> list[str]:
                options = {"do_sample": number % 2 == 0, "seed": number, "target_prefix": "z" * (number % 3)}
                pieces = [piece async for piece in front.stream(text_of(number), max_new_tokens=20, **options)]
                assert "".join(pieces) == translator.translate(text_of(number), max_new_tokens=20, **options)
                return pieces

            found = await asyncio.gather(*(one(number) for number in range(12)))
            assert max(map(len, found)) > 3

    play(main())


def test_pieces_come_before_the_end(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        engine = watched(front)
        engine.gate = threading.Semaphore(3)
        async with front:
            letters = [i for i in range(259) if i not in range(100, 120)]
            pieces = front.stream("a", max_new_tokens=6, suppress_tokens=letters)
            found = [await anext(pieces) for _ in range(3)]
            assert all(len(piece) == 1 for piece in found)
            engine.gate.release(3)
            found += [piece async for piece in pieces]
            assert "".join(found) == translator.translate("a", max_new_tokens=6, suppress_tokens=letters)

    play(main())


@pytest.mark.parametrize("seed", range(3))
def test_the_cancelled_leave_nothing_behind(translator, seed) -> None:
    async def main() -> None:
        front, chance = AsyncTranslator(translator, max_waiting=5), random.Random(seed)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        async with front:

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
            assert front._waiting == 0 and not front._parked and not front._inbox and not front._jobs
        cancelled = 0
        for number, answer in enumerate(found):
            if isinstance(answer, asyncio.CancelledError):
                assert number in gone
                cancelled += 1
            elif number % 4:
                expected = translator.translate(text_of(number), **options_of(number))
                assert rounded(answer) == rounded(expected)
        assert cancelled > 3

    play(main())


def test_the_cancelled_leave_at_once(translator) -> None:
    long = {
        "max_new_tokens": 60,
        "min_new_tokens": 60,
        "suppress_tokens": [i for i in range(259) if i < 100 or i > 120],
    }

    async def main() -> None:
        front = AsyncTranslator(translator)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        async with front:
            task = asyncio.create_task(front.translate("a", **long))
            await until(lambda: engine.entered == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.gate.release(3)
            await until(lambda: engine.is_empty)
            assert engine.entered == 1
            async for piece in front.stream("a", **long):
                assert len(piece) == 1
                break
            engine.gate.release(20)
            await until(lambda: engine.is_empty)
            assert engine.entered <= 5

    play(main())


def test_the_queue_is_bounded_and_fair(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator, max_waiting=2)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        ended: list[int] = []
        async with front:

            async def one(number: int) -> None:
                await front.translate("a", do_sample=True, seed=1, num_return_sequences=16, **FEW)
                ended.append(number)  # each fills the batch, so they run in turn

            tasks = [asyncio.create_task(one(0))]
            await until(lambda: front._waiting == 1)
            tasks += [asyncio.create_task(one(number)) for number in range(1, 8)]
            await asyncio.sleep(0.01)
            # One is on its way into the batch and counts until it has begun; of the others one more may wait.
            assert len(front._inbox) + front._waiting == 2 and len(front._parked) == 6
            tasks[4].cancel()
            await asyncio.sleep(0.01)
            assert len(front._parked) == 5
            engine.gate.release(MANY)
            await asyncio.gather(*tasks, return_exceptions=True)
        assert ended == [0, 1, 2, 3, 5, 6, 7]

    play(main())


def test_an_error_reaches_its_task_alone(translator) -> None:
    def broken(input_ids, scores):
        if input_ids.shape[1] > 3:
            raise KeyError("broken on purpose")
        return scores

    async def main() -> None:
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

    play(main())


@pytest.mark.parametrize("error", [RuntimeError("no memory"), SystemExit(1)], ids=repr)
def test_an_error_of_the_model_ends_what_runs_and_nothing_else(translator, error) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        engine = watched(front)
        engine.gate, engine.error = threading.Semaphore(0), error
        async with front:
            big = {"do_sample": True, "num_return_sequences": 16, "seed": 1, **FEW}
            first = asyncio.create_task(front.translate("first", **big))
            await until(lambda: front._waiting == 1 and not front._inbox)
            second = asyncio.create_task(front.translate("second", **big))
            await until(lambda: len(front._inbox) == 1)
            engine.gate.release(MANY)
            with pytest.raises(RuntimeError, match=rf"text 'first': .*the model failed: {type(error).__name__}"):
                await first
            assert await second == translator.translate("second", **big)
            assert await front.translate("third", **FEW) == translator.translate("third", **FEW)
            await until(lambda: engine.is_empty)

    play(main())


def test_one_that_cannot_begin_fails_and_lets_others_in(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        engine, begun = watched(front), []
        start = engine.start

        def failing(max_rows, num_tokens) -> None:
            begun.append(num_tokens)
            if len(begun) == 1:
                raise MemoryError("too much")
            start(max_rows, num_tokens)

        engine.start = failing
        async with front:
            found = await asyncio.gather(*(front.translate(t, **FEW) for t in "abc"), return_exceptions=True)
            assert isinstance(found[0], RuntimeError) and "MemoryError: too much" in str(found[0])
            assert found[1:] == [translator.translate(t, **FEW) for t in "bc"]

    play(main())


def test_ids_that_the_model_does_not_have_are_an_error_of_their_own_task(translator) -> None:
    class Foreign(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [9999 if i == ord("!") + 3 else i for i in super().encode(text)]

    async def main() -> None:
        async with AsyncTranslator(Translator(translator.model, Foreign())) as front:
            texts = ["a", "b", "wrong!", "c"]
            *found, prefixed = await asyncio.gather(
                *(front.translate(text, **FEW) for text in texts),
                front.translate("d", target_prefix="!", **FEW),
                return_exceptions=True,
            )
            for error, name in ((found.pop(2), "source"), (prefixed, "target")):
                assert isinstance(error, ValueError) and f"expected {name} ids from 0 to 258, got" in str(error)
            assert found == [translator.translate(text, **FEW) for text in "abc"]
            with pytest.raises(ValueError, match="expected source ids from 0 to 258"):
                front.stream("wrong!")

    play(main())


def test_after_an_error_of_the_model_the_device_is_not_asked_again(translator, monkeypatch) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        engine, made = watched(front), []
        starts: list[tuple[int, int]] = []
        new_scheduler, start = translator.new_scheduler, engine.start

        def once(*args, **options):
            made.append(new_scheduler(*args, **options))
            assert len(made) == 1, "a device that has failed can't say how much memory is free"
            return made[0]

        def noted(max_rows, num_tokens) -> None:
            starts.append((max_rows, num_tokens))
            start(max_rows, num_tokens)

        monkeypatch.setattr(translator, "new_scheduler", once)
        engine.start, engine.error = noted, RuntimeError("CUDA error")
        async with front:
            with pytest.raises(RuntimeError, match="the model failed: RuntimeError: CUDA error"):
                await front.translate("a", **FEW)
            assert isinstance(await front.translate("b", **FEW), str)
        assert len(starts) == 2 and starts[0] == starts[1]

    play(main())


def test_when_the_thread_cannot_go_on_nobody_waits_for_it(translator) -> None:
    def fails(*_):
        raise SystemExit("nothing works any more")

    async def main() -> None:
        front = AsyncTranslator(translator, max_waiting=1)
        engine = watched(front)
        engine.gate, engine.error = threading.Semaphore(0), RuntimeError("broken")
        front._recover = fails
        big = {"do_sample": True, "num_return_sequences": 16, "seed": 1, **FEW}
        await front.__aenter__()
        tasks = [asyncio.create_task(front.translate("a", **big))]
        await until(lambda: engine.entered == 1 and front._waiting == 1)
        front._waiting = 0  # as if one that had begun before were stepping now
        tasks += [asyncio.create_task(front.translate(text, **big)) for text in "bc"]
        await until(lambda: len(front._inbox) == 1 and len(front._parked) == 1)
        engine.gate.release(MANY)
        for task, text in zip(tasks, "abc", strict=True):
            with pytest.raises(RuntimeError, match=f"text '{text}': .*can't go on, .*: SystemExit: nothing works any"):
                await task
        with pytest.raises(RuntimeError, match="can't go on, .*: SystemExit: nothing works any more"):
            await front.translate("late")
        await front.close()
        with pytest.raises(RuntimeError, match="expected an AsyncTranslator that is open"):
            await front.translate("late")
        del front._recover
        async with front:
            assert await front.translate("a", **FEW) == translator.translate("a", **FEW)

    play(main())


def test_a_thread_that_cannot_begin_tells_who_comes(translator, monkeypatch) -> None:
    def fails(*_, **__):
        raise MemoryError("no device")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(translator, "new_scheduler", fails)
            async with AsyncTranslator(translator) as front:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="can't go on, .*: MemoryError: no device"):
                        await front.translate("a", **FEW)

    play(main())


@pytest.mark.parametrize("cancel", [False, True])
def test_closing_waits_or_cancels(translator, cancel) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator, max_waiting=2)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        await front.__aenter__()
        big = {"do_sample": True, "num_return_sequences": 16, "seed": 1, **FEW}
        tasks = [asyncio.create_task(front.translate(t, **big)) for t in "abcdef"]
        await until(lambda: len(front._parked) == 4 and engine.entered == 1)
        closing = asyncio.create_task(front.close(cancel=cancel))
        await until(lambda: front._is_closing)
        with pytest.raises(RuntimeError, match="expected an AsyncTranslator that is open"):
            await front.translate("late")
        assert not closing.done()
        engine.gate.release(MANY)
        await closing
        found = await asyncio.gather(*tasks, return_exceptions=True)
        if not cancel:
            assert found == [translator.translate(t, **big) for t in "abcdef"]
        else:
            assert all(isinstance(error, RuntimeError) and "was closed" in str(error) for error in found)
            assert [str(error)[:9] for error in found] == [f"text '{t}':" for t in "abcdef"]
        assert engine.is_empty
        await front.close()  # again: nothing happens
        with pytest.raises(RuntimeError, match="use it inside of `async with`"):
            await front.translate("late")

    play(main())


def test_an_error_inside_of_the_block_cancels_what_runs(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        watched(front).gate = gate = threading.Semaphore(0)
        with pytest.raises(KeyError):
            async with front:
                task = asyncio.create_task(front.translate("a", max_new_tokens=60))
                await until(lambda: front._waiting == 1)
                threading.Timer(0.02, gate.release, [MANY]).start()
                raise KeyError
        with pytest.raises(RuntimeError, match="text 'a': cancelled: the AsyncTranslator was closed"):
            await task

    play(main())


def test_a_second_loop_and_two_at_once(translator) -> None:
    front = AsyncTranslator(translator, max_waiting=1)

    async def main() -> list[str]:
        async with front:
            with pytest.raises(RuntimeError, match="got one that is open already"):
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


def test_a_loop_that_is_gone_holds_nobody_up(translator) -> None:
    front = AsyncTranslator(translator)
    engine, orphans = watched(front), []

    async def leaves() -> None:
        engine.gate = threading.Semaphore(0)
        await front.__aenter__()
        orphans.append(asyncio.ensure_future(front.translate("a", max_new_tokens=50)))
        await until(lambda: front._waiting == 1)

    play(leaves())  # cancels its tasks
    assert engine.gate is not None
    engine.gate.release(MANY)

    async def comes() -> str:
        found = await front.translate("b", **FEW)
        await front.close()
        return found

    assert play(comes()) == translator.translate("b", **FEW)
    assert engine.is_empty


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the tasks, when they are deleted
def test_a_loop_that_is_closed_with_its_tasks_holds_nobody_up(translator) -> None:
    front = AsyncTranslator(translator, max_waiting=1)
    engine, orphans = watched(front), []
    engine.gate = gate = threading.Semaphore(0)

    async def leaves() -> None:
        await front.__aenter__()
        orphans.append(asyncio.ensure_future(front.translate("a", **FEW)))
        await until(lambda: front._waiting == 1)
        orphans.extend(asyncio.ensure_future(front.translate(text, **FEW)) for text in "bc")
        await until(lambda: len(front._parked) == 2)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(leaves(), 20))
    gate.release()
    for _ in range(2000):
        if len(front._parked) == 1:
            break
        time.sleep(0.002)
    loop.close()  # its tasks aren't cancelled: one runs, one has found a place and can't know it, one waits for one

    async def comes() -> str:
        found = asyncio.create_task(front.translate("d", **FEW))
        await until(lambda: len(front._parked) == 2)
        gate.release(MANY)
        answer = await found
        await asyncio.wait_for(front.close(), 20)
        return answer

    assert play(comes()) == translator.translate("d", **FEW)
    assert engine.is_empty and len(orphans) == 3
    orphans.clear()
    gc.collect()  # here, where what they say is expected


def test_the_model_is_in_evaluation_while_it_works_and_then_as_it_was(translator) -> None:
    model, modes = translator.model, []

    def processor(input_ids, scores):
        modes.append(model.training)
        return scores

    async def main() -> None:
        async with AsyncTranslator(translator) as front:
            await front.translate("a", logits_processor=processor, **FEW)

    model.train()
    try:
        play(main())
        assert modes and not any(modes) and model.training
    finally:
        model.eval()


def test_max_time_counts_from_the_call(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator)
        watched(front).gate = gate = threading.Semaphore(0)
        async with front:
            late = asyncio.create_task(front.translate("a", max_time=0.01, max_new_tokens=60))
            await until(lambda: front._waiting == 1)
            time.sleep(0.02)
            gate.release(MANY)
            assert len(await late) <= 1

    play(main())


def test_max_time_counts_while_a_task_waits_for_a_place(translator) -> None:
    async def main() -> None:
        front = AsyncTranslator(translator, max_waiting=1)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        async with front:
            first = asyncio.create_task(front.translate("a", **FEW))
            await until(lambda: front._waiting == 1)
            calls = [front.translate(text, max_time=0.01 * i, **FEW) for i, text in enumerate("bc", 1)]
            late, later = (asyncio.create_task(call) for call in calls)
            patient = asyncio.create_task(front.translate("d", max_time=100.0, **FEW))
            assert [await late, await later] == ["", ""]  # while the first is still held up
            assert engine.entered == 1 and len(front._parked) == 1 and not patient.done()
            engine.gate.release(MANY)
            assert [await first, await patient] == [translator.translate(t, **FEW) for t in "ad"]

    play(main())


def test_who_has_found_a_place_is_ended_by_the_scheduler(translator) -> None:
    async def main() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        front = AsyncTranslator(translator, max_waiting=1)
        engine = watched(front)
        engine.gate = threading.Semaphore(0)
        async with front:
            first = asyncio.create_task(front.translate("a", **FEW))
            await until(lambda: front._waiting == 1)
            second = asyncio.create_task(front.translate("b", max_time=0.1, **FEW))
            await until(lambda: len(front._parked) == 1)
            engine.gate.release()
            await until(lambda: not front._parked)
            await asyncio.sleep(0.12)
            assert not second.done()
            engine.gate.release(MANY)
            assert await first == translator.translate("a", **FEW)
            assert len(await second) <= 1
        assert errors == []

    play(main())


def test_malformed_calls(translator) -> None:
    for wrong, message in (
        ({"translator": None}, "expected a Translator, got NoneType"),
        ({"max_waiting": 0}, "expected max_waiting to be an integer of at least 1, got 0"),
        ({"max_waiting": True}, "expected max_waiting to be an integer of at least 1, got True"),
        ({"engine": "steam"}, "expected an engine out of"),
    ):
        with pytest.raises(ValueError, match=message):
            AsyncTranslator(**{"translator": translator, **wrong})

    async def main() -> None:
        async with AsyncTranslator(translator, engine="encode_once") as front:
            assert await front.translate("a", engine="encode_once", **FEW) == translator.translate("a", **FEW)
            for text, options, message in (
                (7, {}, "expected a str, got int 7"),
                (["a"], {}, "expected a str, got list"),
                (" ", {}, "expected something to translate, got an empty text"),
                ("x" * 100, {}, "expected at most 64 tokens, got 101"),
                ("a", {"num_beam": 2}, "no option 'num_beam' here; did you mean 'num_beams'?"),
                ("a", {"on_error": "skip"}, "no option 'on_error' here"),
                ("a", {"target_prefix": ["b"]}, "expected a str or None, got list"),
                ("a", {"target_prefix": "x" * 64}, "expected a prefix of fewer tokens"),
                ("a", {"engine": "kv_cache"}, "expected neither engine nor use_cache"),
                ("a", {"use_cache": False}, "expected neither engine nor use_cache"),
                ("a", {"return_scores": 1}, "expected return_scores to be True or False, got 1"),
            ):
                with pytest.raises(ValueError, match=message):
                    await front.translate(text, **options)
                if "return_scores" not in options:
                    with pytest.raises(ValueError, match=message):
                        front.stream(text, **options)
            for options in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
                with pytest.raises(ValueError, match="expected no beams, several samples or scores"):
                    front.stream("a", **options)
            with pytest.raises(ValueError, match="no option 'return_scores' here"):
                front.stream("a", return_scores=True)

    play(main())


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
