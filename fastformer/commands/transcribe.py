"""`fastformer transcribe`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jsonargparse import ArgumentParser

from fastformer.commands._options import add_fields
from fastformer.console import progress, shown
from fastformer.files import write_atomically
from fastformer.settings import Range

if TYPE_CHECKING:
    from fastformer.audio.results import Segment, TranscriptionInfo

USAGE = "fastformer transcribe FOLDER [AUDIO ...] [--FLAG VALUE ...]"
REST = "audio"
TEXTS = ("initial_prompt", "prefix", "hotwords")
_OPTIONS = (
    "beam_size", "patience", "length_penalty", "repetition_penalty", "no_repeat_ngram_size",
    "condition_on_previous_text", "prefix", "hotwords", "max_new_tokens", "without_timestamps", "word_timestamps",
    "vad_filter", "multilingual",
)  # fmt: skip


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Adds a flag for each of some options of `WhisperModel.transcribe`."""
    from fastformer.audio.options import TranscriptionOptions

    return add_fields(parser, TranscriptionOptions, _OPTIONS)


def transcribe(
    folder: str,
    audio: list[str] | None = None,
    *,
    format: Literal["txt", "srt", "vtt", "json"] = "txt",
    out: str | None = None,
    language: str = "auto",
    task: Literal["transcribe", "translate"] = "transcribe",
    initial_prompt: str | None = None,
    precision: Literal["fp32", "bf16", "int8"] | None = None,
    threads: Annotated[int, Range(0)] = 0,
    batch_size: Annotated[int, Range(1)] | None = None,
    **options: Any,
) -> None:
    """Writes down speech, or translates it into English, as text or subtitles.

    Several files are decoded together, and each gets the text that it has alone. A file's text goes to standard output
    as it is decoded.

    Args:
        folder: the folder of a Whisper that CTranslate2 or transformers saved
        audio: files of audio, WAV of 16 kHz or with the extra "audio" any; - or none is standard input
        format: lines of text, subtitles of .srt or .vtt, or JSON with all facts, an object for each file
        out: the folder to write a file in for each audio, of the same name; needed for subtitles of several files
        language: the code of the language, such as en; auto detects it
        task: transcribe, or translate into English
        initial_prompt: a text before the first window, in whose style the text continues
        precision: the precision of the weights; by default they stay as they were saved
        threads: the number of threads; 0 uses all cores
        batch_size: cut a file at pauses into windows that are decoded together, so many at a time; by default only
            windows of different files are
        options: options of the transcription
    """
    from fastformer.audio import WhisperModel

    paths = audio or ["-"]
    names = [Path(path).with_suffix(f".{format}").name if path != "-" else f"audio.{format}" for path in paths]
    _check_names(names, format, out)
    model = WhisperModel(folder, compute_type=precision or "default", cpu_threads=threads)
    options |= {"language": None if language == "auto" else language, "task": task, "initial_prompt": initial_prompt}
    are_together = len(paths) > 1 and batch_size is None
    with progress(is_shown=are_together, unit="s", unit_scale=True) as advance:
        results: Iterator[tuple[Iterable[Segment], TranscriptionInfo]]
        if are_together:
            results = model.transcribe_all(map(_source, paths), on_progress=advance, **options)
        else:
            options |= {"batch_size": batch_size, "log_progress": True}
            results = (model.transcribe(_source(path), **options) for path in paths)
        for (segments, info), name in zip(results, names, strict=True):
            _write(segments, info, format, out and Path(out, name))


def _check_names(names: Sequence[str], format: str, out: str | None) -> None:
    if out is None and len(names) > 1 and format in ("srt", "vtt"):
        raise ValueError(f"expected --out FOLDER for the subtitles of {len(names)} files, which are a file each")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if out is not None and repeated:
        raise ValueError(f"expected files of different names, got several that become {repeated[0]}")


def _source(path: str) -> Any:
    return sys.stdin.buffer.read() if path == "-" else path


def _write(segments: Iterable[Segment], info: TranscriptionInfo, format: str, path: Path | str | None) -> None:
    """Writes a transcription to a file, or to standard output as it comes."""
    from fastformer.audio.results import FORMATS

    pieces = FORMATS[format](segments, info)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), "".join(pieces).encode())
        return
    for piece in pieces:
        sys.stdout.write(shown(piece, sys.stdout))
        sys.stdout.flush()
