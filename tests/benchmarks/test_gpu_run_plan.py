"""Tests the plan for a GPU without one: order, resuming, logs, and failures that don't stop it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_run_plan, run
from benchmarks.gpu.steps import TESTS, other_tests, steps
from benchmarks.gpu.warm import PlanStep
from benchmarks.gpu_run_plan import listing, run_step, with_wheels, work_through
from benchmarks.measure.checking import verdicts_of
from benchmarks.measure.launches import recorded_launches
from benchmarks.measure.record import ROOT
from benchmarks.measure.suites import benchmarks, chosen_cases, nothing_fits


def step(key: str, *codes: str) -> PlanStep:
    return PlanStep(key, [(["sh", "-c", code], {"NUMBER": str(i)}) for i, code in enumerate(codes)], 1.0)


def test_a_run_resumes_and_continues_after_a_failure(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(step: PlanStep, out: Path, limit: float) -> dict[str, Any]:
        ran.append(step.key)
        if step.key == "cut off" and ran.count("cut off") == 1:
            raise KeyboardInterrupt
        return {"ok": step.key != "bad"}

    todo = [PlanStep(key, (), 9) for key in ("a", "bad", "cut off", "b")]
    todo += [PlanStep("depends on bad", (), 9, after="bad"), PlanStep("depends on b", (), 9, after="b")]
    todo += [PlanStep("depends on nothing that ran", (), 9, after="c")]
    file = tmp_path / "gpu_run_plan.jsonl"
    work = partial(work_through, todo, tmp_path, run=run)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert ran == ["a", "bad", "cut off"]
    assert work() == 1 and ran[3:] == ["cut off", "b", "depends on b"]
    assert work() == 1 and len(ran) == 6  # nothing twice
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["key"] for line in lines] == [item.key for item in todo]
    assert [line["key"] for line in lines if "left_out" in line] == ["depends on bad", "depends on nothing that ran"]


def test_a_run_ends_in_time_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins no step that would take longer, except the first, and repeats one that may only have been cut off."""
    now, limits = [0.0], []
    monkeypatch.setattr(gpu_run_plan, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(step: PlanStep, out: Path, limit: float) -> dict[str, Any]:
        limits.append((step.key, limit))
        now[0] += (taken := min(limit, {"slow": 70.0, "long": 500.0}.get(step.key, step.seconds)))
        return {"ok": taken < limit}

    todo = [PlanStep("a", (), 40), PlanStep("slow", (), 50), PlanStep("b", (), 5), PlanStep("long", (), 200)]
    assert work_through(todo, tmp_path, 100.0, run) == 3
    assert limits == [("a", 80), ("slow", 60)]
    assert work_through(todo, tmp_path, 100.0, run) == 3
    assert limits[2:] == [("slow", 100), ("b", 30)]
    assert work_through(todo, tmp_path, 100.0, run) == 1
    assert limits[4:] == [("long", 100)]
    lines = [json.loads(line) for line in (tmp_path / "gpu_run_plan.jsonl").read_text().splitlines()]
    assert [(line["key"], line["ok"]) for line in lines] == [("a", True), ("slow", True), ("b", True), ("long", False)]


def test_a_step_that_hangs_or_crashes_has_a_log_and_a_line(tmp_path: Path) -> None:
    """A hanging process is ended with its children.

    The outputs of all processes and the names of failed tests are kept.
    """
    codes = (
        "echo 3 passed $NUMBER",
        "exit 5",  # a shard without tests
        "echo 'FAILED tests/a.py::b[1] - AssertionError'; exit 1",
        "echo 'ERROR tests/c.py - x'; sleep 60; true",
    )
    began = time.monotonic()
    result = run_step(step("some tests", *codes), tmp_path, 2.0)
    assert time.monotonic() - began < 30
    assert not result["ok"] and sorted(result["failed"]) == ["tests/a.py::b[1]", "tests/c.py"]
    assert sorted(result["tails"]) == ["2", "3"]
    assert "exit status 1" in result["tails"]["2"] and "2 s" in result["tails"]["3"]
    (log,) = (tmp_path / "logs").iterdir()  # one a step
    text = log.read_text()
    assert "3 passed 0" in text and "ERROR tests/c.py" in text
    assert run_step(step("right", *codes[:2]), tmp_path, 30.0) == {"ok": True, "failed": [], "tails": {}}


FLASH_ATTENTION_3 = """
from torch import cat
from torch.nn.functional import scaled_dot_product_attention

def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    starts = cu_seqlens_q.tolist()
    assert starts == cu_seqlens_k.tolist() and max_seqlen_q == max_seqlen_k >= max(cu_seqlens_q.diff())
    parts = (slice(*ends) for ends in zip(starts, starts[1:]))
    return cat([flash_attn_func(q[None, part], k[None, part], v[None, part], causal=causal)[0] for part in parts])
"""


def test_a_wheel_beside_the_plan_is_a_rival_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the plan's process, whose forks are steps, and in new ones; FlashAttention-3 has only forward."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert "fa3" in benchmarks()["attention"].missing("cuda")
    with zipfile.ZipFile(tmp_path / "fa3_fwd-0.0.3-cp39-abi3-manylinux_2_24_x86_64.whl", "w") as wheel:
        wheel.writestr("fa3_fwd_interface.py", FLASH_ATTENTION_3)
    with with_wheels(tmp_path):
        found = f"{sys.executable} -c 'import importlib.util as u; assert u.find_spec(\"fa3_fwd_interface\")'"
        assert run_step(step("find it", found), tmp_path, 30.0)["ok"]
        for name, causal, dropout_p, mode, reason in (
            ("attention", True, 0.0, "fwd", ""), ("attention", False, 0.0, "fwd", ""),
            ("attention", True, 0.0, "bwd", "no backward pass"), ("attention", True, 0.1, "fwd", "no dropout"),
            ("packed_attention", True, 0.0, "fwd", ""), ("packed_attention", False, 0.0, "fwd", ""),
            ("packed_attention", True, 0.0, "fwdbwd", "no backward pass"),
        ):  # fmt: skip
            benchmark = benchmarks()[name]
            assert "fa3" not in benchmark.missing("cuda")
            providers = {other: benchmark.providers[other] for other in ("fastformer", "eager", "fa3")}
            shape = {"batch": 2, "seqlen": 5, "heads": 2, "head_dim": 8, "causal": causal, "dropout_p": dropout_p}
            verdicts = verdicts_of(benchmark, providers, shape, mode, torch.float32, "cpu")
            assert not verdicts.wrong and verdicts.passed("fa3") == (not reason)
            assert reason in verdicts.refused.get("fa3", ""), (name, mode)


def test_launches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fastformer.kernels import _launch
    from fastformer.kernels import rotary as kernels

    rotary: Any = kernels

    def no_launch(*args: object, **options: object) -> None:
        return None

    kernel, other = (SimpleNamespace(fn=SimpleNamespace(__name__=name)) for name in ("_some_kernel", "_other_kernel"))
    for module in (_launch, rotary):
        monkeypatch.setattr(module, "launch", no_launch)
    with recorded_launches() as names:
        rotary.launch(kernel, (1,))
        _launch.Launch(other, (1,))()
    assert names == {"_some_kernel", "_other_kernel"}
    assert rotary.launch is no_launch and _launch.launch is no_launch


def test_the_runner_knows_the_timed_cases(tmp_path: Path) -> None:
    """Each command matches some cases, and a step that depends on another one comes after it."""
    keys: set[str] = set()
    for step in steps(tmp_path):
        ((command, variables), *_) = step.commands
        if "benchmarks.run" in command:
            benchmark = benchmarks()[op := command[command.index("--op") + 1]]
            assert (variables.get("FASTFORMER_ATTENTION_KERNELS") == "ours") == (op == "attention")
            assert step.seconds > 5 and ("--dtype" in command) == ("bfloat16" in benchmark.dtypes)
        assert not step.after or step.after in keys
        keys.add(step.key)


def test_the_first_ten_minutes_answer_what_users_ask(tmp_path: Path) -> None:
    """That is so even if nothing was compiled beforehand, and the extension is built on the device."""
    seconds, early = 90.0, []
    for step in steps(tmp_path):
        seconds += step.seconds
        if seconds > 600:
            break
        early.append(step)
    lines = "\n".join(listing(early, ()))
    for question in (
        "attention causal=True", "tests repeats", "training_step", "graph_decoding", "accelerated", "add_layer_norm",
        "embedding", "rotary", "linear_cross_entropy", "seqlen=16", "seqlen=64", "decode_attention",
    ):  # fmt: skip
        assert question in lines, question
    assert lines.index("training_step") < lines.index("graph_decoding") < lines.index("add_layer_norm")
    for op, rivals in {
        "attention": "sdpa flash, sdpa cudnn, fa3", "packed_attention": "fa3", "add_layer_norm": "liger",
        "embedding": "liger", "rotary": "liger", "linear_cross_entropy": "liger",
    }.items():  # fmt: skip
        of_op = [line for line in lines.splitlines() if f"look {op} " in line]
        assert of_op and all(line.endswith(rivals) for line in of_op), op


def test_each_command_parses_and_names_existing_cases(tmp_path: Path) -> None:
    """A typo in an option, a shape, a provider, a file or a pattern would waste its step."""
    all_files = " ".join(TESTS.values()).split()
    for step in steps(tmp_path):
        ((command, _), *_) = step.commands
        assert command[:2] == [sys.executable, "-m"]
        module, *rest = command[2:]
        if module == "benchmarks.run":
            options = run._parser(sorted(benchmarks())).parse_args(rest)
            chosen = list(chosen_cases(benchmarks(), options))
            assert nothing_fits(benchmarks(), options, chosen) is None
            for option, values in (("shape", {key for key, _ in options.shape}), ("mode", set(options.mode or ()))):
                allowed = {case.mode for case in chosen} if option == "mode" else set(chosen[0].shape)
                assert values <= allowed, (step.key, option)
            assert set(options.provider or ()) <= {*chosen[0].benchmark.providers}, step.key
            for name, value in options.shape:  # each is of some case
                assert value in {str(case.shape[name]) for case in chosen}, (step.key, name, value)
        elif module == "pytest":
            plugin, files = command[command.index("-p") + 1], [word for word in rest if word.endswith(".py")]
            assert importlib.util.find_spec(plugin) is not None
            texts = ["".join((ROOT / file).read_text() for file in paths) for paths in (files, all_files)]
            for pattern in command[command.index("-k") + 1 :][:1] if "-k" in command else ():
                names = set(re.findall(r"\w+", pattern)) - {"not", "or", "and"}
                assert all(name in texts[1] for name in names), (step.key, names)
                assert any(name in texts[0] for name in names), (step.key, names)
                compile(pattern, "pattern", "eval")
        else:
            assert module == "pip"


def test_every_test_for_a_device_is_in_one_step() -> None:
    named = [path for files in (*TESTS.values(), other_tests()) for path in files.split()]
    assert len(named) == len(set(named)) and all((ROOT / path).exists() for path in named)
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
        if path.parent.name in ("ops", "kernels") or marked:
            assert path.relative_to(ROOT).as_posix() in named
