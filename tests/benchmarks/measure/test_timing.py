"""Turns are interleaved, disturbed turns are repeated or marked, and a ratio whose passes disagree is unsteady."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.measure.noise_monitor import NoiseMonitor
from benchmarks.measure.timing import STEADY, Interleaved, Ratio, Rounds, Turn, time_interleaved


class Script(NoiseMonitor):
    """Reports turns as a script says, and later ones as quiet."""

    def __init__(self, *disturbed: bool) -> None:
        super().__init__(1, proc=None)
        self._disturbed, self.waits = list(disturbed), 0

    def end(self) -> bool:
        return self._disturbed.pop(0) if self._disturbed else False

    def wait(self, seconds: float) -> None:
        self.waits += 1


def test_turns_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timing.time_interleaved(functions, rounds=4, device="cpu", watcher=NoiseMonitor(1, proc=None))
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b", "b", "a"] * 2


@pytest.mark.parametrize("device, seconds, moves", [("cpu", 0.0, True), ("cpu", 1.0, False), ("cuda", 0.0, False)])
def test_each_round_of_short_calls_has_inputs_elsewhere(device, seconds, moves, monkeypatch) -> None:
    """The timed calls of a round use the same new copies of the inputs, after two calls that aren't timed."""
    copies: list[torch.Tensor] = []
    calls: list[tuple[str, int, int]] = []
    offsets: list[int] = []

    def note(name: str, number: int) -> None:
        calls.append((name, number, 1))

    def anew() -> dict[str, Callable[[], object]]:
        copies.append(torch.empty(10_000))
        return {name: functools.partial(note, name, len(copies)) for name in ("a", "b")}

    def turn(function: Callable[[], object], repeats: int) -> float:
        function()
        calls[-1] = (*calls[-1][:2], repeats)
        offsets.append(sum(block.numel() for block in timing._held))
        return seconds or 0.0033

    monkeypatch.setattr(timing, "_cpu_turn", turn)
    monkeypatch.setattr(timing, "_cuda_turn", turn)
    timing.time_interleaved(anew(), rounds=4, device=device, watcher=NoiseMonitor(1, proc=None), anew=anew)
    assert len(copies) == (5 if moves else 1)
    assert len({t.data_ptr() for t in copies}) == len(copies)
    assert len(set(offsets)) == len(copies)  # what lies before the copies differs from round to round
    timed = calls[6:]
    if moves:
        warm, turns = [("a", 2), ("b", 2)], [("a", 3), ("b", 3)]
        expected = [[*warm, *turns], [*warm, *turns[::-1]]] * 2
        assert timed == [(name, n + 2, times) for n, round_ in enumerate(expected) for name, times in round_]
    else:
        assert {number for _, number, _ in timed} == {1} and len(timed) == 8
    assert not timing._held


def test_a_disturbed_turn_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    functions = {"a": lambda: None, "b": lambda: None}
    # Turns are a b, b a, a b, ...: a's second and b's third are disturbed.
    watcher = Script(False, False, False, True, False, True)
    rounds = time_interleaved(functions, rounds=4, device="cpu", watcher=watcher)
    assert [turn.disturbed for turn in rounds.turns["a"]] == [False, True, False, False, False]
    assert [turn.disturbed for turn in rounds.turns["b"]] == [False, False, True, False, False]
    assert watcher.waits == 1 and rounds.ratio("a", "b").quiet and rounds.disturbed("a") == 0.2


def test_results_that_are_always_disturbed_are_kept_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    rounds = time_interleaved({"a": lambda: None}, rounds=4, device="cpu", watcher=Script(*[True] * 99))
    assert len(rounds.turns["a"]) == 12 and rounds.disturbed("a") == 1.0
    assert rounds.ratio("a", "a") == Ratio(1.0, False)


def test_the_seconds_end_it_after_three_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    for watcher in (Script(), Script(*[True] * 99)):
        rounds = time_interleaved({"a": lambda: None}, rounds=9, device="cpu", seconds=0.0, watcher=watcher)
        assert len(rounds.turns["a"]) == 3


def turns(*seconds: float, disturbed: tuple[int, ...] = ()) -> list[Turn]:
    return [Turn(s, number in disturbed) for number, s in enumerate(seconds)]


def test_times_are_of_the_quiet_turns() -> None:
    rounds = Rounds({"a": turns(1, 9, 2, 9, 4, disturbed=(1, 3)), "b": turns(1, 9, 2, 9, 4, disturbed=(1, 3, 4))})
    assert rounds["a"].p50 == 2.0
    assert rounds["b"].p50 == 4.0  # of all: two quiet turns are too few
    assert rounds.disturbed("b") == 0.6


def test_a_ratio_is_the_median_over_rounds() -> None:
    """The machine slows down, and one turn of each function is an outlier."""
    rounds = Rounds({"a": turns(1, 2, 4, 800, 16), "b": turns(2, 4, 8, 32, 3200)})
    assert rounds.ratio("a", "b") == Ratio(2.0, True)


