"""Everything that waits for a GPU, unattended, in chunks: check, then time, most important first.

    python -m benchmarks.gpu_run_plan --out DIR [--resume FILE] [--minutes 9]

Each step writes one JSON line to FILE (default DIR/gpu_run_plan.jsonl) as it ends. A run stops before a step once its
minutes are spent and is simply called again: steps that FILE has are skipped. What matters most fits one machine's
time; the rest waits for another machine, with FILE carried there. A step that fails is a line too, and the
others go on; where it left the device unusable (an illegal address) or hangs, they go on in the next call. Exit status:
0 all steps done and right, 3 steps are left (call again), 1 all done and something failed.

What is timed are the runner's cases (`benchmarks.run`): checked against fp64 first, rivals interleaved, the L2 cache
flushed before every turn; their rows go to DIR/cuda.jsonl. Reads nothing outside the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import record
from benchmarks.measure.case import Benchmark, Inputs, cast
from benchmarks.measure.execute import run_case
from benchmarks.measure.kernel_flags import HOPPER, PERSISTENT, Switch, not_theirs, switched_on
from benchmarks.measure.roofline import measure_machine
from benchmarks.measure.suites import benchmarks
from benchmarks.measure.timing import time_interleaved
from fastformer.graphs import Graphs

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]
SHARDS = min(14, os.cpu_count() or 1)

# What the steps of one machine may take in all by their estimates: it is lent for 30 minutes, and starting it and
# installing takes its share. A run of this program is cut at 10 minutes, so that a chunk has 9.
LEASE, CHUNK = 26 * 60, 9 * 60

# The files whose tests a step runs: first what only a GPU can show, in sizes of many tiles, then each op's own.
TESTS = {
    "attention": "tests/kernels/test_attention_gpu.py",
    "attention_hopper": "tests/kernels/test_attention_hopper_gpu.py",
    "rows": "tests/kernels/test_rows_gpu.py",
    **{
        stem: f"tests/kernels/test_{stem}.py tests/ops/test_{stem}.py"
        for stem in (
            "add_layer_norm",
            "feed_forward",
            "linear_cross_entropy",
            "embedding",
            "rotary",
            "decode_attention",
        )
    },
    "generation": "tests/generation/test_graph_engine_gpu.py",
    "models": "tests/models/test_backends.py tests/models/test_transformer.py tests/test_graphs.py "
    "tests/training/test_graph_updates_gpu.py",
}


@functools.cache
def other_tests() -> str:
    """The files that no step above has: of tests/ops and tests/kernels all, elsewhere those with tests for a GPU."""
    named = {path for files in TESTS.values() for path in files.split()}
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        on_device = path.parent.name in ("ops", "kernels") or "mark.gpu" in path.read_text(encoding="utf-8")
        if on_device and name not in named and path.name != "test_gpu_run_plan.py":
            found.append(name)
    return " ".join(found)


# Of attention's rivals those that are worth meeting twice: the others have been, and flex takes its time to compile.
BEST_RIVALS = ("fastformer", "sdpa flash", "sdpa cudnn")


class Step(NamedTuple):
    """One unit of work: its line's key, what it does, and about how many seconds it takes."""

    key: str
    run: Callable[[], Result]
    seconds: float = 15.0


def tests(files: str, log: Path, limit: float, shards: int = SHARDS) -> Callable[[], Result]:
    """A step: the GPU tests of some files (space between), in processes side by side, since most of it is compiling.

    What each prints is in LOG.0, LOG.1, ... from the first line on, and what failed by the limit is in the step's line.
    """
    arguments = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-rfE", "--tb=short", *files.split()]
    commands = [
        (arguments, os.environ | {"FASTFORMER_TEST_SHARD": f"{shard}/{shards}"}, log.with_name(f"{log.name}.{shard}"))
        for shard in range(shards)
    ]
    return lambda: run_side_by_side(commands, limit)


