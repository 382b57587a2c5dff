"""`fastformer score`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fastformer.settings import BleuTokenize

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = "fastformer score --hypotheses FILE --reference FILE | fastformer score RUN --file FILE [--target FILE]"


def score(
    *,
    hypotheses: str | None = None,
    reference: str | None = None,
    baseline: str | None = None,
    bleu_tokenize: BleuTokenize = "13a",
    ter: bool = False,
) -> None:
    """Scores translations against references.

    It prints BLEU and chrF of the whole, each with the signature by which sacrebleu says how it was computed.

    Args:
        hypotheses: translations of any system, one a line; an empty line is an empty translation
        reference: the right translations, as many lines; several files, separated by commas, for several references
        baseline: translations of another system; adds its scores, and the probability (p) that a difference as large
            as the one found is chance, by paired bootstrap over 1,000 samples
        bleu_tokenize: how BLEU cuts text into words; zh, ja-mecab and ko-mecab are for languages without spaces
        ter: add the translation edit rate (lower is better)
    """
    if hypotheses is None or reference is None:
        raise ValueError("expected --hypotheses together with --reference")
    _score_hypotheses(hypotheses, reference, baseline, bleu_tokenize, ter)


def _score_hypotheses(
    hypotheses: str, reference: str, baseline: str | None, bleu_tokenize: BleuTokenize, ter: bool
) -> None:
    from fastformer.commands import listed_paths
    from fastformer.training.evaluate import corpus_metrics, corpus_scores

    found = _lines(hypotheses)
    references = [_lines(file) for file in listed_paths(reference)]
    others = None if baseline is None else _lines(baseline)
    for name, lines in zip([*listed_paths(reference), baseline], [*references, others], strict=True):
        if lines is not None and len(lines) != len(found):
            raise ValueError(f"expected as many lines in {name} as in {hypotheses}, {len(found):,}, got {len(lines):,}")
    if others is None:
        scores = corpus_scores(found, *references, bleu_tokenize=bleu_tokenize, ter=ter)
        for name, (value, signature) in scores.items():
            print(f"{name} {value:.2f}  {signature}")
        return
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    systems: list[tuple[str, Sequence[str]]] = [("baseline", others), ("hypotheses", found)]
    metrics = corpus_metrics(bleu_tokenize, ter)
    signatures, table = PairedTest(systems, metrics, references, "bs", 1000)()
    for name, (key, signed) in zip(metrics, signatures.items(), strict=True):  # it calls chrF "chrF2"
        first, second = table[key]
        assert not isinstance(first, str) and not isinstance(second, str)
        # It counts the samples that differ by more, and finds none where the systems are equal.
        chance = 1.0 if first.score == second.score else second.p_value
        print(f"{name} {second.score:.2f}  baseline {first.score:.2f}  p = {chance:.4f}  {signed}")


def _lines(file: str) -> list[str]:
    """The lines of a UTF-8 file, empty ones too, however long."""
    path = Path(file)
    if not path.exists() or path.is_dir():
        raise ValueError(f"expected a text file, but there is no file {path}")
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data:
        raise ValueError(f"{path} is empty: expected at least one line")
    lines = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number:,}: expected UTF-8, got byte 0x{line[error.start]:02x}; convert the file, for "
                "example with iconv"
            ) from error
    return lines
