"""The answers of a language model: completions, whole or piece by piece, with the scores of tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from fastformer.generation.async_jobs import Answers
from fastformer.generation.request_builder import CheckedInput, RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.search import Hypothesis
from fastformer.generation.streaming import Detokenizer, TextPieces

T = TypeVar("T")

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


class Ask:
    """A request of one row, and the state of its text."""

    def __init__(
        self,
        builder: RequestBuilder,
        checked: CheckedInput,
        sample: int | None,
        begin: Sequence[int],
        tokenizer: Detokenizer,
        name: str,
    ) -> None:
        self._builder, self._checked, self._sample = builder, checked, sample
        self._begin, self._tokenizer, self.name = begin, tokenizer, name

    def build(self) -> Request:
        # All samples have place 0: they depend only on the seed and their own number.
        return self._builder.build(self._checked, place=0, sample=self._sample, kind=_Scored)

    def pieces(self) -> TextPieces:
        stop = self._builder.config.stop_strings
        return TextPieces(self._tokenizer, self._begin, is_told=True, stop=stop)

    def completion(self, request: Request) -> Completion:
        found, pieces = request.results[0], self.pieces()
        text = pieces.add(found.tokens) + pieces.end()
        tokens = [_scored(request, found, place) for place in range(len(found.tokens))]
        return Completion(text, tokens, self.reason(found, pieces), request.cached_tokens)

    def reason(self, found: Hypothesis, pieces: TextPieces) -> FinishReason:
        ends = self._builder.ids.eos
        is_cut = len(found.tokens) >= self._checked.limit and found.tokens[-1] not in ends
        return "length" if is_cut and not pieces.is_stopped else "stop"


class _Scored(Request):
    """A request that reports its tokens with their log-probabilities, if these are computed."""

    def listen(self, on_token: Callable[[Any], object]) -> None:
        numbers = itertools.count()
        # This runs in the thread that decodes, so the row doesn't grow meanwhile.
        super().listen(lambda token: on_token(self._told(token, next(numbers))))

    def _told(self, token: int, place: int) -> ScoredToken:
        return _scored(self, self.search.results()[0], place) if self.log_probs else ScoredToken(token, 0.0)


def _scored(request: Request, row: Hypothesis, place: int) -> ScoredToken:
    """Returns one of the tokens of a request's row, with its scores."""
    alternatives = row.alternatives[place] if row.alternatives else ()
    return ScoredToken(row.tokens[place], row.log_probs[place] if request.log_probs else 0.0, alternatives)


async def pieces_of(asks: Sequence[Ask], answers: Answers[Request]) -> AsyncIterator[Piece]:
    """Yields the pieces of all samples as they arrive."""
    streams = [_told(ask, answers, place) for place, ask in enumerate(asks)]
    try:
        if len(streams) == 1:
            async for piece in streams[0]:
                yield piece
        else:
            async for _, piece in merged(streams):
                yield piece
    finally:
        answers.leave()


async def _told(ask: Ask, answers: Answers[Request], place: int) -> AsyncIterator[Piece]:
    """Yields the pieces of a sample."""
    pieces = ask.pieces()
    async for new in answers.tokens(place):
        scored = cast(list[ScoredToken], new)  # the type of `_Scored`'s tokens
        yield Piece(place, pieces.add([one.token for one in scored]), scored)
    request = await answers.ended(place)
    yield Piece(place, pieces.end(), [], ask.reason(request.results[0], pieces), request.cached_tokens)


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Merges streams: yields each item as it arrives, with the index of its stream. The first error ends all."""
    coming: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pass_on(place: int, stream: AsyncIterator[T]) -> None:
        try:
            async for one in stream:
                coming.put_nowait((place, one))
        except Exception as error:
            coming.put_nowait(error)
        else:
            coming.put_nowait(None)

    tasks = [asyncio.ensure_future(pass_on(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await coming.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
