"""Measures the time of each token against its position, for each engine: what a cache saves, and what grows anyway.

    python -m benchmarks.token_times base --picture times.svg [--engines kv_cache cpp] [--precision fp32 int8]
    python -m benchmarks.token_times RUN --tokens 128 --out benchmarks/results/token_times.jsonl

MODEL is a case of `benchmarks.peers` (base, base-paper, tiny, gpt2) or a run folder of a Transformer. One input is
decoded greedily, and a clock is read at each token; engines take turns, and the median of the rounds counts. The time
of the first token includes the encoder, or the prompt.

Each step is a call of the engine, which takes some microseconds. `generate` lets an engine that searches by itself
("cpp") take many steps in one call.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from benchmarks.peers.cases import CASES, make_job, make_model
from benchmarks.peers.job import PRECISIONS, Model
from benchmarks.publish.charts import draw_token_times
from fastformer.generation.config import GenerationConfig, Precision
from fastformer.generation.engines.base import Limits
from fastformer.generation.evaluation import evaluating
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import run_batch

_SOURCE = 32  # tokens of the source, for a run
_ENGINES = ("recompute", "encode_once", "cross_cache", "kv_cache", "cpp")  # from the plainest to the fastest


class PlotLine(NamedTuple):
    """One line of the plot."""

    engine: str
    precision: Precision | None

    def __str__(self) -> str:
        return self.engine if self.precision is None else f"{self.engine}, {self.precision}"


def token_times(model: Model, source: list[int], tokens: int, line: PlotLine, *, may_end: bool = False) -> list[float]:
    """Measures the seconds of each new token of one input, (tokens,), the first from the beginning of the call.

    Args:
        model, source: the model and its input.
        tokens: the number of tokens.
        line: the engine and precision.
        may_end: whether the model might end earlier, which is then prevented.
    """
    least = tokens if may_end else 0
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=least, engine=line.engine, precision=line.precision)
    times = [time.perf_counter()]
    with evaluating(model), torch.inference_mode():
        builder = RequestBuilder(model, config, log_probs=False)
        request = builder.build(builder.check(source))
        batch = builder.engine.open(1, builder.engine.tokens_needed(request.prompt, 1, tokens))
        batch.prefill([request.prompt])
        while not request.is_done:
            run_batch(batch, [request], Limits(1, math.inf, 1))
            times.append(time.perf_counter())
    if request.error is not None:
        raise request.error
    return [end - start for start, end in itertools.pairwise(times)]


def lines(engines: list[str] | None, precisions: list[Precision]) -> list[PlotLine]:
    """Returns the lines to draw: the C++ engine in each precision, the other engines in the model's own."""
    drawn = []
    for engine in engines or [name for name in _ENGINES if name in ENGINES and name != "encode_once"]:
        if engine == "cpp":
            drawn += [PlotLine(engine, precision) for precision in precisions]
        else:
            drawn.append(PlotLine(engine, None))
    return drawn


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each engine, and draws the plot."""
    parser = parser_of("token_times", __doc__, out=True)
    parser.add_argument("model", help="a case of benchmarks.peers, or a run folder")
    parser.add_argument("--tokens", type=int, default=128, help="of the output")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="which ones")
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=["fp32", "int8"], help="of the C++ engine"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--picture", type=Path, help="draw this run to this file: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1:
        parser.error(
            f"expected --tokens of at least 2 and --rounds of at least 1, got {options.tokens}, {options.rounds}"
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    is_case = options.model in CASES and options.model != "run"
    case = {"name": options.model} if is_case else {"name": "run", "run": options.model}
    try:
        model = make_model(case)
        drawn = lines(options.engines, options.precision)
        source = _source(case, model)
        for line in drawn:
            token_times(model, source, 2, line, may_end=not is_case)  # the warm-up
    except ValueError as error:
        parser.error(str(error))
    rounds: dict[PlotLine, list[list[float]]] = {line: [] for line in drawn}
    for _ in range(options.rounds):
        for line in drawn:
            rounds[line].append(token_times(model, source, options.tokens, line, may_end=not is_case))
    shared = record.environment("cpu")
    rows = []
    for line, measured in rounds.items():
        seconds = [statistics.median(of_token) for of_token in zip(*measured, strict=True)]
        # Single positions are noisy, so the first and the last eighth are averaged.
        share = max(1, (len(seconds) - 1) // 8)
        first, last = (1e3 * sum(part) / share for part in (seconds[1 : 1 + share], seconds[-share:]))
        print(f"{line!s:>18}: {first:.3g} ms a token at the start, {last:.3g} ms at the end")
        row = {
            "suite": "decoding",
            "op": "token_times",
            "model": options.model if is_case else Path(options.model).name,
            "provider": line.engine,
            "precision": line.precision or "fp32",
            "shape": {"tokens": options.tokens},
            # The first token includes the encoder, or the prompt.
            "curve": {
                "x": list(range(2, len(seconds) + 1)),
                "y": [1e3 * second for second in seconds[1:]],
                "x_label": "position of the new token",
                "y_label": "ms a token",
            },
        }
        rows.append(row | shared)
        record.append(options.out, rows[-1])
    if options.picture:
        draw_token_times(rows).savefig(options.picture, dpi=150, facecolor="white")
    return 0


def _source(case: dict[str, str], model: Model) -> list[int]:
    """Returns the input of a case; for a run some ids of its vocabulary, since the time doesn't depend on them."""
    if case["name"] != "run":
        return make_job(case, 1, 1).batches[0][0]
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(3, model.config.vocab_size, (_SOURCE,), generator=generator).tolist()
    return ids


if __name__ == "__main__":
    raise SystemExit(main())
