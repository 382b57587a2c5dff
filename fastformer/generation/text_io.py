"""The texts and prefixes that a translator reads, their errors, and the forms of its answers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from fastformer.generation.config import GenerationConfig
from fastformer.generation.requests import Request
from fastformer.generation.search import Hypothesis
from fastformer.generation.streaming import Detokenizer, text_before_stop
from fastformer.requests import failure

logger = logging.getLogger("fastformer")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_SHOWN_SKIPS = 10  # the most warnings; a file in a wrong encoding would fill the screen


class TextCodec(Detokenizer, Protocol):
    """The tokenizer methods that a translator uses; the tokenizers of `fastformer.data` have them."""

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns each id as a readable string."""


class Source(Protocol[T_co]):
    """A source of inputs that arrive over time."""

    def get(self, wait: bool) -> T_co | None:
        """Returns the next input.

        Args:
            wait: wait until an input arrives; False returns None if none has arrived yet.

        Raises:
            EOFError: there are no more inputs.
        """


class IterableSource(Generic[T]):
    """An iterable as a `Source`. An iterable can't tell whether an item has arrived, so `get` always waits."""

    def __init__(self, items: Iterable[T]) -> None:
        self._rest = iter(items)

    def get(self, wait: bool) -> T | None:
        for item in self._rest:
            return item
        raise EOFError


class Item(NamedTuple):
    """A text, the prefix of its translation, and the languages of both; None: the translator's language."""

    text: str
    prefix: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None


ForEach: TypeAlias = str | Iterable[str | None] | None  # one value for all texts, or one for each of them


def as_items(
    texts: str | Iterable[str], target_prefix: ForEach, source_lang: ForEach = None, target_lang: ForEach = None
) -> Iterable[Item]:
    """Yields texts with their prefixes and languages.

    Raises:
        ValueError: an item is not a text, or the other arguments don't match the texts (for iterables, at their end).
    """
    languages = {"source_lang": source_lang, "target_lang": target_lang}
    if isinstance(texts, str):
        for name, value in {"target_prefix": target_prefix, **languages}.items():
            if value is not None and not isinstance(value, str):
                raise ValueError(f"expected {name} as a str for one text, got {type(value).__name__}")
        return [Item(texts, target_prefix, source_lang, target_lang)]  # type: ignore[arg-type]
    if isinstance(texts, bytes | bytearray | Mapping) or not isinstance(texts, Iterable):
        raise ValueError(f"expected a text, or a list of texts, got {type(texts).__name__}")
    if isinstance(target_prefix, str):
        raise ValueError("expected target_prefix as a list, one for each text, got str")
    items: Iterator[Item] = map(Item, texts)
    for field, (name, value) in zip(
        Item._fields[1:], {"target_prefix": target_prefix, **languages}.items(), strict=True
    ):
        if value is None:
            continue
        if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
            raise ValueError(f"expected {name} as a list, one for each text, got {type(value).__name__}")
        items = _with_field(items, field, name, value)
    return items


def _with_field(items: Iterator[Item], field: str, name: str, values: str | Iterable[str | None]) -> Iterator[Item]:
    if isinstance(values, str):
        return (item._replace(**{field: values}) for item in items)
    pairs = _together(items, iter(values), name, name)
    return (item._replace(**{field: value}) for item, value in pairs)


def expect_text(argument: str, number: int | str, value: object) -> str:
    """Returns a value that must be a text. For another value, the ValueError gives its index, number - 1."""
    if not isinstance(value, str):
        place = number - 1 if isinstance(number, int) else number
        raise ValueError(f"{argument}[{place}]: expected a str, got {type(value).__name__} {value!r:.40}")
    return value


