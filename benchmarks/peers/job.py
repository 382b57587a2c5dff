"""The work of peers, and how a peer does it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from fastformer.models import GPT, Transformer

Model = Transformer | GPT
Tokens = list[list[int]]
USUAL = ("int8", "bf16", "fp32")
PRECISIONS = ("int4", *USUAL)


@dataclass(frozen=True)
class Job:
    """Batches that are decoded one after the other; one turn of a peer that decodes.

    Attributes:
        batches: of sources, or of prompts, as ids.
        num_beams: 1 is greedy.
        new_tokens: of each output, where the model never ends one; None: until its end token comes, at most as many
            as the batch's longest source has and a hundred.
    """

    batches: list[Tokens]
    num_beams: int
    new_tokens: int | None

    def limit(self, batch: Tokens) -> int:
        """The most new tokens of an output."""
        return self.new_tokens or max(map(len, batch)) + 100


@dataclass(frozen=True)
class Step:
    """One forward pass, or one training step, of another library's model on its case's batch.

    Attributes:
        results: a file to write what comes out to, with dropout off, as `models.Results`; None: it is timed alone.
        order: of sentences, one of `models.ORDERS`; None where there are none.
    """

    results: str | None = None
    order: str | None = None


@dataclass(frozen=True)
class Turn:
    """What came of a job.

    Attributes:
        seconds: of all of its batches, ids in to ids out; of the step.
        tokens: the new ones of each output, with the end token; None where the peer doesn't tell.
    """

    seconds: float
    tokens: Tokens | None


class Peer(ABC):
    """A program with the weights of one model, in one precision, on a number of threads that never changes.

    Args:
        model: whose weights it gets.
        precision: one of `precisions`.
        threads: that it may use.
        options: of the command line.

    Raises:
        Missing: it is not here, or can't do this model or precision.
    """

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = USUAL
    order: ClassVar[type[Job] | type[Step]]

    @abstractmethod
    def __init__(self, model: Any, precision: str, threads: int, options: dict[str, str]) -> None: ...

    @abstractmethod
    def turn(self, job: Any) -> Turn:
        """Does what is ordered once."""


class Decoder(Peer):
    """A peer that decodes."""

    order = Job

    @abstractmethod
    def decode(self, batch: Any, job: Job) -> Any:
        """Decodes what `inputs` gave; all of it is timed."""

    def inputs(self, batch: Tokens) -> Any:
        """A batch in the form that the peer's users have it in."""
        return batch

    @abstractmethod
    def tokens(self, output: Any, batch: Tokens) -> Tokens:
        """The new tokens that `decode` gave, with the end token."""

    def turn(self, job: Job) -> Turn:
        """Does a job once."""
        inputs = [self.inputs(batch) for batch in job.batches]
        began = time.perf_counter()
        outputs = [self.decode(batch, job) for batch in inputs]
        seconds = time.perf_counter() - began
        found = [self.tokens(output, batch) for output, batch in zip(outputs, job.batches, strict=True)]
        return Turn(seconds, [row for rows in found for row in rows])


class Missing(Exception):
    """Why a peer has no times: what to install, or what it doesn't support."""


def until_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """A row up to its end token, which is kept; the rest is padding."""
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1]
    return row
