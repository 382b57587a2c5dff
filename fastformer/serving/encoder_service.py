"""An encoder as a service without HTTP: it embeds, scores or classifies the texts of many callers at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastformer.encoding import CrossEncoder, Encoder, MultiVectorEncoder
from fastformer.encoding.cross_encoder import Activation, Input
from fastformer.encoding.folder import read_folder
from fastformer.encoding.late_interaction import Task
from fastformer.encoding.modules import Array
from fastformer.encoding.requests import EncodeRequest, embed_request, score_request, vectors_request
from fastformer.encoding.scheduler import EncodingScheduler
from fastformer.generation.session import Session
from fastformer.serving.limits import Limits
from fastformer.serving.service import NO_CALIBRATION, Kind, Service


class Encoded(NamedTuple):
    """The result of encoding texts.

    Attributes:
        rows: (texts, numbers) fp32, or (texts,) for the scores of one label; for vectors of tokens, a list of
            (tokens, dim).
        num_tokens: the number of tokens of all texts.
    """

    rows: Any
    num_tokens: int


class _EncoderService(Service):
    """The part that both kinds of encoder services share: the queue, and the deadline of a request.

    Args:
        encoder: computes the embeddings or the scores.
        name: the name of the model.
        limits: see `Limits`.
    """

    def __init__(
        self, encoder: Encoder | CrossEncoder | MultiVectorEncoder, name: str, *, limits: Limits | None = None
    ) -> None:
        super().__init__(name, limits or Limits())
        self.encoder = encoder
        self.session: Session[EncodeRequest] = Session(
            encoder.model,
            EncodingScheduler,
            name="encoder",
            **self.limits.queue,
        )

    @property
    def max_seq_length(self) -> int:
        """The most tokens that a text may have."""
        return self.encoder.max_seq_length

    async def _ask(self, build: Callable[[], EncodeRequest], size: int, deadline: float) -> Encoded:
        request = await self.session.aside(build, size, deadline=deadline)
        await self.session.ask(request, deadline=deadline)
        return Encoded(request.results, request.num_tokens)


class EmbedService(_EncoderService):
    """An encoder of embeddings as a service."""

    kind: Kind = "encoder"
    encoder: Encoder

    async def embed(self, texts: Sequence[str], *, timeout: float | None = None, **options: Any) -> Encoded:
        """Returns the embeddings of texts, those of `Encoder.encode`.

        Args:
            texts: the texts to embed.
            timeout: seconds after which the request fails; at most the server's limit.
            options: prompt_name, normalize, truncate_dim, cuts; see `embed_request`.

        Raises:
            ValueError: see `embed_request`.
            QueueFull, TooLate, RuntimeError: see `Session.ask`.
        """
        size = sum(map(len, texts))
        return await self._ask(lambda: embed_request(self.encoder, texts, **options), size, self.deadline(timeout))


class RankService(_EncoderService):
    """A cross-encoder or a classifier as a service."""

    kind: Kind = "cross-encoder"
    encoder: CrossEncoder

    async def scores(
        self,
        inputs: Sequence[Input],
        *,
        activation: Activation,
        softmax: bool = False,
        cuts: bool = False,
        timeout: float | None = None,
    ) -> Encoded:
        """Returns the scores of pairs or texts, those of `CrossEncoder.predict`.

        Args:
            inputs: pairs of texts, or lists of one text each.
            activation, softmax, cuts: see `score_request`.
            timeout: see `EmbedService.embed`.

        Raises:
            ValueError: see `score_request`.
            QueueFull, TooLate, RuntimeError: see `Session.ask`.
        """

        def build() -> EncodeRequest:
            return score_request(self.encoder, inputs, activation_fn=activation, apply_softmax=softmax, cuts=cuts)

        return await self._ask(build, sum(len(text) for each in inputs for text in each), self.deadline(timeout))

    async def rank(self, query: str, texts: Sequence[str], *, timeout: float | None = None) -> Encoded:
        """Returns the score of each text for a query, from 0 to 1; texts that are too long are cut."""
        pairs = [[query, text] for text in texts]
        return await self.scores(pairs, activation=SIGMOID, cuts=True, timeout=timeout)


class MultiVectorService(_EncoderService):
    """An encoder of a vector for each token as a service."""

    kind: Kind = "multi-vector"
    encoder: MultiVectorEncoder

    async def vectors(
        self, texts: Sequence[str], task: Task, *, cuts: bool = False, timeout: float | None = None
    ) -> Encoded:
        """Returns the vectors of texts, those of `MultiVectorEncoder`.

        Args:
            texts: the texts.
            task, cuts: see `vectors_request`.
            timeout: see `EmbedService.embed`.

        Raises:
            ValueError: see `vectors_request`.
            QueueFull, TooLate, RuntimeError: see `Session.ask`.
        """
        return await self._vectors(texts, task, cuts, self.deadline(timeout))

    async def rank(self, query: str, texts: Sequence[str], *, timeout: float | None = None) -> Encoded:
        """Returns the score of each text for a query, by `similarity`; texts that are too long are cut."""
        deadline = self.deadline(timeout)
        of_query = await self._vectors([query], "query", True, deadline)
        of_texts = await self._vectors(texts, "document", True, deadline)
        size = sum(map(len, of_texts.rows)) * len(of_query.rows[0])

        def scores() -> Array:
            rows: Array = self.encoder.similarity(of_query.rows, of_texts.rows)[0].numpy()
            return rows

        found = await self.session.aside(scores, size, deadline=deadline)
        return Encoded(found, of_query.num_tokens + of_texts.num_tokens)

    async def _vectors(self, texts: Sequence[str], task: Task, cuts: bool, deadline: float) -> Encoded:
        size = sum(map(len, texts))
        return await self._ask(lambda: vectors_request(self.encoder, texts, task, cuts=cuts), size, deadline)


def open_encoder(
    folder: str | os.PathLike[str],
    name: str,
    *,
    precision: str | None,
    device: Any,
    limits: Limits | None,
    calibration: Iterable[str] | Array | None = None,
) -> EmbedService | RankService | MultiVectorService:
    """Opens the service of an encoder's folder: scores if it has a classification head and no pooling, else embeddings.

    Args:
        folder: see `Encoder` and `CrossEncoder`, also for precision and device.
        name: the name of the model.
        limits: see `Limits`.
        calibration: the argument of `Encoder.calibrate`, for embeddings in int8; None: there are none.

    Raises:
        ImportError, ValueError: see `Encoder`; or a calibration of a model without an embedding for each text.
    """
    loaded = read_folder(Path(folder), device=device)
    if calibration is not None and (loaded.late is not None or (loaded.num_labels and loaded.pooling is None)):
        raise ValueError(NO_CALIBRATION)
    if loaded.num_labels and loaded.pooling is None:
        return RankService(CrossEncoder(loaded, precision=precision), name, limits=limits)
    if loaded.late is not None:
        return MultiVectorService(MultiVectorEncoder(loaded, precision=precision), name, limits=limits)
    encoder = Encoder(loaded, precision=precision)
    if calibration is not None:
        encoder.calibrate(calibration)
    return EmbedService(encoder, name, limits=limits)


SIGMOID, NOTHING = torch.nn.Sigmoid(), torch.nn.Identity()
