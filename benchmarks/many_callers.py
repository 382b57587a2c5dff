"""Measures Python threads that share one encoder: their texts a second together, beside those of one thread.

    python -m benchmarks.many_callers [--callers 8] [--threads 1 2] [--precision fp32 int8] [--batch 1 32]

The model has the shape of MiniLM (6 layers of 384) and random weights. Each caller encodes all of the same texts. They
alternate with one caller that encodes the texts as often in total. The results are compared bit for bit, and the exit
status is 1 if one differs. Torch's number of threads is the limit of the engine in each call.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.encoding.engine import Array, EncoderEngine
from fastformer.models import BERT, BERTConfig

SHAPE = {"vocab_size": 30522, "d_model": 384, "num_heads": 12, "num_layers": 6, "d_ff": 1536, "max_len": 512}


def draw_texts(count: int, vocab_size: int) -> list[list[int]]:
    """Draws the ids of texts of natural lengths, half of which have at most 20 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = (torch.randn(count, generator=generator) * 0.6 + 3.0).exp().long().clamp(4, 128)
    return [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths.tolist()]


def encode(engine: EncoderEngine, texts: Sequence[list[int]], batch: int) -> Array:
    """Computes a vector for each text, in batches of `batch` texts."""
    return np.concatenate([engine.encode(texts[i : i + batch]) for i in range(0, len(texts), batch)])


def seconds_of(
    engine: EncoderEngine, texts: Sequence[list[int]], batch: int, callers: int
) -> tuple[float, list[Array]]:
    """Returns the seconds until all callers have encoded all texts, and the results of each caller."""
    results: list[Array | None] = [None] * callers
    begin = threading.Barrier(callers + 1)

    def call(caller: int) -> None:
        begin.wait()
        results[caller] = encode(engine, texts, batch)

    threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, [result for result in results if result is not None]


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each precision, number of threads and size of a batch."""
    parser = parser_of("many_callers", __doc__)
    parser.add_argument("--callers", type=int, default=8, help="Python threads (default 8)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch (default 1 2)")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16", "int8"), default=["fp32", "int8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="texts of a call (default 1 32)")
    parser.add_argument("--texts", type=int, default=64, help="of each caller (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both (default 5)")
    for name, size in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"of the model (default {size})")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = BERT(BERTConfig(**{name: getattr(options, name) for name in SHAPE})).eval()
    texts = draw_texts(options.texts, options.vocab_size)
    print(record.environment("cpu")["device"])
    is_wrong = False
    for precision in options.precision:
        engine = EncoderEngine(model, precision)
        for threads in options.threads:
            torch.set_num_threads(threads)
            for batch in options.batch:
                expected = encode(engine, texts, batch)
                single: list[float] = []
                many: list[float] = []
                for _ in range(options.rounds):
                    single.append(sum(seconds_of(engine, texts, batch, 1)[0] for _ in range(options.callers)))
                    seconds, results = seconds_of(engine, texts, batch, options.callers)
                    many.append(seconds)
                    is_wrong |= not all(np.array_equal(result, expected) for result in results)
                total = options.callers * len(texts)
                ratio = statistics.median(a / b for a, b in zip(single, many, strict=True))
                alone, together = (total / statistics.median(seconds) for seconds in (single, many))
                how = f"{precision}, {threads} threads of torch, {batch} texts a call"
                rates = f"{alone:7.0f} texts/s by one caller, {together:7.0f} by {options.callers}"
                print(f"{how}: {rates}: {ratio:.2f}x", flush=True)
    if is_wrong:
        print("error: a caller got other bits than one alone")
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
