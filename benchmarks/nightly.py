"""Measures the comparisons of README's table again, appends them to the results, and fails if one got worse.

    make peers && .venv/bin/python -m benchmarks.nightly

Each ratio is compared with its median over the earlier nights on the same kind of CPU, and the trend on this kind is
drawn. The exit status is 1 if a ratio is 10 % below its median, or could not be measured.
"""

from __future__ import annotations

import datetime
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from benchmarks.publish import style
from benchmarks.publish.charts import name_of
from benchmarks.publish.latest import RESULTS, Row, grouped, machine
from benchmarks.publish.summary import NIGHTLY

# Those of `python -m benchmarks.peers`, which measure `NIGHTLY` and little else.
JOBS = (
    "--case minilm --shape order=sorted --precision int8 --peer 'as it is' fastformer.Encoder onnxruntime",
    "--case minilm --shape order=sorted --precision fp32 --peer 'as it is' fastformer.Encoder sentence-transformers",
    "--case base --batch 1 --beams 1 --precision int8 --peer fastformer ctranslate2",
    "--case llama --shape new=32 --precision int8 --peer fastformer llama.cpp",
    "--case bert_base --seqlen '32 to 128' --precision fp32 --peer 'as it is' accelerated onnxruntime",
    "--case torch_nn_encoder --seqlen '1 to 512' --shape mode=training --precision fp32 --peer 'as it is' accelerated",
    "--case gpt2_small --seqlen '16 to 256' --precision fp32 --peer 'as it is' 'accelerated, fused loss'",
)
DROP = 0.9  # of the median of earlier nights


class Ratio(NamedTuple):
    """How many times as fast fastformer was as another program, in one night on a kind of CPU (`kind_of`)."""

    name: str
    kind: str
    night: str
    value: float


def kind_of(row: Row) -> str:
    """Returns what has a trend of its own: a CPU, its number of cores, and the instructions that PyTorch uses."""
    return f"{row['device']}, {row['cores']} cores, {row['capability']}"


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Returns the ratios of all nights, the earliest first."""
    found = []
    for night, measured in sorted(grouped(rows, lambda row: str(row["night"])).items()):
        for does, case, panel, rivals in NIGHTLY:
            for comparison in case.comparisons(measured):
                if comparison.panel == panel.name and comparison.against in rivals:
                    name = f"{does}, {panel.name}, against {name_of(comparison.against)}"
                    found.append(Ratio(name, kind_of(comparison.ours), night, comparison.ratio))
    return found


def verdicts(every: Sequence[Ratio], night: str) -> Iterator[tuple[bool, str]]:
    """Yields for each headline whether it is as good as before, and a line about it."""
    for does, _, panel, rivals in NIGHTLY:
        for rival in rivals:
            name = f"{does}, {panel.name}, against {name_of(rival)}"
            now = next((ratio for ratio in every if (ratio.name, ratio.night) == (name, night)), None)
            if now is None:
                yield False, f"not measured   {name}"
                continue
            before = [r.value for r in every if (r.name, r.kind) == (name, now.kind) and r.night != night]
            usual = statistics.median(before) if before else now.value
            is_good = now.value >= DROP * usual
            verdict = "" if is_good else f"   WORSE: {100 * (1 - now.value / usual):.0f} % below the median"
            yield is_good, f"{now.value:5.2f} ({usual:5.2f})  {name}{verdict}"


def draw(every: Sequence[Ratio], rows: Sequence[Row], path: Path) -> None:
    """Draws each ratio over the nights of the latest night's CPU."""
    here = [ratio for ratio in every if ratio.kind == every[-1].kind]
    nights = sorted({ratio.night for ratio in here})
    fig = style.figure("Times as fast as other programs, night by night", footer=machine(rows[-1:]), height=5.5)
    (axes,) = fig.axes
    for name in dict.fromkeys(ratio.name for ratio in here):
        points = [(nights.index(ratio.night), ratio.value) for ratio in here if ratio.name == name]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xticks(range(len(nights)), [night[:10] for night in nights])
    axes.set_ylim(bottom=0)
    style.legend(fig, columns=1)
    style.save(fig, path.stem, rows, path.parent)


def measure(job: str, rounds: int, out: Path) -> None:
    """Runs one of `JOBS`; a peer that is missing becomes a row that says so."""
    words = [sys.executable, "-m", "benchmarks.peers", *shlex.split(job), "--rounds", str(rounds), "--out", str(out)]
    subprocess.run(words, check=False)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a line for each headline, appends the rows, and draws the trend. Returns 1 if one got worse."""
    parser = parser_of("nightly", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program (3)")
    parser.add_argument("--results", type=Path, default=RESULTS / "nightly.jsonl", help="the file of all nights")
    parser.add_argument("--picture", type=Path, default=record.ROOT / "build" / "nightly.svg", help="the trend")
    options = parser.parse_args(arguments)
    began, night = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat()
    for job in JOBS:  # each keeps its rows, so that those remain if the night's time ends
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "job.jsonl"
            measure(job, options.rounds, out)
            for row in record.read(out) if out.exists() else []:
                record.append(options.results, {**row, "night": night})
    rows = record.read(options.results) if options.results.exists() else []
    every = ratios(rows)
    results = list(verdicts(every, night))
    kinds = " and ".join({ratio.kind: None for ratio in every if ratio.night == night}) or "nothing measured"
    minutes = (time.monotonic() - began) / 60
    print(f"\n{night[:16]} on {kinds}, {minutes:.0f} minutes: times as fast (and its median before)")
    print("\n".join(line for _, line in results))
    if every:
        draw(every, rows, options.picture)
        print(options.picture)
    return 0 if all(is_good for is_good, _ in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
