"""The order in which the windows of a recording are decoded, and the segments that they give."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastformer.audio.features import FRAMES_PER_SECOND, HOP, RATE, Array, Features
from fastformer.audio.options import TranscriptionOptions
from fastformer.audio.reading import Recording, Spliced
from fastformer.audio.results import Segment, TranscriptionInfo, Word
from fastformer.audio.tokens import Tokens
from fastformer.audio.voice import Part, VadOptions, speech_parts
from fastformer.audio.windows import Ask, Decoder, Detected, Draft, Window, compression_ratio, detect, detection_windows
from fastformer.audio.words import WordTimes, is_improbable
from fastformer.requests import BaseRequest

_MIN_PAUSE_MS = 160  # at which the parts of a batch may be cut
_AT_BORDER = 2.0  # seconds from a window's border in which a text is improbable as it is beside silence


@dataclass(eq=False)
class Job:
    """A window's generator, and what it asks for.

    Attributes:
        work: the generator.
        put: takes its result; jobs end in the order in which they began.
        ask: what it asks for; None: it has ended.
        result: its result.
        waited: the steps that it has waited for an answer.
    """

    work: Generator[Ask, Any, Any]
    put: Callable[[Any], list[Segment]]
    ask: Ask | None = None
    result: Any = None
    waited: int = 0

    def advance(self, answer: Any = None) -> None:
        """Gives the generator the answer that it waits for; the first time there is none."""
        try:
            self.ask, self.waited = self.work.send(answer), 0
        except StopIteration as end:
            self.ask, self.result = None, end.value


class SpeechRequest(BaseRequest):
    """A recording, and its segments as they come. They don't depend on other requests.

    Args:
        recording: the audio.
        tokens: the model's tokens.
        config: the model's `SpeechConfig`.
        options: the options.
        language: the language's code; None: it is detected.
        task: "transcribe" or "translate".

    Attributes:
        info: the facts about the recording; None: its language isn't known yet.
        jobs: the windows that are decoded now, in their order.
        progress: seconds of the recording that are done.
        segments: the segments that haven't been taken yet; if there is a listener, it receives them instead.
    """

    name = "the audio"
    is_batch = False

    def __init__(
        self,
        recording: Recording,
        tokens: Tokens,
        config: Any,
        options: TranscriptionOptions,
        language: str | None,
        task: str,
    ) -> None:
        super().__init__(None)
        tokens.check(language, task)
        self.recording, self.tokens, self.config, self.options = recording, tokens, config, options
        self.num_tokens = round(recording.duration)  # its seconds, as its weight in the queue
        self.width = min((options.chunk_length or 30) * FRAMES_PER_SECOND, config.max_frames)
        suppressed = tokens.suppressed(options.suppress_tokens)
        self.decoder = Decoder(tokens, options, suppressed, task, config.max_length, self.is_batch)
        self.words = WordTimes(options.prepend_punctuations, options.append_punctuations)
        self.info: TranscriptionInfo | None = None
        self.jobs: deque[Job] = deque()
        self.progress = 0.0
        self.segments: list[Segment] = []
        self._tell: Callable[[Any], object] = self.segments.append
        self._num_segments = self._num_new_tokens = 0
        self._first: tuple[tuple[int, int], Any] | None = None  # a window whose states are known, and they
        self._language = language if tokens.is_multilingual else "en"
        self._vad: VadOptions | None = None
        self._speech: Spliced | None = None  # None: all of the recording

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether no further window begins."""

    @abstractmethod
    def next_job(self) -> Job:
        """Returns the next window, which doesn't depend on those that are decoded now."""

    @property
    def num_ahead(self) -> int:
        """The most windows that may be decoded at once."""
        return 1 << 30

    @abstractmethod
    def _detection_windows(self) -> Iterator[tuple[Array, tuple[int, int] | None]]:
        """Yields the features in which the language is searched, and the window that has the same ones."""

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens in the segments so far."""
        return self._num_new_tokens

    def listen(self, on_token: Callable[[Any], object]) -> None:
        """Sets the listener, which is called with each segment."""
        self._tell = on_token

    def take(self) -> list[Segment]:
        """Removes and returns the segments that have come."""
        segments = self.segments.copy()
        self.segments.clear()
        return segments

    def facts(self) -> TranscriptionInfo:
        """Returns the facts about the recording, or raises the error that ended the request."""
        if self.error is not None:
            raise self.error
        assert self.info is not None
        return self.info

    def finish(self) -> None:
        """Ends the request with the segments so far."""
        self.is_done = True

    def fill(self, most: int) -> None:
        """Begins windows, so that up to `most` are decoded at once."""
        if self.info is None:
            if self._language is not None:
                self._know(Detected(self._language, 1, None, None))
            elif not self.jobs:
                windows = self._detection_windows()
                self._begin(Job(detect(windows, self.options.language_detection_threshold), self._know))
        while self.info is not None and not self.is_over and len(self.jobs) < min(most, self.num_ahead):
            self._begin(self.next_job())

    def collect(self) -> None:
        """Passes on the segments of the windows that are done; after the last one, the request is done."""
        while self.jobs and self.jobs[0].ask is None:
            job = self.jobs.popleft()
            for segment in job.put(job.result):
                self._num_new_tokens += len(segment.tokens)
                self._tell(segment)
        if self.info is not None and not self.jobs and self.is_over:
            self.finish()

    def _begin(self, job: Job) -> None:
        job.advance()
        self.jobs.append(job)

    def _know(self, detected: Detected) -> list[Segment]:
        self._language, self._first = detected.language, detected.first
        spoken = self.recording.duration if self._speech is None else len(self._speech) / RATE
        self.info = TranscriptionInfo(
            detected.language, detected.probability, self.recording.duration, spoken, detected.all_languages,
            self.options, self._vad,
        )  # fmt: skip
        return []

    def _segment(self, draft: Draft, window: Window, seek: int) -> Segment:
        self._num_segments += 1
        text = window.text
        segment = Segment(
            self._num_segments, seek, draft.start, draft.end, self.tokens.decode(draft.tokens), draft.tokens,
            text.avg_logprob, text.compression_ratio, text.no_speech_prob, draft.words, text.temperature,
        )  # fmt: skip
        if self._speech is not None and not self.options.has_clips:
            self._speech.restore(segment)
        return segment


class Windows(SpeechRequest):
    """Windows one after another: each begins where the text of the one before ends, and reads that text.

    Without times and without the text before, a window is likely to begin 30 s after the one before. Then several are
    decoded at once, and those whose begin turns out to be another are decoded again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options, config = self.options, self.config
        if options.vad_filter and not options.has_clips:
            self._vad = options.vad()
            self._speech = Spliced(self.recording, speech_parts(self.recording, self._vad))
        samples = self.recording if self._speech is None else self._speech
        self.features = Features(samples, config.n_mels, config.max_frames)
        self.num_frames = self.features.num_frames
        self._clips = options.clips(FRAMES_PER_SECOND, self.num_frames)
        self._next = self._place(0, self._clips[0][0])
        prompt = options.initial_prompt
        self._previous = self.tokens.encode(" " + prompt.strip()) if isinstance(prompt, str) else list(prompt or ())

    @property
    def is_over(self) -> bool:
        return self._next is None

    @property
    def num_ahead(self) -> int:
        options = self.options
        reads_text = options.condition_on_previous_text or self._previous
        return 1 if reads_text or options.word_timestamps or not options.without_timestamps else 1 << 30

    def _place(self, clip: int, seek: int) -> tuple[int, int, int] | None:
        """Returns the next window: its clip, its first frame and its length; None at the end."""
        for number in range(clip, len(self._clips)):
            start, stop = self._clips[number]
            seek = max(seek, start) if number == clip else start
            if seek < stop:
                return number, seek, min(self.width, stop - seek)
        return None

    def _detection_windows(self) -> Iterator[tuple[Array, tuple[int, int] | None]]:
        start = 0 if self._next is None else self._next[1]
        for number in range(self.options.language_detection_segments):
            seek = start + number * self.width
            if number and seek >= self.features.all_frames:
                return
            yield self.features.window(seek, self.width), None if number else (seek, self.width)

    def next_job(self) -> Job:
        assert self._next is not None and self._language is not None
        clip, seek, size = self._next
        states = self._first[1] if self._first is not None and self._first[0] == (seek, size) else None
        self._first = None
        work = self.decoder.decode(
            self.features.window(seek, size), self._language, self._previous, offset=seek / FRAMES_PER_SECOND,
            seconds=size / FRAMES_PER_SECOND, num_frames=size, states=states,
        )  # fmt: skip
        is_alone = self.num_ahead == 1
        self._next = None if is_alone else self._place(clip, seek + size)
        return Job(work, lambda window: self._put(window, clip, seek, size, is_alone))

    def _put(self, window: Window, clip: int, seek: int, size: int, is_alone: bool) -> list[Segment]:
        following = seek + window.seek
        segments: list[Segment] = []
        drafts = window.drafts
        if drafts is not None and self.options.word_timestamps:
            drafts, following = self._with_words(window, drafts, seek, size)
        if drafts is not None:
            segments = self._segments(window, drafts, seek)
        following = following if following > seek else seek + size  # never the same window again
        self.progress = min(following, self.num_frames) / FRAMES_PER_SECOND
        if is_alone or following != seek + size:
            self.jobs.clear()
            self._next = self._place(clip, following)
        return segments

    def _segments(self, window: Window, drafts: Sequence[Draft], seek: int) -> list[Segment]:
        segments, ids = list[Segment](), list[int]()
        for draft in drafts:
            if draft.start != draft.end and self.tokens.decode(draft.tokens).strip():
                ids += draft.tokens
                segments.append(self._segment(draft, window, seek))
        options = self.options
        is_reset = window.text.temperature > options.prompt_reset_on_temperature
        self._previous = [] if is_reset or not options.condition_on_previous_text else self._previous + ids
        return segments

    def _with_words(self, window: Window, drafts: list[Draft], seek: int, size: int) -> tuple[list[Draft] | None, int]:
        """Gives a window's segments their words. Returns the segments that stay, and where the next window begins."""
        offset = seek / FRAMES_PER_SECOND
        self.words.put(drafts, window.words, offset, self.tokens.text_end)
        following, last = seek + window.seek, _last_end(drafts)
        if not window.ends_with_time and last is not None and last > offset:
            following = round(last * FRAMES_PER_SECOND)
        threshold = self.options.hallucination_silence_threshold
        if threshold is not None:
            spoken = next((draft for draft in drafts if draft.words), None)
            if spoken is not None and is_improbable(spoken) and spoken.start - offset > threshold:
                return None, seek + round((spoken.start - offset) * FRAMES_PER_SECOND)  # again, without the silence
            cut = self._improbable(drafts, offset, size / FRAMES_PER_SECOND, threshold)
            if cut is not None:
                following = round(max(offset + 1, drafts[cut].start) * FRAMES_PER_SECOND)
                if self.num_frames / FRAMES_PER_SECOND - drafts[cut].end < threshold:
                    following = self.num_frames
                drafts = drafts[:cut]
        if (last := _last_end(drafts)) is not None:
            self.words.last_end = last
        return drafts, following

    def _improbable(self, drafts: list[Draft], offset: float, seconds: float, threshold: float) -> int | None:
        """Returns the place of the first improbable segment between silence, borders and other improbable ones."""
        last_end, window_end = self.words.last_end, offset + self.width / FRAMES_PER_SECOND
        for place, draft in enumerate(drafts):
            if not draft.words:
                continue
            if is_improbable(draft):
                following = next((later for later in drafts[place + 1 :] if later.words), None)
                next_start = following.words[0].start if following and following.words else offset + seconds
                is_after_silence = (
                    draft.start - last_end > threshold or draft.start < threshold or draft.start - offset < _AT_BORDER
                )
                is_before_silence = (
                    next_start - draft.end > threshold
                    or is_improbable(following)
                    or window_end - draft.end < _AT_BORDER
                )
                if is_after_silence and is_before_silence:
                    return place
            last_end = draft.end
        return None