def run_side_by_side(commands: list[tuple[list[str], dict[str, str], Path]], limit: float) -> Result:
    """Runs (arguments, environment, log) all at once; right when all exit 0 (or 5: a shard without tests) in time."""
    end = time.monotonic() + limit
    running = []
    for arguments, environment, log in commands:
        with log.open("w") as file:
            process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        running.append((process, log))
    result: Result = {"ok": True, "failed": [], "tails": {}}
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
    return result


# The share of a step's estimate that the turns of its cases may take: compiling and checking take the rest.
TIMING = 0.5


def time_op(
    op: str,
    shape: dict[str, Any],
    results: Path,
    seconds: float,
    rivals: tuple[str, ...] = (),
    switch: Switch | None = None,
) -> Callable[[], Result]:
    """A step: the runner's own cases of one shape in bf16, in every mode; its rows go to `results`.

    Args:
        seconds: what the step takes by its estimate: passes that disagree go on for as long as that leaves.
        rivals: which, beside ours and the baseline; empty = all.
        switch: kernels that are off by default, with which ours is timed, in the modes that have any of them. Where a
            turn of ours didn't launch them, the line is wrong, and `results` has no row of the mode.
    """

    def run() -> Result:
        benchmark = benchmarks()[op]
        line: Result = {"ok": True, "wrong": {}, "refused": {}, "speedup": {}}
        if switch is not None:
            line |= {"switched_on": switch.name, "launched": {}}
        for mode in benchmark.modes:
            expected = frozenset() if switch is None else switch.expected(shape, mode)
            if switch is not None and not expected:
                line["refused"][f"{mode} {benchmark.ours}"] = f"{switch.name} has no kernel for it"
                continue
            with contextlib.nullcontext() if switch is None else switched_on(switch) as launched:
                outcome = run_case(
                    benchmark, shape, mode, torch.bfloat16, "cuda", providers=rivals, rounds=20,
                    seconds=TIMING * seconds / len(benchmark.modes),
                )  # fmt: skip
            line["wrong"] |= outcome.wrong
            line["refused"] |= outcome.refused
            if launched is not None:
                line["launched"][mode] = dict(launched)
                turns = sum(row["rounds"] for row in outcome.timed if row["provider"] == benchmark.ours)
                if (how := not_theirs(expected, launched, turns)) is not None:
                    line["wrong"].setdefault(benchmark.ours, f"{mode}: {how}")
                    continue
            for row in outcome.rows:
                named = {} if switch is None else {"switched_on": switch.name}
                record.append(results, record.environment("cuda") | row | named)
            for row in outcome.timed:
                line["speedup"][f"{mode} {row['provider']}"] = round(row["speedup"], 3)
        # A rival that errs is only left out; ours must be right.
        line["ok"] = benchmark.ours not in line["wrong"]
        return line

    return run


