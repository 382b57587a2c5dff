"""The languages of a translator as its clients write them, and which language a text is in."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fastformer.generation import Translator

AUTO = "auto"
UNKNOWN = "und"  # ISO 639's "undetermined": of a model of one pair that nothing names
_LEAST = 0.01  # probability of a language that is worth telling


class Detected(NamedTuple):
    """A language by its code, and how sure that is: a probability."""

    code: str
    confidence: float


class Codes:
    """The codes of a model's languages.

    A model that is told its languages knows them by names of its own, such as deu_Latn; their codes are those of ISO
    639-1 where it has one, else the names. Either is understood. A model of one pair has the codes that it is given.

    Args:
        translator: whose languages they are.
        pair: the codes of source and target, of a model that isn't told any.
    """

    def __init__(self, translator: Translator, pair: tuple[str, str] = (UNKNOWN, UNKNOWN)) -> None:
        self.known, self.pair = translator.languages, pair
        self._defaults = translator.source_lang, translator.target_lang

    @cached_property
    def _short(self) -> dict[str, str]:
        """The code of each of the model's names."""
        if self.known is None:
            return {}
        short: dict[str, str] = {}
        for code in self._identifier.labels:
            with contextlib.suppress(ValueError):
                short.setdefault(self.known.find(code), code)
        return {name: short.get(name, name) for name in self.known.ids}

    def entries(self) -> list[dict[str, Any]]:
        """Each language with its code, its name, and the codes of what it can be translated into."""
        if self.known is None:
            source, target = self.pair
            found = {source: [target]}
            found.setdefault(target, [])
            return [{"code": code, "name": code, "targets": targets} for code, targets in found.items()]
        codes = sorted(self._short.values())
        return [
            {"code": code, "name": name, "targets": [other for other in codes if other != code]}
            for name, code in sorted(self._short.items(), key=lambda item: item[1])
        ]

    def defaults(self) -> tuple[str, str | None]:
        """The codes of source and target that a page may begin with."""
        if self.known is None:
            return self.pair
        source, target = self._defaults
        return AUTO if source is None else self.code(source), None if target is None else self.code(target)

    def code(self, name: str) -> str:
        """The code of one of the model's names."""
        return name if self.known is None else self._short.get(self.known.find(name), name)

    def source(self, code: str | None) -> str | None:
        """The model's name of a source language; None: it isn't told one, or its default is meant.

        Raises:
            ValueError: a language that the model doesn't translate from.
        """
        if code is None or code == "":
            return None
        if self.known is None:
            self._expect_one("source_lang", code, self.pair[0])
            return None
        name = self.known.find(code, "source_lang")
        return None if self.known.places == "asked" else name  # such a model reads what comes

    def target(self, code: str | None) -> str | None:
        """The model's name of a target language; see `source`."""
        if code is None or code == "":
            return None
        if self.known is None:
            self._expect_one("target_lang", code, self.pair[1])
            return None
        return self.known.find(code, "target_lang")

    def _expect_one(self, argument: str, code: str, expected: str) -> None:
        if code.strip().lower() != expected.lower():
            raise ValueError(
                f"expected {argument} to be {expected!r}: this model translates from {self.pair[0]} to {self.pair[1]}; "
                f"got {code!r:.40}"
            )

    def detect(self, text: str) -> list[Detected]:
        """The languages that a text may be in, the likeliest first, out of those that the model is told."""
        ranked = self._identifier.rank(text)
        likely = [Detected(code, share) for code, share in ranked if share >= _LEAST]
        return likely or [Detected(*ranked[0])]

    @cached_property
    def _identifier(self) -> Any:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        found = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        if self.known is not None:
            labels: Sequence[str] = [code for code in found.labels if self._is_known(code)]
            if labels:
                found.set_languages(labels)
        return found

    def _is_known(self, code: str) -> bool:
        assert self.known is not None
        try:
            self.known.find(code)
        except ValueError:
            return False
        return True
