"""`AsyncTranslator`: an asyncio interface to a `Translator`, which decodes the requests of many tasks in one batch."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import choose_engine
from fastformer.generation.evaluation import evaluating
from fastformer.generation.jobs import Job, Stream
from fastformer.generation.pair_encoder import Part, joined_texts
from fastformer.generation.request_builder import ModelFacts, RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.session import Session
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import Answer, Item, TextOptions
from fastformer.generation.translator import Translator
from fastformer.settings import shows_fields
from fastformer.special_ids import SpecialIds

_Part: TypeAlias = tuple[Part, Request | None]  # a part of a text, and its request if it has something to translate

# The options of calls with one text.
_ONE_STREAM = ("target_prefix", "source_lang", "target_lang", "split")
_ONE_TEXT = (*_ONE_STREAM, "return_scores", "return_token_scores")
_SHOWN = 40  # the maximum number of characters of a text in an error message


class TextStream(Stream[str]):
    """A translation in pieces: an asynchronous iterator, which cancels its requests when it is closed or deleted.

    Attributes:
        answers: those of the sentences whose pieces have all been returned.
    """

    def __init__(self, job: Job[Any] | None, pieces: AsyncGenerator[str, None], answers: list[Answer]) -> None:
        super().__init__(job, pieces)
        self.answers = answers


class AsyncTranslator(Session[Request]):
    """Translates texts for many tasks at once.

        async with AsyncTranslator(translator) as session:
            text = await session.translate("twenty-one", num_beams=4)
            async for piece in session.stream("forty-two"):
                print(piece, end="")

    Each call takes one text, with options of its own. All requests decode in one batch, in a thread of their own. Don't
    use the model elsewhere meanwhile. A task that is cancelled, or that leaves its stream, releases its memory. Tasks
    of several event loops may share an AsyncTranslator.

    Args:
        translator: its model, tokenizer and memory limits are used.
        max_waiting: how many requests may wait for room in the batch. A task whose request exceeds it waits for a
            place. Each sentence of a split text is a request; those of one text take their places together.
        engine: one of `engines.ENGINES`; None: the fastest that can decode the model.
        max_waiting_tokens: how many source tokens the waiting requests may have; None: any number.
        when_full: "wait" has a task wait for a place; "refuse" raises QueueFull.

    Raises:
        ValueError: a max_waiting below 1, another when_full, or an engine that can't decode the model.
    """

    def __init__(
        self,
        translator: Translator,
        *,
        max_waiting: int = 1024,
        engine: str | None = None,
        max_waiting_tokens: int | None = None,
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> None:
        if not isinstance(translator, Translator):
            raise ValueError(f"expected a Translator, got {type(translator).__name__}")
        self.translator, self.tokenizer = translator, translator.tokenizer
        super().__init__(
            translator.model,
            lambda: translator.new_scheduler(self._engine, is_endless=True),
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            when_full=when_full,
        )
        with evaluating(translator.model):
            self._engine = choose_engine(translator.model, engine, translator.precision, translator.cache_dtype)
        self._facts = ModelFacts.of(self._engine, SpecialIds.of(translator.model.config), is_prompted=False)

    @shows_fields(TextOptions, _ONE_TEXT)
    async def translate(self, text: str, *, config: GenerationConfig | None = None, **options: Any) -> Any:
        """Translates a text, as `Translator.translate` does.

        Args:
            text: the text to translate.
            config, options: see `Translator.translate`, also for target_prefix, source_lang, target_lang, split,
                return_scores and return_token_scores.

        Raises:
            ValueError: see `Translator.translate`.
            QueueFull: the queue is full, and when_full is "refuse".
            RuntimeError: the object is closed, or was closed meanwhile with cancel; the model or a processor failed.
        """
        text_options = TextOptions.taken_from(options, _ONE_TEXT)
        config = self.settings(options, config)
        form = text_options.form(config)
        items, split = [text_options.item(text)], text_options.split
        (answers,) = await self.answers(items, config, log_probs=form.log_probs, split=split)
        return joined_texts(answers)[0] if split else form.of(answers[0])

    async def answers(
        self,
        items: Sequence[Item],
        config: GenerationConfig,
        *,
        log_probs: bool = False,
        split: bool = False,
        deadline: float | None = None,
        most_new_tokens: int | None = None,
        most_parts: int | None = None,
    ) -> list[list[Answer]]:
        """Translates several texts, which are submitted together.

        Args:
            items: the texts.
            config: a result of `settings`.
            log_probs: whether to compute scores.
            split: split each text into sentences.
            deadline: a time of `time.monotonic`; None: no deadline.
            most_new_tokens: the maximum for each sentence, whatever the config says.
            most_parts: the maximum number of sentences, or of texts without split, in the call; None: any number.

        Returns:
            For each text the answers of its sentences, or one answer for the text as a whole.

        Raises:
            ValueError: a text can't be translated, or there are too many parts.
            QueueFull, TooLate, NotRunning, RuntimeError: see `Session.ask`.
        """
        builder = self._builder(config, log_probs=log_probs)
        texts = await self._built(deadline, items, builder, split, most_new_tokens, most_parts)
        if requests := [request for parts in texts for _, request in parts if request is not None]:
            await self.submit(requests, deadline=deadline).results()
        return [[Answer(self.tokenizer, request, part.space) for part, request in parts] for parts in texts]

    @shows_fields(TextOptions, _ONE_STREAM)
    def stream(self, text: str, *, config: GenerationConfig | None = None, **options: Any) -> AsyncIterator[str]:
        """Translates a text piece by piece, as `Translator.stream` does.

        If you leave the loop, the request is cancelled as soon as the iterator is deleted.

        Args:
            text: the text to translate.
            config, options: see `Translator.translate`, also for target_prefix, source_lang, target_lang and split.
                Several samples can't be streamed. Beams can be streamed only with split, whose pieces are sentences.

        Raises:
            ValueError, RuntimeError: see `translate`; a ValueError is raised by the call, before the first piece.
        """
        text_options = TextOptions.taken_from(options, _ONE_STREAM)
        config = self.settings(options, config)
        text_options.form(config, streams=True)
        builder = self._builder(config, log_probs=False)
        (parts,) = self._build([text_options.item(text)], builder, text_options.split)
        return self._pieces(parts, builder, by_token=not text_options.split)

    async def begin(
        self,
        item: Item,
        config: GenerationConfig,
        *,
        split: bool = False,
        deadline: float | None = None,
        most_new_tokens: int | None = None,
        most_parts: int | None = None,
    ) -> TextStream:
        """Begins to stream a translation: when this returns, the request has its place in the queue.

        Unlike in `stream`, the sentences of a split text come piece by piece as well.

        Args:
            item: the text.
            config: a result of `settings`.
            split, deadline, most_new_tokens, most_parts: see `answers`.

        Raises:
            ValueError, QueueFull, NotRunning: raised by the call; see `answers`.
            TooLate, RuntimeError: raised by the iterator.
        """
        TextOptions(split=split).form(config, streams=True)
        builder = self._builder(config, log_probs=False)
        (parts,) = await self._built(deadline, [item], builder, split, most_new_tokens, most_parts)
        return self._pieces(parts, builder, by_token=config.num_beams == 1 and config.samples == 1, deadline=deadline)

    def _pieces(
        self, parts: Sequence[_Part], builder: RequestBuilder, *, by_token: bool, deadline: float | None = None
    ) -> TextStream:
        """Submits a text's parts together, and returns the stream of their translations and the white space."""
        requests = [request for _, request in parts if request is not None]
        job = self.submit(requests, deadline=deadline, streams=by_token) if requests else None
        answers: list[Answer] = []

        async def pieces() -> AsyncGenerator[str, None]:
            indices = itertools.count()
            for part, request in parts:
                rest = ""
                if part.checked is not None and job is not None:
                    index = next(indices)
                    if by_token:
                        text = TextPieces(self.tokenizer, part.checked.prefix, stop=builder.config.stop_strings)
                        async for tokens in job.stream(index):
                            for token in tokens:  # one at a time, even if several tokens arrived together
                                if piece := text.add([token]):
                                    yield piece
                        rest = text.end()
                    else:
                        await job.result(index)
                answer = Answer(self.tokenizer, request, part.space)
                answers.append(answer)
                if rest := rest + part.space if by_token else answer.spaced():
                    yield rest

        return TextStream(job, pieces(), answers)

    async def _built(self, deadline: float | None, items: Sequence[Item], *options: Any) -> list[list[_Part]]:
        """Runs `_build`, in another thread if the texts are long, so that the event loop isn't blocked."""
        size = sum(len(item.text) for item in items if isinstance(item.text, str))
        return await self.aside(lambda: self._build(items, *options), size, deadline=deadline)

    def _build(
        self,
        items: Sequence[Item],
        builder: RequestBuilder,
        split: bool,
        most_new_tokens: int | None = None,
        most_parts: int | None = None,
    ) -> list[list[_Part]]:
        """Encodes texts, and builds the requests of their parts.

        Raises:
            ValueError: a text can't be translated, or there are more than `most_parts` parts.
        """
        texts: list[list[Part]] = []
        count = 0
        # All parts are encoded before the first is translated, so that an invalid one is reported before any work.
        for number, item in enumerate(items, 1):
            texts.append(self.translator.parts(item, number, builder, split=split))
            count += len(texts[-1])
            if most_parts is not None and count > most_parts:  # raised before the remaining texts are read
                raise ValueError(
                    f"expected at most {most_parts:,} sentences in a request, got {count:,} up to text {number}"
                )
        places = itertools.count()  # they decide which random numbers the parts draw

        def build(part: Part, text: str) -> Request | None:
            place = next(places)
            if part.checked is None:
                return None
            limit = part.checked.limit if most_new_tokens is None else min(part.checked.limit, most_new_tokens)
            request = builder.build(part.checked._replace(limit=limit), place=place)
            request.name = f"text {text[:_SHOWN]!r:.{_SHOWN}}"
            return request

        return [[(part, build(part, item.text)) for part in parts] for item, parts in zip(items, texts, strict=True)]

    def _builder(self, config: GenerationConfig, *, log_probs: bool) -> RequestBuilder:
        return RequestBuilder(
            self.model, config, log_probs=log_probs, engine=self._engine, facts=self._facts, tokenizer=self.tokenizer
        )

    def settings(self, options: Mapping[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
        """Returns the config of a request. All requests decode in one batch, with one engine in one precision.

        Raises:
            ValueError: see `Translator.settings`; or another engine or precision.
        """
        config = self.translator.settings(options, config)
        config.check_engine(self, self._engine.name, self.translator.precision, self.translator.cache_dtype)
        return config
