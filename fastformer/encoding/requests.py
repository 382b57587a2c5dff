"""`EncodeRequest`: the texts of one caller, which are embedded or scored together with those of other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastformer.encoding.cross_encoder import Activation, CrossEncoder, Input, check_input, rows_of
from fastformer.encoding.encoder import Encoder
from fastformer.encoding.late_interaction import Task
from fastformer.encoding.modules import Array
from fastformer.encoding.multi_vector_encoder import MultiVectorEncoder
from fastformer.encoding.tokens import Rows
from fastformer.generation.text_io import expect_text
from fastformer.requests import BaseRequest


@dataclass(frozen=True)
class Compute:
    """The engine's computation on rows. Requests whose computations are equal may share a call.

    Attributes:
        method: a method of an encoder. It takes rows of texts, each of which has tokens, and `arguments`, and returns
            the results of the texts, (texts, width); or (texts,) of arrays, if their sizes vary.
        width: the number of values in the result of a text; None: it varies.
        arguments: see above.
    """

    method: Callable[..., Any]
    width: int | None
    arguments: tuple[int | str | None, ...] = ()

    def __call__(self, rows: Rows) -> Any:
        return self.method(rows, *self.arguments)


class EncodeRequest(BaseRequest):
    """Texts as ids, and their results. The results don't depend on other requests.

    Args:
        rows: the rows of the texts.
        compute: the engine's computation on the rows.
        finish: makes the results from the engine's output, (texts, width).
        max_time: seconds after which the request is not begun any more; None: no limit.

    Attributes:
        results: the return value of `finish`; None before the end.
        num_taken: the number of its texts that have been computed.
    """

    name = "the texts"
    num_new_tokens = 0  # an encoding request generates no tokens

    def __init__(
        self, rows: Rows, compute: Compute, finish: Callable[[Any], Any], *, max_time: float | None = None
    ) -> None:
        super().__init__(max_time)
        self.rows, self.compute = rows, compute
        self.results: Any = None
        self._finish = finish
        # The result of a text without tokens stays zeros, or None.
        self._indices = [index for index, ids in enumerate(rows.ids) if ids]
        count, width = len(rows.ids), compute.width
        self._results: Any = np.empty(count, object) if width is None else np.zeros((count, width), np.float32)
        self.num_taken, self.num_tokens = 0, sum(map(len, rows.ids))

    @property
    def is_complete(self) -> bool:
        """Whether all texts of the request have been computed."""
        return self.num_taken == len(self._indices)

    def take(self, batch_tokens: int, *, is_first: bool) -> list[int]:
        """Returns the indices of the texts to compute next.

        Args:
            batch_tokens: the most tokens in these texts together.
            is_first: return at least one text.
        """
        indices: list[int] = []
        for index in self._indices[self.num_taken :]:
            batch_tokens -= len(self.rows.ids[index])
            if batch_tokens < 0 and (indices or not is_first):
                break
            indices.append(index)
        return indices

    def put(self, indices: Sequence[int], results: Any) -> None:
        """Stores the results of the texts that `take` returned."""
        self._results[list(indices)] = results
        self.num_taken += len(indices)

    def is_late(self, now: float) -> bool:
        """Returns whether the deadline has passed before the request began."""
        return super().is_late(now) and not self.num_taken

    def listen(self, on_token: Callable[[int], object]) -> None:
        """Raises a ValueError: an encoding request has no tokens to report."""
        raise ValueError("expected a request of new tokens to listen to, got one of embeddings or scores")

    def finish(self) -> None:
        """Ends the request, with results if all of its texts have been computed."""
        if not self.is_cancelled and self.is_complete:
            try:
                self.results = self._finish(self._results)
            except Exception as error:  # the error ends only this request
                self.error = error
        self.is_done = True


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
    for number, text in enumerate(texts, 1):
        expect_text("sentences", number, text)
    rows = encoder._reader.texts(texts, prompt, cuts=cuts)
    compute = Compute(encoder._pooled, finish.width, (encoder._skipped(prompt),))
    return EncodeRequest(rows, compute, finish, max_time=max_time)


def vectors_request(
    encoder: MultiVectorEncoder, texts: Sequence[str], task: Task, *, cuts: bool = True
) -> EncodeRequest:
    """Returns the request whose results are those of `encoder.encode_query` or `encode_document`, bit for bit.

    Args:
        encoder: computes the vectors.
        texts: the texts.
        task: "query" or "document".
        cuts: see `embed_request`.

    Raises:
        ValueError: see `MultiVectorEncoder.encode`; or a text is too long.
    """
    for number, text in enumerate(texts, 1):
        expect_text("inputs", number, text)
    nothing = np.zeros((0, encoder.get_embedding_dimension()), np.float32)

    def finish(vectors: Any) -> list[Array]:
        return [nothing if each is None else each for each in vectors]

    rows = encoder._read(texts, encoder._prompt_of(task), task, cuts=cuts)
    return EncodeRequest(rows, Compute(encoder._vectors, None, (task,)), finish)


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
    for number, pair in enumerate(inputs, 1):
        check_input(number, pair)

    def finish(logits: Array) -> Array:
        scores = encoder._activated(torch.from_numpy(logits), activation_fn or encoder.activation_fn)
        results: Array = (scores.softmax(1) if apply_softmax and scores.dim() > 1 else scores).numpy()
        return results

    rows = rows_of(encoder._reader, inputs, encoder._prompt(None, None), cuts=cuts)
    return EncodeRequest(rows, Compute(encoder._classify, encoder.num_labels), finish)
