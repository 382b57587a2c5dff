"""`WhisperModel` and `BatchedInferencePipeline`, with the names, arguments and results of faster-whisper."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastformer.audio.features import Array
from fastformer.audio.options import TranscriptionOptions, options_of
from fastformer.audio.plans import Chunks, SpeechRequest, Windows
from fastformer.audio.reading import Source, open_audio
from fastformer.audio.results import Segment, TranscriptionInfo
from fastformer.audio.scheduler import MAX_WINDOWS, SpeechScheduler, answered
from fastformer.audio.tokens import Tokens
from fastformer.audio.voice import VadOptions
from fastformer.audio.windows import detect, detection_windows
from fastformer.console import progress
from fastformer.files import NOT_DOWNLOADED, tokenizers_library
from fastformer.settings import Count, Positive, check_value, shows_fields, suggestion

logger = logging.getLogger("fastformer")

_PRECISIONS = {
    "default": "auto", "auto": "auto", "fp32": "fp32", "float32": "fp32", "int16": "fp32", "bf16": "bf16",
    "bfloat16": "bf16", "float16": "bf16",
    **dict.fromkeys(["int8", "int8_float32", "int8_float16", "int8_bfloat16"], "int8"),
}  # fmt: skip
_HUB_NAMES = ("Systran--faster-whisper-{}", "Systran--faster-{}", "openai--whisper-{}", "{}")


class WhisperModel:
    """A Whisper model that transcribes and translates speech; a caller of faster-whisper changes its import alone.

        model = WhisperModel("whisper-base")
        segments, info = model.transcribe("speech.mp3")
        for segment in segments:
            print(segment.start, segment.end, segment.text)

    Several threads may transcribe with one model.

    Args:
        model_size_or_path: a folder of CTranslate2's or transformers' Whisper; or a name such as "base", if its folder
            is in Hugging Face's cache. Nothing is downloaded.
        device: "cpu" or "auto", which is the same.
        device_index, num_workers: have no effect.
        compute_type: the precision: "int8", "bfloat16", "float32"; "default": that of the folder. Names of
            CTranslate2 that mix two are known too, and fp32 and bf16.
        cpu_threads: the number of threads; 0: that of PyTorch.
        download_root: the cache in which a name is looked up.
        local_files_only, files, revision, use_auth_token: have no effect, except for `files`, which is refused.

    Attributes:
        model: computes states, texts and times.
        hf_tokenizer: the tokenizer.

    Raises:
        ValueError: there is no such folder, it holds no Whisper, or an argument is unknown.
        ImportError: tokenizers is not installed.
    """

    def __init__(
        self,
        model_size_or_path: str | os.PathLike[str],
        device: str = "auto",
        device_index: int | list[int] = 0,
        compute_type: str = "default",
        cpu_threads: int = 0,
        num_workers: int = 1,
        download_root: str | None = None,
        local_files_only: bool = False,
        files: dict[str, Any] | None = None,
        revision: str | None = None,
        use_auth_token: str | bool | None = None,
    ) -> None:
        from fastformer.audio.model import SpeechModel
        from fastformer.checkpoints.speech import load_speech

        if device not in ("auto", "cpu"):
            raise ValueError(f"expected device auto or cpu, on which speech is transcribed, got {device!r}")
        if files is not None:
            raise ValueError("expected a folder, got files in memory")
        if compute_type not in _PRECISIONS:
            hint = suggestion(compute_type, _PRECISIONS)
            raise ValueError(f"expected compute_type in {[*_PRECISIONS]}, got {compute_type!r}{hint}")
        check_value("cpu_threads", cpu_threads, Count)
        folder = _folder(model_size_or_path, download_root)
        file = folder / "tokenizer.json"
        weights = load_speech(folder)  # the numbers are read later
        if not file.is_file():
            raise ValueError(f"expected Whisper's tokenizer in {file}, but there is no such file")
        library = tokenizers_library(str(file))
        self.model: Any = SpeechModel(weights, precision=_PRECISIONS[compute_type], num_threads=cpu_threads or None)
        self.hf_tokenizer = library.Tokenizer.from_file(str(file))
        self.tokens = Tokens(self.hf_tokenizer, self.model.config.is_multilingual)

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows other languages than English, and translates."""
        return self.tokens.is_multilingual

    @property
    def supported_languages(self) -> list[str]:
        """The codes of the model's languages."""
        return list(self.tokens.languages)

    @shows_fields(TranscriptionOptions)
    def transcribe(
        self,
        audio: Source,
        language: str | None = None,
        task: str = "transcribe",
        log_progress: bool = False,
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> tuple[Iterator[Segment], TranscriptionInfo]:
        """Transcribes a recording. Its segments come as they are decoded; to close the iterator ends the work.

        Args:
            audio: a path, a file object, or samples of one channel at 16 kHz.
            language: the code of its language; None: it is detected.
            task: "transcribe", or "translate" into English.
            log_progress: show a progress bar on standard error.
            batch_size: cut the recording at pauses into windows that don't depend on each other, and decode so many
                together, as `BatchedInferencePipeline` does; None: each window begins where the one before ended.
            options: see `TranscriptionOptions`.

        Returns:
            An iterator over segments, and facts about the recording.

        Raises:
            ValueError: the audio can't be read, or an argument is out of its bounds.
        """
        request = self.request(audio, language, task, batch_size=batch_size, **options)
        scheduler = SpeechScheduler(self.model, batch_size or MAX_WINDOWS)
        scheduler.submit([request])
        request.fill(0)
        while request.info is None and not request.is_done:  # until the language is known
            scheduler.step()
        return _segments(scheduler, request, log_progress), request.facts()

    def request(
        self,
        audio: Source,
        language: str | None = None,
        task: str = "transcribe",
        *,
        batch_size: int | None = None,
        max_seconds: float | None = None,
        **options: Any,
    ) -> SpeechRequest:
        """Returns the request for the segments that `transcribe` yields; a `SpeechScheduler` runs it.

        Args:
            audio, language, task, batch_size, options: see `transcribe`.
            max_seconds: the longest audio.
        """
        check_value("batch_size", batch_size, Positive | None)
        settings = options_of(options)
        if not self.is_multilingual:
            if language not in (None, "en"):
                logger.warning("the model knows English alone: transcribing as en, not as %s", language)
            if task == "translate":
                raise ValueError("expected task transcribe for a model of English alone, got 'translate'")
            settings = replace(settings, multilingual=False)
        kind = Windows if batch_size is None else Chunks
        recording = open_audio(audio, max_seconds=max_seconds)
        return kind(recording, self.tokens, self.model.config, settings, language, task)

    def transcribe_all(
        self, audios: Iterable[Source], *, batch_size: int = MAX_WINDOWS, on_progress: Any = None, **options: Any
    ) -> Iterator[tuple[list[Segment], TranscriptionInfo]]:
        """Transcribes recordings together, each with the result that it has alone, and yields them in their order.

        Args:
            audios: the recordings, which are read as there is room for them.
            batch_size: the most windows that are decoded together.
            on_progress: is called with the seconds of audio that are done since the last call.
            options: those of `transcribe`, for all of them.
        """
        scheduler = SpeechScheduler(self.model, batch_size)
        rest, requests = iter(audios), deque[SpeechRequest]()
        while True:
            for audio in itertools.islice(rest, 2 * batch_size - len(requests)):
                requests.append(self.request(audio, **options))
                scheduler.submit([requests[-1]])
            if not requests:
                return
            if requests[0].is_done:
                request = requests.popleft()
                yield request.take(), request.facts()
                continue
            before = sum(request.progress for request in requests)
            scheduler.step()
            if on_progress is not None:
                on_progress(sum(request.progress for request in requests) - before)

    def detect_language(
        self,
        audio: Source | None = None,
        features: Array | None = None,
        vad_filter: bool = False,
        vad_parameters: dict[str, Any] | VadOptions | None = None,
        language_detection_segments: int = 1,
        language_detection_threshold: float | None = 0.5,
    ) -> tuple[str, float, list[tuple[str, float]]]:
        """Detects the language of a recording.

        Args:
            audio: see `transcribe`.
            features: log-mel features (n_mels, frames), in place of audio.
            vad_filter, vad_parameters: leave out what is no speech; see `TranscriptionOptions`.
            language_detection_segments: the windows in which it is searched.
            language_detection_threshold: the probability that counts at once.

        Returns:
            The language's code, its probability, and all codes with theirs, the likeliest first.

        Raises:
            ValueError: neither audio nor features were given; or features, and the model knows English alone.
        """
        if audio is not None:
            _, info = self.transcribe(
                audio, vad_filter=vad_filter, vad_parameters=vad_parameters,
                language_detection_segments=language_detection_segments,
                language_detection_threshold=language_detection_threshold,
            )  # fmt: skip
            return info.language, info.language_probability, info.all_language_probs or []
        if features is None:
            raise ValueError("expected audio or features to detect a language in, got neither")
        width = self.model.config.max_frames
        windows = detection_windows(features[:, : width * language_detection_segments], width)
        found = answered(self.model, detect(windows, language_detection_threshold))
        return found.language, found.probability, found.all_languages or []


def _segments(scheduler: SpeechScheduler, request: SpeechRequest, shows: bool) -> Iterator[Segment]:
    try:
        with progress(is_shown=shows, total=round(request.recording.duration), unit="s") as advance:
            while True:
                yield from request.take()
                if request.is_done:
                    request.facts()
                    return
                before = request.progress
                scheduler.step()
                advance(request.progress - before)
    finally:
        scheduler.clear()


class BatchedInferencePipeline:
    """Transcribes recordings in windows between pauses, many at once.

    Args:
        model: the model.
    """

    def __init__(self, model: WhisperModel) -> None:
        self.model = model

    @shows_fields(TranscriptionOptions)
    def transcribe(
        self,
        audio: Source,
        language: str | None = None,
        task: str = "transcribe",
        log_progress: bool = False,
        *,
        batch_size: int = MAX_WINDOWS,
        **options: Any,
    ) -> tuple[Iterator[Segment], TranscriptionInfo]:
        """Transcribes a recording: `WhisperModel.transcribe` with batch_size, and by default without times within a
        window. Temperatures after the first, thresholds and the text before a window have no effect.

        Args:
            audio, language, task, log_progress, batch_size, options: see `WhisperModel.transcribe`.
        """
        options = {"without_timestamps": True, "vad_filter": True, **options}
        return self.model.transcribe(audio, language, task, log_progress, batch_size=batch_size, **options)


def _folder(name: str | os.PathLike[str], root: str | None) -> Path:
    """Returns a model's folder; one of a name is looked up in Hugging Face's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(root or os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    for pattern in _HUB_NAMES:
        repository = cache / ("models--" + pattern.format(str(name).replace("/", "--")))
        if folders := [path.parent for path in repository.glob("snapshots/*/config.json")]:
            return max(folders, key=lambda path: path.stat().st_mtime)
    raise ValueError(
        f"expected the folder of a Whisper model, got {os.fspath(name)!r}, which is none; {NOT_DOWNLOADED}"
    )
