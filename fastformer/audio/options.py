"""The options of a transcription, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from fastformer.audio.voice import VadOptions
from fastformer.settings import Amount, Convert, Count, Positive, Range, as_ids, check_settings, check_value, suggestion

Task: TypeAlias = Literal["transcribe", "translate"]
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"


def _temperatures(name: str, value: Any) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in values or (None,):
        check_value(name, one, Amount)
    return tuple(map(float, values))


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Returns ids, of which -1 stands for the usual ones."""
    if value is None:
        return None
    ids = as_ids(name, value)
    if any(token < -1 for token in ids):
        raise ValueError(f"expected {name} to be ids, or -1 for the usual ones, got {value!r:.80}")
    return ids


def _prompt(name: str, value: Any) -> Any:
    """Returns a text, or ids."""
    return value if isinstance(value, str) else _ids(name, value)


def _vad(name: str, value: Any) -> VadOptions | dict[str, Any] | None:
    if value is None or isinstance(value, VadOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {name} to be VadOptions or a dict of them, got {value!r:.80}")
    _check_names(name, value, VadOptions)
    return dict(value)


def _check_names(name: str, values: Mapping[str, Any], kind: Any) -> None:
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"expected {name} in {known}, got {key!r}{suggestion(key, known)}")


def _clips(name: str, value: Any) -> tuple[Any, ...]:
    """Returns times in order: start, end, start, ... or the pairs of a batch, as dicts with start and end."""
    if value is None:
        return (0.0,)
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    try:
        items: list[Any] = [value] if isinstance(value, int | float) else list(value)
        if items and all(isinstance(item, Mapping) for item in items):
            items = [item[key] for item in items for key in ("start", "end")]
        times = tuple(map(float, items))
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"expected {name} to be seconds: start,end,start,end,..., got {value!r:.80}") from error
    if not all(0 <= time < 1e9 for time in times) or list(times) != sorted(times):
        raise ValueError(f"expected {name} to be seconds in ascending order, got {value!r:.80}")
    return times


@dataclass(frozen=True)
class TranscriptionOptions:
    """How a recording is transcribed; names and defaults are those of faster-whisper.

    Attributes:
        beam_size: the beams of the search; 1 is greedy
        best_of: the samples of a window at a temperature above 0, of which the likeliest counts
        patience: the search ends when beam_size * patience texts have ended
        length_penalty: the exponent of the length by which a beam's score is divided
        repetition_penalty: divides the logits of tokens that the text has already; 1 is none
        no_repeat_ngram_size: n-grams of this size occur once; 0 is no limit
        temperature: the temperature of sampling, or several that are tried one after another until a text is good
        compression_ratio_threshold: a text that compresses better than this repeats itself: the next temperature
        log_prob_threshold: a text whose tokens have a lower mean log-probability is not good: the next temperature
        no_speech_threshold: a window is silent from this probability on, unless its text is good
        condition_on_previous_text: begin each window with the text before it
        prompt_reset_on_temperature: forget that text after a window that needed a higher temperature
        initial_prompt: a text, or ids, before the first window
        prefix: the beginning of the first window's text
        suppress_blank: begin no text with a blank
        suppress_tokens: ids that are never generated; -1 stands for marks of sounds and speakers
        without_timestamps: generate texts without times
        max_initial_timestamp: the latest begin of the first segment of a window, in seconds
        word_timestamps: find the times of words
        prepend_punctuations: marks that belong to the word after them
        append_punctuations: marks that belong to the word before them
        multilingual: detect the language of each window
        vad_filter: transcribe only the parts in which there is speech
        vad_parameters: how speech is told from silence, see `VadOptions`
        max_new_tokens: the most tokens of a window
        chunk_length: the seconds of a window
        clip_timestamps: the parts to transcribe, in seconds: start,end,start,end; a last end may be missing
        hallucination_silence_threshold: with words, skip silence longer than this around a text that is improbable
        hotwords: words that are likely to occur
        language_detection_threshold: the probability that a language needs to count at once
        language_detection_segments: the windows in which a language is searched
    """

    beam_size: Positive = 5
    best_of: Positive = 5
    patience: Annotated[float, Range(above=0)] = 1.0
    length_penalty: float = 1.0
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    no_repeat_ngram_size: Count = 0
    temperature: Annotated[Any, Convert(_temperatures)] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 2.4
    log_prob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    initial_prompt: Annotated[Any, Convert(_prompt)] = None
    prefix: str | None = None
    suppress_blank: bool = True
    suppress_tokens: Annotated[Any, Convert(_ids)] = (-1,)
    without_timestamps: bool = False
    max_initial_timestamp: Amount = 1.0
    word_timestamps: bool = False
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    multilingual: bool = False
    vad_filter: bool = False
    vad_parameters: Annotated[Any, Convert(_vad)] = None
    max_new_tokens: Positive | None = None
    chunk_length: Annotated[int, Range(1, most=30)] | None = None
    clip_timestamps: Annotated[Any, Convert(_clips)] = (0.0,)
    hallucination_silence_threshold: float | None = None
    hotwords: str | None = None
    language_detection_threshold: float | None = 0.5
    language_detection_segments: Positive = 1

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures, by their name in faster-whisper's results."""
        return tuple(self.temperature)

    @property
    def has_clips(self) -> bool:
        """Whether the caller chose the parts to transcribe."""
        return self.clip_timestamps != (0.0,)

    def clips(self, rate: int, end: int) -> list[tuple[int, int]]:
        """Returns the parts to transcribe of a recording.

        Args:
            rate: the units of a second, such as samples.
            end: the end of the recording, in units.
        """
        points = [min(round(time * rate), end) for time in self.clip_timestamps] or [0]
        points += [end] if len(points) % 2 else []
        return list(zip(points[::2], points[1::2], strict=True))

    def vad(self, **defaults: Any) -> VadOptions:
        """Returns the options of voice activity.

        Args:
            defaults: values for those that the caller didn't set.
        """
        given = self.vad_parameters
        return given if isinstance(given, VadOptions) else VadOptions(**{**defaults, **(given or {})})


def options_of(given: Mapping[str, Any]) -> TranscriptionOptions:
    """Returns the options that a caller gave.

    Raises:
        ValueError: a name is no option, or a value is out of its bounds.
    """
    _check_names("options", given, TranscriptionOptions)
    return TranscriptionOptions(**given)
