"""A model folder as a service without HTTP: it answers the requests of many clients at once."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fastformer.checkpoints import argos
from fastformer.checkpoints.gguf import is_gguf, pooling_of
from fastformer.checkpoints.run import architecture_of
from fastformer.checkpoints.speech import is_speech_folder
from fastformer.generation import AsyncGenerator, AsyncTranslator, Translator
from fastformer.generation.alignment import check_attention, cross_attention
from fastformer.generation.async_generator import Prompt
from fastformer.generation.config import CacheDtype, GenerationConfig, Precision
from fastformer.generation.constraints import Grammar, is_installed
from fastformer.generation.session import Session
from fastformer.generation.text_io import Answer, Item
from fastformer.serving.answers import TooLarge
from fastformer.serving.codes import UNKNOWN, Codes, Detected
from fastformer.serving.limits import Limits

_MOST_ATTENDED = 1_000  # characters of a text whose attention is returned: the answer grows with their square

NO_CALIBRATION = "expected no calibration for a model that computes no embedding for each text"
Kind: TypeAlias = Literal["translator", "generator", "encoder", "multi-vector", "cross-encoder", "speech"]


class Service:
    """A model that works for many clients at once, while its session is open.

    Attributes:
        session: computes the requests.
        name: the model's name, which is its folder's.
        models: the names by which requests choose a model, each with that of an adapter or None: the name alone, and
            for each adapter both "name:adapter" and its own name.
        kind: the kind of model.
        limits: see `Limits`.
    """

    kind: Kind
    session: Session[Any]

    def __init__(self, name: str, limits: Limits, adapters: Collection[str] = ()) -> None:
        self.name, self.limits = name, limits
        self.models: dict[str, str | None] = {name: None}
        for adapter in adapters:
            for model in (f"{name}:{adapter}", adapter):
                if model in self.models:
                    raise ValueError(
                        f"expected adapters by other names than the model's and each other's, got {model!r}"
                    )
                self.models[model] = adapter

    def deadline(self, timeout: float | None = None) -> float:
        """Returns the time by which a request that arrives now has to be answered, as `time.monotonic` counts it.

        Args:
            timeout: the client's limit in seconds; at most the server's limit counts.

        Raises:
            ValueError: timeout is not a positive number.
        """
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"expected timeout to be a number of seconds above 0, got {timeout}")
        return time.monotonic() + min(self.limits.timeout_s, timeout or self.limits.timeout_s)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raises TooLarge if there are more texts, or longer ones, than the limits allow."""
        if (reason := self.limits.why_not(texts)) is not None:
            raise TooLarge(reason)

    def check_config(self, config: GenerationConfig) -> None:
        """Raises a ValueError if a search costs more than the limits allow."""
        limits, rows = self.limits, max(config.num_beams, config.num_return_sequences)
        if rows > limits.max_beams:
            raise ValueError(f"expected at most {limits.max_beams} beams or samples, got {rows:,}")
        if (config.max_new_tokens or 0) > limits.max_new_tokens:
            raise ValueError(
                f"expected max_new_tokens of at most {limits.max_new_tokens:,}, got {config.max_new_tokens:,}"
            )


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


class GenerateService(Service):
    """A language model as a service.

    Args:
        generator: computes the completions.
        name: the name of the model.
        limits: see `Limits`.
    """

    kind: Kind = "generator"
    session: AsyncGenerator

    def __init__(self, generator: AsyncGenerator, name: str, *, limits: Limits | None = None) -> None:
        super().__init__(name, limits or Limits(), generator.adapters)
        self.session = generator

    @property
    def has_chat(self) -> bool:
        """Whether the model's folder has a chat template."""
        return self.session.template is not None

    async def can_constrain(self, deadline: float) -> bool:
        """Returns whether texts can be constrained here; see `AsyncGenerator.can_constrain` and `Session.aside`."""
        return await self.session.aside(lambda: self.session.can_constrain, 0, deadline=deadline, is_slow=True)

    async def check_constraint(self, options: Mapping[str, Any], size: int, deadline: float) -> Grammar | None:
        """Compiles a constraint, which requests have at once as long as the caller keeps the result.

        Args:
            options: the option of decoding.
            size: the number of its characters.
            deadline: a result of `deadline`.

        Raises:
            ValueError: the constraint is wrong, or can't be enforced.
            RuntimeError: the library that enforces it can't be imported.
            QueueFull, TooLate: see `Session.aside`.
        """
        work = functools.partial(self.session.check_constraint, options)
        try:
            return await self.session.aside(work, size, deadline=deadline, is_slow=True)
        except ImportError as error:
            if is_installed():  # no fault of the request
                raise RuntimeError(str(error)) from error
            raise ValueError(f"expected an answer without constraints here: {error}") from error

    async def prompt_ids(self, prompt: Prompt, deadline: float, *, parse_special: bool | None = None) -> list[int]:
        """Returns the ids of a prompt.

        Args:
            prompt: the prompt.
            deadline: a result of `deadline`.
            parse_special: see `AsyncGenerator.encode`; None: True, as in other servers of these formats.

        Raises:
            ValueError: see `AsyncGenerator.encode`.
            QueueFull, TooLate: see `Session.aside`.
        """
        parses = parse_special is not False
        return await self.session.aside(
            lambda: self.session.encode(prompt, parse_special=parses), len(prompt), deadline=deadline
        )


