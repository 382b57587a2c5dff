"""A language model as a service without HTTP: it completes many prompts and chats at once."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from fastformer.generation.async_generator import AsyncGenerator, Prompt
from fastformer.generation.completions import ChatIds
from fastformer.generation.config import Precision
from fastformer.serving.answers import TooLarge
from fastformer.serving.limits import Limits
from fastformer.serving.service import Kind, Service

_MARKS = 16  # about the characters that a template writes around a message


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
        super().__init__(name, limits or Limits())
        self.session = generator

    @property
    def has_chat(self) -> bool:
        """Whether the model's folder has a chat template."""
        return self.session.template is not None

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

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], deadline: float, **variables: Any
    ) -> Coroutine[Any, Any, ChatIds]:
        """Returns the ids of a chat, whose template reads the variables too.

        Args:
            messages: the messages, whose contents are texts.
            deadline: a result of `deadline`.
            variables: see `ChatTemplate.render`.

        Raises:
            TooLarge: the messages have more characters together than the limits allow.
            ValueError: see `AsyncGenerator.chat_ids`.
            QueueFull, TooLate: see `Session.aside`.
        """
        size = sum(len(text) for message in messages for text in message.values())
        size += sum(len(str(value)) for value in variables.values() if not isinstance(value, bool))
        if size > self.limits.max_chat_chars:
            raise TooLarge(
                f"expected messages of at most {self.limits.max_chat_chars:,} characters together, got {size:,}"
            )
        # A template is a program: even for a short chat it may take seconds, until its bounds end it.
        return self.session.aside(
            lambda: self.session.chat_ids(messages, **variables),
            size + _MARKS * len(messages),
            deadline=deadline,
            is_slow=True,
        )


def open_generator(
    folder: str | os.PathLike[str],
    name: str,
    *,
    precision: Precision | None,
    device: Any,
    engine: str | None,
    limits: Limits | None,
    options: Mapping[str, Any] | None = None,
    max_rows: int | None = None,
    max_bytes: int | None = None,
) -> GenerateService:
    """Opens the service of a language model's folder.

    Args:
        folder: see `AsyncGenerator.from_pretrained`, also for precision, device, engine, options, max_rows and
            max_bytes.
        name: the name of the model.
        limits: see `Limits`.

    Raises:
        ImportError, ValueError: see `AsyncGenerator.from_pretrained`.
    """
    limits = limits or Limits()
    generator = AsyncGenerator.from_pretrained(
        folder,
        device=device,
        precision=precision,
        options=options,
        engine=engine,
        max_rows=max_rows,
        max_bytes=max_bytes,
        max_waiting=limits.max_waiting,
        max_waiting_tokens=limits.max_waiting_tokens,
        when_full="refuse",
    )
    return GenerateService(generator, name, limits=limits)
