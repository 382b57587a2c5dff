"""Measures what LoRA adapters cost: the CPU time of a step of requests with adapters, beside the same without any.

    python -m benchmarks.adapters --rows 1 16 --out benchmarks/results/decoding.jsonl

The model has the shape of "llama" in `benchmarks.peers.cases` and random weights; each adapter changes all matrices of
its layers. Both sides take turns in each round and decode as many tokens; the ratio is that of CPU times, so that other
processes count little.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.timing import beside_baseline
from benchmarks.peers.cases import make_model
from fastformer.checkpoints.hf.adapters import Adapter
from fastformer.generation.config import GenerationConfig
from fastformer.generation.generator import Generator
from fastformer.generation.request_builder import RequestBuilder
from fastformer.models import GPT

PROVIDERS = ("none", "adapters")
_LINEARS = ("in_proj_weight", "out_proj.weight", "linear1.weight", "linear2.weight")


def adapter(model: GPT, rank: int, seed: int) -> Adapter:
    """Makes an adapter of random numbers for all matrices of the layers; q, k and v have ranks of their own."""
    draws = torch.Generator().manual_seed(seed)
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    heads = model.config.num_heads * model.config.size_of_head
    for name, weight in model.decoder.named_parameters():
        if not name.endswith(_LINEARS):
            continue
        rest = (len(weight) - heads) // 2
        parts = [heads, rest, rest] if "in_proj" in name else [len(weight)]
        if "linear1" in name:
            parts = [len(weight) // 2] * 2
        b = [torch.randn(part, rank, generator=draws) * 0.01 for part in parts]
        a = torch.randn(rank * len(parts), weight.shape[1], generator=draws) * 0.01
        factors[f"decoder.{name}"] = a, torch.block_diag(*b)
    return Adapter(factors)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each number of rows, and writes the rows of results."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: Any = make_model({"name": options.model})
    generator = Generator(model, precision=options.precision)
    names = [f"adapter {seed}" for seed in range(options.adapters)]
    for seed, name in enumerate(names):
        generator._engine.add_adapter(name, adapter(model, options.rank, seed))
    shared = record.environment("cpu") | {"threads": options.threads}
    for rows in options.rows:
        prompts = torch.randint(3, model.config.vocab_size, (rows, 16)).tolist()
        seconds: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
        for turn in range(-1, options.rounds):
            for provider in PROVIDERS:
                requests = []
                for place, prompt in enumerate(prompts):
                    chosen = names[place % len(names)] if provider == "adapters" else None
                    config = GenerationConfig(
                        max_new_tokens=options.tokens, min_new_tokens=options.tokens, adapter=chosen
                    )
                    builder = RequestBuilder(model, config, log_probs=False, engine=generator._engine)
                    requests.append(builder.build(builder.check(prompt)))
                began = time.process_time()
                generator._session.run(requests)
                if turn >= 0:  # the first turn warms up
                    seconds[provider].append((time.process_time() - began) / options.tokens)
        fields = beside_baseline(seconds, "none")
        shape = {"rows": rows, "model": options.model, "adapters": options.adapters, "rank": options.rank}
        for provider in PROVIDERS:
            row = {
                "suite": "decoding", "op": "adapters", "provider": provider, "precision": options.precision,
                "shape": {**shape, "tokens": options.tokens}, **fields[provider],
            }  # fmt: skip
            record.append(options.out, shared | row)
        print(
            f"{rows} rows: {fields['none']['ms_p50']:.2f} ms of CPU a step without adapters, "
            f"{1 / fields['adapters']['speedup']:.2f} times that with them"
        )
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("adapters", __doc__, out=True)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 16])
    numbers = {"adapters": 4, "rank": 16, "tokens": 64, "rounds": 5, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--model", default="llama")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
