"""Runs all checks and measurements that need a GPU, unattended: the most important first, tests before times.

    python -m benchmarks.gpu_run_plan list                                      the steps, and when each should be done
    python -m benchmarks.gpu_run_plan run --out DIR [--seconds 560] [--only PATTERN]
    python -m benchmarks.gpu_run_plan rehearse --out DIR [--only PATTERN]       without a GPU: see `gpu/rehearsal.py`
    python -m benchmarks.gpu_run_plan compile --out FOLDER [--only PATTERN]     without a GPU: see `gpu/ahead.py`

If commands have a time limit, repeat `run` with --seconds: it goes on where the last one ended, and begins no step that
would take longer, except the first.

A step is a command, or several in parallel, with one log, DIR/logs/STEP.log. When it ends, its JSON line is printed and
appended to DIR/gpu_run_plan.jsonl; on another machine, a copy of this file in DIR is enough to go on. A step that
fails, crashes or hangs also writes a line, and the other steps continue. The exit status of `run` is 0 if all steps
succeeded, 1 if any failed, and 3 if some are left.

`benchmarks/gpu/steps.py` defines the steps and their order. Timed cases are those of the runner (`benchmarks.run`), and
their rows go to DIR/cuda*.jsonl.

You need not install fastformer. Take along fastformer/*.so (else a step builds the extension), the FOLDER of `compile`,
named by FASTFORMER_KERNELS, and wheels of rivals in build/wheels, which are unpacked for the steps. Rows name what is
missing. `pip download --no-deps -d build/wheels fa3-fwd==0.0.3 liger-kernel==0.8.5` gets FlashAttention-3 and Liger.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.warm import PlanStep, has_device, import_ahead, listed, spawn
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, refuse_interpreter

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def run_step(step: PlanStep, out: Path, limit: float) -> dict[str, Any]:
    """Runs the commands of a step in parallel.

    Returns:
        "ok": whether all exit with 0 (or 5: a shard without tests) in time; "failed": the names of tests; "tails": for
        each command that failed, the reason and the end of its output.
    """
    end = time.monotonic() + limit
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = step.key.replace(" ", "_")
    running = []
    for number, (command, variables) in enumerate(step.commands):
        part = logs / f"{name}.{number}.part"
        running.append((spawn(command, variables, part), part))
    result: dict[str, Any] = {"ok": True, "failed": [], "tails": {}}
    texts = []
    for number, (process, part) in enumerate(running):
        status = process.wait(max(0.0, end - time.monotonic()))
        if status is None:
            process.kill()
        text = part.read_text(errors="replace")
        texts.append(text if len(running) == 1 else f"===== command {number}\n{text}")
        result["failed"] += dict.fromkeys(_FAILED.findall(text))
        if status not in (0, 5):
            result["ok"] = False
            reason = f"took longer than {limit:.0f} s" if status is None else f"exit status {status}"
            result["tails"][str(number)] = f"{reason}\n{text[-1500:]}"
    (logs / f"{name}.log").write_text("\n".join(texts))
    for _, part in running:
        part.unlink()
    return result


def work_through(
    todo: Sequence[PlanStep],
    out: Path,
    seconds: float = math.inf,
    run: Callable[[PlanStep, Path, float], dict[str, Any]] = run_step,
) -> int:
    """Runs the steps that have no line yet, until these seconds are over. Returns the exit status: see the module."""
    end, lines = time.monotonic() + seconds, out / "gpu_run_plan.jsonl"
    finished = {line["key"]: line["ok"] for line in record.read(lines)} if lines.is_file() else {}
    left = [step for step in todo if step.key not in finished]
    for step in left:
        began = time.monotonic()
        is_first = step is left[0]
        if step.after and not finished.get(step.after, False):
            line: dict[str, Any] = {"key": step.key, "ok": False, "left_out": f"{step.after!r} was not right"}
        elif not is_first and began + step.seconds > end:
            return 3
        else:
            hangs = max(45.0, 2 * step.seconds)
            line = {"key": step.key, **run(step, out, min(hangs, max(1.0, end - began)))}
            if not (line["ok"] or is_first) and time.monotonic() >= end:
                return 3  # it may only have been cut off
        line["seconds"] = round(time.monotonic() - began, 1)
        record.append(lines, line)
        finished[step.key] = bool(line["ok"])
        print(json.dumps(line), flush=True)
    return 0 if all(finished.values()) else 1


@contextlib.contextmanager
def with_wheels(wheels: Path = record.ROOT / "build" / "wheels") -> Iterator[None]:
    """Unpacks the wheels of a folder, and puts them at the end of the path of the steps, be they forks or not."""
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, folder, "zip")
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))
        yield


def listing(todo: Sequence[PlanStep], leases: Sequence[float]) -> Iterator[str]:
    """Yields a line for each step (seconds, when it should be done, rivals) and for the end of each lease (minutes)."""
    ends, total = list(leases), 0.0
    for step in todo:
        total += step.seconds
        while ends and total > 60 * ends[0]:
            yield f"----- the end of {ends.pop(0):g} minutes"
        beside = f", beside {', '.join(step.rivals)}" if step.rivals else ""
        yield f"{step.seconds:>5.0f} s {total / 60:>6.1f} min  {step.key}{beside}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = parser_of("gpu_run_plan", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "run", "rehearse", "compile"):
        command = commands.add_parser(name)
        if name != "list":
            command.add_argument("--out", type=Path, required=True, help="folder of the results and logs")
            command.add_argument("--only", default="", help="a pattern to find in the names of steps")
        if name == "run":
            command.add_argument("--seconds", type=float, default=math.inf, help="when to end (default: after all)")
        if name == "compile":
            command.add_argument("--arch", type=int, default=90, help="architecture (default: %(default)s)")
            command.add_argument("--jobs", type=int, default=2, help="processes side by side (default: %(default)s)")
    options = parser.parse_args(arguments)
    todo = listed(Path("OUT") if options.command == "list" else options.out)
    if options.command == "list":
        print("\n".join(listing(todo, (15, 30, 45, 90))))
        return 0
    if options.command in ("rehearse", "compile"):
        refuse_interpreter(parser)
    if options.command == "rehearse":
        from benchmarks.gpu.rehearsal import rehearse

        return rehearse(options.out, todo, options.only)
    if options.command == "compile":
        from benchmarks.gpu.ahead import compile_ahead

        return compile_ahead(options.out, todo, options.only, options.arch, options.jobs)
    if not has_device():
        parser.error("expected a CUDA device: on a CPU run `python -m benchmarks.compile_report`")
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"steps are {'forks' if import_ahead() else 'new processes'}", flush=True)
    todo = [step for step in todo if re.search(options.only, step.key)]
    with with_wheels():
        return work_through(todo, options.out, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