def test_a_ratio_is_of_turns_of_the_same_round_both_of_which_were_quiet() -> None:
    a, b = turns(1, 1, 1, 10, 10, disturbed=(0,)), turns(5, 5, 2, 20, 20, disturbed=(1,))
    assert Rounds({"a": a, "b": b}).ratio("a", "b") == Ratio(2.0, True)
    a, b = turns(1, 1, 1, 10, 10, disturbed=(0, 3)), turns(5, 5, 5, 20, 20, disturbed=(1,))
    assert Rounds({"a": a, "b": b}).ratio("a", "b") == Ratio(5.0, False)  # two quiet rounds: all count


def in_passes(*ratios: tuple[float, ...], disturbed: bool | None = False, slow: bool = False) -> Rounds:
    """Makes rounds in which b takes a given multiple of a's time, by pass and round."""
    passes = [number for number, rounds in enumerate(ratios) for _ in rounds]
    a = [Turn(2.0, disturbed, slow) for _ in passes]
    return Rounds({"a": a, "b": [Turn(2.0 * ratio, disturbed, slow) for rounds in ratios for ratio in rounds]}, passes)


def test_the_rounds_of_all_passes_are_pooled() -> None:
    """Each round counts once: the medians of the passes are 2, 4 and 4, and their means 3.4, 4 and 4."""
    ratio = in_passes((1.9, 2.0, 2.0, 2.0, 2.0, 9.0), (4.0,), (4.0,)).ratio("a", "b")
    assert (ratio.value, ratio.passes) == (2.0, 3)


@pytest.mark.parametrize("count, quantile", [(3, 4.303), (4, 3.182), (8, 2.365), (16, 2.131), (64, 1.998)])
def test_uncertainty_is_half_of_the_interval_of_students_t(count: int, quantile: float) -> None:
    """It uses the medians of passes, half of which are 10 % higher, and not single rounds; few passes give a wider
    interval.
    """
    uncertainty = in_passes(*[(0.1, 2.0 * 1.1 ** (i % 2), 9.0) for i in range(count)]).ratio("a", "b").uncertainty
    spread = math.log(1.1) * math.sqrt((count // 2) * (count - count // 2) / count / (count - 1) / count)
    assert uncertainty is not None and 0.89 * quantile < uncertainty / spread < 1.005 * quantile


def test_a_ratio_whose_passes_disagree_is_not_quiet() -> None:
    for disturbed in (False, None):
        ratio = in_passes(*[(2.0 + number % 2,) for number in range(9)], disturbed=disturbed).ratio("a", "b")
        assert ratio.quiet is False and ratio.uncertainty is not None and ratio.uncertainty > STEADY
        ratio = in_passes(*[(2.0 + 0.1 * (number % 2),) for number in range(9)], disturbed=disturbed).ratio("a", "b")
        assert ratio.quiet is (None if disturbed is None else True) and 0.0 < (ratio.uncertainty or 0.0) <= STEADY


def test_quiet_rounds_must_come_from_several_passes() -> None:
    rounds = in_passes(*[(2.0, 2.0)] * 2, *[(2.05, 2.05)] * 3)
    for number in range(4, 10):
        rounds.turns["b"][number] = rounds.turns["b"][number]._replace(disturbed=True)
    ratio = rounds.ratio("a", "b")
    assert ratio.quiet is False and (ratio.value, ratio.passes) == (2.05, 5)  # of all
    rounds.turns["b"][9] = rounds.turns["b"][9]._replace(disturbed=False)
    ratio = rounds.ratio("a", "b")
    assert ratio.quiet is True and (ratio.value, ratio.passes) == (2.0, 3)


def test_a_provider_with_a_slow_clock_is_not_quiet() -> None:
    """The slow rounds count, because on a shared machine almost all have a neighbour."""
    rounds = in_passes(*[(2.0,)] * 6, slow=True)
    assert rounds.ratio("a", "b") == Ratio(2.0, False, 6, 0.0) and rounds.slow("a") == 1.0
    for number in range(3):
        for name in ("a", "b"):
            assert rounds.ratio("a", "b").quiet is False
            rounds.turns[name][number] = rounds.turns[name][number]._replace(slow=False)
    assert rounds.ratio("a", "b") == Ratio(2.0, True, 6, 0.0) and rounds.slow("a") == 0.5


def test_passes_are_separate_and_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has at least one round, and another if one was disturbed; rounds alternate in direction across passes."""
    monkeypatch.setattr(timing, "_TURN", 0.0)
    order: list[str] = []
    functions = {name: functools.partial(order.append, name) for name in ("a", "b")}
    timer = Interleaved("cpu")
    for disturbed in ((), (True, False), ()):
        order.clear()
        timer.take(functions, rounds=1, seconds=9.0, watcher=Script(*disturbed))
    assert timer.rounds.passes == [0, 1, 1, 2] and timer.passes == 3
    assert order == ["a", "b", "b", "a"]  # a call of each without the clock, and the fourth round


def test_a_pass_over_short_calls_has_a_minimum_time() -> None:
    timer = Interleaved("cpu")
    functions = {"a": lambda: None}
    timer.take(functions, rounds=1, seconds=9.0, watcher=Script())
    assert len(timer.rounds.passes) == 1
    timer.take(functions, rounds=1, seconds=9.0, lasting=0.2, watcher=Script())
    assert timer.rounds.passes.count(1) > 2 and timer.seconds > 0.2
