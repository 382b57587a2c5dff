"""Measures what a constraint costs: the CPU time of a token under a JSON schema, beside the same model without one.

    python -m benchmarks.structured --rows 1 16 --out benchmarks/results/decoding.jsonl

The vocabulary is a BPE of Python's own library, and the model has random weights. Both sides take turns in each round
and decode as many tokens; the ratio is that of CPU times, so that other processes count little. "free" is greedy
decoding with nothing else, "schema" the same under a schema of an endless list of objects. With `--forced`, the objects
have long names, whose tokens are certain and read in one pass.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.timing import beside_baseline
from fastformer.data import Tokenizer, train_bpe
from fastformer.generation.generator import Generator
from fastformer.models import GPT

PROVIDERS = ("free", "schema")
_TAGS = {"type": "array", "items": {"type": "string"}}
_ITEM = {"name": {"type": "string"}, "count": {"type": "integer"}, "tags": _TAGS}
_LONG = {f"the_long_name_of_field_number_{i}": {"type": "boolean"} for i in range(4)}


def vocabulary(size: int) -> Tokenizer:
    """Trains a BPE on the sources of Python's library."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines += path.read_text("utf-8", "ignore").splitlines()
    text = "\n".join(lines)[: 100 * size]
    return train_bpe(text.splitlines(), size)


def schema(*, is_forced: bool) -> dict[str, Any]:
    """Returns a schema that never ends by itself."""
    fields = _LONG if is_forced else _ITEM
    item = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 100_000}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each number of rows, and writes the rows of results."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = vocabulary(options.vocab)
    torch.manual_seed(0)
    sizes = {"d_model": options.dim, "num_heads": max(1, options.dim // 64), "num_layers": options.layers}
    sizes |= {"vocab_size": tokenizer.vocab_size, "d_ff": 4 * options.dim, "max_len": options.tokens + 64}
    model = GPT(GPT.config_class(**sizes)).eval()
    generator = Generator(model, precision=options.precision)
    constraint = {"schema": schema(is_forced=options.forced), "tokenizer": tokenizer}
    shared = record.environment("cpu") | {"threads": options.threads}
    for rows in options.rows:
        prompts = torch.randint(260, tokenizer.vocab_size, (rows, 16)).tolist()
        seconds: dict[str, list[float]] = {name: [] for name in PROVIDERS}
        ends = {"eos_token_id": [tokenizer.special_ids.eos[0]], "suppress_tokens": [*tokenizer.special_ids.eos]}
        for turn in range(-1, options.rounds):
            for name in PROVIDERS:
                more: dict[str, Any] = constraint if name == "schema" else ends
                began = time.process_time()
                out = generator.generate(prompts, max_new_tokens=options.tokens, **more)
                passed = time.process_time() - began
                assert isinstance(out, torch.Tensor) and out.shape[1] == 16 + options.tokens
                if turn >= 0:  # the first turn warms up
                    seconds[name].append(passed / options.tokens)
        fields = beside_baseline(seconds, "free")
        shape = {"rows": rows, "dim": options.dim, "layers": options.layers, "vocab": tokenizer.vocab_size}
        for name in PROVIDERS:
            row = {
                "suite": "decoding", "op": "structured", "provider": name, "precision": options.precision,
                "shape": {**shape, "tokens": options.tokens, "forced": options.forced}, **fields[name],
            }  # fmt: skip
            record.append(options.out, shared | row)
        print(
            f"{rows} rows: {fields['free']['ms_p50']:.2f} ms of CPU a step free, "
            f"{1 / fields['schema']['speedup']:.2f} times that under the schema"
        )
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("structured", __doc__, out=True)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 16])
    numbers = {"dim": 768, "layers": 12, "vocab": 32_000, "tokens": 128, "rounds": 5, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--forced", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