def inputs_of(benchmark: Benchmark, shape: dict[str, Any]) -> Inputs:
    """A benchmark's inputs in bf16."""
    return cast(benchmark.make_inputs(shape, "cuda"), torch.bfloat16)


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The function's work as a CUDA graph: what replays it. A rival that can't be captured leaves nothing broken."""

    def work() -> None:
        function()

    graphs = Graphs("cuda")
    graphs.warm_up(work)
    return graphs.capture(work).replay


def time_replays(op: str, shape: dict[str, Any], results: Path, seconds: float) -> Callable[[], Result]:
    """A step: `time_op`, then each provider that is right as a CUDA graph, which a decoding engine replays.

    The line has the microseconds of a replay and, as a share of the bandwidth of a copy, the bytes that the work needs.
    """

    def run() -> Result:
        line = time_op(op, shape, results, seconds / 2)()
        benchmark = benchmarks()[op]
        inputs = inputs_of(benchmark, shape)
        replays: dict[str, Callable[[], object]] = {}
        for name, call in benchmark.offered("cuda").items():
            if f"fwd {name}" not in line["speedup"]:
                continue
            try:
                replays[name] = captured(functools.partial(call, inputs, shape))
            except RuntimeError as error:  # a rival may wait for the host
                line["refused"][f"{name} as a graph"] = str(error)[:200]
                line["ok"] = line["ok"] and name != benchmark.ours
        timings = time_interleaved(replays, rounds=30, device="cuda", seconds=TIMING * seconds / 2)
        bandwidth = measure_machine(torch.bfloat16, "cuda").bandwidth
        moved = benchmark.moved(shape, "fwd", 2)
        line["replay_us"] = {name: round(1e6 * timing.p50, 2) for name, timing in timings.items()}
        line["of_copy"] = {name: round(moved / timing.p50 / bandwidth, 6) for name, timing in timings.items()}
        return line

    return run


def tune_attention(shape: dict[str, Any], kernel: str) -> Callable[[], Result]:
    """A step: time other tiles of one kernel at this shape and record the fastest in the tuning file."""

    def run() -> Result:
        from fastformer.kernels import _attention_configs as configs
        from fastformer.kernels import _tuning
        from fastformer.kernels import attention as kernels
        from fastformer.kernels import attention_backward as backward_kernels
        from fastformer.kernels._launch import architecture

        size = tuple(shape[name] for name in ("batch", "seqlen", "heads", "head_dim"))
        q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        seed = torch.arange(1, 3, device="cuda") if shape["dropout_p"] else None
        window_right = 0 if shape["causal"] else None
        scale = shape["head_dim"] ** -0.5
        problem = kernels.describe_dense(q, k, None, scale, None, window_right, shape["dropout_p"], seed)
        out, lse = kernels.launch_forward(q, k, v, None, problem)
        is_backward = kernel == "attention_bwd"
        call = configs.call_of(architecture(q), problem, q.dtype, "none")

        def launch(config: configs.Config) -> object:
            if is_backward:
                return backward_kernels.launch_backward(dout, q, k, v, out, lse, None, problem, False, config=config)
            return kernels.launch_forward(q, k, v, None, problem, config=config)

        def milliseconds(function: Callable[[], object]) -> float:
            return 1e3 * time_interleaved({"it": function}, rounds=8, device="cuda", seconds=0.5)["it"].p50

        candidates = [
            configs.Config(block_m, block_n, warps, stages, maxnreg=most)
            for block_m in ((32, 64) if is_backward else (64, 128))
            for block_n in (64, 128)
            for warps in (4, 8)
            for stages in (2, 3)
            # 128 registers a thread: two programs of eight warps an SM.
            for most in ((None, 128) if warps == 8 and not is_backward else (None,))
        ]
        if is_backward:  # dq by a kernel of its own, seven products in place of five and an atomic sum
            candidates += [config._replace(split=True) for config in candidates if config.num_stages == 2]
        timed, failed = _tuning.tune(kernel, call, candidates, launch, milliseconds)
        fastest = [{"config": list(config), "milliseconds": value} for value, config in timed[:6]]
        return {"ok": bool(timed), "shape": shape, "call": list(call), "fastest": fastest, "failed": failed}

    return run


# Of the runner's shapes those that a first machine has time for; an op that is not here has all of them there.
_FIRST: dict[str, Callable[[dict[str, Any]], bool]] = {
    "attention": lambda shape: shape["causal"] and shape["seqlen"] in (256, 2048, 8192),
    "masked_attention": lambda shape: shape["head_dim"] == 64,
    "packed_attention": lambda shape: shape["head_dim"] == 64 and shape["causal"],
    "add_layer_norm": lambda shape: shape["dim"] != 1024 and shape["rows"] > 2048,
    "feed_forward": lambda shape: shape["dropout_p"] > 0 and shape["activation"] == "relu",
    "embedding": lambda shape: shape["dropout_p"] > 0,
    "rotary": lambda shape: shape["head_dim"] == 64 and shape["seqlen"] > 512,
    "decode_attention": lambda shape: shape["batch"] in (1, 256) and shape["seqlen"] <= 4096,
    "graph_decoding": lambda shape: shape["batch"] == 1,
    "training_step": lambda shape: shape["lengths"] == "multi30k",
}
# And those that a second one has time for.
_LATER: dict[str, Callable[[dict[str, Any]], bool]] = {
    "attention": lambda shape: shape["seqlen"] == 2048 or (shape["causal"] and shape["seqlen"] != 128),
    "masked_attention": lambda shape: True,
    "packed_attention": lambda shape: True,
    "add_layer_norm": lambda shape: shape["dim"] != 1024 and shape["dropout_p"] > 0,
    "feed_forward": lambda shape: shape["dropout_p"] > 0,
    "rotary": lambda shape: shape["head_dim"] == 64,
    "graph_decoding": lambda shape: True,
}


def shapes_of(op: str, *, later: bool = False) -> list[dict[str, Any]]:
    """Those of the runner's shapes that a first machine has time for, or (later) those that a second one has."""
    shapes = benchmarks()[op].shapes["cuda"]
    first = [shape for shape in shapes if op not in _FIRST or _FIRST[op](shape)]
    if not later:
        return first
    return [shape for shape in shapes if op in _LATER and shape not in first and _LATER[op](shape)]


