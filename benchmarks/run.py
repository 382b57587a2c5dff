"""The one runner: checks every provider against fp64, then times them interleaved.

    python -m benchmarks.run                               everything, on the GPU if there is one
    python -m benchmarks.run --op attention --mode fwd     some of it
    python -m benchmarks.run --out benchmarks/results/cpu.jsonl
    python -m benchmarks.run --compare old.jsonl new.jsonl

A provider that disagrees is not timed and the exit status is 1: a wrong result has no speed. Nor is a rival that
torch.compile left uncompiled, or ours where plain PyTorch ran in the place of every kernel: the reason is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("FASTFORMER_STRICT", "1")  # nothing is measured on a silent fallback

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks import record  # noqa: E402
from benchmarks.case import Benchmark, Inputs, Provider, Shape, cast, outputs_of, results, timed_call  # noqa: E402
from benchmarks.timing import keep_freed_memory, measure_machine, peak_bytes, time_interleaved  # noqa: E402
from fastformer.ops import record_backends, use_backend  # noqa: E402

ROOT = Path(__file__).parents[1]


def benchmarks() -> dict[str, Benchmark]:
    """All benchmarks, from the bench_*.py in the folders beside this file."""
    found = {}
    for path in sorted((ROOT / "benchmarks").glob("*/bench_*.py")):
        for benchmark in importlib.import_module(f"benchmarks.{path.parent.name}.{path.stem}").BENCHMARKS:
            found[benchmark.name] = benchmark
    return found


@dataclass
class Outcome:
    """What came of one case: a row for each provider that was timed, and why the others were not.

    Attributes:
        rows: as they are written.
        wrong: provider -> how it disagrees.
        refused: provider -> why it can't take the case.
        backends: provider -> the ops of this library that it called, and where they ran.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    backends: dict[str, dict[str, str]] = field(default_factory=dict)


def run_case(
    benchmark: Benchmark,
    shape: dict[str, Any],
    mode: str,
    dtype: torch.dtype,
    device: str,
    *,
    providers: Collection[str] = (),
    rounds: int = 15,
    seconds: float = 60.0,
) -> Outcome:
    """Checks the providers of one case and times those that are right, side by side.

    Args:
        providers: which, besides ours and the baseline; empty = all.
        rounds, seconds: see `time_interleaved`.

    Raises:
        Exception: whatever ours or the baseline raises; a rival that can't take the case is left out instead.
    """
    outcome = Outcome()
    chosen = benchmark.offered(device)
    if providers:
        chosen = {n: call for n, call in chosen.items() if n in {benchmark.ours, benchmark.baseline, *providers}}
    # torch.compile gives a function up after eight shapes and goes on eagerly: every case begins anew.
    torch._dynamo.reset()
    graphs: dict[str, int] = dict.fromkeys(chosen, 0)
    watched = {name: _counting_graphs(name, call, graphs) for name, call in chosen.items()}
    _check(benchmark, watched, shape, mode, dtype, device, outcome)
    torch.manual_seed(0)
    inputs = cast(benchmark.make_inputs(shape, device), dtype)
    for name, call in watched.items():
        if name not in outcome.wrong and name not in outcome.refused:
            _identify(benchmark, name, call, inputs, shape, mode, graphs, outcome)
    calls = {
        name: timed_call(call, inputs, shape, mode)
        for name, call in chosen.items()
        if name not in outcome.wrong and name not in outcome.refused
    }
    if (outcome.wrong.keys() | outcome.refused.keys()) & {benchmark.ours, benchmark.baseline}:
        return outcome
    timings = time_interleaved(calls, rounds=rounds, device=device, seconds=seconds)
    flops, moved = benchmark.flops(shape, mode), benchmark.moved(shape, mode, dtype.itemsize)
    floor = measure_machine(dtype, device).floor(flops, moved) if flops or moved else None
    base = timings[benchmark.baseline].p50
    for name, timing in timings.items():
        outcome.rows.append(
            {
                "op": benchmark.name,
                "mode": mode,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": dict(shape),
                "provider": name,
                "ms_p50": 1e3 * timing.p50,
                "ms_p20": 1e3 * timing.p20,
                "ms_p80": 1e3 * timing.p80,
                "speedup": base / timing.p50,
                "baseline": benchmark.baseline,
                "tflop_s": flops / timing.p50 / 1e12 if flops else None,
                "gb_s": moved / timing.p50 / 1e9 if moved else None,
                "tokens_s": benchmark.tokens(shape) / timing.p50 if benchmark.tokens else None,
                "floor_ms": 1e3 * floor if floor else None,
                "peak_mib": peak_bytes(calls[name], device) / 2**20,
                "backends": outcome.backends[name],
            }
        )
    return outcome


