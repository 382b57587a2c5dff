"""A model folder as a service without HTTP: it answers the requests of many clients at once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastformer.checkpoints.speech import is_speech_folder
from fastformer.generation.config import CacheDtype, GenerationConfig, Precision
from fastformer.generation.session import Session
from fastformer.serving.answers import TooLarge
from fastformer.serving.limits import Limits

if TYPE_CHECKING:
    import torch

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
        device: the model's device, or "auto" (see `choose_device`); None: the CPU. Speech always runs on a CPU.
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
        return open_speech(folder, name, precision=precision, device=device, limits=limits, max_windows=max_batch_size)
    if isinstance(device, str) and device != "cpu":
        from fastformer.devices import choose_device

        device = choose_device(device, precision)
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
        from fastformer.serving.generate_service import open_generator

        return open_generator(
            folder, name, limits=limits, device=device, precision=precision, options=options, engine=engine,
            cache_dtype=cache_dtype, max_rows=max_batch_size, max_bytes=max_batch_bytes, draft=draft, adapters=adapters,
        )  # fmt: skip
    from fastformer.serving.translate_service import open_translator

    return open_translator(
        folder, name, engine=engine, limits=limits, options=options, languages=(source_lang, target_lang),
        device=device, precision=precision, cache_dtype=cache_dtype, max_batch_size=max_batch_size,
        max_batch_bytes=max_batch_bytes,
    )  # fmt: skip


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
    # The other kinds need PyTorch.
    from fastformer.checkpoints.gguf import is_gguf, pooling_of
    from fastformer.checkpoints.run import architecture_of

    if is_gguf(folder) and pooling_of(folder) is not None:  # a language model that embeds
        return "encoder"
    kinds: dict[str | None, Kind] = {"BERT": "encoder", "GPT": "generator"}
    return kinds.get(architecture_of(folder), "translator")
