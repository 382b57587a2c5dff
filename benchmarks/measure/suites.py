"""Finds the cases, and those that a command requests."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases.ops.installed import with_installed
from benchmarks.measure.case import SUITES, Benchmark, Shape
from benchmarks.measure.record import ROOT

DEFAULT = tuple(suite for suite in SUITES if suite != "experiments")  # most experiments measure no speed


class Case(NamedTuple):
    """One comparison: the providers run side by side."""

    benchmark: Benchmark
    shape: dict[str, Any]
    mode: str
    dtype: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.shape.items())
        return f"{self.benchmark.name} {self.mode} {self.dtype} {sizes}"


def benchmarks() -> dict[str, Benchmark]:
    """Returns all benchmarks by name, from the files bench_*.py in `cases`."""
    by_name = {}
    for path in sorted((ROOT / "benchmarks").glob("cases/*/bench_*.py")):
        for benchmark in importlib.import_module(f"benchmarks.cases.{path.parent.name}.{path.stem}").BENCHMARKS:
            by_name[benchmark.name] = with_installed(benchmark)
    return by_name


def asked_for(available: dict[str, Benchmark], options: argparse.Namespace) -> list[Benchmark]:
    """Returns the benchmarks of --suite and --op, suite by suite; --op alone searches every suite."""
    suites = options.suite or (SUITES if options.op else DEFAULT)
    selected = [benchmark for benchmark in available.values() if benchmark.suite in suites]
    if options.op:
        selected = [benchmark for benchmark in selected if benchmark.name in options.op]
    return sorted(selected, key=lambda benchmark: (SUITES.index(benchmark.suite), benchmark.name))


def chosen_cases(available: dict[str, Benchmark], options: argparse.Namespace) -> Iterator[Case]:
    """Yields all cases that the command requests.

    --quick runs each benchmark's first shapes, as many as it declares, in its first dtype, and of its modes the first
    and
    the last: forward, and forward with backward. --mode and --dtype override these.
    """
    for benchmark in asked_for(available, options):
        shapes = benchmark.shapes.get(options.device, [])
        modes, dtypes = benchmark.modes, benchmark.dtypes
        if options.quick:
            shapes = shapes[: benchmark.quick]
            modes = modes if options.mode else tuple(dict.fromkeys((modes[0], modes[-1])))
            dtypes = dtypes if options.dtype else dtypes[:1]
        for shape in shapes:
            if not has_values(shape, options.shape):
                continue
            for dtype in (d for d in dtypes if not options.dtype or d in options.dtype):
                for mode in (m for m in modes if not options.mode or m in options.mode):
                    if mode == "replay" and options.device == "cpu":
                        continue
                    yield Case(benchmark, shape, mode, dtype)


def key_value(text: str) -> tuple[str, str]:
    """Parses one `--shape` argument."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, such as seqlen=2048, got {text!r}")
    return name, value


def has_values(shape: Shape, pairs: Iterable[tuple[str, str]]) -> bool:
    """Returns whether a shape has the wanted values; if a name has several wanted values, any of them."""
    return all(str(shape.get(name)) in values for name, values in _by_name(pairs).items())


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for name, value in pairs:
        values.setdefault(name, set()).add(str(value))
    return values


def nothing_fits(available: dict[str, Benchmark], options: argparse.Namespace, chosen: Sequence[Case]) -> str | None:
    """Returns a message if a filter leaves nothing to measure: the existing values. None if something is left."""
    selected = asked_for(available, options)
    if not selected:
        names, suites = ", ".join(options.op or available), ", ".join(options.suite or DEFAULT)
        return f"no benchmark of {names} is of the suites {suites}"
    providers = {provider for benchmark in selected for provider in benchmark.offered(options.device)}
    if unknown := set(options.provider or ()) - providers:
        return f"expected providers out of {sorted(providers)}, got {sorted(unknown)}"
    if chosen:
        return None
    shapes = [shape for benchmark in selected for shape in benchmark.shapes.get(options.device, [])]
    values = _by_name(pair for shape in shapes for pair in shape.items())
    of_shape = ", ".join(f"{name}={'|'.join(sorted(options_of))}" for name, options_of in values.items())
    return (
        f"no case on {options.device} fits all of that. {', '.join(benchmark.name for benchmark in selected)} have "
        f"modes {sorted({mode for benchmark in selected for mode in benchmark.modes})}, "
        f"dtypes {sorted({dtype for benchmark in selected for dtype in benchmark.dtypes})}, shapes with {of_shape}"
        + (f"; --quick leaves out {', '.join(b.name for b in selected if not b.quick)}" if options.quick else "")
    )


def listing(cases: Sequence[Case], device: str, providers: Sequence[str]) -> str:
    """Formats what would run: each benchmark's cases, its providers, and the omitted ones with the reason."""
    lines: list[str] = []
    suite, benchmark = None, None
    for case in cases:
        if case.benchmark.suite != suite:
            suite = case.benchmark.suite
            lines.append(f"{suite}:")
        if case.benchmark is not benchmark:
            benchmark = case.benchmark
            there = chosen_providers(benchmark, device, providers)
            lines.append(f"  {benchmark.name}: {', '.join(there)}")
            for name, device_of in benchmark.only_on.items():
                if device_of != device and name in benchmark.providers:
                    lines.append(f"    without {name}: it is for {device_of} alone")
            lines += [f"    without {name}: {how}" for name, how in benchmark.missing(device).items()]
        lines.append(f"    {case}")
        for name in there:
            if (reason := benchmark.left_out(name, case.shape)) is not None:
                lines.append(f"      without {name}: {reason}")
    return "\n".join(lines)


def chosen_providers(benchmark: Benchmark, device: str, providers: Sequence[str]) -> list[str]:
    """Returns the names of the installed providers, in order: all, or fastformer, the baseline and the wanted ones."""
    missing = benchmark.missing(device)
    there = [name for name in benchmark.offered(device) if name not in missing]
    return [name for name in there if not providers or name in {benchmark.ours, benchmark.baseline, *providers}]
