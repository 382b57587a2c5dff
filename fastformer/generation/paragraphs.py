"""Translates paragraphs sentence by sentence in one batch, and joins the translations."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from fastformer.generation.ordered_stream import Source, ordered_stream
from fastformer.generation.request_builder import CheckedInput, RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.sentences import split_sentences
from fastformer.generation.text_io import Answer, ErrorPolicy, Form, Item, TextError, check_request, expect_text

if TYPE_CHECKING:
    from fastformer.generation.translator import Translator


class Part(NamedTuple):
    """A sentence that is ready for the model.

    Attributes:
        name: the numbers of its text and of the sentence, in messages.
        checked: the sentence's ids; None: the sentence has nothing to translate.
        space: the white space after it, or before the first sentence.
        is_last: whether it is the last sentence of its text.
    """

    name: str
    checked: CheckedInput | None
    space: str
    is_last: bool


class Joined(Answer):
    """The answer for a text whose sentences were translated one by one.

    Args:
        text: the translation.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def texts(self) -> list[str]:
        """Returns the translation, as a list of one text."""
        return [self._text]


def check_split(split: object, form: Form, prefix: object) -> None:
    """Raises a ValueError if texts can't be translated sentence by sentence with these arguments."""
    if not isinstance(split, bool):
        raise ValueError(f"expected split to be True or False, got {split!r}")
    if split and (form.is_list or form.log_probs):
        raise ValueError(
            "expected neither several translations nor scores along with split: those of sentences "
            "can't be combined for a text"
        )
    if split and prefix is not None:
        raise ValueError(
            "expected no target_prefix along with split: the sentences of a text are translated separately, and the "
            "prefix would apply to only one of them"
        )


class _Parts:
    """A source of sentences, made of a source of texts. A text's sentences are encoded before the first is returned."""

    def __init__(
        self, source: Source[Item], translator: Translator, builder: RequestBuilder, errors: ErrorPolicy
    ) -> None:
        self._source, self._translator, self._builder, self._errors = source, translator, builder, errors
        self._ready: deque[Part | None] = deque()  # None: the text is skipped
        self._count = 0

    def get(self, wait: bool) -> Part | None:
        if not self._ready:
            item = self._source.get(wait)
            if item is None:
                return None
            self._count += 1
            self._ready += parts_of(self._translator, item, self._count, self._builder, self._errors)
        return self._ready.popleft()


def parts_of(
    translator: Translator, item: Item, number: int, builder: RequestBuilder, errors: ErrorPolicy | None = None
) -> list[Part]:
    """Splits a text into its sentences, at least one part. The part of a skipped text has no space.

    Raises:
        TextError: a sentence can't be translated, and `errors` doesn't skip it.
        ValueError: the item isn't a text.
    """
    sentences = split_sentences(expect_text("texts", number, item.text))
    parts: list[Part] = []
    for place, (sentence, space) in enumerate(sentences, 1):
        name, checked = f"{number}, sentence {place}", None
        if sentence:
            try:
                checked = translator.encode_item(item._replace(text=sentence), name, builder)
                checked = checked._replace(row=array("q", checked.row))
            except TextError as error:
                if errors is None:
                    raise
                errors.handle(error)
                return [Part(name, None, "", True)]
        parts.append(Part(name, checked, space, place == len(sentences)))
    return parts or [Part(str(number), None, "", True)]


def translated_parts(
    translator: Translator,
    source: Source[Item],
    builder: RequestBuilder,
    errors: ErrorPolicy,
    *,
    read_ahead: int,
    deadline: float | None = None,
) -> Iterator[list[tuple[str, bool]]]:
    """Yields the translations of sentences with the white space after each, and whether each is the last of its text.

    Args:
        translator: the translator.
        source: the texts.
        builder: the builder of the requests.
        errors: the policy for texts that can't be translated; it reports at the end.
        read_ahead: the most sentences that are in memory.
        deadline: a time of `time.monotonic` for all sentences; None: each sentence has the config's max_time.
    """
    places = itertools.count()

    def begin(part: Part) -> Request | None:
        place = next(places)
        if part.checked is None:
            return None
        request = builder.build(part.checked, place=place)
        request.deadline = request.deadline if deadline is None else deadline
        return request

    total = 0
    scheduler = translator.new_scheduler(builder.engine, is_endless=True)
    parts = _Parts(source, translator, builder, errors)
    for ready in ordered_stream(scheduler, parts, begin, model=translator.model, read_ahead=read_ahead):
        found: list[tuple[str, bool]] = []
        for part, request in ready:
            if found and request is not None and request.error is not None:
                yield found  # the results before the error
            check_request(request, part.name)
            said = "".join(Answer(translator.tokenizer, request).texts())
            found.append((said + part.space, part.is_last))
            total += part.is_last
        yield found
    errors.report(total)


def joined(parts: Iterable[list[tuple[str, bool]]]) -> Iterator[list[Answer]]:
    """Yields the answers of whole texts, each as soon as its last sentence is translated."""
    text: list[str] = []
    for ready in parts:
        found: list[Answer] = []
        for said, is_last in ready:
            text.append(said)
            if is_last:
                found.append(Joined("".join(text)))
                text.clear()
        if found:
            yield found
