"""Measures the memory of preparing and training on a corpus too large for memory: the peak of any process, in MiB.

    python -m benchmarks.large_corpus [--pairs 5000000] [--steps 100] [--processes 2] [--folder DIR] [--out FILE]

It makes up the pairs of sentences, runs `fastformer prepare` and `fastformer train` on them, and asks the system for
the largest resident set among the processes of each command. Files that are mapped into memory count as far as they are
resident. The model is the default one, since the memory of a larger model and larger batches doesn't depend on the
corpus. Five million pairs take 1.1 GB of disk space, which is freed afterwards, and about ten minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.synthetic_text import write_pairs

_VOCABULARY, _MAX_TOKENS = 8000, 2048


class Used(NamedTuple):
    """The resources that a command used."""

    seconds: float
    peak_mib: float  # the largest resident set of any of its processes


def run(words: list[str]) -> Used:
    """Runs a `fastformer` command to its end.

    Raises:
        RuntimeError: the command failed.
    """
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "fastformer", *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)  # of the process and all of its descendants that were waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"fastformer {' '.join(words)} ended with {process.returncode}")
    return Used(time.perf_counter() - began, usage.ru_maxrss / 1024)


def measure(folder: Path, pairs: int, steps: int, processes: int, shards: int) -> Iterator[record.Row]:
    """Yields a row for preparing, and one for training."""
    text, prepared = folder / "train.tsv", folder / "shards"
    write_pairs(text, pairs)
    size = text.stat().st_size / 2**20
    words = ["prepare", "--out", str(prepared), "--train_tsv", str(text), "--vocab_size", str(_VOCABULARY)]
    words += ["--processes", str(processes), "--shards", str(shards), "--drop_duplicates"]
    shape = {"pairs": pairs, "text_mib": round(size)}
    yield {**_row("prepare", run(words)), "shape": {**shape, "processes": processes}}
    text.unlink()
    words = ["train", str(folder / "run"), "--train_data", str(prepared), "--steps", str(steps), "--device", "cpu"]
    words += ["--max_tokens", str(_MAX_TOKENS), "--val_every", "0", "--val_examples", "20"]
    words += ["--save_every", str(max(1, steps // 2))]
    shards_mib = sum(file.stat().st_size for file in prepared.glob("shard-*")) / 2**20
    shape |= {"steps": steps, "shards_mib": round(shards_mib), "max_tokens": _MAX_TOKENS}
    yield {**_row("train", run(words)), "shape": shape}


def _row(mode: str, used: Used) -> record.Row:
    return {
        "suite": "model",
        "op": "large_corpus",
        "model": mode,
        "provider": "fastformer",
        "seconds": used.seconds,
        "peak_mib": used.peak_mib,
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each command, and appends it to a file."""
    parser = parser_of("large_corpus", __doc__, out=True)
    parser.add_argument("--pairs", type=positive, default=5_000_000, help="of sentences (default 5,000,000)")
    parser.add_argument("--steps", type=positive, default=100, help="updates (default 100)")
    parser.add_argument("--processes", type=positive, default=2, help="that prepare (default 2)")
    parser.add_argument("--shards", type=int, default=0, help="how many; 0: as `fastformer prepare` chooses")
    parser.add_argument("--folder", type=Path, help="for the files, which are taken away again; by default a new one")
    options = parser.parse_args(arguments)
    shared = {**record.environment("cpu"), "threads": 1}  # of each process
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for row in measure(folder, options.pairs, options.steps, options.processes, options.shards):
            print(f"{row['model']:8} {row['seconds']:7.0f} s, at most {row['peak_mib']:,.0f} MiB in a process")
            record.append(options.out, {**shared, **row})
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