def times_of(op: str, results: Path, *, later: bool = False) -> Iterator[Step]:
    """An op's steps for `shapes_of`."""
    for shape in shapes_of(op, later=later):
        seconds = _SECONDS.get(op, 15.0)
        # Beside gpt2 there is Hugging Face, whose step is compiled first.
        if op == "graph_decoding" and shape["model"] == "gpt2":
            seconds = 75.0
        time_it = time_replays if op == "decode_attention" else time_op
        yield Step(f"time {op} {name_of(shape)}", time_it(op, shape, results, seconds), seconds)


# Most of a training step's is torch.compile's time for the rival, twelve layers forward and backward.
_SECONDS = {
    "attention": 30.0,
    "masked_attention": 30.0,
    "packed_attention": 30.0,
    "decode_attention": 12.0,
    "decoding": 20.0,
    "graph_decoding": 20.0,
    "training_step": 120.0,
}


def steps(out: Path) -> Iterator[Step]:
    """The day, most important first. Rows of the runner go to OUT/cuda.jsonl.

    A new step is `yield Step("time a_new_thing", function, seconds)` at the place that its weight gives it, where
    `function()` returns {"ok": whether it is right, ...}. Tests add the seconds up: all but the last part must stay
    within LEASE, and so must that.
    """
    yield from first_steps(out)
    yield from later_steps(out)


def first_steps(out: Path) -> Iterator[Step]:
    """What one machine has time for: whether every op is right, and how fast it is in the sizes that count."""
    results = out / "cuda.jsonl"
    yield Step("environment", lambda: record.environment("cuda") | {"ok": True}, 5)

    # Attention: right, and how fast beside its rivals.
    yield Step("tests attention", tests(TESTS["attention"], out / "tests_attention.log", 480), 200)
    for op in ("attention", "masked_attention", "packed_attention"):
        yield from times_of(op, results)

    # The kernels for sm_90, which are off by default: right, and the same rivals beside them.
    yield Step("tests attention_hopper", tests(TESTS["attention_hopper"], out / "tests_attention_hopper.log", 240), 90)
    for shape in shapes_of("attention"):
        if shape["seqlen"] == 2048:
            step = time_op("attention", shape, out / "cuda_hopper.jsonl", 15, BEST_RIVALS, HOPPER)
            yield Step(f"time attention_hopper {name_of(shape)}", step, 15)

    # The other ops.
    for stem in list(TESTS)[2:]:
        yield Step(f"tests {stem}", tests(TESTS[stem], out / f"tests_{stem}.log", 240), 40)
    for op in ("linear_cross_entropy", "add_layer_norm", "feed_forward", "embedding", "rotary", "decode_attention"):
        yield from times_of(op, results)

    # Whole models: training, decoding.
    for op in ("training_step", "graph_decoding", "decoding"):
        yield from times_of(op, results)


