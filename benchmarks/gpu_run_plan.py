"""Everything that waits for a GPU, unattended, in chunks: check, then time, most important first.

    python -m benchmarks.gpu_run_plan --out DIR [--resume FILE] [--minutes 9] [--list]

A step is a command, or several side by side. What it prints is in DIR/STEP.log, and one JSON line about it goes to FILE
(default DIR/gpu_run_plan.jsonl) as it ends. A run stops before a step once its minutes are spent and is simply called
again: steps that FILE has are skipped. What matters most fits one machine's time; the rest waits for another machine,
with FILE carried there. A step that fails, crashes or hangs is a line too, and the others go on. Exit status: 0 all
steps done and right, 3 steps are left (call again), 1 all done and something failed.

The timed cases are the runner's (`benchmarks.run`), whose rows go to DIR/cuda*.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import record
from benchmarks.measure.suites import benchmarks, has_values, key_value

SHARDS = min(14, os.cpu_count() or 1)
# What the steps of one machine may take in all by their estimates: it is lent for 30 minutes, and starting it and
# installing takes its share. A run of this program is cut at 10 minutes, so that a chunk has 9.
LEASE, CHUNK = 26 * 60, 9 * 60
_START = 5.0  # seconds until a process times something
_TIMING = 0.5  # the share of a case's estimate that its turns may take: compiling and checking take the rest

# The files whose tests a step runs: first what only a GPU can show, in sizes of many tiles, then each op's own.
TESTS = {
    "attention": "tests/kernels/test_attention_gpu.py",
    "attention_hopper": "tests/kernels/test_attention_hopper_gpu.py",
    "rows": "tests/kernels/test_rows_gpu.py",
    **{
        stem: f"tests/kernels/test_{stem}.py tests/ops/test_{stem}.py"
        for stem in ("add_layer_norm", "feed_forward", "linear_cross_entropy", "embedding", "rotary",
                     "decode_attention")
    },
    "generation": "tests/generation/test_graph_engine_gpu.py",
    "models": "tests/models/test_backends.py tests/models/test_transformer.py tests/test_graphs.py "
    "tests/training/test_graph_updates_gpu.py",
}  # fmt: skip
# Seconds of a shape. Most of a training step's is torch.compile's time for the rival, twelve layers forward and
# backward, and most of gpt2's Hugging Face's, whose step is compiled first.
_SECONDS = {"attention": 30.0, "masked_attention": 30.0, "packed_attention": 30.0, "decode_attention": 12.0,
            "decoding": 20.0, "graph_decoding": 45.0, "training_step": 120.0}  # fmt: skip
# Of attention's rivals those that are worth meeting twice: the others have been, and flex takes its time to compile.
_BEST_RIVALS = ("fastformer", "sdpa flash", "sdpa cudnn")


class Step(NamedTuple):
    """One unit of work.

    Attributes:
        key: its line's, and its logs' name.
        commands: that run side by side, each with what it adds to the environment.
        seconds: that it takes, about.
        kernel: which kernel ours has to launch in some forward pass of its rows; "": any.
        rows: the file that its rows go to.
    """

    key: str
    commands: Sequence[tuple[list[str], dict[str, str]]]
    seconds: float
    kernel: str = ""
    rows: Path = Path()


@functools.cache
def other_tests() -> str:
    """The files that no step above has: of tests/ops and tests/kernels all, elsewhere those with tests for a GPU."""
    named = {path for files in TESTS.values() for path in files.split()}
    found = []
    for path in sorted((record.ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(record.ROOT).as_posix()
        on_device = path.parent.name in ("ops", "kernels") or "mark.gpu" in path.read_text(encoding="utf-8")
        if on_device and name not in named and path.name != "test_gpu_run_plan.py":
            found.append(name)
    return " ".join(found)


def tests(name: str, files: str, seconds: float) -> Step:
    """The GPU tests of some files (space between), in processes side by side, since most of it is compiling."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-rfE", "--tb=short", *files.split()]
    shards = [(command, {"FASTFORMER_TEST_SHARD": f"{shard}/{SHARDS}"}) for shard in range(SHARDS)]
    return Step(f"tests {name}", shards, seconds)


