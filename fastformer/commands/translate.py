"""`fastformer translate`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from fastformer.commands._options import OPTIONS, add_options, given_options
from fastformer.console import OutputLostError, is_terminal, progress_bar, shown
from fastformer.generation.config import GenerationConfig, Precision
from fastformer.settings import BleuTokenize

if TYPE_CHECKING:
    from fastformer.generation import Translator
    from fastformer.generation.alignment import Aligner, Alignment
    from fastformer.generation.text_io import Answer, ErrorPolicy, Item, Source, TextError

logger = logging.getLogger("fastformer")

FILLED_BY = ("file",)  # a text or a file, not both
TEXTS = ("text", "prefix")


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Gives the command's parser the flags of decoding."""
    return add_options(parser, (*OPTIONS, "do_sample"))


def translate(
    run: str,
    text: str | None = None,
    *,
    file: str | None = None,
    reference: str | None = None,
    bleu_tokenize: BleuTokenize = "13a",
    attention: str | None = None,
    align: bool | Literal["words", "tokens"] = False,
    align_layer: int | None = None,
    align_head: int | None = None,
    prefix: str | None = None,
    prefix_file: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    ensemble_weights: str | None = None,
    ensemble_mean: Literal["probabilities", "log_probabilities"] = "probabilities",
    device: str = "auto",
    precision: Precision | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    skip_long: bool = False,
    split: bool = False,
    max_batch_size: int | None = None,
    max_batch_bytes: int | None = None,
    config: str | None = None,
    n_best: int | None = None,
    **options: Any,
) -> None:
    """Translates a text, a file, or standard input line by line.

    A line of output for each line of input, in order; empty lines stay empty.

    Args:
        run: the run folder, or a folder with a BART, a Marian, an NLLB or a T5, say, that transformers saved; several,
            separated by commas, translate together: each step uses the mean of their predictions
        text: the text to translate; without it and without --file, the lines of standard input, answered as they come
        file: a UTF-8 file, one sentence a line; compressed or not; - is standard input, FILE.jsonl:COLUMN a column of
            JSON lines; .parquet, .csv and .tsv have columns, too
        reference: the correct translations of --file, one a line: prints BLEU and chrF
        bleu_tokenize: the tokenization for BLEU; zh, ja-mecab, ko-mecab and char are for languages without spaces
        attention: draw the cross-attention of the translation into this PNG
        align: add to each translation a tab and, for each of its words, the source word that it is aligned with, such
            as 0-0 2-1: pairs of a source and a target place, counted from 0; spaces separate words; or align tokens
        align_layer: the decoder's layer, from 1, whose attention aligns; by default the last but one
        align_head: the head of that layer, from 1; by default the mean of all heads
        prefix: the beginning of the translations; they continue with the next word
        prefix_file: a prefix for each line of --file, one a line; an empty line is no prefix
        source_lang: the language of the text, for a model of many, such as NLLB: eng_Latn, or in short en
        target_lang: the language of the translation, in the same form
        ensemble_weights: for several runs, a weight for each, separated by commas; by default equal weights
        ensemble_mean: for several runs, the mean of their probabilities, or of their logarithms
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: convert the weights to this (auto runs int8 and int4 on a CPU); by default they stay as they were
        on_error: at a line that is too long or not UTF-8, stop, or skip it with an empty line instead and a warning
        skip_long: skip lines that are only too long
        split: cut each line into sentences, translate each, and keep the white space between them; a text in place of a
            line may hold line ends
        max_batch_size: rows that are decoded together: lines times beams or samples; by default 512, on a GPU 1,024
        max_batch_bytes: memory for the caches of those rows; by default 512 MiB, on a GPU a quarter of the free memory
        config: a YAML file with options of decoding, such as num_beams: 4; flags override it
        n_best: above 1, print this many translations of each line, from --num_beams or --do_sample, each on a line of
            its own: number of the input line, tab, score (log-probability, for beams with the length penalty), tab,
            translation
        options: the flags of decoding
    """
    from fastformer.generation.alignment import Aligner
    from fastformer.generation.text_io import ErrorPolicy

    decoding = GenerationConfig.from_options(given_options(config, options))
    # It says, as the flag does, what the weights are loaded as; the translator then says what it computes in.
    precision, decoding = precision or decoding.precision, replace(decoding, precision=None)
    n_best = decoding.num_return_sequences if n_best is None else n_best
    others = {
        "reference": reference, "attention": attention, "prefix": prefix, "prefix_file": prefix_file, "align": align,
        "align_layer": align_layer, "align_head": align_head,
    }  # fmt: skip
    _check_inputs(text, file, n_best, decoding, split, others)
    _check_scores(reference, bleu_tokenize)
    translator = _translator(
        run, bool(align) or attention is not None, device, precision, ensemble_weights, ensemble_mean=ensemble_mean,
        max_batch_size=max_batch_size, max_batch_bytes=max_batch_bytes, source_lang=source_lang,
        target_lang=target_lang,
    )  # fmt: skip
    decoding = translator.settings({"num_return_sequences": n_best}, decoding)
    unit: Literal["words", "tokens"] = "words" if align is True else align or "words"
    aligner = Aligner(translator, unit, align_layer, align_head) if align else None
    if text is not None and attention is not None:
        _draw(translator, text, attention)
    errors = ErrorPolicy(on_error, skip_long)
    source, references = _inputs(text, file, reference, prefix, prefix_file, errors)
    remembered = _Remembered(source)
    answering = translator.answers(remembered, decoding, errors, log_probs=n_best > 1, split=split)
    has_lines, is_scored = not (split and text is not None), references is not None
    printed, lost = _print_all(answering, remembered, aligner, n_best, file, has_lines=has_lines, is_scored=is_scored)
    if references is None:
        return
    _print_scores(printed, references, bleu_tokenize)
    if lost is not None:
        raise lost


