"""Translates a file line by line in one batch that is kept full, and writes the translations in order.

    python examples/translate_file.py MODEL IN OUT [--num_beams 4] [--precision int8]

MODEL is a run of `fastformer train`, or a folder of a translation model as transformers saved it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import fastformer


def lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file one by one, so that the file need not fit in memory."""
    # A line that is not UTF-8 is yielded with surrogates, which `stream` takes for a bad text.
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n").removesuffix("\r")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16", "int8", "int4"])
    options = parser.parse_args(arguments)

    translator = fastformer.Translator.from_pretrained(options.model, precision=options.precision)
    start, count = time.perf_counter(), 0
    with options.target.open("w", encoding="utf-8") as out:
        # Answers come in the order of the lines. A bad line becomes an empty one.
        for answer in translator.stream(lines(options.source), num_beams=options.num_beams, on_error="skip"):
            out.write(f"{answer}\n")
            count += 1
    seconds = time.perf_counter() - start
    print(f"{count} lines in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
