"""A token's way from a request to the text: pieces of text from tokens, and the stop text that ends them."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from fastformer.generation.requests import Request
from fastformer.generation.search import Hypothesis

FinishReason: TypeAlias = Literal["stop", "length"]

# A detokenizer may change the text after the last word: remove spaces, or join an apostrophe with the next word.
_UNSETTLED = re.compile(r"\s\W*\Z")
_LOOK_BACK = 16  # the number of characters that are searched for a change of this kind
BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_BROKEN = 3  # the maximum number of bytes of an incomplete character
_PROBES = ("\U0010ffff", "\ue000", "\u0378")  # unassigned characters: hardly any vocabulary has one as a whole

# The number of tokens that are decoded again for each new one: the window at first, and the shorter windows to try. The
# first window with the same text as the longer one is used.
_WINDOW = 12
_KEPT = (5, 20, 80, 320)
_CONTEXT = 4  # characters that the texts of both windows share, before the uncertain part
_LATENESS = 64  # a long window is decoded when it has grown by a 64th part, which keeps the cost linear


class Detokenizer(Protocol):
    """The tokenizer methods that `TextPieces` uses; the tokenizers of `fastformer.data` have them."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids."""


_TAG = re.compile(r"<[^<>]+>")  # what a mark of several special tokens consists of


def special_marks(tokenizer: Any, marks: Collection[str]) -> dict[str, int]:
    """Returns the ids of the special tokens, which texts omit, that marks are or consist of."""
    added = getattr(tokenizer, "added_tokens", {}) if marks else {}
    parts = (part for mark in marks for part in ([mark] if mark in added else _TAG.findall(mark)))
    special = {part: tokenizer.encode_template(part) for part in dict.fromkeys(parts) if added.get(part)}
    return {mark: ids[0] for mark, ids in special.items() if len(ids) == 1}


