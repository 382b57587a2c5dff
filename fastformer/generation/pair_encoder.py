"""`PairEncoder`: the ids of texts and of their translations, for a model that reads sources.

A text may be translated sentence by sentence: its parts are requests of one batch, and their translations are joined.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fastformer.generation.model_protocols import Model
from fastformer.generation.request_builder import CheckedInput, RequestBuilder
from fastformer.generation.sentences import Sentence, split_sentences
from fastformer.generation.text_io import Answer, ErrorPolicy, Item, Source, TextCodec, TextError, expect_text
from fastformer.languages import LanguageIds, Languages
from fastformer.special_ids import SpecialIds


class PairEncoder:
    """Encodes texts and their translations.

    Args:
        model, tokenizer, source_lang, target_lang: see `Translator`.
    """

    def __init__(
        self, model: Model, tokenizer: TextCodec, source_lang: str | None = None, target_lang: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.source_lang, self.target_lang = model, tokenizer, source_lang, target_lang
        self.check_languages(source_lang, target_lang)

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
        """The supported languages; None for a model of a single pair."""
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

    def encode(self, text: str, number: int | str = 1, languages: LanguageIds | None = None) -> list[int]:
        """Returns the source ids of a text, with EOS at the end and the ids that tell the model the language.

        A tokenizer whose `ends_sources` is false has sources without EOS.

        Args:
            text: the text to translate.
            number: the name of the text in messages.
            languages: a result of `language_ids`; None: the object's languages.

        Raises:
            TextError: the text is empty, longer than the model's max_len, or can't be encoded by the tokenizer.
        """
        if not expect_text("texts", number, text).strip():
            raise TextError(f"text {number}: expected something to translate, got an empty text")
        language_ids = self.language_ids() if languages is None else languages
        ends = [SpecialIds.of(self.model.config).first_eos] * getattr(self.tokenizer, "ends_sources", True)
        try:
            ids = [*language_ids.front, *self.tokenizer.encode(text), *ends, *language_ids.behind]
        except ValueError as error:  # a lone surrogate, or text for which the tokenizer has no token
            raise TextError(f"text {number}: {error}") from error
        max_len = self.model.config.max_len
        if len(ids) > max_len:
            advice = "cut it" if isinstance(number, str) else "split it into sentences"  # the name of a sentence
            raise TextError(
                f"text {number}: expected at most {max_len} tokens, got {len(ids)}: {advice}",
                is_long=True,
            )
        return ids

    def encode_prefix(self, prefix: str | None, number: int | str = 1) -> list[int]:
        """Returns the ids that a translation begins with, without EOS.

        Raises:
            TextError: the tokenizer can't encode the text.
        """
        if prefix is None or prefix == "":
            return []
        if not isinstance(prefix, str):
            raise ValueError(
                f"target_prefix[{number - 1}]: expected a str or None, got {type(prefix).__name__} {prefix!r:.40}"
            )
        if getattr(self.tokenizer, "words_begin_with_space", False):
            prefix = prefix.rstrip(" ")  # else the next word would add a second space
        try:
            return self.encode_target(prefix)
        except ValueError as error:
            raise TextError(f"text {number}: its target_prefix: {error}") from error

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a translation, or of its beginning, without EOS.

        Raises:
            ValueError: the tokenizer can't encode the text.
        """
        # A tokenizer may have a separate vocabulary for the target.
        return list(getattr(self.tokenizer, "encode_target", self.tokenizer.encode)(text))

    def encode_item(self, item: Item, number: int | str, builder: RequestBuilder) -> CheckedInput:
        """Encodes a text and its prefix, and checks them against the model.

        Raises:
            TextError: see `language_ids`, `encode`, `encode_prefix`, `RequestBuilder.check`.
        """
        try:
            languages = self.language_ids(item.source_lang, item.target_lang)
        except ValueError as error:
            raise TextError(f"text {number}: {error}") from error
        ids, prefix = self.encode(item.text, number, languages), self.encode_prefix(item.prefix, number)
        try:
            return builder.check(ids, [*languages.begin, *prefix], num_language_tokens=len(languages.begin))
        except ValueError as error:
            raise TextError(f"text {number}: {error}") from error

    def parts(
        self, item: Item, number: int, builder: RequestBuilder, *, split: bool, errors: ErrorPolicy | None = None
    ) -> list[Part]:
        """Encodes a text as one part, or its sentences as a part each.

        Args:
            item: the text.
            number: the number of the text in messages.
            builder: checks the parts.
            split: cut the text into its sentences.
            errors: skips texts that can't be translated, or raises their errors; None: they are raised.

        Returns:
            At least one part. The only part of a skipped text has nothing to translate and no space.

        Raises:
            TextError: a part can't be translated, and `errors` doesn't skip it.
            ValueError: the item isn't a text.
        """
        name, parts = str(number), list[Part]()
        try:
            text = expect_text("texts", number, item.text)
            sentences = split_sentences(text) if split else [Sentence(text, "")]
            for place, (sentence, space) in enumerate(sentences, 1):
                name, checked = f"{number}, sentence {place}" if split else str(number), None
                if sentence or not split:
                    checked = self.encode_item(item._replace(text=sentence), name if split else number, builder)
                    checked = checked._replace(row=array("q", checked.row))  # there may be many
                parts.append(Part(name, checked, space, place == len(sentences)))
        except TextError as error:
            if errors is None:
                raise
            errors.handle(error)
            return [Part(name, None, "", True)]
        return parts or [Part(name, None, "", True)]