def _check(
    benchmark: Benchmark,
    providers: dict[str, Provider],
    shape: dict[str, Any],
    mode: str,
    dtype: torch.dtype,
    device: str,
    outcome: Outcome,
) -> None:
    """Names the providers that are wrong at the benchmark's shape to check: error over 3x the baseline's and 2 ulp.

    Integer results, such as tokens, have to be equal, but for what the benchmark's `agreement` allows. With dropout the
    oracle is our reference backend, which draws the same mask, and ours alone is checked.
    """
    shape = dict(benchmark.checked(shape))
    ours = providers[benchmark.ours]
    oracle, backend = providers[benchmark.baseline], None
    if shape.get("dropout_p"):
        providers, oracle, backend = {benchmark.ours: ours}, ours, "reference"
    torch.manual_seed(0)
    # Values that the dtype holds, so that all start from the same numbers.
    inputs = cast(cast(benchmark.make_inputs(shape, device), dtype), torch.float32)
    with use_backend(backend):
        outputs = outputs_of(oracle(cast(inputs, torch.float64), shape))
        douts = [torch.randn_like(output) for output in outputs if output.requires_grad]
        exact = results(oracle, cast(inputs, torch.float64), shape, mode, douts)
        plain = results(oracle, cast(inputs, dtype), shape, mode, douts)
    for name, call in providers.items():
        try:
            found = results(call, cast(inputs, dtype), shape, mode, douts)
        except Exception as error:
            if name in (benchmark.ours, benchmark.baseline):
                raise
            outcome.refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        for index, (value, theirs, right) in enumerate(zip(found, plain, exact, strict=True)):
            if (how := _difference(value, theirs, right, dtype, benchmark.agreement.get(name, 1.0))) is not None:
                outcome.wrong[name] = f"tensor {index}: {how}"


def _counting_graphs(name: str, call: Provider, graphs: dict[str, int]) -> Provider:
    """The provider, adding up how many graphs torch.compile makes of it."""

    def counted(x: Inputs, shape: Shape) -> Any:
        before = counters["stats"]["unique_graphs"]
        try:
            return call(x, shape)
        finally:
            graphs[name] += counters["stats"]["unique_graphs"] - before

    return counted


def _identify(
    benchmark: Benchmark,
    name: str,
    call: Provider,
    inputs: Inputs,
    shape: dict[str, Any],
    mode: str,
    graphs: dict[str, int],
    outcome: Outcome,
) -> None:
    """Notes which backends a provider runs on, and refuses one that isn't what it is called.

    What torch.compile left alone is eager, and ours without any kernel is plain PyTorch.
    """
    try:
        with record_backends() as ran:
            results(call, inputs, shape, mode, None)
    except Exception as error:
        if name in (benchmark.ours, benchmark.baseline):
            raise
        outcome.refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
        return
    backends = {op: "+".join(sorted(backend for other, backend in ran if other == op)) for op, _ in sorted(ran)}
    outcome.backends[name] = backends
    if name in benchmark.compiled and not graphs[name]:
        outcome.refused[name] = "torch.compile did not compile it"
    elif name == benchmark.ours and backends and set(backends.values()) == {"reference"}:
        outcome.refused[name] = f"no kernel ran, only the reference of {', '.join(backends)}"


def _difference(
    value: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, agreement: float
) -> str | None:
    if not exact.is_floating_point():
        if value.shape != exact.shape:
            return f"shape {tuple(value.shape)} in place of {tuple(exact.shape)}"
        same = int((value == exact).sum())
        return None if same >= agreement * exact.numel() else f"{exact.numel() - same} other integers"
    if exact.numel() == 0:
        return None
    error, error_plain = (float((t.detach().double() - exact.detach().double()).abs().max()) for t in (value, plain))
    allowed = 3 * error_plain + 2 * torch.finfo(dtype).eps * float(exact.detach().abs().max())
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.2e}"


def table(row: dict[str, Any]) -> str:
    """A row for people: the ratio first, the absolute time with its spread behind it."""
    parts = [f"    {row['provider']:<20} {row['speedup']:>6.2f}x"]
    parts.append(f"{row['ms_p50']:>10.3f} ms [{row['ms_p20']:.3f}, {row['ms_p80']:.3f}]")
    if row["tflop_s"]:
        parts.append(f"{1e3 * row['tflop_s']:>8.0f} GFLOP/s")
    elif row["gb_s"]:
        parts.append(f"{row['gb_s']:>8.1f} GB/s")
    if row["tokens_s"]:
        parts.append(f"{row['tokens_s']:>9,.0f} tokens/s")
    if row["floor_ms"]:
        parts.append(f"floor {row['floor_ms']:.3f} ms")
    parts.append(f"peak {row['peak_mib']:.0f} MiB")
    if row["backends"]:
        parts.append("on " + ", ".join(sorted(set(row["backends"].values()))))
    return "  ".join(parts)


