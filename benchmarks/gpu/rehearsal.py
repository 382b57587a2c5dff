"""Runs the commands of the GPU plan on the stand-in for a GPU (`stand_in.py`), each in a fork of one process."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import time
from collections.abc import Sequence
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


def rehearse(out: Path, todo: Sequence[PlanStep], only: str) -> int:
    """Runs the first command of each step that matches the pattern. Returns 1 if any has a mistake.

    It writes a line for each step to OUT/gpu_rehearsal.jsonl: "ok", "binaries" (which the step would compile), "wrong",
    "seconds".
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a fork doesn't inherit threads
    are_ok = True
    for step in todo:
        command, variables = step.commands[0]
        module, *rest = command[command.index("-m") + 1 :]
        if module == "pip" or not re.search(only, step.key):
            continue
        began = time.monotonic()
        log = out / f"{step.key.replace(' ', '_')}.rehearsal.log"
        status = _run_in_fork(module, rest, variables | {"FASTFORMER_TEST_SHARD": "0/1"}, log)
        text = log.read_text(errors="replace")
        counted = re.search(r"(\d+) binaries", text)
        wrong = [*re.findall(r"^WRONG (.*)", text, re.MULTILINE), *_MISTAKE.findall(text)]
        if status and not wrong:
            wrong = [f"exit status {status}: {text[-600:]}"]
        line: dict[str, Any] = {"key": step.key, "ok": not wrong, "binaries": int(counted[1]) if counted else 0,
                                "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
        record.append(out / "gpu_rehearsal.jsonl", line)
        print(json.dumps(line), flush=True)
        are_ok = are_ok and not wrong
    return 0 if are_ok else 1


def _run_in_fork(module: str, arguments: list[str], variables: dict[str, str], log: Path) -> int:
    """Runs a module with its output in a file, and returns its exit status. If it hangs, its stack is written and it
    ends.

    All modules share one import of PyTorch.
    """

    def work() -> int:
        faulthandler.dump_traceback_later(_LIMIT, exit=True)
        os.environ.update(variables)
        return stand_in.run(module, arguments)

    return os.waitstatus_to_exitcode(os.waitpid(forked(work, log), 0)[1])
