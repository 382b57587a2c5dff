"""Measures the tokenizers library's share of `fastformer prepare`, and the gain of several processes.

    python -m benchmarks.preparing [--pairs 200000] [--processes 1 2] [--rounds 3] [--out FILE]

The tokenizers library encodes the texts of all pairs in this process, with one thread, and does nothing else: no
process of a program that uses it can be faster. Preparing the same pairs with one process also reads, compares,
distributes, shuffles and writes them. The share is the ratio of both CPU times. Then `prepare` runs with each number of
processes, and the elapsed time includes the start of the processes. The tokenizer is trained before.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.synthetic_text import write_pairs
from benchmarks.measure.timing import Timing
from benchmarks.peers.compare import take_turns
from fastformer.data.streams import stream_tsv
from fastformer.training import TrainConfig
from fastformer.training.prepare import prepare

_VOCABULARY = 8000
TOKENIZERS, WHOLE = "tokenizers alone", "fastformer prepare"


def tokenizers_alone(text: Path, tokenizer: Path) -> Callable[[], float]:
    """Makes a call that encodes all texts and returns the seconds of CPU time that the library took."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    blocks = []
    for block in stream_tsv(str(text)):
        blocks += [list(side) for side in zip(*block.pairs(skip_bad=False)[0], strict=True)]

    def encode() -> float:
        began = time.process_time()
        for texts in blocks:
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
                encoding.ids  # noqa: B018 - makes the list
        return time.process_time() - began

    return encode


def prepared(config: TrainConfig, folder: Path, processes: int, clock: Callable[[], float]) -> float:
    """Prepares the pairs into a new folder, which it removes. Returns the elapsed seconds."""
    began = clock()
    prepare(config, folder, processes=processes)
    seconds = clock() - began
    shutil.rmtree(folder)
    return seconds


def measure(pairs: int, processes: Sequence[int], rounds: int) -> Iterator[record.Row]:
    """Yields rows of CPU time for the library and for one process, and of elapsed time for each number of processes."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        text = str(write_pairs(here / "train.tsv", pairs))
        prepare(TrainConfig(train_tsv=text, vocab_size=_VOCABULARY), here / "first", processes=1)
        config = TrainConfig(train_tsv=text, tokenizer=str(here / "first"), drop_duplicates=True)
        numbers = itertools.count()

        def turn(count: int, clock: Callable[[], float]) -> float:
            return prepared(config, here / f"shards-{next(numbers)}", count, clock)

        turns: dict[tuple[str, int], Callable[[], float]] = {
            (TOKENIZERS, 0): tokenizers_alone(Path(text), here / "first"),
            (WHOLE, 0): functools.partial(turn, 1, time.process_time),
            **{(WHOLE, count): functools.partial(turn, count, time.perf_counter) for count in processes},
        }
        measured = take_turns(turns, rounds, pause=0.2)
    for (provider, count), seconds in measured.items():
        baseline = (TOKENIZERS, 0) if count == 0 else (WHOLE, processes[0])
        yield {
            "suite": "experiments",
            "op": "preparing",
            "mode": "fwd",
            "provider": provider,
            "shape": {"pairs": pairs, "processes": count, "clock": "wall" if count else "cpu"},
            **Timing.of(seconds).fields(),
            "speedup": statistics.median(a / b for a, b in zip(measured[baseline], seconds, strict=True)),
            "baseline": baseline[0],
            "rounds": rounds,
        }


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each row, and appends it to a file."""
    parser = parser_of("preparing", __doc__, out=True)
    parser.add_argument("--pairs", type=positive, default=200_000, help="of sentences (default 200,000)")
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], help="that prepare (default 1 2)")
    parser.add_argument("--rounds", type=positive, default=3, help="of all (default 3)")
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, like the processes of `prepare`
    shared = {**record.environment("cpu"), "threads": 1}
    for row in measure(options.pairs, options.processes, options.rounds):
        count, seconds = row["shape"]["processes"], row["ms_p50"] / 1e3
        if count:
            summary = f"by {count} process{'es' * (count > 1)}, {seconds:.2f} s, {row['speedup']:.2f} times as fast"
        else:
            summary = f"{seconds:.2f} s of CPU time" + f", of which tokenizers are {row['speedup']:.0%}" * (
                row["provider"] == WHOLE
            )
        print(f"{row['provider']}: {summary}")
        record.append(options.out, {**shared, **row})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
