"""Measures what a trained draft model gives: the CPU time of a token with its drafts, beside the same model alone.

    python -m benchmarks.trained_draft --precision int8 fp32 --out benchmarks/results/decoding.jsonl

A pair is trained first, and kept in build/trained_draft: a language model of Llama's form on the sources of Python's
own library, and a smaller one on what the first one writes after beginnings from the same text. The prompts are of
modules that neither has seen. Both sides take turns in each round and write the same tokens, one text at a time; the
ratio is that of CPU times, so that other processes count little.

Small models soon repeat themselves, and repetitions are easy to draft. So a "new" text ends before the first four
tokens in a row that occurred before, in it or in its prompt; "whole" ones have `--tokens` tokens each.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.timing import beside_baseline
from fastformer.checkpoints.run import load_models
from fastformer.data import Tokenizer
from fastformer.generation.generator import Generator
from fastformer.models import GPT
from fastformer.models.weights import WEIGHTS
from fastformer.training import TrainConfig, start

PROVIDERS = ("plain", "draft model")
_FORM = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "bias": False, "dropout": 0.0, "max_len": 512}
_HELD_OUT = 10  # one module of so many
_PROMPT = 32  # tokens
_AT_ONCE = 64  # texts that the model writes together, to be learned from
_REPEATS = 4  # tokens in a row
_LEAST = 8  # tokens of a "new" text


def write_sources(folder: Path) -> None:
    """Writes the modules of Python's library as documents: most to train/, and the others to held_out/."""
    for place, module in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        kind = folder / ("train" if place % _HELD_OUT else "held_out")
        kind.mkdir(parents=True, exist_ok=True)
        (kind / f"{module.stem}.txt").write_text(module.read_text("utf-8", "ignore"), "utf-8")