def _translator(
    run: str, shows_attention: bool, device: str, precision: Precision | None, weights: str | None, **others: Any
) -> Translator:
    """Loads the translator of a run, or of several."""
    from fastformer.commands import listed_numbers, listed_paths
    from fastformer.devices import choose_device
    from fastformer.generation import Translator

    runs = listed_paths(run)
    if len(runs) > 1 and shows_attention:
        raise ValueError(f"expected one run with --align or --attention, got {len(runs)}: they show one decoder")
    if len(runs) == 1 and weights is not None:
        raise ValueError(f"expected --ensemble_weights with several runs, RUN1,RUN2, got one: {run}")
    return Translator.from_pretrained(
        runs if len(runs) > 1 else run,
        device=choose_device(device, precision),
        precision=precision,
        ensemble_weights=None if weights is None else listed_numbers("--ensemble_weights", weights),
        **others,
    )


def _draw(translator: Translator, text: str, picture: str) -> None:
    from fastformer.generation import draw_attention

    if text.strip():  # an empty text has its own error
        draw_attention(*translator.attention(text), picture, title=text)
        print(f"drew {picture}", file=sys.stderr)


def _inputs(
    text: str | None,
    file: str | None,
    reference: str | None,
    prefix: str | None,
    prefix_file: str | None,
    errors: ErrorPolicy,
) -> tuple[Source[Item], list[str | TextError] | None]:
    """Returns a source of the texts to translate, and the references of a file."""
    from fastformer.commands._lines import Texts, all_lines, file_lines, good_lines, typed
    from fastformer.generation.text_io import IterableSource, as_items

    if text is not None:
        if not text.strip():
            raise ValueError("expected something to translate, got an empty text")
        return IterableSource(as_items(text, prefix)), None
    if file is None or (file == "-" and reference is None and prefix_file is None):
        return typed("translates", "-", errors, prefix), None
    lines, references = file_lines(file), None
    if reference is not None:
        there = list(lines)
        references, lines = all_lines(reference), iter(there)
        _check_references(references, reference, len(there), file, errors.on_error)
    texts = Texts(IterableSource(lines), file, errors, prefix)
    if prefix_file is None:
        return texts, references
    return IterableSource(as_items((item.text for item in texts), good_lines(prefix_file))), references


