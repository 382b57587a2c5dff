"""The one runner: checks every provider against fp64, then times them interleaved.

    python -m benchmarks.run                               all suites but the experiments, on the GPU if there is one
    python -m benchmarks.run --suite ops decoding --quick  small shapes of some
    python -m benchmarks.run --op attention --mode fwd     some of one
    python -m benchmarks.run --suite scaling --list        what would run, with what is missing and why
    python -m benchmarks.run --out benchmarks/results/cpu.jsonl
    python -m benchmarks.run --compare old.jsonl new.jsonl

A provider that disagrees is not timed and the exit status is 1: a wrong result has no speed. Nor is a rival that
torch.compile left uncompiled, or ours where plain PyTorch ran in the place of every kernel: the reason is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("FASTFORMER_STRICT", "1")  # nothing is measured on a silent fallback

import torch  # noqa: E402

from benchmarks import fits, record  # noqa: E402
from benchmarks.case import SUITES  # noqa: E402
from benchmarks.comparing import compare  # noqa: E402
from benchmarks.execute import run_case  # noqa: E402
from benchmarks.suites import benchmarks, chosen_cases, listing, nothing_fits  # noqa: E402
from benchmarks.timing import keep_freed_memory  # noqa: E402


def table(row: dict[str, Any]) -> str:
    """A row for people: the ratio first, the absolute time with its spread behind it."""
    if "missing" in row:
        return f"    {row['provider']:<20} is missing: {row['missing']}"
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


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for. Returns 1 when a provider disagreed; exits with 2 where nothing fits the command."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", choices=SUITES, help="which suites (all but the experiments)")
    parser.add_argument("--op", nargs="+", choices=sorted(known), help="which benchmarks (all)")
    parser.add_argument("--mode", nargs="+", choices=("fwd", "bwd", "fwdbwd", "step"), help="which passes (all)")
    parser.add_argument("--dtype", nargs="+", help="which dtypes, such as float32 (all)")
    parser.add_argument("--shape", nargs="+", type=key_value, default=[], help="such as seqlen=2048 (all)")
    parser.add_argument("--provider", nargs="+", help="which providers, besides ours and the baseline (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, one dtype, few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each provider")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long one shape may take")
    parser.add_argument("--warm-malloc", action="store_true", help="no page faults: malloc keeps what is freed (glibc)")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two files of results")
    parser.add_argument("--list", action="store_true", help="print what would run, and what is missing and why")
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
    if options.list:
        print(listing(chosen, options.device, options.provider or ()))
        return 0
    if options.quick:
        options.rounds, options.seconds = 5, 4.0

    if options.warm_malloc:
        keep_freed_memory()
    shared = record.environment(options.device)
    print(f"{shared['device']}, {shared['threads']} threads, torch {shared['torch']}, commit {shared['commit']}")
    failed, scaling = False, []
    for case in chosen:
        benchmark, shape, mode, dtype = case
        print(f"\n{case}", flush=True)
        outcome = run_case(
            benchmark, shape, mode, getattr(torch, dtype), options.device, providers=options.provider or (),
            rounds=options.rounds, seconds=options.seconds,
        )  # fmt: skip
        for row in outcome.rows:
            print(table(row), flush=True)
            if benchmark.suite == "scaling":
                scaling.append(shared | row)
            if options.out:
                record.append(options.out, shared | row)
        for name, how in outcome.refused.items():
            print(f"    {name} was not timed: {how}")
        for name, how in outcome.wrong.items():
            print(f"    {name} is wrong and was not timed: {how}")
            failed = True
    if scaling:
        print("\n" + fits.report(scaling))
    return 1 if failed else 0


def key_value(text: str) -> tuple[str, str]:
    """One `--shape` argument."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, such as seqlen=2048, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
