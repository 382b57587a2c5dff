"""What a folder does for its clients, without HTTP: texts in, texts out, many at once."""

from __future__ import annotations

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

from fastformer.checkpoints.hf import FAMILIES, model_type
from fastformer.generation import AsyncTranslator, Translator
from fastformer.generation.alignment import check_attention, cross_attention
from fastformer.generation.async_front import AsyncFront, Stats
from fastformer.generation.async_translator import PartAnswer, TextStream
from fastformer.generation.config import GenerationConfig, Precision
from fastformer.generation.text_io import Item
from fastformer.models import read_architecture
from fastformer.serving.answers import TooLarge
from fastformer.serving.codes import UNKNOWN, Codes, Detected
from fastformer.serving.limits import Limits

_MOST_ATTENDED = 1_000  # characters of a text whose attention is told: the answer grows with their square

Kind: TypeAlias = Literal["translator", "generator", "encoder", "cross-encoder"]


class Service(ABC):
    """A model that works for many clients at once, inside of `async with`.

    Attributes:
        name: the model's, which is its folder's.
        kind: what it does.
        limits: see `Limits`.
    """

    kind: Kind

    def __init__(self, name: str, limits: Limits) -> None:
        self.name, self.limits = name, limits

    @property
    @abstractmethod
    def async_front(self) -> AsyncFront[Any]:
        """The queue of its requests, and the thread that computes them."""

    async def open(self) -> None:
        """Starts the thread that computes."""
        await self.async_front.__aenter__()

    async def close(self, *, cancel: bool = False) -> None:
        """Takes no more requests and ends; with `cancel` without the answers of those that run."""
        await self.async_front.close(cancel=cancel)

    @property
    def is_alive(self) -> bool:
        """Whether it can answer: it is open, and its thread goes on."""
        return self.async_front.is_alive

    def stats(self) -> Stats:
        """Its counters as they are now."""
        return self.async_front.stats()

    def deadline(self, timeout: float | None = None) -> float:
        """When a request that comes now has to be answered, as `time.monotonic` says it.

        Args:
            timeout: seconds that its client gives it; more than the server gives count as those.

        Raises:
            ValueError: no positive number.
        """
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"expected timeout to be a number of seconds above 0, got {timeout}")
        return time.monotonic() + min(self.limits.timeout_s, timeout or self.limits.timeout_s)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raises TooLarge where there are more texts, or longer ones, than the limits allow."""
        limits = self.limits
        if len(texts) > limits.max_texts:
            raise TooLarge(f"expected at most {limits.max_texts} texts, got {len(texts):,}")
        for number, text in enumerate(texts, 1):
            if len(text) > limits.max_text_chars:
                raise TooLarge(
                    f"text {number}: expected at most {limits.max_text_chars:,} characters, got {len(text):,}"
                )

    def check_config(self, config: GenerationConfig) -> None:
        """Raises a ValueError where a search costs more than the limits allow."""
        limits, rows = self.limits, max(config.num_beams, config.num_return_sequences)
        if rows > limits.max_beams:
            raise ValueError(f"expected at most {limits.max_beams} beams or samples, got {rows:,}")
        if (config.max_new_tokens or 0) > limits.max_new_tokens:
            raise ValueError(
                f"expected max_new_tokens of at most {limits.max_new_tokens:,}, got {config.max_new_tokens:,}"
            )

    async def __aenter__(self) -> Service:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(cancel=error is not None)


class TranslateService(Service):
    """A translator as a service.

    Args:
        translator: what translates.
        name: of the model.
        engine: one of `engines.ENGINES`; None: the fastest that can.
        limits: see `Limits`.
        options: of decoding, where a request doesn't say.
        pair: the codes of source and target, of a model that isn't told its languages.

    Attributes:
        codes: of the languages.
        config: of decoding, where a request doesn't say.
    """

    kind: Kind = "translator"

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
        self.front = AsyncTranslator(
            translator,
            max_waiting=self.limits.max_waiting,
            max_waiting_tokens=self.limits.max_waiting_tokens,
            when_full="refuse",
            engine=engine,
        )
        self.config = self.front.settings(options or {})
        self.check_config(self.config)
        self._has_detected = False

    @property
    def async_front(self) -> AsyncFront[Any]:
        return self.front.front

    @property
    def languages(self) -> list[str]:
        """The codes of the languages."""
        return [entry["code"] for entry in self.codes.entries()]

    async def detect(self, text: str) -> list[Detected]:
        """The languages that a text may be in, the likeliest first."""
        # The first call loads what it needs, which takes a moment: beside the event loop.
        found = await self.front.front.aside(
            lambda: self.codes.detect(text), len(text) if self._has_detected else sys.maxsize
        )
        self._has_detected = True
        return found

    def settings(self, options: Mapping[str, Any]) -> GenerationConfig:
        """The config of a request, within the limits.

        Raises:
            ValueError: an option out of its range, or beyond the limits.
        """
        found = self.front.settings(options, self.config)
        self.check_config(found)
        return found

    async def translate(
        self, items: Sequence[Item], config: GenerationConfig, *, scores: bool = False, split: bool, deadline: float
    ) -> list[list[PartAnswer]]:
        """What became of the sentences of each text; all of them decode together.

        Args:
            items: the texts.
            config: from `settings`.
            scores: whether scores are wanted.
            split: cut the texts into sentences.
            deadline: from `deadline`.

        Raises:
            ValueError: a text that can't be translated.
            QueueFull, TooLate, NotRunning, RuntimeError: see `AsyncFront.ask`.
        """
        return await self.front.answers(
            items, config, log_probs=scores, split=split, deadline=deadline,
            most_new_tokens=self.limits.max_new_tokens, most_parts=self.limits.max_sentences,
        )  # fmt: skip

    async def stream(self, item: Item, config: GenerationConfig, *, split: bool, deadline: float) -> TextStream:
        """A text's translation piece by piece; it has its place when this returns. See `translate`."""
        return await self.front.begin(
            item, config, split=split, deadline=deadline,
            most_new_tokens=self.limits.max_new_tokens, most_parts=self.limits.max_sentences,
        )  # fmt: skip

    async def attention(self, parts: Sequence[PartAnswer]) -> Attention:
        """What each token of a translation looked at: the weights of the last decoder layer, the mean of its heads.

        Raises:
            ValueError: a model without attention maps.
        """
        pairs = [part.answer.sequences[0] for part in parts if part.answer is not None and part.answer.sequences]
        # In the thread that has the model, between two steps.
        weights = await self.front.front.call(lambda: cross_attention(self.translator.model, pairs))
        tokenizer = self.translator.tokenizer
        source_tokens = getattr(tokenizer, "source_tokens", tokenizer.tokens)
        found = Attention([], [], [])
        for (source, target), one in zip(pairs, weights, strict=True):
            before = len(found.source)
            found.source.extend(source_tokens(source))
            found.target.extend(tokenizer.tokens(target))
            rows = one[-1].mean(0).tolist()
            found.weights.extend([0.0] * before + [round(weight, 4) for weight in row] for row in rows)
        width = len(found.source)  # a sentence looks at itself alone
        return found._replace(weights=[row + [0.0] * (width - len(row)) for row in found.weights])

    def check_attention(self, items: Sequence[Item]) -> None:
        """Raises a ValueError where attention can't be told, or would be too much of it."""
        check_attention(self.translator.model)
        for item in items:
            if len(item.text) > _MOST_ATTENDED:
                raise TooLarge(
                    f"expected a text of at most {_MOST_ATTENDED:,} characters along with attention, got "
                    f"{len(item.text):,}"
                )