def _print_all(
    answering: Iterator[list[Answer]], remembered: _Remembered, aligner: Aligner | None, n_best: int, file: str | None,
    *, has_lines: bool, is_scored: bool,
) -> tuple[list[str], OutputLostError | None]:  # fmt: skip
    """Prints all answers while they are computed.

    Args:
        answering: yields the answers.
        remembered: the source of their texts.
        aligner: aligns words; None: nothing is aligned.
        n_best: the number of translations of each text to print.
        file: the file of the texts; None: they are from no file.
        has_lines: each text is a line; else there is a single one, whose translation may have several lines.
        is_scored: the translations are scored, even if standard output closes.

    Returns:
        The best translation of each text if is_scored, and the error of an output that closed meanwhile.
    """
    from fastformer.generation.alignment import align_answers

    translations: list[str] = []
    total, lost = 0, None
    with _progress(file) as advance:
        for answers in answering:
            texts = remembered.take(len(answers))
            alignments = None if aligner is None else align_answers(aligner, texts, answers)
            try:
                if has_lines:
                    _print_answers(answers, n_best, total + 1, alignments)
                else:
                    print(shown(_best(answers[0]), sys.stdout), flush=True)
            except OutputLostError as error:
                if not is_scored:
                    raise
                lost = error  # the scores go to standard error
            if is_scored:
                translations += [_best(answer) for answer in answers]
            total += len(answers)
            advance(len(answers))
    return translations, lost


def _check_inputs(
    text: str | None, file: str | None, n_best: int, config: GenerationConfig, split: bool, others: dict[str, Any]
) -> None:
    """Refuses flags that contradict each other; `others` has the flags that are not for every call, by name."""
    from fastformer.plots import check_picture

    given = {name for name, value in others.items() if value not in (None, False)}
    if "attention" in given:
        check_picture(others["attention"])
    shown = ", got both: {prefix!r:.60} and {prefix_file}".format(**others)
    alone = [f"--n_best {n_best}"] * (n_best > 1)
    alone += [f"--{name}" for name in ("prefix", "prefix_file", "attention", "align") if name in given]
    missing = "expected --file with --{}: {}".format
    for is_wrong, message in (
        ("attention" in given and text is None, "expected a text to draw the --attention of"),
        ("reference" in given and file is None, missing("reference", "its translations are compared")),
        ({"prefix", "prefix_file"} <= given, f"expected --prefix or --prefix_file{shown}"),
        ("prefix_file" in given and file is None, missing("prefix_file", "it has a line for each of its lines")),
        ({"prefix", "attention"} <= given, "expected --prefix or --attention, got both: no picture shows a prefix"),
        (n_best < 1, f"expected --n_best of at least 1, got {n_best}"),
        (
            n_best > 1 and "reference" in given,
            "expected --n_best or --reference, got both: one translation of a line is compared",
        ),
        (
            n_best > config.num_beams and not config.do_sample,
            f"expected --num_beams of at least --n_best {n_best}, or --do_sample; got --num_beams {config.num_beams}",
        ),
        (
            split and bool(alone),
            f"expected --split or {' '.join(alone[:1])}, got both: each sentence is translated by itself",
        ),
        (
            "align" not in given and bool({"align_layer", "align_head"} & given),
            "expected --align with --align_layer and --align_head",
        ),
    ):
        if is_wrong:
            raise ValueError(message)


def _check_scores(reference: str | None, bleu_tokenize: BleuTokenize) -> None:
    if reference is not None:
        from fastformer.training.evaluate import corpus_metrics

        corpus_metrics(bleu_tokenize)  # raises errors before the first translation
    elif bleu_tokenize != "13a":
        raise ValueError(f"expected --reference with --bleu_tokenize {bleu_tokenize}, got none")


