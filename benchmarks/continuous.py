"""Translates a file with a batch that is kept full, and in batches of similar length that run to their end.

    python -m benchmarks.continuous RUN in.txt [--num_beams 4] [--rounds 3] [--out FILE]

Both use the same engine and the same number of rows. The batches are those of a program without continuous batching:
windows of 1,000 lines are sorted by length and cut into batches, and a batch ends when its longest translation does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.generation import Translator
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import choose_engine
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, new_scheduler, run

_WINDOW = 1000


def continuous(scheduler: Scheduler, requests: Sequence[Request], peak: Callable[[], None]) -> None:
    """Runs all requests through one batch."""
    scheduler.submit(requests)
    while not scheduler.is_idle:
        scheduler.step()
        peak()


def batches(scheduler: Scheduler, requests: Sequence[Request], peak: Callable[[], None]) -> None:
    """Runs the requests batch by batch, each batch to its end."""
    for start in range(0, len(requests), _WINDOW):
        window = sorted(requests[start : start + _WINDOW], key=lambda request: -len(request.prompt.source or ()))
        size = max(1, scheduler.max_rows // window[0].search.peak_rows)
        for first in range(0, len(window), size):
            run(scheduler, window[first : first + size])
            peak()


WAYS = {"continuous": continuous, "batches": batches}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each of the two."""
    parser = parser_of("continuous", __doc__, out=True)
    parser.add_argument("run", help="the run folder of a translator")
    parser.add_argument("file", type=Path, help="a text file, one sentence a line")
    parser.add_argument("--lines", type=int, default=10_000, help="of the file, at most")
    parser.add_argument("--num_beams", type=int, default=1, help="1 is greedy")
    parser.add_argument("--max_batch_size", type=int, help="rows that are decoded together")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    options = parser.parse_args(arguments)

    translator = Translator.from_pretrained(options.run)
    model = translator.model
    lines = options.file.read_text(encoding="utf-8").splitlines()[: options.lines]
    sources = [translator.encode(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    settings = GenerationConfig(num_beams=options.num_beams)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, list[int]] = {way: [] for way in WAYS}
    outputs: dict[str, list[list[int]]] = {}

    def turn(way: str, count: int) -> tuple[float, list[list[int]], int]:
        builder = RequestBuilder(model, settings, log_probs=False)
        scheduler = new_scheduler(choose_engine(model), options.max_batch_size)
        requests = [builder.build(builder.check(source)) for source in sources[:count]]
        samples: list[int] = []
        began = time.perf_counter()
        WAYS[way](scheduler, requests, lambda: samples.append(_resident()))
        elapsed = time.perf_counter() - began
        return elapsed, [request.results[0].tokens for request in requests], max(samples) - samples[0]

    if isinstance(model, torch.nn.Module):
        model.eval()
    for way in WAYS:
        turn(way, 200)
    for _ in range(options.rounds):
        for way in WAYS:
            elapsed, outputs[way], grown = turn(way, len(sources))
            seconds[way].append(elapsed)
            memory[way].append(grown)

    same = sum(a == b for a, b in zip(outputs["continuous"], outputs["batches"], strict=True))
    tokens = sum(map(len, outputs["continuous"]))
    slowest = statistics.median(seconds["batches"])
    shared = record.environment("cuda" if torch.cuda.is_available() else "cpu")
    for way in WAYS:
        median = statistics.median(seconds[way])
        row = {
            "suite": "decoding",
            "op": "translate_lines",
            "provider": way,
            "shape": {"lines": len(sources), "num_beams": options.num_beams},
            "tokens_s": tokens / median,
            "speedup": slowest / median,
            "baseline": "batches",
            "resident_growth_mib": max(memory[way]),
            "same_tokens": same,
        }
        print(
            f"{way:>10}: {row['tokens_s']:,.0f} new tokens/s, {row['speedup']:.2f}x batches, memory grew by "
            f"{row['resident_growth_mib']} MiB after the first step; {same} of {len(sources)} lines agree"
        )
        record.append(options.out, row | shared)
    return 0


def _resident() -> int:
    """Returns the resident memory of the process in MiB."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 // 2**20 if status.is_file() else 0


if __name__ == "__main__":
    raise SystemExit(main())
