"""The work of peers, and the interface of a peer."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastformer.models import GPT, Transformer

Model = Transformer | GPT
Tokens = list[list[int]]
USUAL = ("int8", "bf16", "fp32")
PRECISIONS = ("int4", *USUAL)


@dataclass(frozen=True)
class PeerJob:
    """Batches that are decoded one after another: one turn of a peer that decodes.

    Attributes:
        batches: batches of sources, or of prompts, as ids.
        num_beams: the number of beams; 1 is greedy.
        new_tokens: the number for each output, if the model never ends one; None: until its end token, at most the
            length of the batch's longest source + 100.
    """

    batches: list[Tokens]
    num_beams: int
    new_tokens: int | None

    def limit(self, batch: Sequence[Sequence[object]]) -> int:
        """Returns the most new tokens of an output."""
        return self.new_tokens or max(map(len, batch)) + 100


@dataclass(frozen=True)
class StepJob:
    """One forward pass, or one training step, of another library's model on its case's batch.

    Attributes:
        results: the file to write the result to (`models.StepResults`), with dropout off; None: the step is only timed.
        order: the order of sentences, one of `models.ORDERS`; None for a case without sentences.
    """

    results: str | None = None
    order: str | None = None


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        seconds: the time for all of its batches, ids in to ids out; or the time of the step.
        tokens: the new tokens of each output, with the end token; None if the peer doesn't return them.
    """

    seconds: float
    tokens: Tokens | None


class Peer(ABC):
    """A program with the weights of one model, in one precision, with a fixed number of threads.

    Args:
        model: the model with the weights.
        precision: one of `precisions`.
        threads: the number of threads that it may use.
        options: options of the command line.

    Raises:
        Missing: the program is not installed, or doesn't support this model or precision.
    """

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = USUAL
    order: ClassVar[type[PeerJob] | type[StepJob]]

    @abstractmethod
    def __init__(self, model: Any, precision: str, threads: int, options: dict[str, str]) -> None: ...

    @abstractmethod
    def turn(self, job: Any) -> JobResult:
        """Runs a job once."""


class DecodingPeer(Peer):
    """A peer that decodes."""

    order = PeerJob

    @abstractmethod
    def decode(self, batch: Any, job: PeerJob) -> Any:
        """Decodes a result of `inputs`; all of it is timed."""

    def inputs(self, batch: Tokens) -> Any:
        """Converts a batch to the form in which the peer's users have it."""
        return batch

    @abstractmethod
    def tokens(self, output: Any, batch: Tokens) -> Tokens:
        """Returns the new tokens of `decode`'s result, with the end token."""

    def turn(self, job: PeerJob) -> JobResult:
        """Runs a job once."""
        inputs = [self.inputs(batch) for batch in job.batches]
        began = time.perf_counter()
        outputs = [self.decode(batch, job) for batch in inputs]
        seconds = time.perf_counter() - began
        tokens = [self.tokens(output, batch) for output, batch in zip(outputs, job.batches, strict=True)]
        return JobResult(seconds, [row for rows in tokens for row in rows])


class Missing(Exception):
    """The reason why a peer has no times: a missing package, or an unsupported case."""


def needed(module: str, install: str = "") -> Any:
    """Imports a module.

    Raises:
        Missing: it is not installed, but `pip install` installs it, or other packages that bring it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"not installed: pip install {install or module}") from error


def transformers() -> Any:
    """Imports transformers, and has it print errors alone."""
    library = needed("transformers")
    library.utils.logging.set_verbosity_error()
    return library


def until_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """Returns a row up to and including its end token; the rest is padding."""
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1]
    return row
