"""`fastformer translate`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastformer.console import OutputLostError, is_terminal, shown
from fastformer.settings import BleuTokenize

if TYPE_CHECKING:
    from fastformer.generation.alignment import Alignment
    from fastformer.generation.input_errors import TextError
    from fastformer.generation.ordered_stream import Source
    from fastformer.generation.text_io import Answer, Item

logger = logging.getLogger("fastformer")

FILLED_BY = ("file",)  # a text or a file, not both
TEXTS = ("text", "prefix")


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
    ensemble_weights: str | None = None,
    ensemble_mean: Literal["probabilities", "log_probabilities"] = "probabilities",
    device: str = "auto",
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    skip_long: bool = False,
    split: bool = False,
    n_best: int = 1,
    num_beams: int = 1,
    beam_rules: Literal["tensor2tensor", "transformers"] = "tensor2tensor",
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    min_new_tokens: int = 0,
    max_new_tokens: int | None = None,
    max_time: float | None = None,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    max_batch_size: int | None = None,
    max_batch_bytes: int | None = None,
) -> None:
    """Translates a text, a file, or standard input line by line.

    A line of output for each line of input, in order; empty lines stay empty.

    Args:
        run: the run folder, or that of a BART, a Marian or a T5 as transformers saves it; several, separated by commas,
            translate together: at each step the mean of what they say counts
        text: what to translate; without it and without --file, the lines of standard input, answered as they come
        file: a UTF-8 file, one sentence a line; compressed or not; - is standard input, FILE.jsonl:COLUMN a column of
            JSON lines, as of .parquet, .csv and .tsv
        reference: the right translations of --file, a line each: prints BLEU and chrF
        bleu_tokenize: how BLEU cuts text into words; zh, ja-mecab, ko-mecab and char are for languages without spaces
        attention: draw what the translation looked at into this PNG
        align: add to each translation a tab and which source word stands behind each of its words, such as 0-0 2-1:
            pairs of a source and a target place, counted from 0; words are what spaces separate; or align tokens
        align_layer: whose attention tells, of the decoder's layers, from 1; by default the last but one
        align_head: of that layer, from 1; by default the mean of all
        prefix: what the translations begin with; they go on with the next word
        prefix_file: the same for the lines of --file, one a line; an empty line is none
        ensemble_weights: of several runs: a number for each, separated by commas; by default all count the same
        ensemble_mean: of several runs: of their probabilities, or of their logarithms
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: what the weights become; int8 is for a CPU alone; without it they stay as they were saved
        on_error: at a line that is too long or no UTF-8, stop, or skip it with an empty line in its place and a warning
        skip_long: skip what is only too long
        split: cut each line into sentences, which are translated by themselves, and keep the white space between them;
            a text in place of a line may hold line ends
        n_best: above 1, so many translations of each line, from --num_beams or --do_sample, each on a line of
            its own: number of the input line, tab, score (log-probability, for beams with the length penalty), tab,
            translation
        num_beams: hypotheses that are followed; 1 is greedy
        beam_rules: whose beam search; transformers is that of Hugging Face's generate
        length_penalty: alpha of ((5 + length) / 6) ** alpha, by transformers' rules of length ** alpha, which divides
            the score of beams; by default 0.6, by transformers' rules 1.0
        early_stopping: stop when num_beams hypotheses are finished, better ones possible or not; never, of
            transformers' rules alone, goes on while a better one is possible
        num_beam_groups: so many groups of beams, which avoid each other's tokens; with --diversity_penalty
        diversity_penalty: what a token costs for each time that an earlier group has just chosen it
        min_new_tokens: the shortest output
        max_new_tokens: the longest output; by default the source's length + 100
        max_time: seconds after which a line's translation ends with what there is
        repetition_penalty: above 1 discourages tokens that were there
        no_repeat_ngram_size: no n-gram of this length comes twice; 0 is off
        do_sample: draw from the distribution instead of taking the best
        temperature: of the sampling; below 1 sharpens the distribution
        top_k: draw from the k best tokens; 0 is all
        top_p: draw from the smallest set of tokens that holds this probability
        seed: of the sampling
        max_batch_size: rows that are decoded together: lines times beams or samples; by default 512, on a GPU 1,024
        max_batch_bytes: what the caches of those may take; by default 512 MiB, on a GPU a quarter of what is free
    """
    from fastformer.commands import listed_numbers, listed_paths
    from fastformer.commands._lines import Texts, all_lines, arriving, file_lines, good_lines
    from fastformer.devices import choose_device
    from fastformer.generation import Translator, draw_attention
    from fastformer.generation.alignment import Aligner, align_answers
    from fastformer.generation.input_errors import ErrorPolicy
    from fastformer.generation.ordered_stream import IterableSource
    from fastformer.generation.text_io import as_items
    from fastformer.plots import check_picture

    if attention is not None:
        check_picture(attention)
    _check_inputs(text, file, reference, attention, n_best, num_beams, do_sample)
    _check_prefixes(file, attention, prefix, prefix_file)
    others = {"prefix": prefix, "prefix_file": prefix_file, "attention": attention, "align": align or None}
    _check_split(split, n_best, [name for name, value in others.items() if value is not None])
    if reference is not None:
        from fastformer.training.evaluate import corpus_metrics

        corpus_metrics(bleu_tokenize)  # raises before anything is translated
    elif bleu_tokenize != "13a":
        raise ValueError(f"expected --reference with --bleu_tokenize {bleu_tokenize}, got none")
    if not align and (align_layer, align_head) != (None, None):
        raise ValueError("expected --align with --align_layer and --align_head")
    runs = listed_paths(run)
    if len(runs) > 1 and (align or attention is not None):
        raise ValueError(
            f"expected one run with --align or --attention, got {len(runs)}: what one decoder looks at counts"
        )
    if len(runs) == 1 and ensemble_weights is not None:
        raise ValueError(f"expected --ensemble_weights with several runs, RUN1,RUN2, got one: {run}")
    translator = Translator.from_pretrained(
        runs if len(runs) > 1 else run,
        device=choose_device("cpu" if (device, precision) == ("auto", "int8") else device),
        precision=precision,
        ensemble_weights=None if ensemble_weights is None else listed_numbers("--ensemble_weights", ensemble_weights),
        ensemble_mean=ensemble_mean,
        max_batch_size=max_batch_size,
        max_batch_bytes=max_batch_bytes,
    )
    settings = translator.settings(
        {
            "num_beams": num_beams,
            "beam_rules": beam_rules,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "num_beam_groups": num_beam_groups,
            "diversity_penalty": diversity_penalty,
            "min_new_tokens": min_new_tokens,
            "max_new_tokens": max_new_tokens,
            "max_time": max_time,
            "repetition_penalty": repetition_penalty,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "num_return_sequences": n_best,
        }
    )
    unit: Literal["words", "tokens"] = "tokens" if align == "tokens" else "words"
    aligner = Aligner(translator, unit, align_layer, align_head) if align else None
    errors, references = ErrorPolicy(on_error, skip_long), None
    if text is not None:
        if not text.strip():
            raise ValueError("expected something to translate, got an empty text")
        if attention is not None:
            draw_attention(*translator.attention(text), attention, title=text)
            print(f"drew {attention}", file=sys.stderr)
        source: Source[Item] = IterableSource(as_items(text, prefix))
    elif file is None or (file == "-" and reference is None and prefix_file is None):
        if is_terminal(sys.stdin):
            print("translates each line that you type; Ctrl-D ends", file=sys.stderr)
        source = Texts(arriving(), "-", errors, prefix)
    else:
        lines = file_lines(file)
        if reference is not None:
            there = list(lines)
            references, lines = all_lines(reference), iter(there)
            _check_references(references, reference, len(there), file, on_error)
        texts = Texts(IterableSource(lines), file, errors, prefix)
        source = texts
        if prefix_file is not None:
            source = IterableSource(as_items((item.text for item in texts), good_lines(prefix_file)))

    found: list[str] = []
    total, lost = 0, None
    remembered = _Remembered(source)
    with _progress(file) as advance:
        for answers in translator.answers(remembered, settings, errors, log_probs=n_best > 1, split=split):
            texts_of = remembered.take(len(answers))
            alignments = None if aligner is None else align_answers(aligner, texts_of, answers)
            try:
                if split and text is not None:
                    _print_text(_best(answers[0]))
                else:
                    _print_answers(answers, n_best, total + 1, alignments)
            except OutputLostError as error:
                if references is None:
                    raise
                lost = error  # the scores are told elsewhere
            if references is not None:
                found += [_best(answer) for answer in answers]
            total += len(answers)
            advance(len(answers))
    if references is not None:
        pairs = [(text, right) for text, right in zip(found, references, strict=True) if isinstance(right, str)]
        texts_found, texts_right = (list(side) for side in zip(*pairs, strict=True))
        _print_scores(texts_found, texts_right, bleu_tokenize)
    if lost is not None:
        raise lost


def _check_inputs(
    text: str | None,
    file: str | None,
    reference: str | None,
    attention: str | None,
    n_best: int,
    num_beams: int,
    do_sample: bool,
) -> None:
    if text is not None and file is not None:
        raise ValueError(f"expected a text or --file, got both: {text!r:.60} and {file}")
    if attention is not None and text is None:
        raise ValueError("expected a text to draw the attention of: fastformer translate RUN 'text' --attention F")
    if reference is not None and file is None:
        raise ValueError("expected --file with --reference: its translations are compared with the reference")
    if n_best < 1:
        raise ValueError(f"expected --n_best of at least 1, got {n_best}")
    if n_best > 1 and reference is not None:
        raise ValueError("expected --n_best or --reference, got both: one translation of a line is compared")
    if n_best > num_beams and not do_sample:
        raise ValueError(
            f"expected --num_beams of at least --n_best {n_best}, or --do_sample; got --num_beams {num_beams}"
        )


def _check_references(references: list[str | TextError], reference: str, count: int, file: str, on_error: str) -> None:
    """Holds the references against the lines of the file; bad ones end it, or are left out of the scores."""
    if len(references) != count:
        raise ValueError(
            f"expected as many lines in {reference} as in {file}, {count:,}, got {len(references):,}: the two files "
            "must be aligned line by line"
        )
    bad = [line for line in references if not isinstance(line, str)]
    if bad and (on_error != "skip" or len(bad) == count):
        raise ValueError(f"{bad[0]}; --on_error skip leaves such lines out of the scores")
    if bad:
        logger.warning("left %d of %d lines out of the scores, the first of them for %s", len(bad), count, bad[0])


def _check_prefixes(file: str | None, attention: str | None, prefix: str | None, prefix_file: str | None) -> None:
    if prefix is not None and prefix_file is not None:
        raise ValueError(f"expected --prefix or --prefix_file, got both: {prefix!r:.60} and {prefix_file}")
    if prefix_file is not None and file is None:
        raise ValueError("expected --file with --prefix_file: it has a line for each of its lines")
    if prefix is not None and attention is not None:
        raise ValueError("expected --prefix or --attention, got both: what a translation itself looks at is drawn")


def _check_split(split: bool, n_best: int, others: list[str]) -> None:
    if split and (n_best > 1 or others):
        other = f"--n_best {n_best}" if n_best > 1 else f"--{others[0]}"
        raise ValueError(f"expected --split or {other}, got both: each sentence is translated by itself")


def _best(answer: Answer) -> str:
    return next(iter(answer.texts()), "")


class _Remembered:
    """A source that remembers its texts until their answers are there."""

    def __init__(self, source: Source[Item]) -> None:
        self._source = source
        self._texts: deque[str] = deque()

    def get(self, wait: bool) -> Item | None:
        """See `Source.get`."""
        item = self._source.get(wait)
        if item is not None:
            self._texts.append(item.text)
        return item

    def take(self, count: int) -> list[str]:
        """The texts of the next answers."""
        return [self._texts.popleft() for _ in range(count)]


def _print_answers(
    answers: list[Answer], n_best: int, first: int, alignments: list[list[Alignment]] | None = None
) -> None:
    """A line for each text, or for each of its n best; what is printed is out at once."""
    from fastformer.generation.alignment import pharaoh

    lines = []
    for place, answer in enumerate(answers):
        columns = [[_one_line(text)] for text in answer.texts()]
        if n_best > 1:
            scores = [score for _, score in answer.scored()]
            columns = [[f"{score:.6f}", *row] for score, row in zip(scores, columns, strict=True)]
        if alignments is not None:
            pairs = zip(columns, alignments[place], strict=True)
            columns = [[word.replace("\t", " ") for word in row] + [pharaoh(found)] for row, found in pairs]
        nothing = ["-inf"] * (n_best > 1) + [""] * (1 if alignments is None else 2)
        number = [str(first + place)] * (n_best > 1)
        lines += ["\t".join([*number, *row]) for row in (columns or [nothing])[:n_best]]
    print(shown("\n".join(lines), sys.stdout), flush=True)


def _print_text(text: str) -> None:
    """A text that may have several lines."""
    print(shown(text, sys.stdout), flush=True)


def _one_line(text: str) -> str:
    # A model of bytes may say a line end, and lines are counted.
    return text.replace("\r", " ").replace("\n", " ")


@contextlib.contextmanager
def _progress(file: str | None) -> Iterator[Callable[[int], object]]:
    """Counts lines on a bar on standard error, for a file whose answers a person doesn't see go by."""
    if file is None or not Path(file).is_file() or not is_terminal(sys.stderr) or is_terminal(sys.stdout):
        yield lambda lines: None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is no reason to stop
        yield lambda lines: None
        return
    from fastformer.data.files import open_bytes

    total = None
    with contextlib.suppress(ValueError), open_bytes(file) as lines:  # translating says what is wrong with it
        total = sum(1 for _ in lines)
    with tqdm(total=total, unit="line", file=sys.stderr) as bar:
        yield bar.update


def _print_scores(found: list[str], references: list[str], bleu_tokenize: BleuTokenize) -> None:
    from fastformer.training.evaluate import corpus_scores, words_hint

    scores = corpus_scores(found, references, bleu_tokenize=bleu_tokenize)
    for name, (score, signature) in scores.items():
        print(f"{name} {score:.2f}  {signature}  ({len(references):,} lines)", file=sys.stderr)
    if (hint := words_hint(references, bleu_tokenize)) is not None:
        logger.warning(hint)
