"""The GPU day's bookkeeping, which needs no GPU: order, chunks, resuming, failures that don't stop the others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_run_plan
from benchmarks.gpu_run_plan import (
    CHUNK,
    LEASE,
    ROOT,
    TESTS,
    Step,
    first_steps,
    later_steps,
    limit_of,
    other_tests,
    run_side_by_side,
    shapes_of,
    steps,
    time_op,
    work_through,
)
from benchmarks.measure import record
from benchmarks.measure.case import Benchmark, cast, timed_call
from benchmarks.measure.execute import Outcome
from benchmarks.measure.kernel_flags import BWD, FWD, HOPPER
from benchmarks.measure.suites import benchmarks
from fastformer.ops import use_backend
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


def test_a_lost_device_ends_the_process_and_not_the_day(tmp_path: Path) -> None:
    """What failed on the device is told in its step, and what comes after it in the next call."""
    lost, ran = [False], []

    def settle() -> None:
        if lost[0]:
            raise RuntimeError("an illegal memory access was encountered")

    def faults() -> dict:
        lost[0] = True
        return {"ok": True}  # the kernel was launched: nobody knows yet

    def follows() -> dict:
        ran.append("after")
        return {"ok": True}

    todo = [Step("faults", faults), Step("after", follows)]
    file = tmp_path / "day.jsonl"
    assert work_through(todo, file, 9, settle=settle) == 3 and not ran
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["ok"] is False and "illegal memory access" in line["error"]
    lost[0] = False  # another process
    assert work_through(todo, file, 9, settle=settle) == 1 and ran == ["after"]


def test_a_step_that_hangs_is_given_up(tmp_path: Path) -> None:
    """By ending the process: nothing else ends a wait for the device. The next call goes on behind it."""
    file = tmp_path / "day.jsonl"
    code = (
        "import time; from pathlib import Path; from benchmarks import gpu_run_plan as plan\n"
        "plan.limit_of = lambda step: 0.2\n"
        "steps = [plan.Step('hangs', lambda: time.sleep(60)), plan.Step('after', lambda: {'ok': True})]\n"
        f"raise SystemExit(plan.work_through(steps, Path({str(file)!r}), 9))"
    )
    for status, keys in ((3, ["hangs"]), (1, ["hangs", "after"])):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert time.monotonic() - began < 50
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["key"] for line in lines] == keys
    assert lines[0]["ok"] is False and "took longer than 0 s" in lines[0]["error"]
    assert limit_of(Step("short", dict, 5)) == 300 and limit_of(Step("long", dict, 200)) == CHUNK


def test_steps_fit_the_lease_and_have_keys_of_their_own(tmp_path: Path) -> None:
    """By their estimates: what matters most in the time that a machine is lent for, the rest in another's."""
    first, later = list(first_steps(tmp_path)), list(later_steps(tmp_path))
    day = list(steps(tmp_path))
    assert [step.key for step in day] == [step.key for step in first + later]
    assert len({step.key for step in day}) == len(day)
    assert all(step.seconds <= CHUNK for step in day)
    for machine in (first, later):
        assert sum(step.seconds for step in machine) <= LEASE < 30 * 60
    assert [step.key for step in first[:2]] == ["environment", "tests attention"]
    keys = " ".join(step.key for step in first)
    for op in (*TESTS, "training_step", "graph_decoding"):
        assert f"tests {op}" in keys or f"time {op}" in keys, op
    for op in ("attention", "add_layer_norm", "feed_forward", "linear_cross_entropy", "decode_attention"):
        assert f"time {op} " in keys, op
    for kind in ("bool_keys", "additive"):
        assert any(step.key.startswith("time masked_attention ") and f"mask={kind}" in step.key for step in first)
    assert "time packed_attention " in keys


