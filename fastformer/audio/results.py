"""The results of a transcription, and the formats that they are written in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fastformer.audio.options import TranscriptionOptions
    from fastformer.audio.voice import VadOptions


@dataclass
class Word:
    """A word with its times in seconds, and the mean probability of its tokens."""

    start: float
    end: float
    word: str
    probability: float


@dataclass
class Segment:
    """A part of a transcription: about a sentence.

    Attributes:
        id: the number of the segment, from 1.
        seek: the frame at which its window begins, in hundredths of a second.
        start, end: the times in seconds.
        text, tokens: the text, and its ids with those of times.
        avg_logprob: the mean log-probability of the tokens of its window.
        compression_ratio: the length of the text by its length when compressed; high for repetitions.
        no_speech_prob: the probability that the window holds no speech.
        words: its words, if they were asked for.
        temperature: the temperature at which the window was decoded.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None
    temperature: float | None


@dataclass
class TranscriptionInfo:
    """The facts about a recording and its transcription.

    Attributes:
        language, language_probability: the language's code, and its probability; 1 if the caller named it.
        duration, duration_after_vad: seconds of the recording, and of the speech in it that is decoded.
        all_language_probs: all languages with their probabilities, the likeliest first; None if it was named.
        transcription_options, vad_options: the settings.
    """

    language: str
    language_probability: float
    duration: float
    duration_after_vad: float
    all_language_probs: list[tuple[str, float]] | None
    transcription_options: TranscriptionOptions
    vad_options: VadOptions | None


def timestamp(seconds: float, mark: str = ".") -> str:
    """Returns a time as 01:02:03.456."""
    total = max(0, round(seconds * 1000))
    return f"{total // 3_600_000:02d}:{total // 60_000 % 60:02d}:{total // 1000 % 60:02d}{mark}{total % 1000:03d}"


def as_text(segments: Iterable[Segment], info: TranscriptionInfo) -> Iterator[str]:
    """Yields a line for each segment."""
    for segment in segments:
        yield segment.text.strip() + "\n"


def as_srt(segments: Iterable[Segment], info: TranscriptionInfo) -> Iterator[str]:
    """Yields the subtitles of an .srt file."""
    for number, segment in enumerate(segments, 1):
        yield f"{number}\n{timestamp(segment.start, ',')} --> {timestamp(segment.end, ',')}\n{_cue(segment)}\n\n"


def as_vtt(segments: Iterable[Segment], info: TranscriptionInfo) -> Iterator[str]:
    """Yields the head and the subtitles of a .vtt file."""
    yield "WEBVTT\n\n"
    for segment in segments:
        text = _cue(segment).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield f"{timestamp(segment.start)} --> {timestamp(segment.end)}\n{text}\n\n"


def as_json(segments: Iterable[Segment], info: TranscriptionInfo) -> Iterator[str]:
    """Yields an object in JSON, whose text comes last: the segments are written as they come."""
    head = {"language": info.language, "language_probability": info.language_probability, "duration": info.duration}
    yield json.dumps(head, ensure_ascii=False)[:-1] + ', "segments": ['
    texts: list[str] = []
    for segment in segments:
        yield (", " if texts else "") + json.dumps(asdict(segment), ensure_ascii=False)
        texts.append(segment.text)
    yield f'], "text": {json.dumps("".join(texts).strip(), ensure_ascii=False)}}}\n'


def _cue(segment: Segment) -> str:
    """Returns a subtitle's text: without an arrow, which is part of the format, and without empty lines."""
    return " ".join(segment.text.replace("-->", "->").split()) or "-"


Writer: TypeAlias = "Callable[[Iterable[Segment], TranscriptionInfo], Iterator[str]]"
FORMATS: dict[str, Writer] = {"txt": as_text, "srt": as_srt, "vtt": as_vtt, "json": as_json}