def train(run: Path, dim: int, layers: int, **settings: Any) -> None:
    """Trains a model of some size in a run folder, or completes it."""
    if (run / WEIGHTS).exists():
        return
    sizes = {"d_model": dim, "num_heads": max(1, dim // 64), "num_layers": layers, "d_ff": dim * 11 // 4}
    config = {
        "model": {"name": "gpt", **_FORM, **sizes}, "seqlen": 128, "max_tokens": 1024, "precision": "bf16",
        "schedule": "cosine", "warmup": 40, "beta2": 0.95, "weight_decay": 0.1, "val_every": 0, "save_every": 100,
        "val_examples": 0, "device": "cpu",
    }  # fmt: skip
    start(TrainConfig.from_dict({**config, **settings}), run, resume="auto").train()


def prompts_of(texts: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Draws beginnings of functions and classes from documents."""
    found = []
    for path in sorted(texts.glob("*.txt")):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        for place, line in enumerate(lines):
            if line.lstrip().startswith(("def ", "class ")):
                found.append(tokenizer.encode("".join(lines[place : place + _PROMPT]))[:_PROMPT])
    found = [ids for ids in found if len(ids) == _PROMPT]
    return random.Random(0).sample(found, min(count, len(found)))


def write_own_texts(model: GPT, tokenizer: Tokenizer, prompts: list[list[int]], folder: Path, tokens: int) -> None:
    """Writes the texts of the model after prompts as documents: what a draft model has to learn."""
    if folder.exists():
        return
    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    generator = Generator(model, precision="int8")
    for first in range(0, len(prompts), _AT_ONCE):
        out = generator.generate(prompts[first : first + _AT_ONCE], max_new_tokens=tokens)
        assert isinstance(out, torch.Tensor)
        for place, row in enumerate(out.tolist(), first):
            (part / f"{place:06}.txt").write_text(tokenizer.decode(row), "utf-8")
    part.rename(folder)


def num_new(row: list[int], begun: int) -> int:
    """Returns the number of tokens after the first `begun` ones up to the first that ends a repetition."""
    seen = set()
    for end in range(_REPEATS, len(row) + 1):
        last = tuple(row[end - _REPEATS : end])
        if last in seen and end > begun:
            return end - 1 - begun
        seen.add(last)
    return len(row) - begun


def trained_pair(options: argparse.Namespace) -> tuple[GPT, GPT, Tokenizer]:
    """Returns the model, its draft model and their tokenizer, trained unless the folder has them."""
    folder: Path = options.folder
    write_sources(folder)
    held_out = str(folder / "held_out")
    train(
        folder / "model", options.dim, options.layers, train_text=str(folder / "train"), val_text=held_out,
        vocab_size=options.vocab, steps=options.steps, lr=1e-3,
    )  # fmt: skip
    (model,), tokenizer = load_models([folder / "model"], ("GPT",))
    own = folder / "own_texts"
    write_own_texts(model, tokenizer, prompts_of(folder / "train", tokenizer, options.texts), own, options.tokens)
    train(
        folder / "draft", options.draft_dim, options.draft_layers, train_text=str(own),
        tokenizer=str(folder / "model"), steps=options.draft_steps, lr=4e-3,
    )  # fmt: skip
    (model, small), tokenizer = load_models([folder / "model", folder / "draft"], ("GPT",))
    return model, small, tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Trains the pair, prints a line for each precision and kind of text, and writes the rows of results."""
    options = _options(arguments)
    torch.set_num_threads(options.training_threads)
    model, small, tokenizer = trained_pair(options)
    torch.set_num_threads(options.threads)
    prompts = prompts_of(options.folder / "held_out", tokenizer, options.prompts)
    shared = record.environment("cpu") | {"threads": options.threads}
    for precision in options.precision:
        plain = Generator(model, precision=precision, max_bytes=2**26)
        drafting = Generator(model, precision=precision, max_bytes=2**26, draft_model=small)
        whole = [_text(plain, prompt, options.tokens) for prompt in prompts]
        for text in options.text:
            lengths = [num_new(row, _PROMPT) if text == "new" else len(row) - _PROMPT for row in whole]
            chosen = [(row[:_PROMPT], length) for row, length in zip(whole, lengths, strict=True) if length >= _LEAST]
            if not chosen:
                print(f"{precision}, {text}: no text of at least {_LEAST} tokens")
                continue
            total = sum(length for _, length in chosen)
            before = drafting.stats()
            seconds: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
            for turn in range(-1, options.rounds):
                written = {}
                for provider, generator in zip(PROVIDERS, (plain, drafting), strict=True):
                    began = time.process_time()
                    written[provider] = [_text(generator, prompt, length) for prompt, length in chosen]
                    if turn >= 0:  # the first turn warms up
                        seconds[provider].append((time.process_time() - began) / total)
                assert written["plain"] == written["draft model"], "drafts changed a text"
            after = drafting.stats()
            drafted = after.drafted_tokens - before.drafted_tokens
            accepted = (after.accepted_tokens - before.accepted_tokens) / max(1, drafted)
            fields = beside_baseline(seconds, "plain")
            shape = {
                "text": text, "dim": options.dim, "layers": options.layers, "draft_dim": options.draft_dim,
                "draft_layers": options.draft_layers, "texts": len(chosen), "tokens": total,
            }  # fmt: skip
            for provider in PROVIDERS:
                row = {
                    "suite": "decoding", "op": "trained_draft", "provider": provider, "precision": precision,
                    "shape": shape, **fields[provider],
                }  # fmt: skip
                if provider == "draft model":
                    row |= {"value": accepted, "unit": "share of drafted tokens that are accepted"}
                record.append(options.out, shared | row)
            print(
                f"{precision}, {text}: {fields['plain']['ms_p50']:.3f} ms of CPU a token, "
                f"{fields['draft model']['speedup']:.2f} times faster with drafts, {accepted:.0%} of them accepted; "
                f"{len(chosen)} texts of {total / len(chosen):.0f} tokens"
            )
    return 0


def _text(generator: Generator, prompt: list[int], tokens: int) -> list[int]:
    out = generator.generate([prompt], max_new_tokens=tokens)
    assert isinstance(out, torch.Tensor)
    row: list[int] = out[0].tolist()
    return row


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("trained_draft", __doc__, out=True)
    parser.add_argument("--folder", type=Path, default=record.ROOT / "build" / "trained_draft", help="keeps the pair")
    sizes = {"dim": 512, "layers": 8, "draft_dim": 128, "draft_layers": 2, "vocab": 2000}
    training = {"steps": 1500, "texts": 1200, "draft_steps": 800, "training_threads": torch.get_num_threads()}
    numbers = {**sizes, **training, "prompts": 40, "tokens": 80, "rounds": 5, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--precision", nargs="+", default=["int8"])
    parser.add_argument("--text", nargs="+", choices=("new", "whole"), default=["new", "whole"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
