"""`AsyncTranslator`: an asyncio interface to a `Translator`, which decodes the requests of many tasks in one batch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fastformer.generation.async_front import Answers, AsyncFront, HasFront
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import choose_engine
from fastformer.generation.model_protocols import evaluating
from fastformer.generation.paragraphs import Part, check_split, parts_of
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import Answer, Item, as_form
from fastformer.generation.translator import Translator, check_one_stream

_SHOWN = 40  # the maximum number of characters of a text in an error message


class PartAnswer(NamedTuple):
    """The answer for a sentence or a whole text, and the white space after it; None: it has nothing to translate."""

    answer: Answer | None
    space: str


class _Prepared(NamedTuple):
    """Texts that are ready to be submitted.

    Attributes:
        texts: the parts of each text.
        requests: the requests of all parts that have something to translate.
        names: the names of the requests in messages.
    """

    texts: list[list[Part]]
    requests: list[Request]
    names: list[str]


class TextStream:
    """A translation in pieces: an asynchronous iterator, which cancels its request when it is deleted.

    Attributes:
        parts: the answers of the sentences whose pieces have all been returned.
    """

    def __init__(self, pieces: AsyncGenerator[str, None], parts: list[PartAnswer]) -> None:
        self._pieces, self.parts = pieces, parts

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancels the requests that haven't ended."""
        await self._pieces.aclose()


