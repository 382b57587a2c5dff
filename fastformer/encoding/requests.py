"""`EncodeRequest`: the texts of one caller, which are embedded or scored together with those of other requests."""

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
    """The engine's computation on rows. Requests whose computations are equal may share a call."""

    @property
    def width(self) -> int:
        """The number of values in the result of a text."""

    def __call__(self, rows: Rows) -> Array:
        """Returns the results of texts, each of which has tokens: (texts, width)."""


class EncodeRequest:
    """Texts as ids, and their results. The results don't depend on other requests.

    Args:
        rows: the rows of the texts.
        compute: the engine's computation on the rows.
        finish: makes the results from the engine's output, (texts, width).
        max_time: seconds after which the request is not begun any more; None: no limit.

    Attributes:
        results: the return value of `finish`; None before the end.
        error: the error that ended the request, or None.
        is_done: whether the request has ended, with results or without.
        is_cancelled: set by `cancel`.
        on_cancel: called when the request is cancelled; set by the scheduler that runs it.
        deadline, begun_at: times of `time.monotonic`, or None; the second is set when the request leaves the queue.
        num_tokens: the number of tokens in its texts.
        num_taken: the number of its texts that have been computed.
    """

    num_new_tokens = 0  # an encoding request generates no tokens

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
        # The result of a text without tokens stays zeros.
        self._places = [place for place, ids in enumerate(rows.ids) if ids]
        self._found = np.zeros((len(rows.ids), compute.width), np.float32)
        self.num_taken = 0

    @property
    def is_complete(self) -> bool:
        """Whether all texts of the request have been computed."""
        return self.num_taken == len(self._places)

    def take(self, batch_tokens: int, *, is_first: bool) -> list[int]:
        """Returns the indices of the texts to compute next.

        Args:
            batch_tokens: the most tokens in these texts together.
            is_first: return at least one text.
        """
        taken: list[int] = []
        for place in self._places[self.num_taken :]:
            batch_tokens -= len(self.rows.ids[place])
            if batch_tokens < 0 and (taken or not is_first):
                break
            taken.append(place)
        return taken

    def put(self, places: Sequence[int], found: Array) -> None:
        """Stores the results of the texts that `take` returned."""
        self._found[list(places)] = found
        self.num_taken += len(places)

    def is_late(self, now: float) -> bool:
        """Returns whether the deadline has passed before the request began."""
        return self.deadline is not None and now >= self.deadline and not self.num_taken

    def listen(self, on_token: Callable[[int], object]) -> None:
        """Raises a ValueError: an encoding request has no tokens to report."""
        raise ValueError("expected a request of new tokens to listen to, got one of embeddings or scores")

    def cancel(self) -> None:
        """Ends the request before the next step, without results. Any thread may call this."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def finish(self) -> None:
        """Ends the request, with results if all of its texts have been computed."""
        if not self.is_cancelled and self.is_complete:
            try:
                self.results = self._finish(self._found)
            except Exception as error:  # the error ends only this request
                self.error = error
        self.is_done = True

    def fail(self, error: Exception) -> None:
        """Ends the request with an error."""
        self.error, self.is_done = error, True


@dataclass(frozen=True)
class _Pooled:
    """The computation of pooled rows, before the steps that follow the pooling."""

    encoder: Encoder
    width: int
    skipped: int

    def __call__(self, rows: Rows) -> Array:
        return self.encoder._pooled(rows, self.skipped)


@dataclass(frozen=True)
class _Logits:
    """The computation of the logits of pairs or texts."""

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
    """Returns the request whose results are `encoder.encode(texts, prompt_name, ...)`, bit for bit.

    Args:
        encoder: computes the embeddings.
        texts, prompt_name, normalize, truncate_dim: see `Encoder.encode`.
        cuts: whether texts that are too long are cut; if not, they are an error.
        max_time: see `EncodeRequest`.

    Raises:
        ValueError: see `Encoder.encode`; or a text is too long.
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
) -> EncodeRequest:
    """Returns the request whose results are `encoder.predict(inputs, ...)`, bit for bit.

    Args:
        encoder: computes the scores.
        inputs: pairs of texts, or lists of one text each.
        activation_fn, apply_softmax: see `CrossEncoder.predict`.
        cuts: see `embed_request`.

    Raises:
        ValueError: see `CrossEncoder.predict`; or a pair is too long.
    """
    for place, each in enumerate(inputs):
        check_input(each, place)

    def finish(logits: Array) -> Array:
        scores = encoder._activated(torch.from_numpy(logits), activation_fn or encoder.activation_fn)
        found: Array = (scores.softmax(1) if apply_softmax and scores.dim() > 1 else scores).numpy()
        return found

    rows = rows_of(encoder._reader, inputs, cuts=cuts)
    return EncodeRequest(rows, _Logits(encoder, encoder.num_labels), finish)
