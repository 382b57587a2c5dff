"""A translator as a service without HTTP: it answers the requests of many clients at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastformer.checkpoints import argos
from fastformer.generation import AsyncTranslator, Translator
from fastformer.generation.alignment import check_attention, cross_attention
from fastformer.generation.config import GenerationConfig
from fastformer.generation.text_io import Answer, Item
from fastformer.serving.answers import TooLarge
from fastformer.serving.codes import UNKNOWN, Codes, Detected
from fastformer.serving.limits import Limits
from fastformer.serving.service import Kind, Service

_MOST_ATTENDED = 1_000  # characters of a text whose attention is returned: the answer grows with their square


class TranslateService(Service):
    """A translator as a service.

    Args:
        translator: computes the translations.
        name: the model's name.
        engine: one of `engines.ENGINES`; None: the fastest that can.
        limits: see `Limits`.
        options: the decoding options that a request may override.
        pair: the codes of source and target of a model without a choice of languages.

    Attributes:
        codes: the codes of the languages.
        config: the decoding config that a request may override.
    """

    kind: Kind = "translator"
    session: AsyncTranslator

    def __init__(
        self,
        translator: Translator,
        name: str,
        *,
        engine: str | None = None,
        limits: Limits | None = None,
        options: Mapping[str, Any] | None = None,
        pair: tuple[str, str] = (UNKNOWN, UNKNOWN),
    ) -> None:
        super().__init__(name, limits or Limits())
        self.translator, self.codes = translator, Codes(translator, pair)
        self.session = AsyncTranslator(translator, engine=engine, **self.limits.queue)
        self.config = self.session.settings(options or {})
        self.check_config(self.config)
        self._has_detected = False

    @property
    def languages(self) -> list[str]:
        """The codes of the languages."""
        return [entry["code"] for entry in self.codes.entries()]

    async def detect(self, text: str, deadline: float) -> list[Detected]:
        """Returns the languages that a text may be in, the likeliest first. For the deadline, see `deadline`."""
        # The first call loads the detector's model, which takes a moment, so it runs beside the event loop.
        languages = await self.session.aside(
            lambda: self.codes.detect(text), len(text), deadline=deadline, is_slow=not self._has_detected
        )
        self._has_detected = True
        return languages

    def settings(self, options: Mapping[str, Any], alternatives: int = 0) -> GenerationConfig:
        """Returns the decoding config of a request, within the limits.

        Args:
            options: the options that the request sets; those of the server hold for the others.
            alternatives: further translations of each text, of beams or samples.

        Raises:
            ValueError: an option is out of its range, or beyond the limits.
        """
        given = dict(options)
        if given.get("do_sample"):  # the beams of the server are not what such a request asks for
            given.setdefault("num_beams", 1)
        if alternatives > (most := self.limits.max_alternatives):
            raise ValueError(f"expected at most {most} alternatives, got {alternatives:,}")
        if alternatives:
            given["num_return_sequences"] = count = alternatives + 1
            if not given.get("do_sample", self.config.do_sample):
                given["num_beams"] = max(count, given.get("num_beams", self.config.num_beams))
        config = self.session.settings(given, self.config)
        self.check_config(config)
        return config

    @property
    def bounds(self) -> dict[str, Any]:
        """The limits that `AsyncTranslator.answers` and `begin` apply."""
        return {"most_new_tokens": self.limits.max_new_tokens, "most_parts": self.limits.max_sentences}

    async def attention(self, answers: Sequence[Answer], deadline: float) -> Attention:
        """Computes a translation's attention: the weights of the last decoder layer, averaged over its heads.

        Args:
            answers: those of the text's sentences.
            deadline: a result of `deadline`.

        Raises:
            ValueError: the model has no attention maps.
            NotRunning, TooLate: see `Session.call`.
        """
        pairs = [sequences[0] for answer in answers if (sequences := answer.sequences)]
        # The model's thread runs this between two steps.
        weights = await self.session.call(lambda: cross_attention(self.translator.model, pairs), deadline=deadline)
        tokenizer = self.translator.tokenizer
        source_tokens = getattr(tokenizer, "source_tokens", tokenizer.tokens)
        attention = Attention([], [], [])
        for (source, target), one in zip(pairs, weights, strict=True):
            before = len(attention.source)
            attention.source.extend(source_tokens(source))
            attention.target.extend(tokenizer.tokens(target))
            rows = one[-1].mean(0).tolist()
            attention.weights.extend([0.0] * before + [round(weight, 4) for weight in row] for row in rows)
        width = len(attention.source)  # a sentence attends only to itself
        return attention._replace(weights=[row + [0.0] * (width - len(row)) for row in attention.weights])

    def check_attention(self, items: Sequence[Item]) -> None:
        """Raises a ValueError if the model can't return its attention, or if a text is too long for it."""
        check_attention(self.translator.model)
        for item in items:
            if len(item.text) > _MOST_ATTENDED:
                raise TooLarge(
                    f"expected a text of at most {_MOST_ATTENDED:,} characters along with attention, got "
                    f"{len(item.text):,}"
                )


class Attention(NamedTuple):
    """The tokens of a text and of its translation, and for each target token the weights of all source tokens."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]


def open_translator(
    folder: str | os.PathLike[str],
    name: str,
    *,
    engine: str | None,
    limits: Limits | None,
    options: Mapping[str, Any],
    languages: tuple[str | None, str | None],
    **loading: Any,
) -> TranslateService:
    """Opens the service of a translator's folder.

    Args:
        folder: see `Translator.from_pretrained`.
        name: the name of the model.
        engine: see `TranslateService`.
        limits: see `Limits`.
        options: see `TranslateService`.
        languages: the languages of source and target of a request that names none; for a model of one pair, their
            codes.
        loading: further arguments of `Translator.from_pretrained`.
    """
    translator = Translator.from_pretrained(folder, **loading)
    source_lang, target_lang = languages
    if translator.languages is None:
        codes = (argos.codes_of(folder) if argos.is_package(folder) else None) or (UNKNOWN, UNKNOWN)
        pair = source_lang or codes[0], target_lang or codes[1]
    else:
        pair = UNKNOWN, UNKNOWN
        translator.check_languages(source_lang, target_lang)
        translator.source_lang, translator.target_lang = source_lang, target_lang
    return TranslateService(translator, name, engine=engine, limits=limits, options=options, pair=pair)
