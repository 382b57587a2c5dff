"""Measures long contexts with keys and values in the computation's dtype and in int8: speed, memory and difference.

    python -m benchmarks.long_contexts --out benchmarks/results/cpu.jsonl

A model of Llama's form with random weights reads a prompt, longer and longer ones, and then decodes one row. In each
round both sides take the same number of steps, in turns; the ratio is that of CPU times of one thread, so that other
processes count little. The prompt's rate counts all of its tokens so far, each of which is read once. The difference is
that of the logits after the prompt, relative to their spread. `benchmarks.precisions` measures the perplexity of a
trained model.
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
from fastformer.generation.engines import Prompt
from fastformer.generation.engines.cpp import CppBatch, CppEngine
from fastformer.models import GPT

CACHE_DTYPES = (None, "int8")
_VOCAB = 32_000


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each context and side, and writes the rows of results."""
    options = _options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    most = max(options.contexts) + (options.rounds + 2) * options.steps
    sizes: dict[str, Any] = {"vocab_size": _VOCAB, "d_model": options.dim, "num_layers": options.layers}
    sizes |= {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "d_ff": 11 * options.dim // 4}
    form = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "max_len": most}
    model = GPT(GPT.config_class(**sizes, **form)).eval()
    engines = {name: CppEngine(model, options.precision, name) for name in CACHE_DTYPES}
    batches = {name: engine.open(1, most + engine.block_size) for name, engine in engines.items()}
    prompt = torch.randint(3, _VOCAB, (max(options.contexts),)).tolist()
    read = dict.fromkeys(CACHE_DTYPES, 0.0)
    plain_dtype = "fp32" if options.precision == "fp32" else "bf16"
    for context in sorted(options.contexts):
        logits, steps = {}, {}
        for name, batch in batches.items():
            began = time.process_time()
            batch.prefill([Prompt(None, prompt[:context])])
            logits[name] = batch.logits(prompt[context - 1 : context])
            read[name] += time.process_time() - began
            steps[name] = list[float]()
        for _ in range(options.rounds):
            for name, batch in batches.items():
                steps[name].append(_seconds_of(batch, options.steps))
        for batch in batches.values():
            batch.free([0])
        caches = {name: f"a cache of {name or plain_dtype}" for name in steps}
        fields = beside_baseline({caches[name]: times for name, times in steps.items()}, caches[None])
        for name, engine in engines.items():
            difference = (logits[name] - logits[None]).square().mean().sqrt() / logits[None].std()
            memory = context * engine.token_bytes / 2**20
            row = {
                "suite": "decoding", "op": "long_context", "provider": caches[name],
                "precision": options.precision,
                "shape": {"context": context, "rows": 1, "dim": options.dim, "layers": options.layers,
                          "heads": options.heads, "kv_heads": options.kv_heads, "vocab": _VOCAB},
                **fields[caches[name]], "value": memory, "unit": "MiB of keys and values",
                "tokens_s": context / read[name], "difference": float(difference),
            }  # fmt: skip
            record.append(options.out, record.environment("cpu") | row)
            print(
                f"{context:,} tokens, {caches[name]}: {row['ms_p50']:.2f} ms of CPU a step, {memory:,.0f} MiB, prompt "
                f"{row['tokens_s']:,.0f} tokens a second, logits differ by {difference:.4f}"
            )
        print(f"{context:,} tokens: a step is {fields[caches['int8']]['speedup']:.2f} times faster with int8")
    return 0


def _seconds_of(batch: CppBatch, steps: int) -> float:
    """Returns the CPU time of a step, the mean of some."""
    began = time.process_time()
    for token in range(steps):
        batch.logits([3 + token])
    return (time.process_time() - began) / steps


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("long_contexts", __doc__, out=True)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[1024, 8192, 32_000], help="tokens of prompts")
    numbers = {"dim": 1024, "layers": 6, "heads": 16, "kv_heads": 4, "steps": 4, "rounds": 11}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--precision", default="int8", choices=["fp32", "bf16", "int8", "int4"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
