"""Runs all checks and measurements that need a GPU, unattended and detached: the most important first, tests before
times.

    python -m benchmarks.gpu_run_plan start --out DIR [--resume FILE]           begins, and returns at once
    python -m benchmarks.gpu_run_plan status --out DIR [--wait 560] [--copy DEST]
    python -m benchmarks.gpu_run_plan list                                      the steps, and when each should be done
    python -m benchmarks.gpu_run_plan run --out DIR                             in the foreground
    python -m benchmarks.gpu_run_plan rehearse --out DIR [--only PATTERN]       without a GPU: see `gpu/rehearsal.py`
    python -m benchmarks.gpu_run_plan compile --out FOLDER [--only PATTERN]     without a GPU: see `gpu/ahead.py`

`start` leaves a process that outlives the command, so if commands have a time limit, you only have to poll with
`status`. `status` prints what is done and what has failed so far, and copies FILE and an archive of everything to DEST.
With --wait, it first waits for so many seconds, or until everything is done. If a machine is returned soon after a
command
ends, combine both: `start ... && status --wait 560 --copy DEST`. `--resume FILE` continues on another machine.

A step is a command, or several in parallel, with one log, DIR/logs/STEP.log. When it ends, its JSON line is appended to
FILE (DIR/gpu_run_plan.jsonl). A step that fails, crashes or hangs also writes a line, and the other steps continue. The
exit status of `run` is 0 if all steps succeeded and 1 if any failed; that of `status` may also be 3: steps are left.

`benchmarks/gpu/steps.py` defines the steps and their order. Timed cases are those of the runner (`benchmarks.run`), and
their rows go to DIR/cuda*.jsonl.

You need not install fastformer. Take along fastformer/*.so (else a step builds the extension), the FOLDER of `compile`,
named by FASTFORMER_KERNELS, and wheels of rivals in build/wheels, which are unpacked for the steps. Rows name what is
missing. `pip download --no-deps -d build/wheels fa3-fwd==0.0.3 liger-kernel==0.8.5` gets FlashAttention-3 and Liger.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.warm import PlanStep, has_device, import_ahead, listed, spawn
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, refuse_interpreter


def limit_of(step: PlanStep) -> float:
    """Returns the seconds after which a step counts as hanging."""
    return max(45.0, 2 * step.seconds)


_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def log_name(step: PlanStep) -> str:
    """Returns the name of a step's log, without its suffix."""
    return step.key.replace(" ", "_")


def run_step(step: PlanStep, out: Path, limit: float) -> dict[str, Any]:
    """Runs the commands of a step in parallel.

    Returns:
        "ok": whether all exit with 0 (or 5: a shard without tests) in time; "failed": the names of tests; "tails": for
        each command that failed, the reason and the end of its output.
    """
    end = time.monotonic() + limit
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    running = []
    for number, (command, variables) in enumerate(step.commands):
        part = logs / f"{log_name(step)}.{number}.part"
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
    (logs / f"{log_name(step)}.log").write_text("\n".join(texts))
    for _, part in running:
        part.unlink()
    return result


def work_through(
    todo: Sequence[PlanStep],
    out: Path,
    resume: Path,
    run: Callable[[PlanStep, Path, float], dict[str, Any]] = run_step,
) -> int:
    """Runs the steps that are not in `resume`. Returns the exit status (see the module)."""
    finished = {line["key"]: line["ok"] for line in record.read(resume)} if resume.is_file() else {}
    for step in todo:
        if step.key in finished:
            continue
        (out / "now.json").write_text(json.dumps({"key": step.key, "log": log_name(step), "began": time.time()}))
        began = time.monotonic()
        if step.after and not finished.get(step.after, False):
            line: dict[str, Any] = {"key": step.key, "ok": False, "left_out": f"{step.after!r} was not right"}
        else:
            line = {"key": step.key, **run(step, out, limit_of(step))}
        line["seconds"] = round(time.monotonic() - began, 1)
        record.append(resume, line)
        finished[step.key] = bool(line["ok"])
        print(json.dumps(line), flush=True)
    (out / "now.json").unlink(missing_ok=True)
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


# Detached runs.


