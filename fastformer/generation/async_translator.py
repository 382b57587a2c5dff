"""`AsyncTranslator`: an asyncio interface to a `Translator`, which decodes the requests of many tasks in one batch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

from fastformer.generation.async_front import Answers, AsyncFront, Stats
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import choose_engine
from fastformer.generation.model_protocols import evaluating
from fastformer.generation.paragraphs import Part, check_split, parts_of
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import Answer, Item, as_form
from fastformer.generation.translator import Translator, check_one_stream

_SHOWN = 40  # characters of a text that an error names


class PartAnswer(NamedTuple):
    """What became of a sentence, or of a whole text, and the white space behind it; None: there was nothing to do."""

    answer: Answer | None
    space: str


class _Prepared(NamedTuple):
    """Texts as they are asked for.

    Attributes:
        texts: the parts of each.
        requests, names: of all parts that there is something to do for; the latter for messages.
    """

    texts: list[list[Part]]
    requests: list[Request]
    names: list[str]


class TextStream:
    """A translation piece by piece: an asynchronous iterator, which cancels its request when it is deleted.

    Attributes:
        parts: what became of each sentence whose pieces were given as a whole.
    """

    def __init__(self, pieces: AsyncGenerator[str, None], parts: list[PartAnswer]) -> None:
        self._pieces, self.parts = pieces, parts

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancels what hasn't ended."""
        await self._pieces.aclose()