class Marked:
    """A tokenizer whose texts show some special tokens, which it else omits.

    Args:
        tokenizer: the tokenizer.
        marks: the special tokens, by id.
    """

    def __init__(self, tokenizer: Detokenizer, marks: Mapping[int, str]) -> None:
        self._tokenizer, self._marks = tokenizer, marks

    @classmethod
    def of(cls, tokenizer: Any, marks: Collection[str]) -> Any:
        """Returns a tokenizer whose texts show these marks: the given one, if its texts omit none of them."""
        shown = {i: mark for mark, i in special_marks(tokenizer, marks).items()}
        return cls(tokenizer, shown) if shown else tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, with the marks among them."""
        text, run = "", list[int]()
        for i in ids:
            if (mark := self._marks.get(i)) is None:
                run.append(i)
            else:
                text, run = f"{text}{self._tokenizer.decode(run) if run else ''}{mark}", []
        return f"{text}{self._tokenizer.decode(run)}" if run else text


class TextPieces:
    """Turns tokens into pieces of text. No piece ends within a character, and none is ever taken back.

    The pieces, one after another, are the text of all tokens together. A piece is returned as soon as no later token
    can change it. Some pieces therefore come a token late, and a run of tokens that spell single bytes may come as a
    whole.

    The cost is linear: for each new token only the last few are decoded, from a place after which their text continues
    as the text of all tokens does. If a tokenizer has no such place, the pieces come later and later.

    Args:
        tokenizer: see above.
        begin: the ids before the first token.
        is_told: whether their text is known already, so that the pieces continue it.
        stop: texts that end the text, without being part of it. They are searched for in the text after that of
            `begin`. They may spell special tokens, which the text itself omits.
        runs: the tokenizer's runs of bytes, which several texts may share; None: they are found again.

    Attributes:
        is_stopped: whether a stop text has been found; text after it is omitted.
    """

    def __init__(
        self,
        tokenizer: Detokenizer,
        begin: Sequence[int] = (),
        *,
        is_told: bool = False,
        stop: Sequence[str] = (),
        runs: ByteRuns | None = None,
    ) -> None:
        self._tokenizer, self._ids, self._begin, self._stop = tokenizer, list(begin), len(begin), tuple(stop)
        self._runs = runs or ByteRuns(tokenizer)
        before = tokenizer.decode(self._ids) if begin and (is_told or stop) else ""
        self._unsearched = 0 if is_told else len(before)  # characters that aren't searched for stop texts
        self._before = before if is_told else ""
        self._given: list[str] = []
        self._held = ""  # text that is certain, and may be the beginning of a stop text
        # The text of the ids from `start` to `end`; its first `certain` characters are certain.
        self._start, self._end, self._text = 0, len(begin) if is_told else 0, self._before
        self._certain = len(self._before)
        self._most = _WINDOW
        self._seen = self._closed = self._end  # the ids that were looked at, and those of them before an unfinished run
        self._looked = self._end  # the ids in which a stop text was searched for
        self._given_length = 0
        self._names: dict[int, str] = {}
        # The stop texts that began before an omitted token: their place, that of the text behind it, what is missing.
        self._open: list[tuple[int, int, str]] = []
        self.is_stopped = False

    def add(self, tokens: Iterable[int]) -> str:
        """Adds new tokens, and returns the text that has become certain since the last call, or ""."""
        if self.is_stopped:
            return ""
        if not self._stop:
            self._ids += tokens
            return self._give(self._grow())
        text, run = "", []
        for token in tokens:
            run.append(token)
            if name := self._name(token):
                text += self._add(run)
                text += "" if self.is_stopped else self._behind(name)
                if self.is_stopped:
                    return text
                run = []
        return text + self._add(run)

    def _add(self, tokens: Sequence[int]) -> str:
        self._ids += tokens
        self._held += self._grow()
        if find_stop(self._held + self._uncertain(), self._stop, self._unsearched) >= 0:
            return self._stopped()
        certain = len(self._held) - _beginning(self._held, self._stop)
        if self._open:
            rest, still_open = self._rest(), []
            for begin, behind, missing in self._open:
                more = rest[behind - self._given_length :]
                if more.startswith(missing):
                    return self._stop_at(rest, begin)
                if missing.startswith(more):
                    still_open.append((begin, behind, missing))
                    certain = min(certain, begin - self._given_length)
            self._open = still_open
        piece, self._held = self._held[:certain], self._held[certain:]
        return self._give(piece)

    def _name(self, token: int) -> str:
        """Returns the name of a token that the text omits, if a stop text spells it, else ""."""
        if token not in self._names:
            name = ""
            if hasattr(self._tokenizer, "tokens") and not self._tokenizer.decode([token] * 2):
                [name] = self._tokenizer.tokens([token])
            is_space = not name.strip("▁↵")  # some tokenizers omit white space at an end
            self._names[token] = name if not is_space and any(name in _named(one) for one in self._stop) else ""
        return self._names[token]

    def _behind(self, name: str) -> str:
        """Looks for stop texts that contain the name of the omitted token that was added last."""
        rest = self._rest()
        length, still_open = self._given_length + len(rest), []
        for begin, behind, missing in self._open:
            more = _named(rest[behind - self._given_length :]) + name
            if _named(missing).startswith(more):
                still_open.append((begin, length, missing[len(more) :]))
        for one in self._stop:
            before, _, _ = _named(one).partition(name)
            if len(before) < len(one) and _named(rest[self._unsearched :]).endswith(before):
                still_open.append((length - len(before), length, one[len(before) + len(name) :]))
        whole = [begin for begin, _, missing in still_open if not missing]
        self._open = still_open
        return self._stop_at(rest, min(whole)) if whole else ""

    def _stop_at(self, rest: str, place: int) -> str:
        self.is_stopped = True
        return self._give(rest[: place - self._given_length])

    def whole(self, tokens: Iterable[int]) -> str:
        """Returns the text of all tokens, which are given at once; see `end`."""
        if self._stop:
            return self.add(tokens) + self.end()
        self._ids += tokens
        return self.end()

    def end(self) -> str:
        """Returns the rest of the text after the last token.

        Raises:
            ValueError: the tokenizer's text doesn't begin with the pieces that were returned before.
        """
        return "" if self.is_stopped else self._stopped() if self._stop else self._give(self._rest())

    def copy(self) -> TextPieces:
        """Returns an independent copy that continues from the same state."""
        copied = copy.copy(self)
        copied._ids, copied._given = list(self._ids), list(self._given)
        return copied

    def _give(self, piece: str) -> str:
        if piece:
            self._given.append(piece)
            self._given_length += len(piece)
            self._unsearched = max(0, self._unsearched - len(piece))
        return piece

    def _grow(self) -> str:
        """Returns the text that has become certain."""
        if self._runs.are_whole:  # an unfinished run is decoded later
            for place in range(len(self._ids) - 1, self._seen - 1, -1):
                if not self._runs.go_on_behind(self._ids[place]):
                    self._closed = place + 1
                    break
        else:
            self._closed = len(self._ids)
        self._seen, end = len(self._ids), self._closed
        new = end - self._end
        if not new or new * _LATENESS < min(end - self._start, end - self._begin):
            return ""
        text = self._tokenizer.decode(self._ids[self._start : end])
        if not text.startswith(self._text[: self._certain]):
            return ""
        # If tokens spell the end-of-text token, the tokenizer omits all text after it, in each window that contains it.
        is_open, before = text != self._text, self._end
        self._text, self._end = text, end
        piece = text[self._certain : self._settled(text)]
        self._certain += len(piece)
        if piece and is_open and end - self._start > self._most:
            self._move(before)
        return piece

    def _settled(self, text: str) -> int:
        """Returns the number of characters at the beginning of a text that no later token can change."""
        end = len(text)
        if not self._runs.are_whole:
            least = end - _MOST_BROKEN
            while end > max(least, 0) and text[end - 1] == BROKEN:
                end -= 1
        match = _UNSETTLED.search(text, max(0, end - _LOOK_BACK), end)
        return len(text[: match.start()].rstrip()) if match else end

    def _move(self, latest: int) -> None:
        """Moves the beginning of the window forward, at most to a given token, if the text then stays the same."""
        uncertain = len(self._text) - self._certain
        for length in _KEPT:
            start = min(latest, self._end - length)
            if start <= self._start:
                break
            text = self._tokenizer.decode(self._ids[start : self._end])
            needed = uncertain + _CONTEXT
            if len(text) >= needed and self._text.endswith(text[len(text) - needed :]):
                self._start, self._text, self._certain = start, text, len(text) - uncertain
                self._most = max(_WINDOW, 2 * length)
                return
        self._most = 2 * (self._end - self._start)

    def _rest(self) -> str:
        """Returns the rest of the text of all tokens, after the part that was returned before."""
        text, given = self._tokenizer.decode(self._ids), self._before + "".join(self._given)
        if text.startswith(given):
            return text[len(given) :]
        if not self._given:  # new tokens have changed the text of those before them
            return self._tokenizer.decode(self._ids[self._begin :])
        raise ValueError(
            f"expected a tokenizer whose text only grows, got {text[-40:]!r} after {given[-40:]!r}: its text can't be "
            "streamed"
        )

    def _uncertain(self) -> str:
        """Returns the current text after the certain part."""
        text, new = self._text, len(self._ids) - self._looked
        if self._end < len(self._ids) and new * _LATENESS >= len(self._ids) - self._start:
            text, self._looked = self._tokenizer.decode(self._ids[self._start :]), len(self._ids)
            if not text.startswith(self._text[: self._certain]):
                return ""
        return text[self._certain :]

    def _stopped(self) -> str:
        """Returns the rest of the text, up to a stop text."""
        rest = self._rest()
        place = find_stop(rest, self._stop, self._unsearched)
        self.is_stopped = place >= 0
        return self._give(rest[:place] if place >= 0 else rest)


class TextStreamer:
    """Prints text as it is generated, for `generate(..., streamer=)`, like Hugging Face's class of this name.

    Args:
        tokenizer: with encode and decode.
        prompt: printed first, in place of the text of the ids that decoding begins with; None: that text.
        stop: texts that end the text, without being printed; give them to `generate` as stop_strings too.
    """

    def __init__(self, tokenizer: Detokenizer, *, prompt: str | None = None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._prompt, self._stop = tokenizer, prompt, tuple(stop)
        self._pieces: TextPieces | None = None

    def put(self, value: Tensor) -> None:
        """Takes ids: first (1, length) what decoding begins with, then (1,) each new token."""
        if self._pieces is None:
            is_told = self._prompt is not None
            self._pieces = TextPieces(self._tokenizer, value.flatten().tolist(), is_told=is_told, stop=self._stop)
            self.write(self._prompt or "")
            return
        self.write(self._pieces.add(value.tolist()))

    def end(self) -> None:
        """Prints the rest and a line end. The streamer can then be used for the next text."""
        if self._pieces is not None:
            self.write(self._pieces.end() + "\n")
        self._pieces = None

    def write(self, text: str) -> None:
        """Prints a piece. Override this to use the text in another way."""
        if text:
            print(text, end="", flush=True)


class StopTexts:
    """A `Stop` of a search that ends rows at a stop text.

    Args:
        pieces: the initial state of each row, with the stop texts.
    """

    def __init__(self, pieces: TextPieces) -> None:
        self._begin = pieces
        self._known: dict[tuple[int, ...], TextPieces] = {}  # the states of the rows that continue, by their tokens

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Returns for each row of new tokens whether its last token completes a stop text."""
        states = {tuple(row): self._after(tuple(row)) for row in rows}
        shortest = min(map(len, rows), default=0)
        # Groups of beams come one after another, each with rows of the same length.
        self._known = {key: pieces for key, pieces in self._known.items() if len(key) >= shortest - 1} | states
        return [states[tuple(row)].is_stopped for row in rows]

    def _after(self, row: tuple[int, ...]) -> TextPieces:
        before = self._known.get(row[:-1])
        pieces = (before or self._begin).copy()
        for token in row if before is None else row[-1:]:
            pieces.add([token])
        return pieces