class Part(NamedTuple):
    """A text or one of its sentences, ready for the model.

    Attributes:
        name: the number of its text, and that of the sentence, in messages.
        checked: its ids; None: it has nothing to translate.
        space: the white space after it, or before the first sentence.
        is_last: whether it is the last part of its text.
    """

    name: str
    checked: CheckedInput | None
    space: str
    is_last: bool


class PartSource:
    """A source of parts, made of a source of texts. A text's parts are all encoded before the first is returned.

    Args:
        source: the texts.
        parts: makes the parts of a text from it and its number.
    """

    def __init__(self, source: Source[Item], parts: Callable[[Item, int], list[Part]]) -> None:
        self._source, self._parts = source, parts
        self._ready: deque[Part] = deque()
        self._count = 0

    def get(self, wait: bool) -> Part | None:
        if not self._ready:
            item = self._source.get(wait)
            if item is None:
                return None
            self._count += 1
            self._ready += self._parts(item, self._count)
        return self._ready.popleft()


def whole_texts(pairs: Iterable[tuple[Part, Answer]]) -> Iterator[list[Answer]]:
    """Yields the answers for the parts of each text."""
    answers: list[Answer] = []
    for part, answer in pairs:
        answers.append(answer)
        if part.is_last:
            yield answers
            answers = []


class Joined(Answer):
    """The answer for a text whose sentences were translated one by one."""

    def __init__(self, sentences: Sequence[Answer]) -> None:
        self._texts = joined_texts(sentences)

    def texts(self) -> list[str]:
        return self._texts


def joined_texts(sentences: Sequence[Answer]) -> list[str]:
    """Joins the translations of a text's sentences to those of the text, best first; see `versions`."""
    spaces = [answer.space for answer in sentences]
    return versions(
        [answer.texts() or [""] for answer in sentences], lambda texts: "".join(map(operator.add, texts, spaces))
    )


def versions(translations: Sequence[Sequence[str]], join: Callable[[list[str]], str]) -> list[str]:
    """Joins the translations of the parts of a text to those of the text, best first.

    Args:
        translations: those of each part, best first; the n-th of the text consists of the n-th of each part, or of its
            last one.
        join: joins a translation of each part.
    """
    most = max(map(len, translations), default=1)
    return list(dict.fromkeys(join([each[min(n, len(each) - 1)] for each in translations]) for n in range(most)))
