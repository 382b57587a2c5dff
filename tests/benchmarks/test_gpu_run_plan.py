"""The plan for a GPU, without one: order, chunks, resuming, logs, failures that don't stop the others."""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_run_plan import (
    CHUNK,
    LEASE,
    TESTS,
    Step,
    first_steps,
    later_steps,
    limit_of,
    main,
    other_tests,
    run_step,
    work_through,
)
from benchmarks.measure.launches import recorded_launches
from benchmarks.measure.record import ROOT
from benchmarks.measure.suites import benchmarks
from tests import conftest


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def step(key: str, *codes: str, seconds: float = 1.0, **fields: Any) -> Step:
    return Step(key, [(python(code), {"NUMBER": str(i)}) for i, code in enumerate(codes)], seconds, **fields)


def test_chunks_resume_and_go_on_after_a_failure(tmp_path: Path) -> None:
    now, ran = 0.0, []

    def run(step: Step, out: Path, limit: float) -> dict[str, Any]:
        nonlocal now
        ran.append(step.key)
        now += step.seconds
        return {"ok": step.key != "bad"}

    todo = [
        Step(key, (), seconds) for key, seconds in (("long", 900), ("a", 200), ("bad", 100), ("b", 200), ("c", 200))
    ]
    file = tmp_path / "plan.jsonl"
    work = partial(work_through, todo, tmp_path, file, 9, run, lambda: now)
    assert work() == 3 and ran == ["long"]  # longer than a chunk, yet it runs, alone
    assert work() == 3 and ran == ["long", "a", "bad", "b"]
    assert work() == 1 and ran[-1] == "c"
    assert work() == 1 and len(ran) == 5  # nothing twice
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["key"], line["ok"]) for line in lines] == [(each.key, each.key != "bad") for each in todo]


def test_a_step_that_hangs_or_crashes_has_a_log_and_a_line(tmp_path: Path) -> None:
    """A hanging process is ended with its children, and what each printed is kept, as are the names of what failed."""
    codes = (
        "import os; print('3 passed', os.environ['NUMBER'], os.environ['FASTFORMER_TUNING_FILE'])",
        "raise SystemExit(5)",  # a shard without tests
        "print('FAILED tests/a.py::b[1] - AssertionError'); raise SystemExit(1)",
        "import time; print('ERROR tests/c.py - x', flush=True); time.sleep(60)",
    )
    began = time.monotonic()
    result = run_step(step("some tests", *codes), tmp_path, 3.0)
    assert time.monotonic() - began < 30
    assert not result["ok"] and sorted(result["failed"]) == ["tests/a.py::b[1]", "tests/c.py"]
    assert sorted(result["tails"]) == ["some_tests.2.log", "some_tests.3.log"]
    assert "exit status 1" in result["tails"]["some_tests.2.log"] and "3 s" in result["tails"]["some_tests.3.log"]
    assert (tmp_path / "some_tests.0.log").read_text() == f"3 passed 0 {tmp_path / 'tuning.json'}\n"
    assert run_step(step("right", *codes[:2]), tmp_path, 30.0) == {"ok": True, "failed": [], "tails": {}}


def test_kernels_that_are_off_by_default_have_to_be_launched(tmp_path: Path) -> None:
    rows = tmp_path / "cuda.jsonl"
    older = {"mode": "fwd", "kernels": ["_wanted_kernel"]}
    rows.write_text(json.dumps(older) + "\n")

    def timed(mode: str, name: str) -> bool:
        row = json.dumps({"mode": mode, "kernels": [name]}) + "\n"
        code = f"open({str(rows)!r}, 'a').write({row!r})"
        return run_step(step("time", code, kernel="_wanted", rows=rows), tmp_path, 30.0)["ok"]

    assert timed("fwd", "_wanted_kernel") and not timed("fwd", "_usual_kernel") and not timed("bwd", "_wanted_kernel")
    assert not run_step(step("time", "pass", kernel="_wanted", rows=rows), tmp_path, 30.0)[
        "ok"
    ]  # older rows don't count


def test_launches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fastformer.kernels import _launch
    from fastformer.kernels import rotary as kernels

    rotary: Any = kernels

    def no_launch(*args: object, **options: object) -> None:
        return None

    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="_some_kernel"))
    for module in (_launch, rotary):
        monkeypatch.setattr(module, "launch", no_launch)
    with recorded_launches() as names:
        rotary.launch(kernel, (1,), PERSISTENT=False)
        _launch.Launch(kernel, (1,), PERSISTENT=True)()
    assert names == {"_some_kernel", "_some_kernel[persistent]"}
    assert rotary.launch is no_launch and _launch.launch is no_launch


def test_the_plan_fits_its_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, later = list(first_steps(tmp_path)), list(later_steps(tmp_path))
    for steps in (first, later):
        assert sum(each.seconds for each in steps) <= LEASE
    keys = [each.key for each in (*first, *later)]
    assert len(set(keys)) == len(keys) and all(limit_of(each) <= CHUNK for each in (*first, *later))
    assert main(["--out", str(tmp_path), "--list"]) == 0
    assert [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()] == keys
    assert not torch.cuda.is_available() or pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])


def test_the_runner_knows_what_is_timed(tmp_path: Path) -> None:
    """Each command fits cases, and asks for kernels that are off by default by a variable that is read."""
    sources = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    for each in (*first_steps(tmp_path), *later_steps(tmp_path)):
        ((command, variables), *_) = each.commands
        if "benchmarks.run" in command:
            benchmark = benchmarks()[command[command.index("--op") + 1]]
            assert each.seconds > 10 and ("--dtype" in command) == ("bfloat16" in benchmark.dtypes)
        assert all(name in sources for name in variables if name != "FASTFORMER_TEST_SHARD")
        assert bool(each.kernel) == (each.key.split()[1] in ("hopper", "persistent"))


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
