"""Scores and alignments of given translations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import overload

from fastformer.generation.alignment import Aligner, Alignment, Unit, align_texts
from fastformer.generation.config import Precision
from fastformer.generation.model_protocols import Model, why_not_by_modules
from fastformer.generation.scoring import MAX_TOKENS, score_texts
from fastformer.generation.text_io import ErrorPolicy, TextCodec, TokenScored, as_pairs
from fastformer.languages import LanguageIds, Languages


class Judge(ABC):
    """Scores and aligns texts with given translations; `Translator` inherits from it and adds translating.

    Attributes:
        model, tokenizer, precision, source_lang, target_lang: see `Translator`.
    """

    model: Model
    tokenizer: TextCodec
    precision: Precision | None
    source_lang: str | None
    target_lang: str | None

    @abstractmethod
    def encode(self, text: str, number: int = 1) -> list[int]:
        """Returns the source ids of a text; see `Translator.encode`."""

    @abstractmethod
    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a translation; see `Translator.encode_target`."""

    def language_ids(self, source_lang: str | None = None, target_lang: str | None = None) -> LanguageIds:
        """Returns the ids that tell the model the languages of a text; empty for a model with one pair of languages.

        Args:
            source_lang, target_lang: the languages; None: those of the object.

        Raises:
            ValueError: an unknown language, or no language is given and the object has none.
        """
        languages = self.languages
        if languages is None:
            self.check_languages(source_lang, target_lang)
            return LanguageIds()
        source = self.source_lang if source_lang is None else source_lang
        return languages.of(source, self.target_lang if target_lang is None else target_lang)

    @property
    def languages(self) -> Languages | None:
        """The languages that the tokenizer knows; None: the model has one pair of languages, which nothing tells it."""
        return getattr(self.tokenizer, "languages", None)

    def check_languages(self, source_lang: object, target_lang: object) -> None:
        """Checks languages that apply to all texts.

        Raises:
            ValueError: an unknown language, or the model's languages can't be chosen.
        """
        given = {"source_lang": source_lang, "target_lang": target_lang}
        languages = self.languages
        if languages is not None:
            languages.check(*(name if isinstance(name, str) else None for name in given.values()))
            return
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"expected no {name}, because this {type(self.model).__name__}'s tokenizer has no language codes, "
                    f"got {value!r:.40}"
                )

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def score(  # type: ignore[overload-overlap]
        self,
        texts: str,
        translations: str,
        *,
        on_error: str = ...,
        skip_long: bool = ...,
        max_tokens: int = ...,
    ) -> TokenScored: ...

    @overload
    def score(
        self,
        texts: Iterable[str],
        translations: Iterable[str],
        *,
        on_error: str = ...,
        skip_long: bool = ...,
        max_tokens: int = ...,
    ) -> list[TokenScored]: ...

    def score(
        self,
        texts: str | Iterable[str],
        translations: str | Iterable[str],
        *,
        on_error: str = "stop",
        skip_long: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> TokenScored | list[TokenScored]:
        """Scores given translations by forced decoding.

        The model's modules compute the scores, in their own precision. For a translation that `translate` found by
        greedy decoding, the result equals `return_scores` up to rounding, if the text is tokenized to the tokens that
        the model generated.

        Args:
            texts: a text, or texts, as in `translate`.
            translations: a str for a str, else one for each text. The translation of an empty text has to be empty. An
                empty translation of another text is scored as EOS alone.
            on_error: "stop", or "skip": a pair that can't be scored (an empty text, a side longer than the model's
                max_len) gets the score -inf, and a warning with its number.
            skip_long: skip pairs that are only too long.
            max_tokens: the most tokens in a batch, on its longer side, padding included.

        Returns:
            A `TokenScored(text, score, tokens)` for a str, else a list with one for each text: the translation; its
            log-probability, without a length penalty; and its tokens, EOS included, each with its log-probability. It
            also has `per_token` and `perplexity`. If text and translation are empty, there are no tokens, and the score
            is 0.

        Raises:
            ValueError: an item isn't a text, the numbers of texts and translations differ, or a pair can't be scored
                (the message has its number, from 1).
        """
        # Only modules compute the scores. Those of a quantised model hold its rounded weights.
        reason = why_not_by_modules(self.model, self.precision)
        if reason is not None:
            raise ValueError(f"expected a precision that the model's modules have, to score in: {reason}")
        errors = ErrorPolicy(on_error, skip_long, ("its score at -inf", "their scores are -inf"))
        found = list(score_texts(self, as_pairs(texts, translations), errors, max_tokens))
        return found[0] if isinstance(texts, str) else found

    @overload  # a str is also an iterable of str: the first overload that fits counts
    def align(  # type: ignore[overload-overlap]
        self,
        texts: str,
        translations: str,
        *,
        unit: Unit = ...,
        layer: int | None = ...,
        head: int | None = ...,
        on_error: str = ...,
        skip_long: bool = ...,
    ) -> Alignment: ...

    @overload
    def align(
        self,
        texts: Iterable[str],
        translations: Iterable[str],
        *,
        unit: Unit = ...,
        layer: int | None = ...,
        head: int | None = ...,
        on_error: str = ...,
        skip_long: bool = ...,
    ) -> list[Alignment]: ...

    def align(
        self,
        texts: str | Iterable[str],
        translations: str | Iterable[str],
        *,
        unit: Unit = "words",
        layer: int | None = None,
        head: int | None = None,
        on_error: str = "stop",
        skip_long: bool = False,
    ) -> Alignment | list[Alignment]:
        """Aligns each word of a translation with a word of its text, using the decoder's cross-attention.

        Args:
            texts, translations: as in `score`.
            unit: align "words", which are separated by whitespace, or "tokens", without EOS.
            layer: the decoder layer, from 1, whose attention is used; None: the last but one, or the only one.
            head: the head of that layer, from 1; None: the mean of all heads.
            on_error: "stop", or "skip": a pair that `score` can't score gets an empty alignment and a warning.
            skip_long: skip pairs that are only too long.

        Returns:
            For a str, pairs of a source and a target place, from 0, in the order of the target: each target word has
            one, see `Aligner`. The list is empty if either side has no words. Else a list of such lists, one for each
            text.

        Raises:
            ValueError: see `score`; the model has no `attention_maps`, an unknown unit, or a missing layer or head.
        """
        aligner = Aligner(self, unit, layer, head)
        errors = ErrorPolicy(on_error, skip_long, ("its alignment empty", "their alignments are empty"))
        found = align_texts(aligner, as_pairs(texts, translations), errors)
        return found[0] if isinstance(texts, str) else found
