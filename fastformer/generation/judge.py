"""Scores and alignments of translations that exist."""

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
    """Scores and aligns texts and their translations; the half of `Translator` that makes none.

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
        """See `Translator.encode`."""

    @abstractmethod
    def encode_target(self, text: str) -> list[int]:
        """See `Translator.encode_target`."""

    def language_ids(self, source_lang: str | None = None, target_lang: str | None = None) -> LanguageIds:
        """The ids that tell the model the languages of a text: none for a model of one pair of languages.

        Args:
            source_lang, target_lang: None: the class's.

        Raises:
            ValueError: see the class; a language that isn't said anywhere.
        """
        languages = self.languages
        if languages is None:
            self.check_languages(source_lang, target_lang)
            return LanguageIds()
        source = self.source_lang if source_lang is None else source_lang
        return languages.of(source, self.target_lang if target_lang is None else target_lang)

    @property
    def languages(self) -> Languages | None:
        """The languages of the model, which its tokenizer knows; None: it isn't told any."""
        return getattr(self.tokenizer, "languages", None)

    def check_languages(self, source_lang: object, target_lang: object) -> None:
        """Checks languages that are given for all texts.

        Raises:
            ValueError: an unknown language, or one for a model that isn't told any.
        """
        given = {"source_lang": source_lang, "target_lang": target_lang}
        languages = self.languages
        if languages is not None:
            languages.check(*(name if isinstance(name, str) else None for name in given.values()))
            return
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"expected no {name} for this {type(self.model).__name__}, whose tokenizer knows no languages, got "
                    f"{value!r:.40}"
                )

    @overload  # a str is an iterable of str as well: the first that fits counts
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
        """Scores translations that exist by forced decoding.

        It is computed by the model's modules, in the precision that they have. Of a translation that `translate` has
        found by greedy decoding it is the score that `return_scores` gives, up to rounding, where the text's tokens are
        those that the model said.

        Args:
            texts: a text, or texts, as `translate` takes them.
            translations: a str for a str, else one for each text. That of an empty text has to be empty; an empty one
                of another text is scored as such.
            on_error: "stop", or "skip": a pair that can't be scored (an empty text, a side longer than the model's
                max_len) gets the score -inf and a warning that names it by its number.
            skip_long: skip what is only too long.
            max_tokens: of a batch, on its longer side, padding included.

        Returns:
            A `TokenScored(text, score, tokens)` for a str, else a list with one for each text: the translation; its
            log-probability, without a length penalty; and its tokens, EOS included, each with its own. It also has
            `per_token` and `perplexity`. Where text and translation are empty there are no tokens, and the score is 0.

        Raises:
            ValueError: something that is no text, other numbers of texts and translations, a pair that can't be scored
                (named by its number, from 1).
        """
        # Score with the modules alone: a quantised model's are those of its rounded weights.
        reason = why_not_by_modules(self.model, self.precision)
        if reason is not None:
            raise ValueError(f"expected a precision that the model's modules have, to score in: {reason}")
        errors = ErrorPolicy(on_error, skip_long, ("its score at -inf", "their scores are -inf"))
        found = list(score_texts(self, as_pairs(texts, translations), errors, max_tokens))
        return found[0] if isinstance(texts, str) else found

    @overload  # a str is an iterable of str as well: the first that fits counts
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
        """Aligns each word of a translation with a word of its text, by the decoder's cross-attention.

        Args:
            texts, translations: as `score` takes them.
            unit: align "words", which whitespace separates, or "tokens", EOS left out.
            layer: of the decoder, from 1, whose attention counts; None: the last but one, or the only one.
            head: of that layer, from 1; None: the mean of all.
            on_error: "stop", or "skip": a pair that `score` would not take gets an empty alignment and a warning.
            skip_long: skip what is only too long.

        Returns:
            For a str, pairs of a source and a target place, from 0, in the order of the target: each target word has
            one, see `Aligner`. Empty where either side has no words. Else a list of such lists, one for each text.

        Raises:
            ValueError: see `score`; a model without `attention_maps`, another unit, a layer or head that it lacks.
        """
        aligner = Aligner(self, unit, layer, head)
        errors = ErrorPolicy(on_error, skip_long, ("its alignment empty", "their alignments are empty"))
        found = align_texts(aligner, as_pairs(texts, translations), errors)
        return found[0] if isinstance(texts, str) else found
