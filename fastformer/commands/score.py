"""`fastformer score`."""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import TYPE_CHECKING, Literal

from fastformer.settings import BleuTokenize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from fastformer.generation.config import Precision
    from fastformer.generation.text_io import ErrorPolicy, TokenScored

_LEFT = ("its score at -inf", "their scores are -inf")  # in the message about a skipped line
LISTED = ("reference",)
_LINES = 4096  # lines of a language model's file that are scored before the first of them is printed
USAGE = "fastformer score --hypotheses FILE --reference FILE | fastformer score RUN --file FILE [--target FILE]"


def score(
    run: str | None = None,
    *,
    file: str | None = None,
    target: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    by_line: bool = False,
    context: int | None = None,
    token_scores: bool = False,
    device: str = "auto",
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    skip_long: bool = False,
    max_tokens: int = 8192,
    hypotheses: str | None = None,
    reference: str | None = None,
    baseline: str | None = None,
    bleu_tokenize: BleuTokenize = "13a",
    ter: bool = False,
) -> None:
    """Scores translations: against references, or by their probability in a model.

    With --hypotheses it prints BLEU and chrF of the whole corpus, each with sacrebleu's signature of the computation.
    With a RUN it prints a line for each line of --target: the log-probability, its mean for a token, and the
    perplexity, separated by tabs; with a language model, one line for the whole --file. Totals go to standard error.

    Args:
        run: the run folder of a translator or of a language model, or a folder with a BART, a Marian, a T5 or a Llama,
            say, that transformers saved; several, separated by commas, score together, by the mean of their
            probabilities
        file: a UTF-8 file: the sources of --target, one a line; or the text that a language model reads
        target: translations of --file by any system, one a line; the translation of an empty line is empty
        source_lang: the language of --file, for a translator of many, such as NLLB: eng_Latn, or in short en
        target_lang: the language of --target, in the same form
        by_line: with a language model, score each line of --file as a text of its own, without its line end
        context: with a language model, the minimum number of tokens before each scored token, if a text is longer than
            the model's positions; by default half of these
        token_scores: add a fourth column, a JSON list of each token with its log-probability
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        precision: convert the weights to this; by default they stay as they were saved
        on_error: at a pair of lines that is too long or not UTF-8, stop, or skip it with the score -inf and a warning
        skip_long: skip pairs that are only too long
        max_tokens: the most tokens of a batch; fewer need less memory
        hypotheses: translations by any system, one a line; an empty line is an empty translation
        reference: the correct translations, with the same number of lines; several files, separated by commas, are
            several references
        baseline: translations by another system; adds its scores, and the probability (p) that a difference as large
            as the one found is chance, by paired bootstrap over 1,000 samples
        bleu_tokenize: the tokenization for BLEU; zh, ja-mecab and ko-mecab are for languages without spaces
        ter: add the translation edit rate (lower is better)
    """
    by_model, by_reference = (run, file, target), (hypotheses, reference, baseline)
    if any(by_model) == any(by_reference):
        raise ValueError("expected RUN and --file, or --hypotheses and --reference")
    if any(by_reference):
        if hypotheses is None or reference is None:
            raise ValueError("expected --hypotheses together with --reference")
        _score_hypotheses(hypotheses, reference, baseline, bleu_tokenize, ter)
        return
    if run is None or file is None:
        raise ValueError("expected RUN together with --file")

    from fastformer.checkpoints.run import architecture_of, described
    from fastformer.commands import listed_paths
    from fastformer.devices import choose_device
    from fastformer.generation.text_io import ErrorPolicy

    place, errors = choose_device(device), ErrorPolicy(on_error, skip_long, _LEFT)
    architecture = architecture_of(listed_paths(run)[0])
    if architecture in ("BERT", "Whisper"):
        raise ValueError(f"expected a translator or a language model, got {described(listed_paths(run)[0])}")
    if architecture == "GPT":
        if source_lang is not None or target_lang is not None:
            raise ValueError(f"expected no --source_lang and --target_lang for the language model in {run}")
        if target is not None:
            raise ValueError(f"expected no --target for the language model in {run}: it scores --file")
        scores = _text_scores(run, file, by_line, context, place, precision, errors, max_tokens)
    else:
        if target is None:
            raise ValueError(f"expected --target, translations of the lines of --file, for the translator in {run}")
        if by_line or context is not None:
            raise ValueError("expected --by_line and --context only for a language model")
        pair = source_lang, target_lang
        scores = _translation_scores(run, file, target, pair, place, precision, errors, max_tokens)
    total = _Total()
    for scored in scores:
        columns = [f"{value:.6f}" for value in (scored.score, scored.per_token, scored.perplexity)]
        if token_scores:
            pairs = [[token, round(value, 6)] for token, value in scored.tokens]
            columns.append(json.dumps(pairs, ensure_ascii=False))
        print("\t".join(columns))
        total.add(scored)
    total.report()


