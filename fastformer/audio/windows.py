"""Decodes windows of audio. A window is a generator: it yields what it needs of the model, and receives the answer.

So the windows of many recordings can ask the model together, and each is written as if it ran alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fastformer.audio.features import FRAMES_PER_SECOND, Array
from fastformer.audio.options import TranscriptionOptions
from fastformer.audio.results import Word
from fastformer.audio.tokens import SECONDS_PER_TIMESTAMP, Tokens
from fastformer.audio.words import TimedWord, timed_words


class Ask(NamedTuple):
    """What a window asks of the model: a call of a method, which windows share that ask for the same arguments.

    Attributes:
        method: the name of a method of `SpeechModel`.
        states: its first argument for this window: features (1, n_mels, frames), or states (1, frames, d_model).
        values: further arguments for this window, of which the method takes a list with one for each window.
        arguments: the other arguments, by name.
    """

    method: str
    states: Array
    values: Mapping[str, Any] = MappingProxyType({})
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass
class Draft:
    """A segment before it has an id; the fields are those of `Segment`."""

    start: float
    end: float
    tokens: list[int]
    words: list[Word] | None = None


class Text(NamedTuple):
    """The text of a window, and how likely it is."""

    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    compression_ratio: float


class Window(NamedTuple):
    """A window that was decoded.

    Attributes:
        text: its text.
        drafts: its segments; None: it is silent.
        seek: the frames, from its begin, after which the next window begins.
        ends_with_time: whether its text ends with one time, after which there is no speech.
        words: the words of its segments, if they were asked for.
    """

    text: Text
    drafts: list[Draft] | None
    seek: int
    ends_with_time: bool
    words: list[TimedWord]


@dataclass(frozen=True)
class Decoder:
    """Decodes windows of one recording.

    Attributes:
        tokens: the model's tokens.
        options: the options of the recording.
        suppressed: the ids that are never generated.
        task: "transcribe" or "translate".
        max_length: the most tokens of a prompt and its text.
        is_batch: whether the windows are those of `BatchedInferencePipeline`: each is decoded once, at the first
            temperature, and none is taken for silent.
    """

    tokens: Tokens
    options: TranscriptionOptions
    suppressed: tuple[int, ...]
    task: str
    max_length: int
    is_batch: bool = False

    def decode(
        self,
        features: Array,
        language: str,
        previous: Sequence[int],
        *,
        offset: float,
        seconds: float,
        num_frames: int,
        states: Any = None,
    ) -> Generator[Ask, Any, Window]:
        """Decodes a window.

        Args:
            features: its features.
            language: the code of its language, unless that is detected for each window.
            previous: the ids of the text before it.
            offset: its begin, in seconds, which seeds sampling. The text of the window at 0 begins with the prefix.
            seconds, num_frames: its length.
            states: its states, if they are known already.
        """
        options, tokens = self.options, self.tokens
        if states is None:
            states = yield Ask("encode", features[None])
        if options.multilingual:
            language = (yield Ask("detect_language", states))[0][0][2:-2]
        prompt = self._prompt(language, previous, options.prefix if offset == 0 and not self.is_batch else None)
        text = yield from self._text(states, prompt, round(offset * FRAMES_PER_SECOND))
        if not self.is_batch and _is_silent(text, options):
            return Window(text, None, num_frames, False, [])
        drafts, seek, ends_with_time = split(tokens, text.tokens, offset, seconds, num_frames)
        words: list[TimedWord] = []
        spoken = [token for draft in drafts for token in draft.tokens if token < tokens.text_end]
        if options.word_timestamps and spoken:
            start = (("start_sequence", tuple(tokens.sequence(language, self.task))),)
            aligned = yield Ask("align", states, {"text_tokens": spoken, "num_frames": num_frames}, start)
            words = timed_words(tokens, spoken, language, aligned)
        return Window(text, drafts, seek, ends_with_time, words)

    def _prompt(self, language: str, previous: Sequence[int], prefix: str | None) -> list[int]:
        tokens, options, half = self.tokens, self.options, self.max_length // 2 - 1
        hotwords = tokens.encode(" " + options.hotwords.strip())[:half] if options.hotwords and not prefix else []
        prompt = [tokens.previous, *hotwords, *previous[-half:]] if hotwords or previous else []
        prompt += tokens.sequence(language, self.task)
        if options.without_timestamps:
            prompt.append(tokens.no_timestamps)
        elif prefix:
            prompt.append(tokens.first_timestamp)
        return prompt + (tokens.encode(" " + prefix.strip())[:half] if prefix else [])

    def _text(self, states: Any, prompt: list[int], seed: int) -> Generator[Ask, Any, Text]:
        """Generates a text: the first that is good of those at rising temperatures, or else the likeliest."""
        options = self.options
        arguments = self._arguments(prompt)
        texts = []
        for temperature in options.temperatures[: 1 if self.is_batch else None]:
            search: dict[str, Any] = {"beam_size": options.beam_size, "patience": options.patience}
            if temperature > 0 and not self.is_batch:
                search = {"beam_size": 1, "num_hypotheses": options.best_of}
                search |= {"sampling_topk": 0, "sampling_temperature": temperature}
            result = yield Ask("generate", states, {"prompts": prompt, "seed": seed}, (*(arguments | search).items(),))
            ids = list(result.sequences_ids[0])
            log_prob = result.scores[0] * len(ids) ** options.length_penalty / (len(ids) + 1)
            ratio = compression_ratio(self.tokens.decode(ids).strip())
            texts.append(Text(ids, log_prob, result.no_speech_prob, temperature, ratio))
            if self.is_batch or _is_good(texts[-1], options):
                return texts[-1]
        most = options.compression_ratio_threshold
        plain = [text for text in texts if most is not None and text.compression_ratio <= most]
        best = max(plain or texts, key=lambda text: text.avg_logprob)
        return best._replace(temperature=texts[-1].temperature)

    def _arguments(self, prompt: list[int]) -> dict[str, Any]:
        """Returns the arguments of `SpeechModel.generate` that a window has at every temperature."""
        options, max_length = self.options, self.max_length
        if options.max_new_tokens is not None:
            max_length = len(prompt) + options.max_new_tokens
        if max_length > self.max_length:
            raise ValueError(
                f"expected a prompt and new tokens of at most {self.max_length} together, got {len(prompt)} and "
                f"max_new_tokens={options.max_new_tokens}"
            )
        names = ("length_penalty", "repetition_penalty", "no_repeat_ngram_size", "suppress_blank")
        arguments = {name: getattr(options, name) for name in names}
        arguments |= {"max_length": max_length, "suppress_tokens": self.suppressed}
        if not self.is_batch:
            arguments["max_initial_timestamp_index"] = round(options.max_initial_timestamp / SECONDS_PER_TIMESTAMP)
        return arguments | {"return_scores": True, "return_no_speech_prob": True}


def _is_good(text: Text, options: TranscriptionOptions) -> bool:
    """Whether a text needs no other temperature."""
    ratio, least, silence = options.compression_ratio_threshold, options.log_prob_threshold, options.no_speech_threshold
    if least is not None and text.avg_logprob < least:
        return silence is not None and text.no_speech_prob > silence
    return ratio is None or text.compression_ratio <= ratio


def _is_silent(text: Text, options: TranscriptionOptions) -> bool:
    silence, least = options.no_speech_threshold, options.log_prob_threshold
    is_likely = least is not None and text.avg_logprob > least
    return silence is not None and text.no_speech_prob > silence and not is_likely


def compression_ratio(text: str) -> float:
    """Returns the length of a text in bytes by its length when compressed."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def split(
    tokens: Tokens, ids: Sequence[int], offset: float, seconds: float, num_frames: int
) -> tuple[list[Draft], int, bool]:
    """Splits a window's text at its times: two times that follow each other are an end and a begin.

    Args:
        tokens: the model's tokens.
        ids: the text's ids.
        offset: the window's begin, in seconds.
        seconds, num_frames: the window's length.

    Returns:
        The segments, the frames after which the next window begins, and whether the text ends with a single time.
    """
    is_time = [*map(tokens.is_timestamp, ids)]
    ends_with_time = is_time[-2:] == [False, True]
    cuts = [place for place in range(1, len(ids)) if is_time[place] and is_time[place - 1]]
    if not cuts:
        times = [token for token in ids if tokens.is_timestamp(token)]
        if times and times[-1] != tokens.first_timestamp:
            seconds = tokens.seconds(times[-1])
        return [Draft(offset, offset + seconds, list(ids))], num_frames, ends_with_time
    if ends_with_time:
        cuts.append(len(ids))
    drafts = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        part = list(ids[begin:end])
        drafts.append(Draft(offset + tokens.seconds(part[0]), offset + tokens.seconds(part[-1]), part))
    if ends_with_time:
        return drafts, num_frames, True
    # The text after the last time isn't complete: the next window begins there.
    last = ids[cuts[-1] - 1] - tokens.first_timestamp
    return drafts, last * round(FRAMES_PER_SECOND * SECONDS_PER_TIMESTAMP), False