def as_pairs(texts: str | Iterable[str], translations: str | Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yields texts, each with its translation.

    Raises:
        ValueError: an item is not a text, or the translations don't match the texts (for iterables, at their end).
    """
    if isinstance(texts, str) != isinstance(translations, str):
        raise ValueError(
            "expected translations as a str for one text and as a list for several, got "
            f"{type(translations).__name__} for {type(texts).__name__}"
        )
    if isinstance(texts, str) and isinstance(translations, str):
        return [(texts, translations)]
    for values in (texts, translations):
        if isinstance(values, bytes | bytearray | Mapping) or not isinstance(values, Iterable):
            raise ValueError(f"expected a text, or a list of texts, got {type(values).__name__}")
    return _together(iter(texts), iter(translations), "translations", "translation")


def _together(texts: Iterator[Any], others: Iterator[Any], name: str, one: str) -> Iterator[tuple[Any, Any]]:
    missing = object()
    for number in itertools.count():
        text, other = next(texts, missing), next(others, missing)
        if text is missing and other is missing:
            return
        if text is missing or other is missing:
            more, fewer = ("texts", name) if other is missing else (name, "texts")
            raise ValueError(f"expected a {one} for each text, got {number} of {fewer} and more of {more}")
        yield text, other


class Scored(NamedTuple):
    """A translation and its score: the log-probability, for beams divided by the length penalty."""

    text: str
    score: float


class TokenScored(NamedTuple):
    """A translation, its score, and its new tokens with the log-probability of each, EOS included."""

    text: str
    score: float
    tokens: list[tuple[str, float]]

    @property
    def per_token(self) -> float:
        """The mean log-probability of the tokens. Without tokens it is -inf for a text that was skipped, else NaN."""
        if not self.tokens:
            return -math.inf if self.score == -math.inf else math.nan
        return math.fsum(log_prob for _, log_prob in self.tokens) / len(self.tokens)

    @property
    def perplexity(self) -> float:
        """The perplexity of the tokens, exp(-per_token)."""
        return perplexity(self.per_token)


def perplexity(per_token: float) -> float:
    """Returns exp(-per_token) for the mean log-probability of a token; inf if a float can't hold it."""
    return math.exp(-per_token) if not per_token < -700 else math.inf


class Answer:
    """The translations of a text, or of one of its sentences.

    Args:
        tokenizer: decodes the translations.
        request: the finished request; None for an empty or skipped text.
        space: the white space after a sentence.
    """

    def __init__(self, tokenizer: TextCodec, request: Request | None, space: str = "") -> None:
        self._tokenizer, self.space = tokenizer, space
        self._results: list[Hypothesis] = [] if request is None else request.results
        self._prefix = [] if request is None else request.prompt.tokens[1:]  # without the start token
        self._stop = () if request is None else request.stop_strings
        self._source = () if request is None else request.prompt.source or ()

    @property
    def sequences(self) -> list[tuple[Sequence[int], list[int]]]:
        """Returns the ids of the source, and of each translation with its prefix, best first."""
        return [(self._source, [*self._prefix, *hypothesis.tokens]) for hypothesis in self._results]

    def texts(self) -> list[str]:
        """Returns the translations, best first."""
        return [text_before_stop(self._tokenizer, self._prefix, result.tokens, self._stop) for result in self._results]

    def spaced(self) -> str:
        """Returns the only translation with the white space after it."""
        return "".join(self.texts()) + self.space

    def scored(self) -> list[Scored]:
        """Returns the translations with their scores, best first."""
        return [Scored(text, result.score) for text, result in zip(self.texts(), self._results, strict=True)]

    def token_scored(self) -> list[TokenScored]:
        """Returns the translations with their scores and those of their tokens, best first."""
        answers = []
        for text, result in zip(self.texts(), self._results, strict=True):
            tokens = zip(self._tokenizer.tokens(result.tokens), result.log_probs, strict=True)
            answers.append(TokenScored(text, result.score, list(tokens)))
        return answers


class Form(NamedTuple):
    """The form of an answer for the caller: one translation or a list of them, with scores or without."""

    is_list: bool
    scores: bool = False
    token_scores: bool = False

    @property
    def log_probs(self) -> bool:
        """Whether log-probabilities are needed."""
        return self.scores or self.token_scores

    def of(self, answer: Answer) -> Any:
        """Converts an answer to this form."""
        values: list[Any]
        nothing: Any
        if self.token_scores:
            values, nothing = answer.token_scored(), TokenScored("", -math.inf, [])
        elif self.scores:
            values, nothing = answer.scored(), Scored("", -math.inf)
        else:
            values, nothing = answer.texts(), ""
        if self.is_list:
            return values
        return values[0] if values else nothing


@dataclass(frozen=True)
class TextOptions:
    """The options of a call that translates texts, apart from those of the search; see `Translator.translate`."""

    target_prefix: ForEach = None
    source_lang: ForEach = None
    target_lang: ForEach = None
    on_error: str = "stop"
    skip_long: bool = False
    split: bool = False
    return_scores: bool = False
    return_token_scores: bool = False

    def __post_init__(self) -> None:
        for name in ("split", "return_scores", "return_token_scores"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"expected {name} to be True or False, got {value!r}")

    @classmethod
    def taken_from(cls, options: dict[str, Any], names: Iterable[str] | None = None) -> TextOptions:
        """Removes these options from those of a call, and returns them.

        Args:
            options: the options of the call; those of the search are left.
            names: the fields that the call has; None: all.
        """
        names = cls.__dataclass_fields__ if names is None else names
        given = {name: options.pop(name) for name in names if name in options}
        return cls(**given) if given else _USUAL

    def items(self, texts: str | Iterable[str]) -> Iterable[Item]:
        """Yields texts with their prefixes and languages; see `as_items`."""
        return as_items(texts, self.target_prefix, self.source_lang, self.target_lang)

    def item(self, text: str) -> Item:
        """Returns the only text of a call, whose values `PairEncoder.encode_item` checks."""
        return Item(text, self.target_prefix, self.source_lang, self.target_lang)  # type: ignore[arg-type]

    def errors(self) -> ErrorPolicy:
        """Returns what happens to texts that can't be translated."""
        return ErrorPolicy(self.on_error, self.skip_long)

    def form(self, config: GenerationConfig, *, streams: bool = False) -> Form:
        """Returns the form of the answers.

        Args:
            config: the config of the search.
            streams: whether the translation of one text is to come piece by piece.

        Raises:
            ValueError: the options contradict each other or the config.
        """
        form = Form(config.num_return_sequences > 1, self.return_scores, self.return_token_scores)
        if self.split and (form.is_list or form.log_probs):
            raise ValueError(
                "expected neither several translations nor scores along with split: those of sentences "
                "can't be combined for a text"
            )
        if self.split and self.target_prefix is not None:
            raise ValueError(
                "expected no target_prefix along with split: the sentences of a text are translated separately, and "
                "the prefix would apply to only one of them"
            )
        if streams and not self.split and (form.is_list or form.log_probs or config.num_beams > 1):
            raise ValueError(
                "expected no beams, several samples or scores along with one text to stream: its pieces come before "
                "the end is known; translate gives them"
            )
        return form


_USUAL = TextOptions()


class TextError(ValueError):
    """Raised for a text that can't be translated.

    Attributes:
        is_long: whether the reason is its length.
    """

    def __init__(self, message: str, *, is_long: bool = False) -> None:
        super().__init__(message)
        self.is_long = is_long


def check_request(request: Request | None, name: object) -> None:
    """Raises the error of a request, if it has one, with the name of its text."""
    if request is not None and request.error is not None:
        raise failure(f"text {name}", request.error) from request.error


class ErrorPolicy:
    """Whether texts that can't be translated stop the work or are skipped.

    Args:
        on_error: "stop" raises the first error; "skip" logs a warning and leaves the answer empty.
        skip_long: whether to skip texts that are only too long, whatever on_error says.
        left: the result of a skipped text in messages: for one text, and for several.

    Attributes:
        skipped: the number of texts that were skipped.
    """

    def __init__(
        self,
        on_error: str = "stop",
        skip_long: bool = False,
        left: tuple[str, str] = ("its translation empty", "their translations are empty"),
    ) -> None:
        if on_error not in ("stop", "skip"):
            raise ValueError(f"expected on_error to be 'stop' or 'skip', got {on_error!r}")
        self.on_error, self.skip_long, self.skipped, self._left = on_error, skip_long, 0, left

    def handle(self, error: TextError) -> None:
        """Raises the error, or skips its text."""
        if self.on_error != "skip" and not (self.skip_long and error.is_long):
            advice = "skip_long or on_error skip leaves" if error.is_long else "on_error skip leaves"
            raise TextError(f"{error}; {advice} {self._left[0]}", is_long=error.is_long) from error
        self.skipped += 1
        if self.skipped <= _SHOWN_SKIPS:
            logger.warning("skipped %s", error)

    def report(self, total: int) -> None:
        """Logs the number of skipped texts at the end, if any were skipped."""
        if self.skipped:
            logger.warning("skipped %s of %s texts; %s", f"{self.skipped:,}", f"{total:,}", self._left[1])
