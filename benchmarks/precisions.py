"""Measures the quality of smaller precisions: a translator's BLEU, chrF and lines as in fp32, or a GPT's perplexity.

    python -m benchmarks.precisions RUN test2016.en test2016.de [--num_beams 1 4] [--out FILE]
    python -m benchmarks.precisions RUN tenth.txt --data NAME [--window 256] [--out FILE]

A translator translates with the default engine: on a CPU that is the C++ engine. The perplexity is that of the C++
engine, which reads windows of the text token by token, each without the text before it; also with int8 keys and values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.checkpoints import load_model
from fastformer.data.text import read_pairs
from fastformer.generation import Translator
from fastformer.generation.config import Precision
from fastformer.generation.engines import Prompt
from fastformer.generation.engines.cpp import CppEngine
from fastformer.models import GPT
from fastformer.training.evaluate import corpus_scores

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int4")
_ROWS = 64  # windows that are read together


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each precision and, with a translator, for each number of beams."""
    parser = parser_of("precisions", __doc__, out=True)
    parser.add_argument("run", help="the run folder of a translator or of a language model")
    parser.add_argument("file", type=Path, help="a text file; of a translator, one sentence a line")
    parser.add_argument("reference", type=Path, nargs="?", help="the right translations, a line each")
    parser.add_argument("--num_beams", type=int, nargs="+", default=[1, 4], help="of a translator; 1 is greedy")
    parser.add_argument("--window", type=int, default=256, help="of a language model: tokens that are read together")
    parser.add_argument("--data", default="multi30k en-de", help="what the texts are of, for the results")
    options = parser.parse_args(arguments)
    shared = record.environment("cpu")
    for row in perplexities(options) if options.reference is None else translations(options):
        record.append(options.out, {"suite": "decoding", "provider": "fastformer", "data": options.data} | row | shared)
    return 0


def translations(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a translator's rows."""
    pairs = read_pairs(options.file, options.reference)
    texts, references = [text for text, _ in pairs], [target for _, target in pairs]
    translators = {name: Translator.from_pretrained(options.run, device="cpu", precision=name) for name in PRECISIONS}
    for num_beams in options.num_beams:
        outputs: dict[str, list[str]] = {}
        for precision, translator in translators.items():
            outputs[precision] = translator.translate(texts, num_beams=num_beams)
            scores = corpus_scores(outputs[precision], references)
            (bleu, signature), (chrf, _) = scores["BLEU"], scores["chrF"]
            same = sum(a == exact_text for a, exact_text in zip(outputs[precision], outputs["fp32"], strict=True))
            quality = f"BLEU {bleu:.2f}, chrF {chrf:.2f}"
            print(f"{num_beams} beams, {precision}: {quality}; {same} of {len(texts)} lines as in fp32")
            yield {
                "op": "translate_precisions",
                "precision": precision,
                "shape": {"lines": len(texts), "num_beams": num_beams},
                "sacrebleu_test2016": bleu,
                "chrf_test2016": chrf,
                "signature": signature,
                "same_tokens": same,
            }


def perplexities(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a language model's rows."""
    model, tokenizer = load_model(options.run, ("GPT",))
    ids = torch.tensor(tokenizer.encode(options.file.read_text(encoding="utf-8")))
    windows = ids[: len(ids) // options.window * options.window].view(-1, options.window)
    if not len(windows):
        raise ValueError(f"expected a text of at least {options.window} tokens, got {len(ids)}: {options.file}")
    for precision in PRECISIONS:
        for cache_dtype in (None, "int8"):
            value = perplexity(model.eval(), precision, windows, cache_dtype)
            of_cache = f", a cache of {cache_dtype}" if cache_dtype else ""
            print(f"{precision}{of_cache}: perplexity {value:.4f} of {windows.numel()} tokens")
            yield {
                "op": "score_precisions" if cache_dtype is None else f"score_cache_{cache_dtype}",
                "precision": precision,
                "shape": {"tokens": windows.numel(), "window": options.window},
                "perplexity": value,
            }


def perplexity(model: GPT, precision: str, windows: Tensor, cache_dtype: str | None = None) -> float:
    """Returns exp of the mean of -log p of all tokens but the first of each window, by the C++ engine.

    Args:
        model: the model.
        precision: one of `PRECISIONS`.
        windows: (count, length) ids.
        cache_dtype: see `GenerationConfig`.
    """
    engine, nats = CppEngine(model, precision, cache_dtype), 0.0
    for chunk in windows.split(_ROWS):
        prompts = [Prompt(None, [first]) for first in chunk[:, 0].tolist()]
        batch = engine.open(len(chunk), sum(engine.tokens_needed(prompt, 1, windows.shape[1]) for prompt in prompts))
        batch.prefill(prompts)
        for current, following in zip(chunk.T[:-1], chunk.T[1:], strict=True):
            log_probs = batch.logits(current.tolist()).log_softmax(-1)
            nats -= float(log_probs.gather(1, following[:, None]).double().sum())
    return math.exp(nats / (windows.numel() - len(windows)))


if __name__ == "__main__":
    raise SystemExit(main())
