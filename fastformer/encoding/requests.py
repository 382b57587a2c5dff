"""A request: some texts that are embedded or scored together with those of other requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from fastformer.encoding.cross_encoder import Activation, CrossEncoder, Input, check_input, rows_of
from fastformer.encoding.encoder import Encoder
from fastformer.encoding.modules import Array
from fastformer.encoding.tokens import Rows


class Compute(Protocol):
    """What the engine does with rows; requests whose computations are equal may share a call."""

    @property
    def width(self) -> int:
        """The numbers of a result."""

    def __call__(self, rows: Rows) -> Array:
        """(texts, width) of texts, each of which has tokens."""


class EncodeRequest:
    """Texts as ids, and what becomes of them. Its numbers depend on no other request.

    Args:
        rows: of the texts.
        compute: what the engine does with them.
        finish: makes the results of what the engine gave, (texts, width).
        max_time: seconds after which it is not begun any more; None: no end.

    Attributes:
        results: what `finish` gave; None before the end.
        error: what went wrong with it, or None.
        is_done: whether it has ended, well or not.
        is_cancelled: set by `cancel`.
        on_cancel: called when it is cancelled; set by the scheduler that runs it.
        deadline, begun_at: in the time of `time.monotonic`, or None; the latter is set when it leaves the queue.
        num_tokens: of its texts.
        num_taken: how many of its texts have been computed.
    """

    num_new_tokens = 0  # of an answer

    def __init__(
        self, rows: Rows, compute: Compute, finish: Callable[[Array], Any], *, max_time: float | None = None
    ) -> None:
        self.rows, self.compute = rows, compute
        self.results: Any = None
        self.error: Exception | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.begun_at: float | None = None
        self.is_done = self.is_cancelled = False
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.num_tokens = sum(map(len, rows.ids))
        self._finish = finish
        # A text without tokens stays zeros.
        self._places = [place for place, ids in enumerate(rows.ids) if ids]
        self._found = np.zeros((len(rows.ids), compute.width), np.float32)
        self.num_taken = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of its texts have been computed."""
        return self.num_taken == len(self._places)

    def take(self, batch_tokens: int, *, is_first: bool) -> list[int]:
        """The places of the texts that are computed next.

        Args:
            batch_tokens: of all of them together at most.
            is_first: give at least one.
        """
        taken: list[int] = []
        for place in self._places[self.num_taken :]:
            batch_tokens -= len(self.rows.ids[place])
            if batch_tokens < 0 and (taken or not is_first):
                break
            taken.append(place)
        return taken

    def put(self, places: Sequence[int], found: Array) -> None:
        """Takes in the results of the texts that `take` gave."""
        self._found[list(places)] = found
        self.num_taken += len(places)

    def is_late(self, now: float) -> bool:
        """Whether its time is over before it has begun."""
        return self.deadline is not None and now >= self.deadline and not self.num_taken

    def listen(self, on_token: Callable[[int], object]) -> None:
        """Raises a ValueError: it has no tokens to tell of."""
        raise ValueError("expected a request of new tokens to listen to, got one of embeddings or scores")

    def cancel(self) -> None:
        """Ends it before the next step, without results. Any thread may call this."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def finish(self) -> None:
        """Ends it, with results if all of its texts have been computed."""
        if not self.is_cancelled and self.is_complete:
            try:
                self.results = self._finish(self._found)
            except Exception as error:  # it ends this request alone
                self.error = error
        self.is_done = True

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self.error, self.is_done = error, True


@dataclass(frozen=True)
class _Pooled:
    """Embeddings before what stands behind the pooling."""

    encoder: Encoder
    width: int
    skipped: int

    def __call__(self, rows: Rows) -> Array:
        return self.encoder._pooled(rows, self.skipped)


@dataclass(frozen=True)
class _Logits:
    """Logits of pairs or texts."""

    encoder: CrossEncoder
    width: int

    def __call__(self, rows: Rows) -> Array:
        return self.encoder._engine.classify(rows.ids, rows.types)


def embed_request(
    encoder: Encoder,
    texts: Sequence[str],
    *,
    prompt_name: str | None = None,
    normalize: bool | None = None,
    truncate_dim: int | None = None,
    cuts: bool = True,
    max_time: float | None = None,
) -> EncodeRequest:
    """The request whose results are `encoder.encode(texts, prompt_name, ...)`, bit for bit.

    Args:
        encoder: whose embeddings these are.
        texts, prompt_name, normalize, truncate_dim: see `Encoder.encode`.
        cuts: whether texts that are too long are cut; without, they are an error.
        max_time: see `EncodeRequest`.

    Raises:
        ValueError: see `Encoder.encode`; a text that is too long.
    """
    finish, prompt = encoder._finish(normalize, False, truncate_dim), encoder._prompt(None, prompt_name)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"sentences[{place}]: expected a str, got {type(text).__name__} {text!r:.40}")
    rows = encoder._reader.texts([prompt + text for text in texts], cuts=cuts)
    return EncodeRequest(rows, _Pooled(encoder, finish.width, encoder._skipped(prompt)), finish, max_time=max_time)


def score_request(
    encoder: CrossEncoder,
    inputs: Sequence[Input],
    *,
    activation_fn: Activation | None = None,
    apply_softmax: bool = False,
    cuts: bool = True,
    max_time: float | None = None,
) -> EncodeRequest:
    """The request whose results are `encoder.predict(inputs, ...)`, bit for bit.

    Args:
        encoder: whose scores these are.
        inputs: pairs of texts, or lists of one text each.
        activation_fn, apply_softmax: see `CrossEncoder.predict`.
        cuts, max_time: see `embed_request`.

    Raises:
        ValueError: see `CrossEncoder.predict`; a pair that is too long.
    """
    for place, each in enumerate(inputs):
        check_input(each, place)

    def finish(logits: Array) -> Array:
        scores = encoder._activated(torch.from_numpy(logits), activation_fn or encoder.activation_fn)
        found: Array = (scores.softmax(1) if apply_softmax and scores.dim() > 1 else scores).numpy()
        return found

    rows = rows_of(encoder._reader, inputs, cuts=cuts)
    return EncodeRequest(rows, _Logits(encoder, encoder.num_labels), finish, max_time=max_time)
