"""The answers of a language model: completions, whole or piece by piece, with the scores of tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from fastformer.generation.jobs import Job
from fastformer.generation.requests import Request
from fastformer.generation.search import Hypothesis
from fastformer.generation.streaming import TextPieces

FinishReason: TypeAlias = Literal["stop", "length"]


class ScoredToken(NamedTuple):
    """A new token with its scores.

    Attributes:
        token: the id of the token.
        log_prob: its log-probability, before temperature, top_k and top_p; undefined unless it was requested.
        alternatives: the likeliest tokens at its position with their log-probabilities, best first; as many as were
            requested.
    """

    token: int
    log_prob: float
    alternatives: Sequence[tuple[int, float]] = ()


class Completion(NamedTuple):
    """The text and tokens that were generated for a prompt.

    Attributes:
        text: the text, without the stop text that may have ended it.
        tokens: the new tokens, including the id that ends a text and the tokens of the stop text.
        finish_reason: "stop": the model or a stop text ended it; "length": it was cut.
        cached_tokens: the number of prompt tokens that were reused from an earlier prompt with the same beginning.
    """

    text: str
    tokens: list[ScoredToken]
    finish_reason: FinishReason
    cached_tokens: int


class Piece(NamedTuple):
    """A piece of a streamed text, which may be empty, and the new tokens.

    Attributes:
        sample: the index of the sample, among num_return_sequences.
        text: the piece, of which no part is taken back later.
        tokens: the new tokens. The text of a token may come in a later piece.
        finish_reason: see `Completion`; None except in a sample's last piece.
        cached_tokens: see `Completion`; set in a sample's last piece.
    """

    sample: int
    text: str
    tokens: list[ScoredToken]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class ChatIds(list[int]):
    """The ids of a chat. Its answer is decoded as a text of its own, and ends at the end of a turn."""


class SampleRequest(Request):
    """A continuation of a prompt: a request of one row, which makes its text and scores.

    Args:
        arguments, options: see `Request`.
        new_text: makes the text's pieces from the stop texts.
        ends: the ids that end the text.
    """

    def __init__(
        self, *arguments: Any, new_text: Callable[..., TextPieces], ends: Collection[int], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._new_text, self._ends = new_text, ends

    @functools.cached_property
    def _text(self) -> TextPieces:
        return self._new_text(stop=self.stop_strings)

    def listen(self, on_token: Callable[[Any], object]) -> None:
        """Sets the listener; if log-probabilities are computed, it is called with `ScoredToken`s."""
        if self.log_probs:
            places = itertools.count()
            # This runs in the thread that decodes, so the row doesn't grow meanwhile.
            super().listen(lambda token: on_token(_scored(self.search.results()[0], next(places))))
        else:
            super().listen(on_token)

    def piece(self, index: int, tokens: Sequence[Any]) -> Piece:
        """Returns the piece of new tokens, as the listener got them."""
        if self.log_probs:
            return Piece(index, self._text.add([token.token for token in tokens]), [*tokens])
        return Piece(index, self._text.add(tokens), [ScoredToken(token, 0.0) for token in tokens])

    def last_piece(self, index: int) -> Piece:
        """Returns the end of the text, after the end of the request."""
        return Piece(index, self._text.end(), [], self._reason(), self.cached_tokens)

    def completion(self) -> Completion:
        """Returns the whole text, after the end of a request that was not streamed."""
        result = self.results[0]
        text = self._text.whole(result.tokens)
        if self.log_probs:
            tokens = [_scored(result, place) for place in range(len(result.tokens))]
        else:
            tokens = [ScoredToken(token, 0.0) for token in result.tokens]
        return Completion(text, tokens, self._reason(), self.cached_tokens)

    def _reason(self) -> FinishReason:
        tokens = self.results[0].tokens
        is_cut = len(tokens) >= self.search.limit and tokens[-1] not in self._ends
        return "length" if is_cut and not self._text.is_stopped else "stop"


def _scored(row: Hypothesis, place: int) -> ScoredToken:
    """Returns one of the tokens of a row, with its scores."""
    return ScoredToken(row.tokens[place], row.log_probs[place], row.alternatives[place] if row.alternatives else ())


async def pieces_of(job: Job[Any]) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of a job of `SampleRequest`s as they arrive; `Piece.sample` is the index of the request."""
    try:
        async for index, tokens in job.arrivals():
            request = job.requests[index]
            yield request.piece(index, tokens) if tokens else request.last_piece(index)
    finally:
        job.leave()