class Attention(NamedTuple):
    """The tokens of a text and of its translation, and for each of the latter the weights of all the former."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]


def open_service(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    device: Any = None,
    engine: str | None = None,
    limits: Limits | None = None,
    options: Mapping[str, Any] | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    max_batch_size: int | None = None,
    max_batch_bytes: int | None = None,
) -> Service:
    """The service of a folder, whichever kind of model it holds. It is not started yet.

    Args:
        folder: of a run, or as transformers or sentence-transformers saves it.
        precision: see `Translator.from_pretrained`.
        device: where it runs; None: the CPU.
        engine: one of `engines.ENGINES`; None: the fastest that can.
        limits: see `Limits`.
        options: of decoding, where a request doesn't say.
        source_lang, target_lang: the languages where a request doesn't say; of a model of one pair, their codes.
        max_batch_size, max_batch_bytes: see `Translator`.

    Raises:
        ValueError: a folder that holds no model that can be served.
    """
    name = Path(folder).resolve().name
    kind = _kind_of(Path(folder))
    if kind != "translator":
        for what, value in (("source_lang", source_lang), ("target_lang", target_lang)):
            if value is not None:
                raise ValueError(f"expected no {what} for a model that translates nothing, got {value!r}")
    if kind == "encoder":
        from fastformer.serving.encoder_service import open_encoder

        return open_encoder(folder, name, precision=precision, device=device, limits=limits)
    if kind == "generator":
        from fastformer.serving.generator_service import open_generator

        return open_generator(folder, name, precision=precision, device=device, engine=engine, limits=limits)
    translator = Translator.from_pretrained(
        folder, device=device, precision=precision, max_batch_size=max_batch_size, max_batch_bytes=max_batch_bytes
    )
    if translator.languages is None:
        pair = source_lang or UNKNOWN, target_lang or UNKNOWN
    else:
        pair = UNKNOWN, UNKNOWN
        translator.check_languages(source_lang, target_lang)
        translator.source_lang, translator.target_lang = source_lang, target_lang
    return TranslateService(translator, name, engine=engine, limits=limits, options=options, pair=pair)


def _kind_of(folder: Path) -> Kind:
    """What a folder's model does, as far as the folder says; a translator reads the rest, and says what is wrong."""
    if (folder / "modules.json").is_file():  # of sentence-transformers
        return "encoder"
    kind = model_type(folder)
    family = None if kind is None else FAMILIES.get(kind)
    if family is not None:
        return {"encoder": "encoder", "decoder": "generator"}.get(family.kind, "translator")  # type: ignore[return-value]
    if kind is None and (folder / "config.json").is_file() and read_architecture(folder) == "GPT":
        return "generator"
    return "translator"