def test_a_line_of_kernels_that_are_off_by_default_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the op has met the call before; and a line whose turns didn't launch them is wrong, and no result."""
    pytest.importorskip("triton")
    from fastformer.kernels import _attention_hopper as hopper

    torch.use_deterministic_algorithms(False)  # which has a form of the backward pass of its own
    launched: list[str] = []
    monkeypatch.setattr(hopper, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    monkeypatch.setattr(hopper, "_processors", lambda device: 2)
    monkeypatch.setattr(hopper, "architecture", lambda x: 90)
    shape = {"batch": 1, "seqlen": 70, "heads": 2, "head_dim": 64, "causal": True, "dropout_p": 0.0}

    def run_ours(benchmark: Benchmark, shape: dict, mode: str, *rest: Any, **options: Any) -> Outcome:
        with use_backend("triton"):
            inputs = cast(benchmark.make_inputs(shape, "cpu"), torch.float16)
            call = timed_call(benchmark.providers[benchmark.ours], inputs, shape, mode)
            for _ in range(3):
                call()
        return Outcome(rows=[{"mode": mode, "provider": benchmark.ours, "speedup": 2.0, "rounds": 3}])

    monkeypatch.setattr(gpu_run_plan, "run_case", run_ours)
    monkeypatch.setattr(record, "environment", lambda device: {})
    results = tmp_path / "cuda.jsonl"
    assert time_op("attention", shape, results, 15)()["ok"] and not launched
    line = time_op("attention", shape, results, 15, (), HOPPER)()
    assert line["ok"], line
    assert list(line["speedup"]) == ["fwd fastformer", "bwd fastformer", "fwdbwd fastformer"]
    assert line["launched"]["fwdbwd"] == {FWD: 4, BWD: 3}  # it makes the gradients' shapes of one
    assert line["launched"]["bwd"] == {FWD: 1, BWD: 3} and line["launched"]["fwd"] == {FWD: 3}
    rows = [json.loads(row) for row in results.read_text().splitlines()]
    assert [row.get("switched_on") for row in rows] == 3 * [None] + 3 * ["attention_hopper"]

    count = len(launched)
    run_ours(benchmarks()["attention"], shape, "fwdbwd")
    assert len(launched) == count  # off again

    monkeypatch.setattr(hopper, "architecture", lambda x: 89)
    line = time_op("attention", shape, results, 15, (), HOPPER)()
    assert not line["ok"] and f"0 launches of {FWD}" in line["wrong"]["fastformer"] and not line["speedup"]
    assert len(results.read_text().splitlines()) == len(rows)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_the_day_runs_to_its_end_on_a_stub(tmp_path: Path) -> None:
    """Every step once, all of them right, in calls of nine minutes; no kernel runs (see the stub for what is real)."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "stub_device.py"), str(tmp_path)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stub = json.loads(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (tmp_path / "gpu_run_plan.jsonl").read_text().splitlines()]
    assert [line for line in lines if not line["ok"]] == []
    assert [line["key"] for line in lines] == [step.key for step in steps(tmp_path)]
    counts = stub["counts"]
    assert counts["steps"] == counts["waits for the device"] == len(lines)
    assert stub["seconds"] == sum(step.seconds for step in steps(tmp_path))
    assert stub["statuses"] == [3] * (len(stub["statuses"]) - 1) + [0]
    assert len(stub["statuses"]) <= 1 + stub["seconds"] // (CHUNK - 120)  # no call leaves more than a long step's time
    # Each mode of each shape, and again the tuned ones and those with the kernels that are off by default.
    prefixes = {"attention": ("time tuned", "time attention_hopper"), "feed_forward": "time persistent"}
    again = {op: sum(line["key"].startswith(start) for line in lines) for op, start in prefixes.items()}
    timed = {op: len(shapes_of(op)) + len(shapes_of(op, later=True)) for op in benchmarks()}
    without = sum(
        len(line["refused"]) for line in lines if "switched_on" in line
    )  # modes that have none of the kernels
    masks = ("masked_attention", "packed_attention")
    for op in ("attention", *masks, "add_layer_norm", "feed_forward", "linear_cross_entropy", "embedding", "rotary"):
        times = timed[op] + again.get(op, 0)
        assert counts[f"cases of {op}"] == len(benchmarks()[op].modes) * times - without * (op == "attention") > 0
    # What is off by default was launched where a line says so, backward too where there is a kernel for that.
    hopper = [line["launched"] for line in lines if line["key"].startswith("time attention_hopper")]
    assert [len(launched) for launched in hopper] == [3, 2, 3, 2] and without == 2  # head_dim 64, 128
    assert all(
        launched["fwdbwd"][FWD] == 1 and launched["fwdbwd"].get(BWD, 0) == ("bwd" in launched) for launched in hopper
    )
    persistent = [line["launched"] for line in lines if line["key"].startswith("time persistent")]
    assert persistent and all(each["fwd"] == {"_linear_activation_kernel": 1} for each in persistent)
    # A decoding step's kernel as a graph, which must say its share of the bandwidth.
    replayed = [line for line in lines if line["key"].startswith("time decode_attention")]
    assert len(replayed) == counts["graphs"] == len(shapes_of("decode_attention")) > 0
    assert all(line["of_copy"]["fastformer"] > 0 and line["replay_us"]["fastformer"] > 0 for line in replayed)
    files = ("cuda.jsonl", "cuda_tuned.jsonl", "cuda_hopper.jsonl", "cuda_persistent.jsonl")
    rows = "".join((tmp_path / name).read_text() for name in files)
    assert len(rows.splitlines()) == sum(count for name, count in counts.items() if name.startswith("cases of"))
    # Tuning: all candidates launch, and the fastest (the stub's last) is in the file that later calls read.
    found = [line for line in lines if line["key"].startswith("tune ")]
    assert found and all(not line["failed"] for line in found)
    table = json.loads((tmp_path / "tuning.json").read_text())
    assert sum(map(len, table.values())) == len(found)
    for line in found:
        assert line["fastest"][0]["config"] in table[line["key"].split()[1]].values()


def test_every_test_for_a_device_is_in_one_step() -> None:
    named = [path for files in (*TESTS.values(), other_tests()) for path in files.split()]
    assert len(named) == len(set(named))
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
        if path.parent.name in ("ops", "kernels") or marked:
            assert path.relative_to(ROOT).as_posix() in named


def test_device_tests_of_attention_take_several_blocks() -> None:
    """Of rows and of keys, with the tiles that an H200 gets: a loop of one step shows neither races nor stale rows."""
    pytest.importorskip("triton")
    from fastformer.kernels import _attention_configs as configs
    from fastformer.kernels._attention_common import mask_kind
    from fastformer.kernels.attention import describe_dense
    from tests.kernels.attention_cases import make_inputs
    from tests.kernels.test_attention_gpu import CASES

    masked: set[bool] = set()
    assert {"packed", "dropout", "bool_keys", "bias", "causal"} <= {name for case in CASES for name in case.options}
    for case in (case.times(11) for case in CASES):
        q, k = (
            torch.empty(case.batch, seqlen, heads, case.head_dim, dtype=torch.bfloat16)
            for seqlen, heads in ((case.seqlen_q, case.heads), (case.seqlen_k, case.kv_heads))
        )
        seed = torch.tensor([1, 2]) if case.dropout_p else None
        left, right = case.window
        problem = describe_dense(q, k, None, case.scale, left, right, case.dropout_p, seed)
        call = configs.call_of(90, problem, q.dtype, mask_kind(make_inputs(case, q.dtype)["mask"]))
        masked.add(call.masked)
        for config in (configs.forward_config(call), configs.backward_config(call)):
            assert case.seqlen_q > 2 * config.block_m and case.seqlen_k > 2 * config.block_n, case.options
    assert masked == {False, True}  # each with the tile that it gets


def test_what_is_checked_of_attention_fits_a_device() -> None:
    """The timed shapes, but for batch and heads, which no kernel's tile depends on: scores of 2 GiB in fp64."""
    for name in ("attention", "masked_attention", "packed_attention"):
        attention = benchmarks()[name]
        for shape in attention.shapes["cuda"]:
            small = attention.checked(shape)
            assert small["batch"] * small["heads"] * shape["seqlen"] ** 2 * 8 <= 2**31
            assert small["batch"] * small["heads"] >= min(shape["batch"] * shape["heads"], 4)
            assert {**small, "batch": 0, "heads": 0} == {**shape, "batch": 0, "heads": 0}


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
    for files in (*TESTS.values(), other_tests()):
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