def _last_end(drafts: Sequence[Draft]) -> float | None:
    """Returns the end of the last word; without words, that of the last segment."""
    words: list[Word] = [word for draft in drafts for word in draft.words or ()]
    return words[-1].end if words else drafts[-1].end if drafts else None


class Chunks(SpeechRequest):
    """Windows between pauses, none of which depends on another: those of `BatchedInferencePipeline`."""

    is_batch = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options, recording = self.options, self.recording
        most = self.width * HOP
        if options.has_clips:
            clips = options.clips(RATE, len(recording))
            parts = [Part(at, min(at + most, stop)) for start, stop in clips for at in range(start, stop, most)]
        elif options.vad_filter or len(recording) >= most:
            given = options.vad() if options.vad_parameters else options.vad(min_silence_duration_ms=_MIN_PAUSE_MS)
            self._vad = VadOptions(**{**vars(given), "max_speech_duration_s": most / RATE})
            parts = speech_parts(recording, self._vad)
        else:
            parts = [Part(0, len(recording))]
        self._speech = Spliced(recording, parts)
        # What is decoded as one window, with its begin in the recording or in all of its speech.
        if options.has_clips:
            chunks = [(part.start, Spliced(recording, [part])) for part in parts]
        else:
            chunks = [(start, Spliced(recording, joined)) for start, joined in _joined(parts, most)]
        self._left = deque(chunks)

    @property
    def is_over(self) -> bool:
        return not self._left

    def _features(self, chunk: Spliced) -> Features:
        return Features(chunk, self.config.n_mels, self.config.max_frames)

    def _detection_windows(self) -> Iterator[tuple[Array, tuple[int, int] | None]]:
        width = self.config.max_frames
        pieces, left = [], self.options.language_detection_segments * width
        for _, chunk in self._left:
            if left <= 0:
                break
            features = self._features(chunk)
            size = min(left, features.num_frames)
            pieces.append(features.window(0, size)[:, :size])
            left -= size
        joined = np.concatenate([*pieces, np.full((self.config.n_mels, 1), -1.5, np.float32)], 1)
        return detection_windows(joined, width)

    def next_job(self) -> Job:
        assert self._language is not None
        start, chunk = self._left.popleft()
        features, seconds = self._features(chunk), len(chunk) / RATE
        prompt = self.options.initial_prompt
        previous = self.tokens.encode(prompt) if isinstance(prompt, str) else list(prompt or ())
        work = self.decoder.decode(
            features.window(0, features.num_frames), self._language, previous, offset=start / RATE,
            seconds=seconds, num_frames=math.ceil(seconds) * FRAMES_PER_SECOND,
        )  # fmt: skip
        return Job(work, lambda window: self._put(window, int(start / RATE * FRAMES_PER_SECOND), chunk.stop))

    def _put(self, window: Window, seek: int, stop: int) -> list[Segment]:
        drafts = window.drafts or []
        if self.options.word_timestamps:
            self.words.last_end = self.words.put(drafts, window.words, seek / FRAMES_PER_SECOND, self.tokens.text_end)
        segments = []
        for draft in drafts:
            draft.start, draft.end = round(draft.start, 3), round(draft.end, 3)
            segment = self._segment(draft, window, seek)
            segment.compression_ratio = compression_ratio(segment.text)
            segments.append(segment)
        self.progress = stop / RATE
        return segments


def _joined(parts: Sequence[Part], most: int) -> list[tuple[int, list[Part]]]:
    """Joins parts to groups of at most `most` samples, each with the number of those before it."""
    groups: list[tuple[int, list[Part]]] = []
    end = 0
    for part in parts:
        start, end = end, end + part.stop - part.start
        if groups and end - groups[-1][0] <= most:
            groups[-1][1].append(part)
        else:
            groups.append((start, [part]))
    return groups
