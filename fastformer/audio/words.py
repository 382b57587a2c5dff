"""Words and their times: from the alignment of a window's tokens, and corrected where a pause hides their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fastformer.audio.options import APPENDED, PREPENDED
from fastformer.audio.results import Word
from fastformer.audio.tokens import TIMES_PER_SECOND, Tokens

_SENTENCE_ENDS = ".。!！?？"
_MOST_USUAL = 0.7  # seconds of a usual word
_UNLIKELY, _BRIEF, _LONG = 0.15, 0.133, 2.0  # the probability and the seconds of a word that was probably not said


@dataclass
class TimedWord:
    """A word of a window, whose times are relative to the window's begin.

    Attributes:
        num_tokens: its number of tokens; those of a mark that was joined to another word belong to that word.
    """

    word: str
    num_tokens: int
    start: float
    end: float
    probability: float

    @property
    def duration(self) -> float:
        """The length in seconds."""
        return self.end - self.start

    def take(self, other: TimedWord, joined: str) -> None:
        """Takes the text and the tokens of another word, which becomes empty."""
        self.word, other.word = joined, ""
        self.num_tokens, other.num_tokens = self.num_tokens + other.num_tokens, 0


def timed_words(tokens: Tokens, ids: Sequence[int], language: str, aligned: Any) -> list[TimedWord]:
    """Returns the words of a window's text.

    Args:
        tokens: the tokenizer.
        ids: the text's ids, without times.
        language: its language.
        aligned: what `SpeechModel.align` found for the ids.
    """
    words = tokens.words([*ids, tokens.text_end], language)
    if len(words) <= 1 or not aligned.alignments:
        return []
    # The path visits each token in turn; a token's time is where the path first meets it.
    places, times = np.asarray(aligned.alignments).T
    begins = times[np.diff(places, prepend=places[0] - 1) > 0] / TIMES_PER_SECOND
    result, first = [], 0
    for text, word_ids in words[:-1]:
        last = first + len(word_ids)
        probability = float(np.mean(aligned.text_token_probs[first:last]))
        result.append(TimedWord(text, len(word_ids), float(begins[first]), float(begins[last]), probability))
        first = last
    return result


class WordTimes:
    """Gives the segments of a recording their words, window after window.

    Args:
        prepended, appended: see `TranscriptionOptions`.

    Attributes:
        last_end: the time at which the words before a window end.
    """

    def __init__(self, prepended: str, appended: str) -> None:
        self._prepended, self._appended = prepended, appended
        self.last_end = 0.0

    def put(self, segments: Sequence[Any], words: list[TimedWord], offset: float, text_end: int) -> float:
        """Sets the words, the start and the end of a window's segments. Returns the end of the last words.

        Args:
            segments: have `tokens`, `start` and `end`.
            words: the words of all of them.
            offset: the time of the window.
            text_end: the first id that belongs to no text.
        """
        durations = [word.duration for word in words if word.duration]
        usual = min(_MOST_USUAL, float(np.median(durations))) if durations else 0.0
        if durations:
            _shorten_at_sentences(words, 2 * usual)
        if words:
            _join_marks(words, self._prepended, self._appended)
        last_end, rest = self.last_end, iter(words)
        for segment in segments:
            left = sum(token < text_end for token in segment.tokens)
            spoken = []
            while left > 0 and (word := next(rest, None)) is not None:
                left -= word.num_tokens
                if word.word:
                    start, end = round(offset + word.start, 2), round(offset + word.end, 2)
                    spoken.append(Word(start, end, word.word, word.probability))
            if spoken:
                _fit(segment, spoken, last_end, usual)
                last_end = segment.end
            segment.words = spoken
        return last_end


def _shorten_at_sentences(words: list[TimedWord], most: float) -> None:
    """Shortens words beside the end of a sentence, which contain its pause."""
    for before, word in pairwise(words):
        if word.duration > most:
            if word.word in _SENTENCE_ENDS:
                word.end = word.start + most
            elif before.word in _SENTENCE_ENDS:
                word.start = word.end - most


def _join_marks(words: Sequence[TimedWord], prepended: str, appended: str) -> None:
    """Joins marks to the words that they belong to; a joined mark stays as an empty word without tokens."""
    target = words[-1]
    for word in reversed(words[:-1]):
        if word.word.startswith(" ") and word.word.strip() in prepended:
            target.take(word, word.word + target.word)
        else:
            target = word
    target = words[0]
    for word in words[1:]:
        if not target.word.endswith(" ") and word.word in appended:
            target.take(word, target.word + word.word)
        else:
            target = word


def _fit(segment: Any, words: list[Word], last_end: float, usual: float) -> None:
    """Shortens the words at the borders of a segment, which contain its pauses, and sets the segment's times."""
    first, last, most = words[0], words[-1], 2 * usual
    second = words[1] if len(words) > 1 else None
    is_long = first.end - first.start > most or (second is not None and second.end - first.start > 2 * most)
    if first.end - last_end > 4 * usual and is_long:
        if second is not None and second.end - second.start > most:
            first.end = second.start = max(second.end / 2, second.end - most)
        first.start = max(0, first.end - most)
    if segment.start < first.end and segment.start - 0.5 > first.start:
        first.start = max(0, min(first.end - usual, segment.start))
    else:
        segment.start = first.start
    if segment.end > last.start and segment.end + 0.5 < last.end:
        last.end = max(last.start + usual, segment.end)
    else:
        segment.end = last.end


def is_improbable(segment: Any) -> bool:
    """Whether the words of a segment were probably not said: very short, very long, or unlikely."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PREPENDED + APPENDED][:8]
    score = sum(map(_strangeness, words))
    return score >= 3 or score + 0.01 >= len(words)


def _strangeness(word: Word) -> float:
    duration = word.end - word.start
    return (word.probability < _UNLIKELY) + 15 * max(0.0, _BRIEF - duration) + max(0.0, duration - _LONG)
