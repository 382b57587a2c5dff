"""Counts the cores that `Encoder.encode` keeps busy on many texts: the process's CPU time divided by the time.

    python -m benchmarks.encoding_cores FOLDER [--texts 10000] [--threads 2] [--precision int8 fp32] [--out FILE]

The texts are the sentences of this repository's documentation, repeated. While the engine computes, a thread makes the
ids of the next texts. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import time
from pathlib import Path

from benchmarks.measure import record
from benchmarks.measure.commands import count, parser_of, positive

PROVIDER = "fastformer.Encoder"


def sentences(number: int) -> list[str]:
    """Returns sentences of the documentation, each with its number, so that no two are equal."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((record.ROOT / "docs").rglob("*.md")))
    own = [each.strip() for each in re.split(r"(?<=[.!?])\s+", text) if 15 < len(each.strip()) < 600]
    return [f"{text} {place}" for place, text in zip(range(number), itertools.cycle(own), strict=False)]


def main(arguments: list[str] | None = None) -> int:
    """Prints a line and appends a row for each precision."""
    parser = parser_of("encoding_cores", __doc__, out=True)
    parser.add_argument("folder", help="the folder of an encoder")
    parser.add_argument("--texts", **count(10_000, "texts in a call"))
    parser.add_argument("--threads", **count(2, "threads of the engine"))
    parser.add_argument("--precision", nargs="+", choices=("int8", "bf16", "fp32"), default=["int8", "fp32"])
    parser.add_argument("--rounds", type=positive, default=3, help="calls of each (3)")
    options = parser.parse_args(arguments)
    for precision in options.precision:
        record.append(options.out, _row(options, precision))
    return 0


def _row(options: argparse.Namespace, precision: str) -> dict[str, object]:
    import torch

    import fastformer
    from benchmarks.measure.timing import Timing

    torch.set_num_threads(options.threads)
    encoder = fastformer.Encoder.from_pretrained(options.folder, precision=precision)
    texts = sentences(options.texts)
    encoder.encode(texts[:64])
    cores, times = [], []
    for _ in range(options.rounds):
        began, busy = time.perf_counter(), time.process_time()
        encoder.encode(texts)
        times.append(time.perf_counter() - began)
        cores.append((time.process_time() - busy) / times[-1])
    timing, busiest = Timing.of(times), statistics.median(cores)
    rate = options.texts / timing.p50
    print(f"{precision}, {options.threads} threads: {busiest:.2f} cores, {rate:,.0f} texts a second")
    return {
        "suite": "model", "op": "encoding_cores", "provider": PROVIDER, "dtype": precision,
        "model": Path(options.folder).name, "shape": {"texts": options.texts},
        **timing.fields(), "rounds": options.rounds, "value": busiest, "unit": "cores",
        **record.environment("cpu"), "threads": options.threads,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
