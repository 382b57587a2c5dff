"""The GPU day's bookkeeping, which needs no GPU: order, chunks, resuming, failures that don't stop the others."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_day import OTHER_TESTS, ROOT, TESTS, Step, run_side_by_side, steps, work_through
from benchmarks.run import benchmarks
from tests import conftest


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


def test_side_by_side(tmp_path: Path) -> None:
    """A hanging process is ended with its children, and what each printed is kept, as are the names of what failed."""
    scripts = {
        "right": "print('3 passed')",
        "nothing to do": "raise SystemExit(5)",
        "wrong": "print('FAILED tests/a.py::b[1] - AssertionError'); raise SystemExit(1)",
        "hangs": "import time; print('ERROR tests/c.py - x', flush=True); time.sleep(60)",
    }
    began = time.monotonic()
    commands = [([sys.executable, "-c", code], dict(os.environ), tmp_path / name) for name, code in scripts.items()]
    result = run_side_by_side(commands, 3.0)
    assert time.monotonic() - began < 30
    assert not result["ok"] and sorted(result["failed"]) == ["tests/a.py::b[1]", "tests/c.py"]
    assert list(result["tails"]) == ["wrong", "hangs"]
    assert "exit status 1" in result["tails"]["wrong"]
    assert "took longer than 3 s" in result["tails"]["hangs"] and "tests/c.py" in result["tails"]["hangs"]
    assert (tmp_path / "right").read_text() == "3 passed\n"
    assert run_side_by_side(commands[:2], 30.0) == {"ok": True, "failed": [], "tails": {}}


def test_the_tests_of_a_step_exist_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is there; the shards of a run are a partition; on a GPU the ops' tests are marked, others are not."""
    for files in (*TESTS.values(), OTHER_TESTS):
        assert all((ROOT / path).exists() for path in files.split())
    seen = []
    for shard in range(3):
        monkeypatch.setenv("FASTFORMER_TEST_SHARD", f"{shard}/3")
        items = [SimpleNamespace(path=Path(f"tests/nn/{i}")) for i in range(7)]
        conftest.pytest_collection_modifyitems(items)
        seen += [int(item.path.name) for item in items]
    assert sorted(seen) == list(range(7))
    monkeypatch.delenv("FASTFORMER_TEST_SHARD")

    def note(_: object, *, to: list[str], path: str) -> None:
        to.append(path)

    for has_gpu in (False, True):
        monkeypatch.setattr(conftest, "HAS_GPU", has_gpu)
        marked: list[str] = []
        items = [
            SimpleNamespace(path=ROOT / path, fixturenames=names, add_marker=partial(note, to=marked, path=path))
            for path, names in (
                ("tests/ops/a.py", ["device"]), ("tests/kernels/b.py", ["device"]), ("tests/ops/c.py", []),
                ("tests/nn/d.py", ["device"]),
            )
        ]  # fmt: skip
        conftest.pytest_collection_modifyitems(items)
        assert marked == (["tests/ops/a.py", "tests/kernels/b.py"] if has_gpu else [])