def times(
    op: str,
    out: Path,
    *values: str,
    label: str = "",
    rivals: Sequence[str] = (),
    seconds: float | None = None,
    flag: str = "",
    kernel: str = "",
) -> Step:
    """The runner's cases of an op, in bf16 where it has that.

    Args:
        values: such as "seqlen=2048", of the shapes (all); a name given twice takes either value.
        label: of kernels that are off by default, and of the file of their rows.
        rivals: which, beside ours and the baseline; empty = all.
        seconds: of a shape.
        flag: the environment variable that turns those kernels on.
        kernel: see `Step`.
    """
    benchmark = benchmarks()[op]
    shapes = [shape for shape in benchmark.shapes["cuda"] if has_values(shape, map(key_value, values))]
    each = seconds or _SECONDS.get(op, 15.0)
    rows = out / ("_".join(["cuda", *label.split()[:1]]) + ".jsonl")
    command = [sys.executable, "-m", "benchmarks.run", "--device", "cuda", "--op", op, "--rounds", "20",
               "--seconds", f"{_TIMING * each / len(benchmark.modes):g}", "--out", str(rows)]  # fmt: skip
    if "bfloat16" in benchmark.dtypes:
        command += ["--dtype", "bfloat16"]
    for option, given in (("--shape", values), ("--provider", rivals)):
        command += [option, *given] if given else []
    key = " ".join(filter(None, ["time", label, op, *values]))
    return Step(key, [(command, {flag: "1"} if flag else {})], _START + each * len(shapes), kernel, rows)


def first_steps(out: Path) -> Iterator[Step]:
    """What one machine has time for: whether every op is right, and how fast it is in the sizes that count.

    A new step is another `yield`, at the place that its weight gives it. Tests add the seconds up: these steps, and
    `later_steps`, must each stay within LEASE.
    """
    yield tests("attention", TESTS["attention"], 200)
    yield times("attention", out, "causal=True", "seqlen=8192")
    yield times("attention", out, "causal=True", "seqlen=2048", "seqlen=256")
    yield times("masked_attention", out, "head_dim=64")
    yield times("packed_attention", out, "head_dim=64", "causal=True")
    yield tests("attention_hopper", TESTS["attention_hopper"], 90)
    yield times("attention", out, "causal=True", "seqlen=2048", label="hopper", rivals=_BEST_RIVALS, seconds=15,
                flag="FASTFORMER_HOPPER_ATTENTION", kernel="_attention_hopper_fwd_kernel")  # fmt: skip
    for name in list(TESTS)[2:]:
        yield tests(name, TESTS[name], 40)
    yield times("linear_cross_entropy", out)
    yield times("add_layer_norm", out, "rows=16384", "dim=512", "dim=4096")
    yield times("feed_forward", out, "dropout_p=0.1", "activation=relu")
    yield times("embedding", out, "dropout_p=0.1")
    yield times("rotary", out, "head_dim=64", "seqlen=4096")
    lengths = (f"seqlen={seqlen}" for seqlen in (64, 128, 512, 4096))
    yield times("decode_attention", out, "batch=1", "batch=256", *lengths)
    yield times("training_step", out, "lengths=multi30k")
    yield times("graph_decoding", out, "batch=1")
    yield times("decoding", out)


def later_steps(out: Path) -> Iterator[Step]:
    """What waits for a second machine: the tests of everything else, other tiles, and sizes that say less."""
    yield tests("others", other_tests(), 200)
    for head_dim in (64, 128):
        values = ("causal=True", "seqlen=2048", "dropout_p=0.0", f"head_dim={head_dim}")
        tune = [sys.executable, "-m", "benchmarks.tune_attention", "--shape", *values]
        yield Step(f"tune attention {' '.join(values)}", [(tune, {})], 120)
        # With the tiles that were found: all steps read OUT/tuning.json.
        yield times("attention", out, *values, label="tuned", rivals=_BEST_RIVALS, seconds=15)
    yield times("feed_forward", out, "dropout_p=0.1", "activation=relu", label="persistent", rivals=("fastformer",),
                flag="FASTFORMER_PERSISTENT_FEED_FORWARD", kernel="[persistent]")  # fmt: skip
    yield times("attention", out, "causal=False", "seqlen=2048")
    yield times("attention", out, "causal=True", "seqlen=64", "seqlen=512")
    yield times("masked_attention", out, "head_dim=128")
    yield times("packed_attention", out, "head_dim=128")
    yield times("add_layer_norm", out, "rows=2048", "dim=512", "dim=4096", "dropout_p=0.1")
    yield times("feed_forward", out, "dropout_p=0.1", "activation=gelu")
    yield times("rotary", out, "head_dim=64", "seqlen=512")
    yield times("graph_decoding", out, "batch=16")