def compare(old: Path, new: Path) -> str:
    """Old over new, line by line: above 1 is faster now. Lines of all kinds may share a file.

    Raises:
        ValueError: a file that is not there, or a line that is not a JSON object.
    """
    before = {record.key(row): row for row in record.read(old)}
    lines = []
    for row in record.read(new):
        known = before.get(record.key(row))
        now, then = record.seconds(row), None if known is None else record.seconds(known)
        if known is None or now is None or then is None:
            continue
        parts = [f"{then / now:>6.2f}x"]
        if "speedup" in row and "speedup" in known:
            against = f"against {row['baseline']}: " if "baseline" in row else ""
            parts.append(f"({against}{known['speedup']:.2f}x -> {row['speedup']:.2f}x)")
        if known.get("backends", row.get("backends")) != row.get("backends"):
            parts.append(f"(other backends: {known['backends']} -> {row.get('backends')})")
        lines.append("  ".join([*parts, " ".join(record.key(row))]))
    return "\n".join(lines) or "no line of one file has a line about the same thing, with a time, in the other"


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for. Returns 1 when a provider disagreed; exits with 2 where nothing fits the command."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=sorted(known), help="which benchmarks (all)")
    parser.add_argument("--mode", nargs="+", choices=("fwd", "bwd", "fwdbwd", "step"), help="which passes (all)")
    parser.add_argument("--dtype", nargs="+", help="which dtypes, such as float32 (all)")
    parser.add_argument("--shape", nargs="+", type=key_value, default=[], help="such as seqlen=2048 (all)")
    parser.add_argument("--provider", nargs="+", help="which providers, besides ours and the baseline (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one small shape an op, few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each provider")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long one shape may take")
    parser.add_argument("--warm-malloc", action="store_true", help="no page faults: malloc keeps what is freed (glibc)")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two files of results")
    options = parser.parse_args(arguments)
    if options.compare:
        try:
            print(compare(*options.compare))
        except ValueError as error:
            parser.error(str(error))
        return 0
    chosen = list(chosen_cases(known, options))
    if (complaint := nothing_fits(known, options, chosen)) is not None:
        parser.error(complaint)
    if options.quick:
        options.rounds, options.seconds = 5, 4.0

    if options.warm_malloc:
        keep_freed_memory()
    shared = record.environment(options.device)
    print(f"{shared['device']}, {shared['threads']} threads, torch {shared['torch']}, commit {shared['commit']}")
    failed = False
    for benchmark, shape, mode, dtype in chosen:
        print(f"\n{benchmark.name} {mode} {dtype} " + " ".join(f"{k}={v}" for k, v in shape.items()), flush=True)
        outcome = run_case(
            benchmark, shape, mode, getattr(torch, dtype), options.device, providers=options.provider or (),
            rounds=options.rounds, seconds=options.seconds,
        )  # fmt: skip
        for row in outcome.rows:
            print(table(row), flush=True)
            if options.out:
                record.append(options.out, row | shared)
        for name, how in outcome.refused.items():
            print(f"    {name} was not timed: {how}")
        for name, how in outcome.wrong.items():
            print(f"    {name} is wrong and was not timed: {how}")
            failed = True
    return 1 if failed else 0


Chosen = tuple[Benchmark, dict[str, Any], str, str]


def chosen_cases(known: dict[str, Benchmark], options: argparse.Namespace) -> Iterator[Chosen]:
    """(benchmark, shape, mode, dtype's name) of all that the command asks for."""
    for name in options.op or sorted(known):
        benchmark = known[name]
        shapes = benchmark.shapes.get(options.device, [])
        for shape in shapes[: benchmark.quick] if options.quick else shapes:
            if not all(str(shape.get(key)) == value for key, value in options.shape):
                continue
            for dtype in (d for d in benchmark.dtypes if not options.dtype or d in options.dtype):
                for mode in (m for m in benchmark.modes if not options.mode or m in options.mode):
                    yield benchmark, shape, mode, dtype


def nothing_fits(known: dict[str, Benchmark], options: argparse.Namespace, chosen: list[Chosen]) -> str | None:
    """What to say where a filter leaves nothing to measure: what there is. None where something is left."""
    asked = [known[name] for name in options.op or sorted(known)]
    providers = {provider for benchmark in asked for provider in benchmark.offered(options.device)}
    if unknown := set(options.provider or ()) - providers:
        return f"expected providers out of {sorted(providers)}, got {sorted(unknown)}"
    if chosen:
        return None
    shapes = [shape for benchmark in asked for shape in benchmark.shapes.get(options.device, [])]
    values: dict[str, set[str]] = {}
    for shape in shapes:
        for name, value in shape.items():
            values.setdefault(name, set()).add(str(value))
    of_shape = ", ".join(f"{name}={'|'.join(sorted(each))}" for name, each in values.items())
    return (
        f"no case on {options.device} fits all of that. {', '.join(benchmark.name for benchmark in asked)} have "
        f"modes {sorted({mode for benchmark in asked for mode in benchmark.modes})}, "
        f"dtypes {sorted({dtype for benchmark in asked for dtype in benchmark.dtypes})}, shapes with {of_shape}"
        + (f"; --quick leaves out {', '.join(b.name for b in asked if not b.quick)}" if options.quick else "")
    )


def key_value(text: str) -> tuple[str, str]:
    """One `--shape` argument."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, such as seqlen=2048, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