def start(out: Path, resume: Path | None, only: str = "") -> int:
    """Begins a run that outlives this process, and returns its exit status."""
    if (pid := _pid_of_run(out)) is not None:
        print(f"expected no run in {out}, process {pid} is one", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    if resume is not None and resume.absolute() != lines_of(out).absolute():
        shutil.copyfile(resume, lines_of(out))
    command = [sys.executable, "-m", "benchmarks.gpu_run_plan", "run", "--out", str(out.absolute())]
    command += ["--only", only] if only else []
    with (out / "run.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=record.ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    # For a moment after exec, Linux shows a process without its arguments.
    while process.poll() is None and not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    (out / "run.pid").write_text(str(process.pid))
    print(f"process {process.pid} works in {out}")
    return 0


def lines_of(out: Path) -> Path:
    """Returns the file of the finished steps."""
    return out / "gpu_run_plan.jsonl"


def _pid_of_run(out: Path) -> int | None:
    """Returns the id of the process of a run that is still going, or None."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((out / "run.pid").read_text())
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # it may be a child of this process that has ended
        if b"gpu_run_plan" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def status(out: Path, wait: float, copy: Path | None, todo: Sequence[PlanStep]) -> int:
    """Prints a run's progress, and copies its results. Returns the exit status (see the module)."""
    end = time.monotonic() + wait
    while _pid_of_run(out) is not None and time.monotonic() < end:
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    lines = record.read(lines_of(out)) if lines_of(out).is_file() else []
    for line in lines:
        outcome = "ok" if line["ok"] else line.get("left_out", f"FAILED {line.get('failed') or line.get('tails')}")
        print(f"{line['seconds']:>6.1f} s  {line['key']}: {outcome}"[:400])
    left = [step.key for step in todo if step.key not in {line["key"] for line in lines}]
    if (out / "now.json").is_file():
        now = json.loads((out / "now.json").read_text())
        parts = sorted((out / "logs").glob(f"{now['log']}.*.part"))
        failed = [name for part in parts for name in _FAILED.findall(part.read_text(errors="replace"))]
        is_on = "" if _pid_of_run(out) is not None else ", but no process does"
        print(f"{time.time() - now['began']:>6.1f} s  {now['key']} runs{is_on}; failed by now: {failed}")
    if copy is not None:
        copy.mkdir(parents=True, exist_ok=True)
        if lines_of(out).is_file():
            shutil.copy(lines_of(out), copy)
        with tarfile.open(copy / "results.tar.gz", "w:gz") as archive:
            archive.add(out, "results")
    print(f"{len(lines)} steps done, {sum(not line['ok'] for line in lines)} of them not right, {len(left)} left")
    return 3 if left else int(not all(line["ok"] for line in lines))


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
    for name in ("start", "status", "run", "rehearse", "compile", "list"):
        command = commands.add_parser(name)
        if name != "list":
            command.add_argument("--out", type=Path, required=True, help="folder of the results and logs")
        if name == "start":
            command.add_argument("--resume", type=Path, help="lines of a run on another machine to go on from")
        if name in ("start", "run", "rehearse", "compile"):
            command.add_argument("--only", default="", help="a pattern to find in the names of steps")
        if name == "compile":
            command.add_argument("--arch", type=int, default=90, help="architecture (default: %(default)s)")
            command.add_argument("--jobs", type=int, default=2, help="processes side by side (default: %(default)s)")
        if name == "status":
            command.add_argument("--wait", type=float, default=0.0, help="seconds to wait before, while it runs")
            command.add_argument("--copy", type=Path, help="folder to copy the results to, as one archive")
    options = parser.parse_args(arguments)
    todo = listed(Path("OUT") if options.command == "list" else options.out)
    if options.command == "list":
        print("\n".join(listing(todo, (15, 30, 45, 90))))
        return 0
    if options.command == "status":
        return status(options.out, options.wait, options.copy, todo)
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
    if options.command == "start":
        return start(options.out, options.resume, options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"steps are {'forks' if import_ahead() else 'new processes'}", flush=True)
    todo = [step for step in todo if re.search(options.only, step.key)]
    with with_wheels():
        return work_through(todo, options.out, lines_of(options.out))


if __name__ == "__main__":
    sys.exit(main())