def later_steps(out: Path) -> Iterator[Step]:
    """What waits for a second machine: the tests of everything else, other tiles, and sizes that say less."""
    yield Step("tests others", tests(other_tests(), out / "tests_others.log", 480), 200)

    # Other tiles, and what they bring.
    for shape in shapes_of("attention"):
        if shape["seqlen"] == 2048 and (shape["head_dim"] == 64 or not shape["dropout_p"]):
            for kernel in ("attention_fwd", "attention_bwd"):
                yield Step(f"tune {kernel} {name_of(shape)}", tune_attention(shape, kernel), 60)
            # With the tiles that the tuning found: OUT/tuning.json, which main() makes the tuning file.
            step = time_op("attention", shape, out / "cuda_tuned.jsonl", 15, BEST_RIVALS)
            yield Step(f"time tuned attention {name_of(shape)}", step, 15)

    # The feed-forward product as a fixed grid, which is off by default: where its tiles are many.
    for shape in shapes_of("feed_forward"):
        step = time_op("feed_forward", shape, out / "cuda_persistent.jsonl", 15, ("fastformer",), PERSISTENT)
        yield Step(f"time persistent feed_forward {name_of(shape)}", step, 15)

    for op in _LATER:
        yield from times_of(op, out / "cuda.jsonl", later=True)


def name_of(shape: dict[str, Any]) -> str:
    """A shape in one word a value."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def work_through(
    todo: list[Step],
    resume: Path,
    minutes: float,
    clock: Callable[[], float] = time.monotonic,
    settle: Callable[[], object] = lambda: None,
) -> int:
    """Runs the steps that `resume` lacks until the minutes are spent.

    Args:
        settle: waits for the device, and raises what has gone wrong on it: in the step that caused it, not the next.

    Returns:
        The exit status (see the module's docstring).
    """
    start = clock()
    lines = [json.loads(line) for line in resume.read_text().splitlines()] if resume.exists() else []
    done = {line["key"]: line["ok"] for line in lines}
    ran = 0
    for step in todo:
        if step.key in done:
            continue
        # The first of a chunk always runs: a step that is longer than a chunk must not stop the day.
        if ran and (clock() - start + step.seconds) / 60 > minutes:
            break
        ran += 1
        began, lost = clock(), False
        watchdog = threading.Timer(limit_of(step), give_up, (step, resume))
        watchdog.daemon = True
        watchdog.start()
        try:
            result = step.run()
            settle()
        except Exception as error:  # one failed step must not lose the others
            result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:1000]}"}
            lost = not _usable(settle)
        watchdog.cancel()
        line = {"key": step.key, "seconds": round(clock() - began, 1), **result}
        _write(resume, line)
        done[step.key] = bool(line["ok"])
        print(json.dumps(line), flush=True)
        if lost:
            print("the device answers nothing more in this process: call again", flush=True)
            break
    left = [step.key for step in todo if step.key not in done]
    failed = [key for key, ok in done.items() if not ok]
    print(f"{len(done)} steps done, {len(failed)} failed {failed}, {len(left)} left", flush=True)
    return 3 if left else 1 if failed else 0


def limit_of(step: Step) -> float:
    """The seconds after which a step counts as hanging: many times its estimate, but no more than a chunk."""
    return min(CHUNK, max(300.0, 4 * step.seconds))


def give_up(step: Step, resume: Path) -> None:
    """Ends the process, whose main thread waits for a kernel that never ends; the next call skips the step."""
    error = f"took longer than {limit_of(step):.0f} s: the process was ended"
    _write(resume, {"key": step.key, "seconds": limit_of(step), "ok": False, "error": error})
    os._exit(3)


def _write(resume: Path, line: Result) -> None:
    with resume.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _usable(settle: Callable[[], object]) -> bool:
    try:
        settle()
    except Exception:  # an error of the device stays with the process
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results and the tuning file")
    parser.add_argument("--resume", type=Path, help="file to go on from (default: OUT/gpu_run_plan.jsonl)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop before a step that would pass this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device: on a CPU run `python -m benchmarks.compile_report`")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["FASTFORMER_TUNING_FILE"] = str(args.out.absolute() / "tuning.json")
    resume = args.resume or args.out / "gpu_run_plan.jsonl"
    return work_through(list(steps(args.out)), resume, args.minutes, settle=torch.cuda.synchronize)


if __name__ == "__main__":
    sys.exit(main())
