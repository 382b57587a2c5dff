"""Runs the commands of the GPU plan on the stand-in for a GPU (`stand_in.py`), each in a fork of one process."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import stand_in
from benchmarks.gpu.warm import PlanStep, forked
from benchmarks.measure import record

_LIMIT = 900  # seconds after which a step counts as hanging

# A rival may refuse a case, or have no CPU kernel for it. Its other exceptions are mistakes in the benchmark.
_MISTAKE = re.compile(
    r"^ +(.* was not timed: (?:Name|Attribute|Type|Key|Index|Import|ModuleNotFound|Unbound\w+)Error.*)", re.MULTILINE
)


def in_forks(
    out: Path, todo: Sequence[PlanStep], only: str, work: Callable[[str, list[str]], int], jobs: int = 1
) -> Iterator[tuple[PlanStep, int, Path, float]]:
    """Calls `work` for the first command of each step that matches the pattern, but not for pip's.

    Args:
        work: called in a fork with the command's module and arguments; returns the exit status.
        jobs: the number of forks side by side.

    Yields:
        (step, exit status, log, seconds) when a step has ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a fork doesn't inherit threads
    chosen = [step for step in todo if "pip" not in step.commands[0][0] and re.search(only, step.key)]
    running: dict[int, tuple[PlanStep, Path, float]] = {}
    while chosen or running:
        while chosen and len(running) < jobs:
            step = chosen.pop(0)
            log = out / f"{step.key.replace(' ', '_')}.log"
            running[forked(functools.partial(_run_first, step, work), log)] = step, log, time.monotonic()
        pid, status = os.wait()
        step, log, began = running.pop(pid)
        yield step, os.waitstatus_to_exitcode(status), log, time.monotonic() - began


def _run_first(step: PlanStep, work: Callable[[str, list[str]], int]) -> int:
    command, variables = step.commands[0]
    os.environ.update({**variables, "FASTFORMER_TEST_SHARD": "0/1"})
    module, *arguments = command[command.index("-m") + 1 :]
    return work(module, arguments)


def rehearse(out: Path, todo: Sequence[PlanStep], only: str) -> int:
    """Runs the first command of each step that matches the pattern. Returns 1 if any has a mistake.

    It writes a line for each step to OUT/gpu_rehearsal.jsonl: "ok", "binaries" (which the step would compile), "wrong",
    "seconds". If a step hangs, its stack is written to its log and it ends.
    """

    def work(module: str, arguments: list[str]) -> int:
        faulthandler.dump_traceback_later(_LIMIT, exit=True)
        return stand_in.run(module, arguments)

    are_ok = True
    for step, status, log, seconds in in_forks(out, todo, only, work):
        text = log.read_text(errors="replace")
        counted = re.search(r"(\d+) binaries", text)
        wrong = [*re.findall(r"^WRONG (.*)", text, re.MULTILINE), *_MISTAKE.findall(text)]
        if status and not wrong:
            wrong = [f"exit status {status}: {text[-600:]}"]
        line: dict[str, Any] = {"key": step.key, "ok": not wrong, "binaries": int(counted[1]) if counted else 0,
                                "wrong": wrong, "seconds": round(seconds, 1)}  # fmt: skip
        record.append(out / "gpu_rehearsal.jsonl", line)
        print(json.dumps(line), flush=True)
        are_ok = are_ok and not wrong
    return 0 if are_ok else 1
