"""The runner: checks every provider against fp64, then times the providers in interleaved turns.

    python -m benchmarks.run                               all suites but the experiments, on the GPU if there is one
    python -m benchmarks.run --suite ops decoding --quick  small shapes of some suites
    python -m benchmarks.run --op attention --mode fwd     some cases of one op
    python -m benchmarks.run --suite scaling --list        what would run, and what is missing with the reason
    python -m benchmarks.run --out benchmarks/results/cpu.jsonl
    python -m benchmarks.run --compare old.jsonl new.jsonl
    python -m benchmarks.run --op small_work small_work_training --publish   record, then write the tables

Cases are checked, and then timed in passes over all of them (at most 24 at once), so that the results of a case in
different minutes can be compared. Their rows are written when the last pass is over, or when you stop the run (Ctrl-C,
SIGTERM). `--rounds` is the number of passes, and `--seconds` the time for a case in all of them, including further
passes over cases that disagree.

The end of the output compares fastformer with each rival, and names the cases that it loses, and those that were
disturbed, unsteady, refused, wrong or missing. A provider with a wrong result is not timed; if it is fastformer or the
baseline, the exit status is 1. A rival that torch.compile left uncompiled is not timed either, nor is fastformer if
plain PyTorch ran instead of every kernel: the reason is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("FASTFORMER_STRICT", "1")  # a silent fallback must not be measured

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks import plot, readme  # noqa: E402
from benchmarks.experiments import EXPERIMENTS  # noqa: E402
from benchmarks.measure import record, scaling_fits  # noqa: E402
from benchmarks.measure.case import SUITES  # noqa: E402
from benchmarks.measure.commands import parser_of  # noqa: E402
from benchmarks.measure.comparing import compare  # noqa: E402
from benchmarks.measure.console import summary, table, title  # noqa: E402
from benchmarks.measure.execute import Outcome, run_cases  # noqa: E402
from benchmarks.measure.suites import DEFAULT, Case, benchmarks, chosen_cases, key_value, listing, nothing_fits  # noqa: E402
from benchmarks.measure.timing import keep_freed_memory  # noqa: E402
from benchmarks.peers import suite as peers  # noqa: E402
from benchmarks.publish.latest import RESULTS  # noqa: E402


class Recorder:
    """The measurements of a command so far.

    Attributes:
        rows: the rows of all cases.
        not_timed: (provider and case, reason).
        failed: whether fastformer, a baseline or a peer was wrong.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Stores the command's options."""
        self.rows: list[dict[str, Any]] = []
        self.not_timed: list[tuple[str, str]] = []
        self.failed = False
        self._options = options
        self._shared = record.environment(options.device) | ({"quick": True} if options.quick else {})
        _say("{device}, {threads} threads, torch {torch}, commit {commit}".format(**self._shared))

    def cases(self, cases: Sequence[Case]) -> None:
        """Measures some cases, one group after another; compiled functions stay while passes are taken."""
        options = self._options
        with tqdm(total=len(cases), unit="case", file=sys.stderr, disable=None, leave=False) as bar:
            for first in range(0, len(cases), _TOGETHER):
                _say(f"\n{len(cases[first : first + _TOGETHER])} cases are checked and then timed, in passes over all")
                for case, outcome in run_cases(
                    cases[first : first + _TOGETHER], options.device, providers=options.provider or (),
                    rounds=options.rounds, seconds=options.seconds,
                    on_action=lambda doing, case: bar.set_description(f"{doing}: {case.benchmark.name} {case.mode}"),
                ):  # fmt: skip
                    self._case(case, outcome)
                    bar.update()

    def _case(self, case: Case, outcome: Outcome) -> None:
        _say(f"\n{case}")
        for row in outcome.rows:
            self._keep(row)
        for name, how in outcome.refused.items():
            self._leave_out(case, name, how)
        for name, how in outcome.wrong.items():
            self._leave_out(case, name, f"it is wrong: {how}")
        must_be_right = {case.benchmark.ours, case.benchmark.baseline}
        if case.benchmark.compares_stages:
            must_be_right.update(case.benchmark.providers)
        self.failed = self.failed or not must_be_right.isdisjoint(outcome.wrong)

    def peers(self, suite: str) -> None:
        """Measures the peers of a suite, each in a process of its own."""
        before = ""
        for row in peers.run(suite, quick=self._options.quick):
            if title(row) != before:
                before = title(row)
                _say(f"\n{before}")
            if "wrong" in row:
                self._leave_out(before, row["provider"], f"it is wrong: {row['wrong']}")
                self.failed = True
            else:
                self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        _say(table(row))
        self.rows.append(self._shared | row)
        record.append(self._options.out, self.rows[-1])

    def _leave_out(self, case: object, name: str, why: str) -> None:
        _say(f"    {name} was not timed: {why}")
        self.not_timed.append((f"{name}, {case}", why))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Returns 1 if a result was wrong, 130 if you stopped the run; exits with 2 if nothing matches the command.
    """
    available = benchmarks()
    parser = _parser(sorted(available))
    options = parser.parse_args(arguments)
    if options.compare:
        try:
            print(compare(*options.compare))
        except ValueError as error:
            parser.error(str(error))
        return 0
    if options.publish:
        if options.out or options.quick or options.device != "cpu":
            parser.error("--publish is for a whole run on a CPU: without --out, --quick and --device cuda")
        options.out = RESULTS / "cpu.jsonl"
    suites = options.suite or DEFAULT
    # Peers run only if no filter selects cases.
    is_filtered = any((options.op, options.mode, options.dtype, options.shape, options.provider))
    with_peers = [suite for suite in peers.SUITES if suite in suites and options.device == "cpu" and not is_filtered]
    experiments = list(EXPERIMENTS) if "experiments" in suites and not is_filtered else []
    chosen = list(chosen_cases(available, options))
    if not (with_peers or experiments) and (complaint := nothing_fits(available, options, chosen)) is not None:
        parser.error(complaint)
    if options.list:
        print(listing(chosen, options.device, options.provider or ()))
        for suite in with_peers:
            print(f"{suite}, peers, each of which says whether it is there when it starts:")
            for plan in peers.plans(suite, quick=options.quick):
                precisions, threads = ", ".join(plan.precisions), ", ".join(map(str, plan.threads))
                print(f"    {plan.case['name']}: {precisions}; threads {threads}")
        for name in experiments:
            print(f"experiment {name}: {EXPERIMENTS[name]}")
        return 0
    options.seconds = options.seconds if options.seconds is not None else (9.0 if options.quick else 60.0)
    keep_freed_memory()
    run = Recorder(options)
    try:
        run.cases(chosen)
        for suite in with_peers:
            run.peers(suite)
    except KeyboardInterrupt:
        print("stopped: the following results are of the cases that had enough passes", file=sys.stderr)
        return 130
    finally:
        print(summary(run.rows, run.not_timed))
    if any(row["suite"] == "scaling" for row in run.rows):
        print("\n" + scaling_fits.report(run.rows))
    for name in experiments:
        print(f"\nexperiment {name}: {EXPERIMENTS[name]}", flush=True)
        flags = (["--quick"] if options.quick else []) + (["--out", str(options.out)] if options.out else [])
        importlib.import_module(f"benchmarks.experiments.{name}").main(flags)
    if options.publish and not run.failed:
        readme.main(["--write"])
        plot.main([])
    return 1 if run.failed else 0


_TOGETHER = 24  # the most cases in a pass: their modules and compiled functions stay in memory


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def _parser(ops: Sequence[str]) -> argparse.ArgumentParser:
    parser = parser_of("run", __doc__, out=True)
    parser.add_argument("--suite", nargs="+", choices=SUITES, help="which suites (all but the experiments)")
    parser.add_argument("--op", nargs="+", choices=ops, metavar="OP", help="which benchmarks (all); see --list")
    modes = ("fwd", "bwd", "fwdbwd", "step", "replay")
    parser.add_argument("--mode", nargs="+", choices=modes, help="which passes (all)")
    parser.add_argument("--dtype", nargs="+", help="which dtypes, such as float32 (all)")
    parser.add_argument(
        "--shape",
        nargs="+",
        type=key_value,
        default=[],
        help="such as seqlen=2048 (all); a name given twice takes either value",
    )
    parser.add_argument("--provider", nargs="+", help="which providers, besides ours and the baseline (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, one dtype, less time")
    parser.add_argument("--rounds", type=int, default=16, help="passes, with a turn of each provider or several (16)")
    parser.add_argument("--seconds", type=float, help="about how long one case may be timed (60; 9 with --quick)")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="append to benchmarks/results/cpu.jsonl, then write the tables of README.md and docs, and the pictures",
    )
    parser.add_argument("--list", action="store_true", help="print what would run, and what is missing and why")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two files of results")
    return parser


if __name__ == "__main__":
    # Rows of ours are ours, also where PyTorch's kernels come to be the default of calls that repeat.
    os.environ.setdefault("FASTFORMER_ATTENTION_KERNELS", "ours")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
