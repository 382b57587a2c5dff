"""Measures how well an encoder finds sentences in each precision, on sentences of this repository's documentation.

    python -m benchmarks.retrieval FOLDER [--precision fp32 bf16 int8] [--out FILE]

A query is two fifths of a sentence's words, or its words with typing errors, and has to find the sentence among all
others. Each sentence makes three queries of both kinds, since near ties move the recall of fewer queries by more than a
precision does. Recall is the share of the queries whose sentence is among the first places, and nDCG at 10 counts its
place by 1 / log2(1 + place), as MTEB does. The model has to read English.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer import Encoder
from fastformer.generation.sentences import split_sentences

PRECISIONS = ("fp32", "bf16", "int8")
DRAWS = 3  # queries of a sentence
MEASURES = ("recall at 1", "recall at 10", "nDCG at 10")


def main(arguments: list[str] | None = None) -> int:
    """Prints a line and appends a row for each task, measure and precision."""
    parser = parser_of("retrieval", __doc__, out=True)
    parser.add_argument("folder", type=Path, help="the folder of an encoder")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of the weights (all)")
    options = parser.parse_args(arguments)
    for row in rows(options, sentences()):
        record.append(options.out, row)
    return 0


def sentences() -> list[str]:
    """Returns the sentences of the documentation that have more than seven words, each once."""
    pages = [*record.ROOT.glob("[CR]*.md"), *(record.ROOT / "docs").glob("[egs]*/*.md")]
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))
    unique = dict.fromkeys(sentence.text for sentence in split_sentences(text))
    return [text for text in unique if 40 < len(text) < 400 and "[SEP]" not in text and len(text.split()) > 7]


def tasks(texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, queries) of each task; query i has to find text i % len(texts)."""
    generator = random.Random(0)
    drawn = texts * DRAWS
    few = [" ".join(word for word in text.split() if generator.random() < 0.4) or text for text in drawn]
    yield "two fifths of the words", few
    yield "typing errors", [re.sub(r"\w{4,}", lambda word: _mistyped(word[0], generator), text) for text in drawn]


def _mistyped(word: str, generator: random.Random) -> str:
    """Returns the word, or in one of two cases the word with two neighbouring letters swapped."""
    place = generator.randrange(1, len(word) - 1)
    if generator.random() < 0.5:
        return word
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def measured(encoder: Any, queries: list[str], texts: list[str]) -> dict[str, float]:
    """Returns each of `MEASURES`, in percent; of equal scores, the text that is searched counts as the last one."""
    scores = encoder.encode(queries, normalize=True) @ encoder.encode(texts, normalize=True).T
    searched = scores[np.arange(len(queries)), np.arange(len(queries)) % len(texts)]
    places = (scores >= searched[:, None]).sum(1)
    gains = np.where(places <= 10, 1 / np.log2(1 + places), 0)
    values = ((places <= 1).mean(), (places <= 10).mean(), gains.mean())
    return {name: 100 * float(value) for name, value in zip(MEASURES, values, strict=True)}


def rows(options: argparse.Namespace, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of all tasks: those of one run, with one time, so that a table has all precisions."""
    shared = record.environment("cpu")
    encoders = {precision: Encoder(options.folder, precision=precision) for precision in options.precision}
    for task, queries in tasks(texts):
        for precision, encoder in encoders.items():
            values = measured(encoder, queries, texts)
            print(f"{task}, {precision}: " + ", ".join(f"{name} {value:.2f} %" for name, value in values.items()))
            for measure, value in values.items():
                yield {
                    "suite": "model", "op": "retrieval", "provider": "fastformer.Encoder", "precision": precision,
                    "model": options.folder.absolute().name, "data": "sentences of the documentation",
                    "shape": {"task": task, "measure": measure, "texts": len(texts), "queries": len(queries)},
                    "value": value, "unit": "%", **shared,
                }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
