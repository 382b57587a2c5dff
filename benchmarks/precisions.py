"""Measures the quality of a translator's smaller precisions: BLEU, chrF, and how many lines equal those of fp32.

    python -m benchmarks.precisions RUN test2016.en test2016.de [--num_beams 1 4] [--out FILE]

All of them translate with the default engine: on a CPU that is the C++ engine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.measure import record
from fastformer.data.text import read_pairs
from fastformer.generation import Translator
from fastformer.generation.config import Precision
from fastformer.training.evaluate import corpus_scores

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int4")


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each number of beams and each precision."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precisions", description=about)
    parser.add_argument("run", help="the run folder of a translator")
    parser.add_argument("file", type=Path, help="a text file, one sentence a line")
    parser.add_argument("reference", type=Path, help="the right translations, a line each")
    parser.add_argument("--num_beams", type=int, nargs="+", default=[1, 4], help="1 is greedy")
    parser.add_argument("--data", default="multi30k en-de", help="what the texts are of, for the results")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)

    pairs = read_pairs(options.file, options.reference)
    texts, references = [text for text, _ in pairs], [target for _, target in pairs]
    translators = {name: Translator.from_pretrained(options.run, device="cpu", precision=name) for name in PRECISIONS}
    shared = record.environment("cpu")
    for num_beams in options.num_beams:
        found: dict[str, list[str]] = {}
        for precision, translator in translators.items():
            found[precision] = translator.translate(texts, num_beams=num_beams)
            scores = corpus_scores(found[precision], references)
            (bleu, signature), (chrf, _) = scores["BLEU"], scores["chrF"]
            same = sum(one == other for one, other in zip(found[precision], found["fp32"], strict=True))
            quality = f"BLEU {bleu:.2f}, chrF {chrf:.2f}"
            print(f"{num_beams} beams, {precision}: {quality}; {same} of {len(texts)} lines as in fp32")
            row = {
                "suite": "decoding",
                "op": "translate_precisions",
                "provider": "fastformer",
                "precision": precision,
                "data": options.data,
                "shape": {"lines": len(texts), "num_beams": num_beams},
                "sacrebleu_test2016": bleu,
                "chrf_test2016": chrf,
                "signature": signature,
                "same_tokens": same,
            }
            if options.out:
                record.append(options.out, row | shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