def _translation_scores(
    run: str, file: str, target: str, pair: tuple[str | None, str | None], device: torch.device,
    precision: Precision | None, errors: ErrorPolicy, max_tokens: int,
) -> Iterator[TokenScored]:  # fmt: skip
    """Yields a translator's score of each line of a file, given that of another."""
    from fastformer.commands import listed_paths
    from fastformer.commands._lines import all_lines
    from fastformer.generation import Translator
    from fastformer.generation.scoring import score_texts

    sources, targets = all_lines(file), all_lines(target)
    _check_counts(sources, file, targets, target)
    runs = listed_paths(run)
    source_lang, target_lang = pair
    translator = Translator.from_pretrained(
        runs if len(runs) > 1 else run, device=device, precision=precision, source_lang=source_lang,
        target_lang=target_lang,
    )  # fmt: skip
    return score_texts(translator, zip(sources, targets, strict=True), errors, max_tokens)


def _text_scores(
    run: str, file: str, by_line: bool, context: int | None, device: torch.device, precision: Precision | None,
    errors: ErrorPolicy, max_tokens: int,
) -> Iterator[TokenScored]:  # fmt: skip
    """Yields a language model's score of each text of a file."""
    from fastformer.checkpoints import load_models
    from fastformer.commands import listed_paths
    from fastformer.commands._lines import all_lines
    from fastformer.data.text import read_text
    from fastformer.generation import Ensemble
    from fastformer.generation.model_protocols import DTYPES
    from fastformer.generation.scoring import score_rows, window_parts
    from fastformer.generation.text_io import TokenScored

    models, tokenizer = load_models(listed_paths(run), ("GPT",), device=device, dtype=DTYPES.get(precision or ""))
    model = models[0] if len(models) == 1 else Ensemble(models)
    if by_line:
        texts, skipped = [], set()
        for place, line in enumerate(all_lines(file)):
            if not isinstance(line, str):
                errors.handle(line)
                skipped.add(place)
            texts.append(line if isinstance(line, str) else "")
        rows = tokenizer.encode_batch(texts)
        errors.report(len(texts))
    else:
        texts, skipped = [read_text(file, skip_bad=errors.on_error == "skip")], set()
        pieces = tokenizer.encode_batch(tokenizer.pieces(texts[0]))
        # As in training, EOS ends a document.
        rows = [[*(i for ids in pieces for i in ids), tokenizer.special_ids.first_eos]]
    for start in range(0, len(rows), _LINES):
        some = rows[start : start + _LINES]
        scores = score_rows(model, [window_parts(row, model.config.max_len, context) for row in some], max_tokens)
        for place, (row, log_probs) in enumerate(zip(some, scores, strict=True), start):
            tokens = list(zip(tokenizer.tokens(row[1:]), log_probs, strict=True))
            yield TokenScored(texts[place], -math.inf if place in skipped else math.fsum(log_probs), tokens)


class _Total:
    """The sum of the scores, for a last line on standard error."""

    def __init__(self) -> None:
        self._texts = self._tokens = self._characters = 0
        self._score = 0.0

    def add(self, scored: TokenScored) -> None:
        """Adds a text's score, if it has scored tokens."""
        if scored.tokens:
            self._texts, self._tokens = self._texts + 1, self._tokens + len(scored.tokens)
            self._characters += len(scored.text)
            self._score += scored.score

    def report(self) -> None:
        """Prints the last line."""
        from fastformer.generation.text_io import perplexity

        if not self._tokens:
            print("no text was scored", file=sys.stderr)
            return
        mean = self._score / self._tokens
        print(
            f"scored {self._texts:,} text{'s' * (self._texts > 1)} of {self._tokens:,} tokens: log-probability "
            f"{self._score:.2f}, {mean:.4f} a token, {self._score / max(self._characters, 1):.4f} a character; "
            f"perplexity {perplexity(mean):.4f}",
            file=sys.stderr,
        )


def _score_hypotheses(
    hypotheses: str, reference: str, baseline: str | None, bleu_tokenize: BleuTokenize, ter: bool
) -> None:
    from fastformer.commands import listed_paths
    from fastformer.commands._lines import good_lines
    from fastformer.training.evaluate import corpus_metrics, corpus_scores

    translations = good_lines(hypotheses)
    files = listed_paths(reference)
    references = [good_lines(file) for file in files]
    others = None if baseline is None else good_lines(baseline)
    for file, lines in zip(files, references, strict=True):
        _check_counts(translations, hypotheses, lines, file)
    if baseline is not None and others is not None:
        _check_counts(translations, hypotheses, others, baseline)
    if others is None:
        scores = corpus_scores(translations, *references, bleu_tokenize=bleu_tokenize, ter=ter)
        for name, (value, signature) in scores.items():
            print(f"{name} {value:.2f}  {signature}")
        return
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    systems: list[tuple[str, Sequence[str]]] = [("baseline", others), ("hypotheses", translations)]
    metrics = corpus_metrics(bleu_tokenize, ter)
    signatures, table = PairedTest(systems, metrics, references, "bs", 1000)()
    for name, (key, signed) in zip(metrics, signatures.items(), strict=True):  # sacrebleu calls chrF "chrF2"
        first, second = table[key]
        assert not isinstance(first, str) and not isinstance(second, str)
        # sacrebleu counts the samples that differ by more, and finds none if the systems are equal.
        chance = 1.0 if first.score == second.score else second.p_value
        print(f"{name} {second.score:.2f}  baseline {first.score:.2f}  p = {chance:.4f}  {signed}")


def _check_counts(lines: Sequence[object], file: str, others: Sequence[object], other: str) -> None:
    if len(lines) != len(others):
        raise ValueError(f"expected as many lines in {other} as in {file}, {len(lines):,}, got {len(others):,}")