class Detected(NamedTuple):
    """The language of a recording.

    Attributes:
        all_languages: all languages with their probabilities, the likeliest first; None: the caller named the language.
        first: the place of the window in which it was found, and its states; None: no window is decoded from them.
    """

    language: str
    probability: float
    all_languages: list[tuple[str, float]] | None
    first: tuple[tuple[int, int], Any] | None


def detection_windows(features: Array, width: int) -> Iterator[tuple[Array, None]]:
    """Yields windows of features for `detect`, the last one followed by zeros."""
    for start in range(0, features.shape[1], width):
        window = features[:, start : start + width]
        yield np.pad(window, ((0, 0), (0, width - window.shape[1]))), None


def detect(
    windows: Iterable[tuple[Array, tuple[int, int] | None]], threshold: float | None
) -> Generator[Ask, Any, Detected]:
    """Detects a language: the first that is likely enough in a window, or else the one that most windows have.

    Args:
        windows: the features of each, and the place of the window that is decoded from the same ones, if any.
        threshold: the probability that is enough; None: any.
    """
    found, first = list[list[tuple[str, float]]](), None
    for features, place in windows:
        states = yield Ask("encode", features[None])
        languages = yield Ask("detect_language", states)
        found.append([(token[2:-2], probability) for token, probability in languages])
        if place is not None:
            first = place, states
        if found[-1][0][1] > (threshold or 0):
            return Detected(*found[-1][0], found[-1], first)
    likeliest = [each[0] for each in found]
    names = [name for name, _ in likeliest]
    best = max(dict.fromkeys(names), key=names.count)
    return Detected(best, max(share for name, share in likeliest if name == best), found[-1], first)
