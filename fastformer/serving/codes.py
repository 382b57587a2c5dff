"""The codes of a translator's languages in requests, and the detection of a text's language."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fastformer.generation import Translator

AUTO = "auto"
UNKNOWN = "und"  # ISO 639's "undetermined": the language of a one-pair model whose folder names none
_LEAST = 0.01  # languages of a lower probability are not reported


class Detected(NamedTuple):
    """A language by its code, and the probability that a text is in it."""

    code: str
    confidence: float


class Codes:
    """The codes of a model's languages in requests and answers.

    A model with a choice of languages has its own names for them, such as deu_Latn. The code of a language is that of
    ISO 639-1 if there is one, else the model's name; requests may use either. A model of one pair has the codes in
    `pair`.

    Args:
        translator: the translator whose languages have the codes.
        pair: the codes of source and target of a model without a choice of languages.
    """

    def __init__(self, translator: Translator, pair: tuple[str, str] = (UNKNOWN, UNKNOWN)) -> None:
        self.known, self.pair = translator.languages, pair
        self._defaults = translator.source_lang, translator.target_lang

    @cached_property
    def _short(self) -> dict[str, str]:
        """The codes of the model's names, by name."""
        if self.known is None:
            return {}
        short: dict[str, str] = {}
        for code in self._identifier.labels:
            with contextlib.suppress(ValueError):
                short.setdefault(self.known.find(code), code)
        return {name: short.get(name, name) for name in self.known.ids}

    def entries(self) -> list[dict[str, Any]]:
        """Returns each language with its code, its name, and the codes of the languages that it translates into."""
        if self.known is None:
            source, target = self.pair
            targets_of = {source: [target]}
            targets_of.setdefault(target, [])
            return [{"code": code, "name": code, "targets": targets} for code, targets in targets_of.items()]
        codes = sorted(self._short.values())
        return [
            {"code": code, "name": name, "targets": [other for other in codes if other != code]}
            for name, code in sorted(self._short.items(), key=lambda item: item[1])
        ]

    def defaults(self) -> tuple[str, str | None]:
        """Returns the codes of source and target that a page shows first."""
        if self.known is None:
            return self.pair
        source, target = self._defaults
        return AUTO if source is None else self.code(source), None if target is None else self.code(target)

    def code(self, name: str) -> str:
        """Returns the code of one of the model's names."""
        return name if self.known is None else self._short.get(self.known.find(name), name)

    def source(self, code: str | None) -> str | None:
        """Returns the model's name of a source language; None if the model isn't told one, or for its default.

        Raises:
            ValueError: the model doesn't translate from the language.
        """
        if code is None or code == "":
            return None
        if self.known is None:
            self._expect_one("source_lang", code, self.pair[0])
            return None
        name = self.known.find(code, "source_lang")
        return None if self.known.places == "asked" else name  # such a model infers the source language from the text

    def target(self, code: str | None) -> str | None:
        """Returns the model's name of a target language; see `source`."""
        if code is None or code == "":
            return None
        if self.known is None:
            self._expect_one("target_lang", code, self.pair[1])
            return None
        return self.known.find(code, "target_lang")

    def _expect_one(self, argument: str, code: str, expected: str) -> None:
        if code.strip().lower() != expected.lower():
            if expected == UNKNOWN:
                raise ValueError(f"expected no {argument}, since the server was started without it, got {code!r:.40}")
            raise ValueError(
                f"expected {argument} to be {expected!r}: this model translates from {self.pair[0]} to {self.pair[1]}; "
                f"got {code!r:.40}"
            )

    def detect(self, text: str) -> list[Detected]:
        """Returns the languages that a text may be in, the likeliest first, among those of the model."""
        ranked = self._identifier.rank(text)
        likely = [Detected(code, share) for code, share in ranked if share >= _LEAST]
        return likely or [Detected(*ranked[0])]

    @cached_property
    def _identifier(self) -> Any:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        if self.known is not None:
            labels: Sequence[str] = [code for code in identifier.labels if self._is_known(code)]
            if labels:
                identifier.set_languages(labels)
        return identifier

    def _is_known(self, code: str) -> bool:
        assert self.known is not None
        try:
            self.known.find(code)
        except ValueError:
            return False
        return True