class Attention(NamedTuple):
    """The tokens of a text and of its translation, and for each target token the weights of all source tokens."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]


def open_service(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    device: torch.device | str | None = None,
    engine: str | None = None,
    cache_dtype: CacheDtype | None = None,
    limits: Limits | None = None,
    options: Mapping[str, Any] | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    max_batch_size: int | None = None,
    max_batch_bytes: int | None = None,
    draft: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    calibration: Iterable[str] | npt.NDArray[np.float32] | None = None,
) -> Service:
    """Opens the service of a folder, whatever kind of model it holds. It is not started yet.

    Args:
        folder: a run folder, or a folder that transformers or sentence-transformers saved.
        precision: see `Translator.from_pretrained`.
        device: the model's device; None: the CPU.
        engine: one of `engines.ENGINES`; None: the fastest that can.
        cache_dtype: the dtype of keys and values; see `Generator`.
        limits: see `Limits`.
        options: the decoding options that a request may override; those of beams are for a translator.
        source_lang, target_lang: the languages of a request that names none; for a model of one pair, their codes.
        max_batch_size, max_batch_bytes: the most rows that are decoded together, and the memory for their caches; see
            `Translator` and `AsyncGenerator`.
        draft: the folder of a smaller model, which drafts tokens for a language model; see `AsyncGenerator`.
        adapters: the folder of each LoRA adapter of a language model, by its name; see `Service.models`.
        calibration: the texts, embeddings or ranges from which embeddings are rounded to int8; see `Encoder.calibrate`.

    Raises:
        ValueError: the folder holds no model that can be served, or an argument doesn't apply to its kind.
    """
    name = Path(folder).resolve().name
    kind = _kind_of(Path(folder))
    options = dict(options or {})
    if kind != "generator":
        _refuse("a model that is no language model", draft=draft, adapters=adapters or None)
    if kind != "translator":
        _refuse("a model that translates nothing", source_lang=source_lang, target_lang=target_lang)
    if kind != "encoder" and calibration is not None:
        raise ValueError(NO_CALIBRATION)
    if kind == "speech":
        from fastformer.serving.speech_service import open_speech

        _refuse("a model of speech", engine=engine, cache_dtype=cache_dtype, max_batch_bytes=max_batch_bytes, **options)
        return open_speech(folder, name, precision=precision, limits=limits, max_windows=max_batch_size)
    if kind == "encoder":
        from fastformer.serving.encoder_service import open_encoder

        _refuse(
            "an encoder, which decodes nothing", engine=engine, cache_dtype=cache_dtype, max_batch_size=max_batch_size,
            max_batch_bytes=max_batch_bytes, **options,
        )  # fmt: skip
        return open_encoder(folder, name, precision=precision, device=device, limits=limits, calibration=calibration)
    if kind == "generator":
        beams = {name: options.get(name) for name in ("num_beams", "length_penalty")}
        _refuse("a language model, which is served without beams", **beams)
        limits = limits or Limits()
        generator = AsyncGenerator.from_pretrained(
            folder, device=device, precision=precision, options=options, engine=engine, cache_dtype=cache_dtype,
            max_rows=max_batch_size, max_bytes=max_batch_bytes, draft=draft, adapters=adapters, **limits.queue,
        )  # fmt: skip
        return GenerateService(generator, name, limits=limits)
    translator = Translator.from_pretrained(
        folder, device=device, precision=precision, cache_dtype=cache_dtype, max_batch_size=max_batch_size,
        max_batch_bytes=max_batch_bytes,
    )  # fmt: skip
    if translator.languages is None:
        codes = (argos.codes_of(folder) if argos.is_package(folder) else None) or (UNKNOWN, UNKNOWN)
        pair = source_lang or codes[0], target_lang or codes[1]
    else:
        pair = UNKNOWN, UNKNOWN
        translator.check_languages(source_lang, target_lang)
        translator.source_lang, translator.target_lang = source_lang, target_lang
    return TranslateService(translator, name, engine=engine, limits=limits, options=options, pair=pair)


def _refuse(kind: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"expected no {name} for {kind}, got {value!r}")


def _kind_of(folder: Path) -> Kind:
    """Returns the kind of a folder's model; an unknown one is a translator's, whose loader explains any error."""
    if (folder / "modules.json").is_file():  # a folder of sentence-transformers
        return "encoder"
    if is_speech_folder(folder):
        return "speech"
    if is_gguf(folder) and pooling_of(folder) is not None:  # a language model that embeds
        return "encoder"
    kinds: dict[str | None, Kind] = {"BERT": "encoder", "GPT": "generator"}
    return kinds.get(architecture_of(folder), "translator")
