"""A language model as a service without HTTP: it answers the requests of many clients at once."""

from __future__ import annotations

import os
from typing import Any

from fastformer.generation import AsyncGenerator
from fastformer.generation.async_generator import Prompt
from fastformer.serving.limits import Limits
from fastformer.serving.service import Kind, Service


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


def open_generator(
    folder: str | os.PathLike[str], name: str, *, limits: Limits | None, **loading: Any
) -> GenerateService:
    """Opens the service of a language model's folder.

    Args:
        folder: see `AsyncGenerator.from_pretrained`.
        name: the name of the model.
        limits: see `Limits`.
        loading: further arguments of `AsyncGenerator.from_pretrained`.
    """
    limits = limits or Limits()
    return GenerateService(AsyncGenerator.from_pretrained(folder, **loading, **limits.queue), name, limits=limits)
