"""Measures the real tokens a second of a training with one process, and with several that share its batches.

    python -m benchmarks.processes [--processes 2] [--rounds 3] [--out benchmarks/results/training.jsonl]

Every process computes with one thread. In each round the trainings run one after another: one process, several with
DDP, several with FSDP, in reverse order in every other round. All have the same batches and the same updates. The speed
of a training is the median over the later lines of its log, so that its start doesn't count. Run it on an idle machine
with a core for each process.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.synthetic_text import write_pairs
from benchmarks.measure.timing import Timing
from benchmarks.peers.compare import take_turns
from fastformer.training import TrainConfig
from fastformer.training.prepare import prepare

ALONE, SHARDINGS = "one process", ("ddp", "fsdp")
SIZES = {"d_model": 256, "layers": 3, "max_tokens": 1024, "accumulate": 2, "steps": 40}
_PAIRS, _VOCABULARY = 20_000, 2000
_LINES = 8  # lines of the log; the first two are from the warm-up
_MINUTES = 10  # the longest duration of a training


def command(shards: Path, run: Path, sharding: str | None, processes: int, sizes: Mapping[str, int]) -> list[str]:
    """Returns the command line of a training.

    Args:
        shards: the shards to train on.
        run: the run folder.
        sharding: how several processes share the weights; None: one process without torchrun.
        processes: the number of processes, if there are several.
        sizes: the sizes of SIZES.
    """
    settings = {
        "train_data": shards, "device": "cpu", "dropout_seeds": "batch", "log_every": max(1, sizes["steps"] // _LINES),
        "val_every": 0, "val_examples": 0, "save_every": 0, "warmup": 100, "model.num_heads": 4,
        "model.d_model": sizes["d_model"], "model.d_ff": 4 * sizes["d_model"],
        "model.num_encoder_layers": sizes["layers"], "model.num_decoder_layers": sizes["layers"],
        **{name: sizes[name] for name in ("max_tokens", "accumulate", "steps")},
    }  # fmt: skip
    launcher = ["-m", "fastformer"]
    if sharding is not None:
        settings["sharding"] = sharding
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "fastformer"]
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, *launcher, "train", str(run), *words]


def tokens_a_second(run: Path) -> float:
    """Returns the tokens a second in a training's log, without its start."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds: list[float] = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    return statistics.median(speeds[2:] or speeds)


def train(words: list[str], run: Path) -> float:
    """Runs a training to its end. Returns the seconds per token."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60 * _MINUTES)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{process.stdout}{process.stderr}")
    return 1 / tokens_a_second(run)


def measure(processes: int, rounds: int, sizes: Mapping[str, int]) -> Iterator[record.Row]:
    """Yields a row for one process, and one for several processes of each sharding."""
    kinds = {ALONE: None, **{f"{processes} processes, {sharding}": sharding for sharding in SHARDINGS}}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        text = TrainConfig(train_tsv=str(write_pairs(here / "train.tsv", _PAIRS)), vocab_size=_VOCABULARY)
        prepare(text, here / "shards", processes=1)
        numbers = iter(range(10**6))

        def turn(sharding: str | None) -> float:
            run = here / f"run-{next(numbers)}"
            return train(command(here / "shards", run, sharding, processes, sizes), run)

        turns: dict[str, Callable[[], float]] = {
            name: functools.partial(turn, sharding) for name, sharding in kinds.items()
        }
        measured = take_turns(turns, rounds, pause=0.5)
    for name in kinds:
        timing = Timing.of(measured[name])
        ratios = [alone / seconds for alone, seconds in zip(measured[ALONE], measured[name], strict=True)]
        yield {
            "suite": "model",
            "op": "processes",
            "mode": "step",
            "dtype": "float32",
            "provider": name,
            "shape": {**sizes, "processes": 1 if name == ALONE else processes},
            "tokens_s": 1 / timing.p50,
            "speedup": statistics.median(ratios),
            "baseline": ALONE,
            "rounds": rounds,
        }


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each row, and appends it to a file."""
    parser = parser_of("processes", __doc__, out=True)
    parser.add_argument("--processes", type=positive, default=2, help="that share a training (default 2)")
    parser.add_argument("--rounds", type=positive, default=3, help="trainings of each kind (default 3)")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, default=size, help=f"of the training (default {size})")
    options = parser.parse_args(arguments)
    if options.accumulate % options.processes:
        parser.error(f"expected --accumulate to be a multiple of {options.processes} processes")
    shared = {**record.environment("cpu"), "threads": 1}
    for row in measure(options.processes, options.rounds, {name: getattr(options, name) for name in SIZES}):
        print(f"{row['provider']:20} {row['tokens_s']:9,.0f} tokens/s, {row['speedup']:.2f} times {ALONE}")
        record.append(options.out, {**shared, **row})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
