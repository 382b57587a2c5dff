"""`fastformer rank`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

from fastformer.console import shown
from fastformer.settings import Range

TEXTS = ("query",)


def rank(
    folder: str,
    *,
    query: str,
    file: str | None = None,
    top_k: Annotated[int, Range(1)] | None = None,
    json_lines: bool = False,
    precision: Literal["fp32", "bf16", "int8", "int4"] | None = None,
    device: str = "auto",
    batch_tokens: Annotated[int, Range(1)] = 16384,
) -> None:
    """Ranks passages by how well they answer a query, with a cross-encoder.

    Prints a line for each passage, the best first: its score, a tab, and its text.

    Args:
        folder: the cross-encoder's folder, as sentence-transformers or transformers saves it
        query: the question that the passages are to answer
        file: a UTF-8 file, one passage a line; compressed or not; - is standard input, FILE.jsonl:COLUMN a column of
            JSON lines, as of .parquet, .csv and .tsv; without it, the lines of standard input
        top_k: print only this many of the best passages
        json_lines: print a JSON object a line: corpus_id (the number of the passage's line, from 0), score, text
        precision: convert the weights to this; int8 and int4 are for a CPU; by default they stay as they were saved
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        batch_tokens: tokens that are computed together; fewer need less memory
    """
    from fastformer.commands._lines import each_line
    from fastformer.devices import choose_device
    from fastformer.encoding import CrossEncoder

    if not query.strip():
        raise ValueError("expected a query, got an empty text")
    ranker = CrossEncoder.from_pretrained(folder, precision=precision, device=choose_device(device, precision))
    ranking = ranker.rank(query, each_line(file), top_k, return_documents=True, batch_tokens=batch_tokens)
    for each in ranking:
        if json_lines:
            print(json.dumps(each, ensure_ascii=False))
        else:
            print(shown(f"{each['score']:.6f}\t{each['text']}", sys.stdout))
    if ranker.num_cut:
        print(f"cut {ranker.num_cut:,} passages to {ranker.max_seq_length} tokens with the query", file=sys.stderr)