class AsyncTranslator:
    """Translates for many tasks at once.

        async with AsyncTranslator(translator) as front:
            text = await front.translate("twenty-one", num_beams=4)
            async for piece in front.stream("forty-two"):
                print(piece, end="")

    A task asks for one text at a time, with options of its own. All requests decode in one batch, in a thread of their
    own; don't use the model elsewhere meanwhile. A task that is cancelled, or that leaves its stream, releases its
    memory. Tasks of several event loops may share an AsyncTranslator.

    Args:
        translator: whose model, tokenizer and limits of memory these are.
        max_waiting: how many requests may wait for room in the batch. A task that asks for more waits for a place. The
            sentences of a text, each a request, take their places together.
        engine: how to decode, one of `engines.ENGINES`; None: the fastest that can.
        max_waiting_tokens: how many source tokens those may have; None: any number.
        when_full: "refuse" raises QueueFull where a task would wait for a place.

    Attributes:
        front: what runs the requests.

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

    async def __aenter__(self) -> AsyncTranslator:
        await self.front.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(cancel=error is not None)

    async def close(self, *, cancel: bool = False) -> None:
        """Takes no more requests, and returns when its thread has ended.

        `async with` does it at its end, and cancels what runs if it ends with an error.

        Args:
            cancel: end what runs and what waits, whose tasks get a RuntimeError; without, they get their translations
                first.
        """
        await self.front.close(cancel=cancel)

    @property
    def num_queued(self) -> int:
        """How many requests have a place in the queue and haven't begun."""
        return self.front.num_queued

    @property
    def num_blocked(self) -> int:
        """How many requests wait for a place in the queue."""
        return self.front.num_blocked

    def stats(self) -> Stats:
        """Its counters as they are now."""
        return self.front.stats()

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
            text: what to translate.
            target_prefix, source_lang, target_lang, split, return_scores, return_token_scores, config, options: see
                `Translator.translate`.

        Raises:
            ValueError: see `Translator.translate`.
            QueueFull: there is no place for it now, and when_full is "refuse".
            RuntimeError: this is closed, or was closed meanwhile with cancel; the model or a processor failed.
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
        """The answers of several texts, which are asked for together.

        Args:
            items: the texts.
            config: from `settings`.
            log_probs: whether scores are wanted.
            split: cut each text into sentences.
            deadline: a time of `time.monotonic`; None: it may take as long as it takes.
            most_new_tokens: of each sentence, whatever the config says.
            most_parts: sentences of all texts, or texts without split; more are an error. None: any number.

        Returns:
            For each text what became of its sentences, or of it as a whole.

        Raises:
            ValueError: a text that can't be translated.
            QueueFull, TooLate, NotRunning, RuntimeError: see `AsyncFront.ask`.
        """
        builder = self._builder(config, log_probs=log_probs)
        prepared = await self._prepared(items, builder, split, most_new_tokens, most_parts)
        texts = prepared.texts
        if not prepared.requests:
            return [[PartAnswer(None, part.space) for part in parts] for parts in texts]
        asked = self.front.submit(prepared.requests, deadline=deadline, names=prepared.names)
        try:
            found: list[list[PartAnswer]] = []
            place = 0
            for parts in texts:
                found.append([])
                for part in parts:
                    answer = None
                    if part.checked is not None:
                        answer = Answer(self.translator.tokenizer, await asked.ended(place))
                        place += 1
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
        """Gives a text's translation piece by piece, as `Translator.stream` does.

        Leaving the loop over it cancels the request, as soon as the iterator is deleted.

        Args:
            text: what to translate.
            target_prefix, source_lang, target_lang, split, config, options: see `Translator.translate`; neither beams
                nor several samples can be streamed, but beams with split, whose pieces are sentences.

        Raises:
            ValueError, RuntimeError: see `translate`; the first at once.
        """
        config = self.settings(options, config)
        form = as_form(config, False, False)
        check_split(split, form, target_prefix)
        if not split:
            check_one_stream(form, config)
        item = Item(text, target_prefix, source_lang, target_lang)
        builder = self._builder(config, log_probs=False)
        prepared = self._made([item], builder, split, None, None)

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
        """As `stream`, but the request has its place in the queue when this returns, and the sentences of a split text
        come piece by piece as well.

        Args:
            item: the text.
            config: from `settings`.
            split, deadline, most_new_tokens, most_parts: see `answers`.

        Raises:
            ValueError, QueueFull, NotRunning: at once; see `answers`.
            TooLate, RuntimeError: from the iterator.
        """
        by_token = config.num_beams == 1 and config.samples == 1
        if not split:
            check_one_stream(as_form(config, False, False), config)
        builder = self._builder(config, log_probs=False)
        prepared = await self._prepared([item], builder, split, most_new_tokens, most_parts)
        return self._pieces(prepared, builder, by_token, deadline)

    def _pieces(
        self, prepared: _Prepared, builder: RequestBuilder, by_token: bool, deadline: float | None = None
    ) -> TextStream:
        """The translations of a text's parts, which decode together, with the white space behind each."""
        asked: Answers[Request] | None = None
        if prepared.requests:
            asked = self.front.submit(
                prepared.requests,
                deadline=deadline,
                names=prepared.names,
                listen=range(len(prepared.requests)) if by_token else (),
            )
        found: list[PartAnswer] = []
        (parts,) = prepared.texts
        return TextStream(self._told(parts, asked, by_token, builder.config, found), found)

    async def _told(
        self,
        parts: Sequence[Part],
        asked: Answers[Request] | None,
        by_token: bool,
        config: GenerationConfig,
        answers: list[PartAnswer],
    ) -> AsyncGenerator[str, None]:
        """What `asked` brings, in the order of the parts, whose answers are appended to a list."""
        tokenizer, place = self.translator.tokenizer, 0
        try:
            for part in parts:
                if part.checked is None or asked is None:
                    answers.append(PartAnswer(None, part.space))
                    if part.space:
                        yield part.space
                    continue
                rest = ""
                if by_token:
                    found = TextPieces(tokenizer, part.checked.prefix, stop=config.stop_strings)
                    async for tokens in asked.tokens(place):
                        for token in tokens:  # each by itself, however late this task is
                            if piece := found.add([token]):
                                yield piece
                    rest = found.end()
                answer = Answer(tokenizer, await asked.ended(place))
                answers.append(PartAnswer(answer, part.space))
                rest = rest if by_token else "".join(answer.texts())
                if rest or part.space:
                    yield rest + part.space
                place += 1
        finally:
            if asked is not None:
                asked.leave()

    async def _prepared(
        self,
        items: Sequence[Item],
        builder: RequestBuilder,
        split: bool,
        most_new_tokens: int | None,
        most_parts: int | None,
    ) -> _Prepared:
        """See `_made`; the event loop doesn't wait for long texts."""
        size = sum(len(item.text) for item in items if isinstance(item.text, str))
        return await self.front.aside(lambda: self._made(items, builder, split, most_new_tokens, most_parts), size)

    def _made(
        self,
        items: Sequence[Item],
        builder: RequestBuilder,
        split: bool,
        most_new_tokens: int | None,
        most_parts: int | None,
    ) -> _Prepared:
        """What texts become before they can be asked for.

        Raises:
            ValueError: a text that can't be translated, or more than `most_parts`.
        """
        made = _Prepared([], [], [])
        count = 0
        for number, item in enumerate(items, 1):
            parts = self._parts(item, number, builder, split)
            count += len(parts)
            if most_parts is not None and count > most_parts:  # before the rest is read
                raise ValueError(
                    f"expected at most {most_parts:,} sentences in a request, got {count:,} up to text {number}"
                )
            requests = self._requests(builder, parts, most_new_tokens, count - len(parts))
            made.texts.append(parts)
            made.requests.extend(requests)
            made.names.extend([f"text {item.text[:_SHOWN]!r:.{_SHOWN}}"] * len(requests))
        return made

    def _parts(self, item: Item, number: int, builder: RequestBuilder, split: bool) -> list[Part]:
        """A text's sentences, or all of it, as ids.

        Raises:
            ValueError: a text that can't be translated.
        """
        # All are encoded before the first is translated, so that a bad one is named before the work.
        if split:
            return parts_of(self.translator, item, number, builder)
        return [Part(str(number), self.translator.encode_item(item, number, builder), "", True)]

    def _requests(
        self, builder: RequestBuilder, parts: Sequence[Part], most_new_tokens: int | None, before: int
    ) -> list[Request]:
        """The requests of a text's parts, behind so many parts of other texts: the place decides what is drawn."""
        found = []
        for place, part in enumerate(parts, before):
            checked = part.checked
            if checked is not None:
                limit = checked.limit if most_new_tokens is None else min(checked.limit, most_new_tokens)
                found.append(builder.build(checked._replace(limit=limit), place=place))
        return found

    def _builder(self, config: GenerationConfig, *, log_probs: bool) -> RequestBuilder:
        translator = self.translator
        return RequestBuilder(
            translator.model, config, log_probs=log_probs, engine=self._engine, tokenizer=translator.tokenizer
        )

    def settings(self, options: Mapping[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
        """The config of a request; all of them decode in one batch, with one engine in one precision.

        Raises:
            ValueError: see `Translator.settings`; another engine or precision.
        """
        found = self.translator.settings(options, config)
        if found.precision != self.translator.precision:
            raise ValueError(
                f"expected no precision: all requests decode in one batch, in {self.translator.precision or 'the '}"
                f"{'' if self.translator.precision else 'precision of the model'}; Translator(..., precision=) chooses"
            )
        if found.engine not in (None, self._engine.name) or not found.use_cache:
            raise ValueError(
                f"expected neither engine nor use_cache: all requests decode in one batch, by engine "
                f"{self._engine.name!r}; AsyncTranslator(..., engine=) chooses another"
            )
        return found


def joined_texts(parts: Sequence[PartAnswer]) -> list[str]:
    """The translations of a text, best first, of what became of its sentences.

    The n-th best one has the n-th best of each sentence, or the last that there is.
    """
    said = [[""] if part.answer is None else part.answer.texts() or [""] for part in parts]
    most = max(map(len, said), default=1)
    texts = [
        "".join(one[min(n, len(one) - 1)] + part.space for one, part in zip(said, parts, strict=True))
        for n in range(most)
    ]
    return list(dict.fromkeys(texts))
