"""What a folder does for its clients, without HTTP: texts in, texts out, many at once."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

from fastformer.checkpoints.hf import FAMILIES, model_type
from fastformer.generation import AsyncTranslator, Translator
from fastformer.generation.config import Precision
from fastformer.models import read_architecture
from fastformer.serving.limits import Limits

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

    @abstractmethod
    async def open(self) -> None:
        """Starts the thread that decodes."""

    @abstractmethod
    async def close(self, *, cancel: bool = False) -> None:
        """Takes no more requests and ends; with `cancel` without the answers of those that run."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it can answer: it is open, and its thread goes on."""

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
    """

    kind: Kind = "translator"

    def __init__(
        self, translator: Translator, name: str, *, engine: str | None = None, limits: Limits | None = None
    ) -> None:
        super().__init__(name, limits or Limits())
        self.translator = translator
        self.front = AsyncTranslator(translator, max_waiting=self.limits.max_waiting, engine=engine)

    async def open(self) -> None:
        await self.front.__aenter__()

    async def close(self, *, cancel: bool = False) -> None:
        await self.front.close(cancel=cancel)

    @property
    def is_alive(self) -> bool:
        return True

    @property
    def languages(self) -> list[str]:
        """The names of the model's languages; empty: it isn't told any."""
        known = self.translator.languages
        return [] if known is None else sorted(known.ids)

    async def translate(
        self,
        texts: Sequence[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The translations of texts, which decode together."""
        return [
            await self.front.translate(text, source_lang=source_lang, target_lang=target_lang, **(options or {}))
            for text in texts
        ]

    async def stream(
        self,
        text: str,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[str]:
        """A text's translation piece by piece."""
        return self.front.stream(text, source_lang=source_lang, target_lang=target_lang, **(options or {}))


def open_service(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    device: Any = None,
    engine: str | None = None,
    limits: Limits | None = None,
) -> Service:
    """The service of a folder, whichever kind of model it holds. It is not started yet.

    Args:
        folder: of a run, or as transformers or sentence-transformers saves it.
        precision: see `Translator.from_pretrained`.
        device: where it runs; None: the CPU.
        engine: one of `engines.ENGINES`; None: the fastest that can.
        limits: see `Limits`.

    Raises:
        ValueError: a folder that holds no model that can be served.
    """
    name = Path(folder).resolve().name
    kind = _kind_of(Path(folder))
    if kind == "encoder":
        from fastformer.serving.encoder_service import open_encoder

        return open_encoder(folder, name, precision=precision, device=device, limits=limits)
    if kind == "generator":
        from fastformer.serving.generator_service import open_generator

        return open_generator(folder, name, precision=precision, device=device, engine=engine, limits=limits)
    translator = Translator.from_pretrained(folder, device=device, precision=precision)
    return TranslateService(translator, name, engine=engine, limits=limits)


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