def _check_references(references: list[str | TextError], reference: str, count: int, file: str, on_error: str) -> None:
    """Compares the references with the file's lines; a bad reference is an error, or is omitted from the scores."""
    if len(references) != count:
        raise ValueError(
            f"expected as many lines in {reference} as in {file}, {count:,}, got {len(references):,}: the two files "
            "must be aligned line by line"
        )
    bad = [line for line in references if not isinstance(line, str)]
    if bad and (on_error != "skip" or len(bad) == count):
        raise ValueError(f"{bad[0]}; --on_error skip omits such lines from the scores")
    if bad:
        logger.warning("omitted %d of %d lines from the scores, the first of them for %s", len(bad), count, bad[0])


def _best(answer: Answer) -> str:
    return next(iter(answer.texts()), "")


class _Remembered:
    """A source that stores its texts until their answers are there."""

    def __init__(self, source: Source[Item]) -> None:
        self._source = source
        self._texts: deque[str] = deque()

    def get(self, wait: bool) -> Item | None:
        item = self._source.get(wait)
        if item is not None:
            self._texts.append(item.text)
        return item

    def take(self, count: int) -> list[str]:
        """Returns the texts of the next answers, and forgets them."""
        return [self._texts.popleft() for _ in range(count)]


def _print_answers(answers: list[Answer], n_best: int, first: int, alignments: list[list[Alignment]] | None) -> None:
    """Prints a line for each text, or for each of its n best answers, and flushes the lines at once."""
    from fastformer.generation.alignment import pharaoh

    lines = []
    for place, answer in enumerate(answers):
        # A byte-level model may produce a line end, and readers count lines.
        columns = [[text.replace("\r", " ").replace("\n", " ")] for text in answer.texts()]
        if n_best > 1:
            scores = [score for _, score in answer.scored()]
            columns = [[f"{score:.6f}", *row] for score, row in zip(scores, columns, strict=True)]
        if alignments is not None:
            pairs = zip(columns, alignments[place], strict=True)
            columns = [[word.replace("\t", " ") for word in row] + [pharaoh(alignment)] for row, alignment in pairs]
        nothing = ["-inf"] * (n_best > 1) + [""] * (1 if alignments is None else 2)
        number = [str(first + place)] * (n_best > 1)
        lines += ["\t".join([*number, *row]) for row in (columns or [nothing])[:n_best]]
    print(shown("\n".join(lines), sys.stdout), flush=True)


@contextlib.contextmanager
def _progress(file: str | None) -> Iterator[Callable[[int], object]]:
    """Counts lines with a progress bar on standard error, for a file whose answers aren't shown on a terminal."""
    bar = None
    if file is not None and Path(file).is_file() and not is_terminal(sys.stdout):
        bar = progress_bar(unit="line")
    if file is None or bar is None:
        yield lambda lines: None
        return
    from fastformer.data.files import open_bytes

    with bar:
        with contextlib.suppress(ValueError), open_bytes(file) as lines:  # translating raises the error
            bar.reset(total=sum(1 for _ in lines))
        yield bar.update


def _print_scores(answers: list[str], wanted: list[str | TextError], bleu_tokenize: BleuTokenize) -> None:
    from fastformer.training.evaluate import corpus_scores, words_hint

    pairs = [(text, right) for text, right in zip(answers, wanted, strict=True) if isinstance(right, str)]
    translations, references = (list(side) for side in zip(*pairs, strict=True))
    scores = corpus_scores(translations, references, bleu_tokenize=bleu_tokenize)
    for name, (score, signature) in scores.items():
        print(f"{name} {score:.2f}  {signature}  ({len(references):,} lines)", file=sys.stderr)
    if (hint := words_hint(references, bleu_tokenize)) is not None:
        logger.warning(hint)