class AsyncTranslator(HasFront):
    """Translates texts for many tasks at once.

        async with AsyncTranslator(translator) as front:
            text = await front.translate("twenty-one", num_beams=4)
            async for piece in front.stream("forty-two"):
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
        self.translator, self.max_waiting = translator, max_waiting
        self.front: AsyncFront[Request] = AsyncFront(
            translator.model,
            lambda: translator.new_scheduler(self._engine, is_endless=True),
            name=type(self).__name__,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            when_full=when_full,
        )
        with evaluating(translator.model):
            self._engine = choose_engine(translator.model, engine, translator.precision)

    async def translate(
        self,
        text: str,
        *,
        target_prefix: str | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        split: bool = False,
        return_scores: bool = False,
        return_token_scores: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Any:
        """Translates a text, as `Translator.translate` does.

        Args:
            text: the text to translate.
            target_prefix, source_lang, target_lang, split, return_scores, return_token_scores, config, options: see
                `Translator.translate`.

        Raises:
            ValueError: see `Translator.translate`.
            QueueFull: the queue is full, and when_full is "refuse".
            RuntimeError: the object is closed, or was closed meanwhile with cancel; the model or a processor failed.
        """
        config = self.settings(options, config)
        form = as_form(config, return_scores, return_token_scores)
        check_split(split, form, target_prefix)
        item = Item(text, target_prefix, source_lang, target_lang)
        (parts,) = await self.answers([item], config, log_probs=form.log_probs, split=split)
        if split:
            return joined_texts(parts)[0]
        assert parts[0].answer is not None
        return form.of(parts[0].answer)

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
    ) -> list[list[PartAnswer]]:
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
            QueueFull, TooLate, NotRunning, RuntimeError: see `AsyncFront.ask`.
        """
        builder = self._builder(config, log_probs=log_probs)
        prepared = await self._prepared(deadline, items, builder, split, most_new_tokens, most_parts)
        texts = prepared.texts
        if not prepared.requests:
            return [[PartAnswer(None, part.space) for part in parts] for parts in texts]
        asked = self.front.submit(prepared.requests, deadline=deadline, names=prepared.names)
        try:
            found: list[list[PartAnswer]] = []
            tokenizer, places = self.translator.tokenizer, itertools.count()
            for parts in texts:
                found.append([])
                for part in parts:
                    answer = None if part.checked is None else Answer(tokenizer, await asked.ended(next(places)))
                    found[-1].append(PartAnswer(answer, part.space))
            return found
        finally:
            asked.leave()

    def stream(
        self,
        text: str,
        *,
        target_prefix: str | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        split: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> AsyncIterator[str]:
        """Translates a text piece by piece, as `Translator.stream` does.

        If you leave the loop, the request is cancelled as soon as the iterator is deleted.

        Args:
            text: the text to translate.
            target_prefix, source_lang, target_lang, split, config, options: see `Translator.translate`. Several samples
                can't be streamed. Beams can be streamed only with split, whose pieces are sentences.

        Raises:
            ValueError, RuntimeError: see `translate`; a ValueError is raised by the call, before the first piece.
        """
        config = self.settings(options, config)
        form = as_form(config, False, False)
        check_split(split, form, target_prefix)
        if not split:
            check_one_stream(form, config)
        item = Item(text, target_prefix, source_lang, target_lang)
        builder = self._builder(config, log_probs=False)
        prepared = self._made([item], builder, split)

        async def pieces() -> AsyncIterator[str]:
            async for piece in self._pieces(prepared, builder, not split):
                yield piece

        return pieces()

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
        by_token = config.num_beams == 1 and config.samples == 1
        if not split:
            check_one_stream(as_form(config, False, False), config)
        builder = self._builder(config, log_probs=False)
        prepared = await self._prepared(deadline, [item], builder, split, most_new_tokens, most_parts)
        return self._pieces(prepared, builder, by_token, deadline)

    def _pieces(
        self, prepared: _Prepared, builder: RequestBuilder, by_token: bool, deadline: float | None = None
    ) -> TextStream:
        """Submits a text's parts together, and returns the stream of their translations and the white space."""
        asked: Answers[Request] | None = None
        if prepared.requests:
            asked = self.front.submit(
                prepared.requests,
                deadline=deadline,
                names=prepared.names,
                listen=range(len(prepared.requests)) if by_token else (),
            )
        answers: list[PartAnswer] = []
        tokenizer, (parts,) = self.translator.tokenizer, prepared.texts

        async def told() -> AsyncGenerator[str, None]:
            places = itertools.count()
            try:
                for part in parts:
                    answer, rest = None, ""
                    if part.checked is not None and asked is not None:
                        place = next(places)
                        if by_token:
                            found = TextPieces(tokenizer, part.checked.prefix, stop=builder.config.stop_strings)
                            async for tokens in asked.tokens(place):
                                for token in tokens:  # one at a time, even if several tokens arrived together
                                    if piece := found.add([token]):
                                        yield piece
                            rest = found.end()
                        answer = Answer(tokenizer, await asked.ended(place))
                        rest = rest if by_token else "".join(answer.texts())
                    answers.append(PartAnswer(answer, part.space))
                    if rest or part.space:
                        yield rest + part.space
            finally:
                if asked is not None:
                    asked.leave()

        return TextStream(told(), answers)

    async def _prepared(self, deadline: float | None, items: Sequence[Item], *options: Any) -> _Prepared:
        """Runs `_made`, in another thread if the texts are long, so that the event loop isn't blocked."""
        size = sum(len(item.text) for item in items if isinstance(item.text, str))
        return await self.front.aside(lambda: self._made(items, *options), size, deadline=deadline)

    def _made(
        self,
        items: Sequence[Item],
        builder: RequestBuilder,
        split: bool,
        most_new_tokens: int | None = None,
        most_parts: int | None = None,
    ) -> _Prepared:
        """Prepares texts for `submit`: encodes them and builds their requests.

        Raises:
            ValueError: a text can't be translated, or there are more than `most_parts` parts.
        """
        translator, made, count = self.translator, _Prepared([], [], []), 0
        # All parts are encoded before the first is translated, so that an invalid one is reported before any work.
        for number, item in enumerate(items, 1):
            if split:
                parts = parts_of(translator, item, number, builder)
            else:
                parts = [Part(str(number), translator.encode_item(item, number, builder), "", True)]
            made.texts.append(parts)
            places = range(count, count + len(parts))  # they decide which random numbers the parts draw
            count += len(parts)
            if most_parts is not None and count > most_parts:  # raised before the remaining texts are read
                raise ValueError(
                    f"expected at most {most_parts:,} sentences in a request, got {count:,} up to text {number}"
                )
            for place, part in zip(places, parts, strict=True):
                if (checked := part.checked) is not None:
                    limit = checked.limit if most_new_tokens is None else min(checked.limit, most_new_tokens)
                    made.requests.append(builder.build(checked._replace(limit=limit), place=place))
                    made.names.append(f"text {item.text[:_SHOWN]!r:.{_SHOWN}}")
        return made

    def _builder(self, config: GenerationConfig, *, log_probs: bool) -> RequestBuilder:
        translator = self.translator
        return RequestBuilder(
            translator.model, config, log_probs=log_probs, engine=self._engine, tokenizer=translator.tokenizer
        )

    def settings(self, options: Mapping[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
        """Returns the config of a request. All requests decode in one batch, with one engine in one precision.

        Raises:
            ValueError: see `Translator.settings`; or another engine or precision.
        """
        found = self.translator.settings(options, config)
        found.check_engine(self, self._engine.name, self.translator.precision)
        return found


def joined_texts(parts: Sequence[PartAnswer]) -> list[str]:
    """Joins the translations of a text's sentences to those of the text, best first; see `versions`."""
    said = [[""] if part.answer is None else part.answer.texts() or [""] for part in parts]
    spaces = [part.space for part in parts]
    return versions(said, lambda texts: "".join(map(operator.add, texts, spaces)))


def versions(said: Sequence[Sequence[str]], join: Callable[[list[str]], str]) -> list[str]:
    """Joins the translations of the parts of a text to those of the text, best first.

    Args:
        said: the translations of each part, best first; the n-th of the text consists of the n-th of each part, or of
            its last one.
        join: joins a translation of each part.
    """
    most = max(map(len, said), default=1)
    return list(dict.fromkeys(join([one[min(n, len(one) - 1)] for one in said]) for n in range(most)))