def behind_ends(ids: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """Returns the ids after the last id that ends a text. A tokenizer omits earlier ids, or ends the text there.

    The prompt of a chat has an id of `ends` after each turn.
    """
    place = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in ends), 0)
    return ids[place:]


def find_stop(text: str, stop: Sequence[str], start: int = 0) -> int:
    """Returns the smallest index from `start` on at which a stop text begins, or -1."""
    return min((place for one in stop if (place := text.find(one, start)) >= 0), default=-1)


def text_before_stop(tokenizer: Detokenizer, begin: Sequence[int], tokens: Sequence[int], stop: Sequence[str]) -> str:
    """Returns the text of all ids, up to the first stop text behind that of `begin`."""
    if not stop:
        return tokenizer.decode([*begin, *tokens])
    pieces = TextPieces(tokenizer, begin, stop=stop)
    return pieces.add(tokens) + pieces.end()


def _named(text: str) -> str:
    """Returns a text in the form in which tokenizers name tokens."""
    return text.replace(" ", "▁").replace("\n", "↵")


def _beginning(text: str, stop: Sequence[str]) -> int:
    """Returns the number of characters at the end of a text that may be the beginning of a stop text."""
    most = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in stop)), 0)


class ByteRuns:
    """The handling of tokens for single bytes in a tokenizer.

    Some tokenizers decode a run of byte tokens as a whole: if any byte is not valid UTF-8, none of the run is decoded.

    Attributes:
        are_whole: whether the tokenizer decodes runs as a whole.
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._goes_on: dict[int, bool] = {}
        self.are_whole = False
        for self._character in _PROBES:
            try:
                self._ids = tokenizer.encode(self._character)
            except ValueError:
                continue
            # A byte that is not text by itself.
            self._byte = next((i for i in self._ids if tokenizer.decode([i]) == BROKEN), None)
            if self._byte is not None:
                self.are_whole = self.go_on_behind(self._byte)
                return

    def go_on_behind(self, token: int) -> bool:
        """Returns whether a run continues after a token: it is a byte, or is omitted from the text."""
        if token not in self._goes_on:
            text = self._tokenizer.decode([*self._ids, token, *([] if self._byte is None else [self._byte])])
            self._goes_on[token] = self._character not in text
        return self._goes_on[token]


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
        """Returns the piece of new tokens, as the listener got them; without any, the end of an ended request."""
        if not tokens:
            return Piece(index, self._text.end(), [], self._reason(), self.cached_tokens)
        if self.log_probs:
            return Piece(index, self._text.add([token.token for token in tokens]), [*tokens])
        return Piece(index, self._text.add(tokens), [ScoredToken(token, 0.0) for token in tokens])

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
        is_complete = self.search.matchers is not None and self.search.matchers[0].is_complete
        return "length" if is_cut and not (is_complete or self._text.is_stopped) else "stop"


def _scored(row: Hypothesis, place: int) -> ScoredToken:
    """Returns one of the tokens of a row, with its scores."""
    return ScoredToken(row.tokens[place], row.log_probs[place], row.alternatives[place] if row.alternatives else ())
