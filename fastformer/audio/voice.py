"""Voice activity: which parts of a recording are speech, by Silero's model, or by their energy without its package."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from fastformer.audio.features import RATE, Array, Samples
from fastformer.settings import Convert, Count, Range, check_settings

logger = logging.getLogger("fastformer")

_STEP, _CONTEXT = 512, 64  # samples that a probability is about, and those before them that the model reads too
_BLOCK = 2_000  # probabilities that are computed together
_SHORT_PAUSE = 98 * RATE // 1000  # the least pause at which a speech that is too long is split
_SILERO = {"faster_whisper": "assets/silero_vad_v6.onnx", "silero_vad": "data/silero_vad_16k_sequence.onnx"}
_LOUD, _AUDIBLE = 8.0, 1e-5  # times the noise's energy, and the least energy, of speech


def _seconds(name: str, value: Any) -> float:
    """Returns a time above 0, which may be infinite."""
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"expected {name} above 0, got {value!r:.80}")
    return float(value)


@dataclass(frozen=True)
class VadOptions:
    """How speech is told from silence; names and defaults are those of faster-whisper.

    Attributes:
        threshold: the probability from which a moment is speech
        neg_threshold: the probability below which speech ends; None: 0.15 less than threshold
        min_speech_duration_ms: shorter speech is dropped
        max_speech_duration_s: longer speech is split, at its last pause if it has any
        min_silence_duration_ms: the length of a pause that ends a part
        speech_pad_ms: what is kept on both sides of a part
    """

    threshold: Annotated[float, Range(0, most=1)] = 0.5
    neg_threshold: Annotated[float, Range(0, most=1)] | None = None
    min_speech_duration_ms: Count = 0
    max_speech_duration_s: Annotated[float, Convert(_seconds)] = math.inf
    min_silence_duration_ms: Count = 2000
    speech_pad_ms: Count = 400

    def __post_init__(self) -> None:
        check_settings(self)


class Part(NamedTuple):
    """A part of a recording that is speech: its first sample, and the one after its last."""

    start: int
    stop: int


def speech_parts(samples: Samples, options: VadOptions) -> list[Part]:
    """Returns the parts of a recording that are speech, in their order; they don't overlap."""
    parts = _parts(speech_probabilities(samples), len(samples), options)
    pad = RATE * options.speech_pad_ms / 1000
    result = []
    start = max(0, int(parts[0].start - pad)) if parts else 0
    for part, following in zip(parts, parts[1:], strict=False):
        pause = following.start - part.stop
        kept = pause // 2 if pause < 2 * pad else pad  # a short pause is shared by both
        result.append(Part(start, int(part.stop + kept)))
        start = int(following.start - kept)
    return result + [Part(start, min(len(samples), int(part.stop + pad))) for part in parts[-1:]]


def _parts(probabilities: Array, length: int, options: VadOptions) -> list[Part]:
    """Returns the parts that are speech, without padding."""
    low = max(options.threshold - 0.15, 0.01) if options.neg_threshold is None else options.neg_threshold
    least = RATE * options.min_speech_duration_ms / 1000
    pause = RATE * options.min_silence_duration_ms / 1000
    most = RATE * options.max_speech_duration_s - _STEP - 2 * RATE * options.speech_pad_ms / 1000
    parts: list[Part] = []
    start: int | None = None
    # Where the silence began that may end the part; begin and end of the last pause that can split a part too long.
    quiet = split = resume = 0
    for index, probability in enumerate(probabilities.tolist()):
        now = _STEP * index
        if probability >= options.threshold:
            if quiet:
                quiet = 0
                if resume < split:
                    resume = now
            if start is None:
                start = now
                continue
        if start is not None and now - start > most:
            if split:
                parts.append(Part(start, split))
                start = None if resume < split else resume
                split = resume = quiet = 0
            else:
                parts.append(Part(start, now))
                start, split, resume, quiet = None, 0, 0, 0
                continue
        if probability < low and start is not None:
            quiet = quiet or now
            if now - quiet > _SHORT_PAUSE:
                split = quiet
            if now - quiet >= pause:
                if quiet - start > least:
                    parts.append(Part(start, quiet))
                start, split, resume, quiet = None, 0, 0, 0
    if start is not None and length - start > least:
        parts.append(Part(start, length))
    return parts


def speech_probabilities(samples: Samples) -> Array:
    """Returns the probability of speech for each 512 samples."""
    model = _silero() or _energies
    blocks = range(0, len(samples), _BLOCK * _STEP)
    return np.concatenate([np.zeros(0, np.float32), *model(_frames(samples, at) for at in blocks)])


def _frames(samples: Samples, start: int) -> Array:
    """Returns a block of frames, each with the samples before it; the recording is followed by silence."""
    audio = samples.read(max(0, start - _CONTEXT), min(len(samples), start + _BLOCK * _STEP))
    missing = _CONTEXT if start == 0 else 0
    audio = np.pad(audio, (missing, -(len(audio) + missing - _CONTEXT) % _STEP))
    return np.lib.stride_tricks.sliding_window_view(audio, _STEP + _CONTEXT)[::_STEP]


def _energies(blocks: Iterator[Array]) -> Iterator[Array]:
    """Yields 1 for frames that are much louder than the quiet ones of the recording, 0 for the others."""
    energies = np.concatenate([np.square(block[:, _CONTEXT:]).mean(1) for block in blocks] or [np.zeros(0)])
    # Sounds between words are quieter than words: a frame counts with the loudest of its neighbours.
    spread = np.max([np.roll(energies, shift) for shift in range(-3, 4)], 0) if energies.size else energies
    noise = float(np.quantile(energies, 0.1)) if energies.size else 0.0
    yield (spread > max(_AUDIBLE, min(_LOUD * noise, float(energies.max(initial=0)) / _LOUD))).astype(np.float32)


@functools.cache
def _silero() -> Callable[[Iterator[Array]], Iterator[Array]] | None:
    """Returns Silero's model; None if no package has it.

    The copy of faster-whisper, if that is installed, finds the pauses that it finds there; silero-vad's is newer. No
    package is imported: silero-vad sets the process's number of threads to 1.
    """
    if importlib.util.find_spec("onnxruntime"):
        for file in filter(None, itertools.starmap(_data_file, _SILERO.items())):
            return functools.partial(_by_onnx, _onnx_session(file))
    logger.info("silero-vad and onnxruntime are not installed: speech is told from silence by its energy")
    return None


def _data_file(package: str, name: str) -> Path | None:
    """Returns a file of a package that is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations)), name)
    return file if file.is_file() else None


def _onnx_session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _by_onnx(session: Any, blocks: Iterator[Array]) -> Iterator[Array]:
    hidden = cell = np.zeros((1, 1, 128), np.float32)
    for block in blocks:
        inputs = {"input": np.ascontiguousarray(block), "h": hidden, "c": cell}
        values, hidden, cell = session.run(["speech_probs", "hn", "cn"], inputs)
        yield values.reshape(-1)