def limit_of(step: Step) -> float:
    """The seconds after which a step counts as hanging: many times its estimate, but no more than a chunk."""
    return min(CHUNK, max(300.0, 4 * step.seconds))


def run_step(step: Step, out: Path, limit: float) -> dict[str, Any]:
    """Runs a step's commands side by side.

    Returns:
        "ok": whether all exit 0 (or 5: a shard without tests) in time and the kernel was launched; "failed": names of
        tests; "tails": the end of the log of each command that isn't right.
    """
    end = time.monotonic() + limit
    before = len(record.read(step.rows)) if step.rows.is_file() else 0
    running = []
    for number, (command, variables) in enumerate(step.commands):
        log = out / (step.key.replace(" ", "_") + (f".{number}" if len(step.commands) > 1 else "") + ".log")
        tuning = {"FASTFORMER_TUNING_FILE": str(out.absolute() / "tuning.json")}
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=record.ROOT, env=os.environ | tuning | variables, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        running.append((process, log))
    result: dict[str, Any] = {"ok": True, "failed": [], "tails": {}}
    for process, log in running:
        try:
            status = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
            process.wait()
            status = None
        text = log.read_text(errors="replace")
        result["failed"] += re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if status not in (0, 5):
            result["ok"] = False
            reason = f"took longer than {limit:.0f} s" if status is None else f"exit status {status}"
            result["tails"][log.name] = f"{reason}\n{text[-1500:]}"
    if step.kernel:
        rows = record.read(step.rows)[before:] if step.rows.is_file() else []
        launched = {name for row in rows for name in row.get("kernels", ()) if row["mode"] == "fwd"}
        if not any(step.kernel in name for name in launched):
            result |= {"ok": False, "launched": sorted(launched), "expected": step.kernel}
    return result


def work_through(
    todo: Sequence[Step],
    out: Path,
    resume: Path,
    minutes: float,
    run: Callable[[Step, Path, float], dict[str, Any]] = run_step,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs the steps that `resume` lacks until the minutes are spent. Returns the exit status (see the module)."""
    start = clock()
    done = {line["key"]: line["ok"] for line in record.read(resume)} if resume.exists() else {}
    ran = 0
    for step in todo:
        if step.key in done:
            continue
        # The first of a chunk always runs: a step that is longer than a chunk must not stop the plan.
        if ran and (clock() - start + step.seconds) / 60 > minutes:
            break
        ran += 1
        began = clock()
        line = {"key": step.key, **run(step, out, limit_of(step))}
        line["seconds"] = round(clock() - began, 1)
        record.append(resume, line)
        done[step.key] = bool(line["ok"])
        print(json.dumps(line), flush=True)
    left = [step.key for step in todo if step.key not in done]
    failed = [key for key, ok in done.items() if not ok]
    print(f"{len(done)} steps done, {len(failed)} failed {failed}, {len(left)} left", flush=True)
    return 3 if left else 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run_plan", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results, the logs and the tuning file")
    parser.add_argument("--resume", type=Path, help="file to go on from (default: OUT/gpu_run_plan.jsonl)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop before a step that would pass this")
    parser.add_argument("--list", action="store_true", help="print the steps with their seconds, and run none")
    options = parser.parse_args(arguments)
    todo = [*first_steps(options.out), *later_steps(options.out)]
    if options.list:
        for step in todo:
            print(f"{step.seconds:>5.0f} s  {step.key}")
        return 0
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device: on a CPU run `python -m benchmarks.compile_report`")
    options.out.mkdir(parents=True, exist_ok=True)
    resume = options.resume or options.out / "gpu_run_plan.jsonl"
    return work_through(todo, options.out, resume, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
