"""The GPU day's bookkeeping, which needs no GPU: order, chunks, resuming, failures that don't stop the others."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_day import Step, steps, work_through
from benchmarks.run import benchmarks


class Clock:
    """Time that only steps spend."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_chunks_resume_and_go_on_after_a_failure(tmp_path: Path) -> None:
    clock, ran = Clock(), []

    def step(key: str, seconds: float, ok: bool = True) -> Step:
        def run() -> dict:
            ran.append(key)
            clock.now += seconds
            if not ok:
                raise ValueError("broken")
            return {"ok": True}

        return Step(key, run, seconds)

    todo = [step("long", 900), step("a", 200), step("bad", 100, ok=False), step("b", 200), step("c", 200)]
    file = tmp_path / "day.jsonl"
    assert work_through(todo, file, 9, clock) == 3 and ran == ["long"]  # longer than a chunk, yet it runs, alone
    assert work_through(todo, file, 9, clock) == 3 and ran == ["long", "a", "bad", "b"]
    assert work_through(todo, file, 9, clock) == 1 and ran[-1] == "c"
    assert work_through(todo, file, 9, clock) == 1 and len(ran) == 5  # nothing twice
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["long", "a", "bad", "b", "c"]
    assert lines[2]["ok"] is False and "broken" in lines[2]["error"]


def test_steps_fit_a_chunk_and_have_keys_of_their_own(tmp_path: Path) -> None:
    day = list(steps(tmp_path))
    assert len({step.key for step in day}) == len(day)
    assert all(step.seconds <= 9 * 60 for step in day)
    assert [step.key for step in day[:2]] == ["environment", "tests attention"]


def test_flops_of_the_published_charts() -> None:
    """16k tokens, 2048 = heads * head_dim, n = 8192: 4 * 2 * 16 * 8192^2 * 128 FLOPs, 2.5 times as many backward."""
    attention = benchmarks()["attention"]
    causal, full = (
        next(s for s in attention.shapes["cuda"] if (s["seqlen"], s["head_dim"], s["causal"]) == (8192, 128, causal))
        for causal in (True, False)
    )
    assert (full["batch"], full["heads"]) == (2, 16)
    assert attention.flops(full, "fwd") == 4 * 2 * 16 * 8192**2 * 128
    assert attention.flops(causal, "bwd") == attention.flops(full, "fwd") * 1.25
