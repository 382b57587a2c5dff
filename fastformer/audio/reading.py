"""Reads audio from files, bytes and arrays: one channel of 16 kHz, at once or a part at a time.

WAV of one channel at 16 kHz in 16 bits is read as it is, and all other formats of FFmpeg by `av` (an extra).
"""

from __future__ import annotations

import bisect
import importlib.util
import io
import itertools
import os
import sys
import tempfile
import wave
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from fastformer.audio.features import RATE, Array
from fastformer.audio.results import Segment

Source: TypeAlias = "str | os.PathLike[str] | BinaryIO | bytes | np.ndarray[Any, Any]"

_IN_MEMORY = 64 << 20  # bytes; a longer recording is held in a temporary file
_BLOCK = 1 << 16  # samples that are read together


class Recording:
    """Audio of one channel at 16 kHz, in an array, or in 16 bits in a file that is deleted with the object.

    Args:
        length: the number of samples.
        samples: fp32.
        file: 16-bit samples, in place of `samples`.
    """

    def __init__(self, length: int, samples: Array | None = None, file: Any = None) -> None:
        self._length, self._samples, self._file = length, samples, file

    @staticmethod
    def of(samples: Any) -> Recording:
        """Returns the recording of an array or a tensor of samples: floats from -1 to 1, or 16-bit integers.

        Raises:
            ValueError: the array has another shape or type, or holds NaN or infinite numbers.
        """
        array = np.asarray(samples)
        if array.ndim != 1:
            raise ValueError(
                f"expected samples of one channel at {RATE:,} Hz, in an array of one dimension, got the shape "
                f"{array.shape}: average the channels first"
            )
        if array.dtype == np.int16:
            array = array.astype(np.float32) / 32768
        elif array.dtype.kind != "f":
            raise ValueError(f"expected samples as floats from -1 to 1, or as int16, got {array.dtype}")
        array = np.ascontiguousarray(array, np.float32)
        if not np.isfinite(array.sum(dtype=np.float64)):
            raise ValueError("expected finite samples, got NaN or infinite ones")
        return Recording(len(array), array)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self._length

    @property
    def duration(self) -> float:
        """The length in seconds."""
        return self._length / RATE

    def read(self, start: int, stop: int) -> Array:
        """Returns the samples from start to stop, in fp32."""
        if self._samples is not None:
            return self._samples[start:stop]
        self._file.seek(2 * start)
        samples = np.frombuffer(self._file.read(2 * max(0, min(stop, self._length) - start)), np.int16)
        return samples.astype(np.float32) * np.float32(2**-15)


class Spliced:
    """Parts of a recording, one behind the other, and the times in the recording of times in them.

    Args:
        recording: the audio.
        parts: the first sample of each part and the one after its last, in ascending order.

    Attributes:
        stop: the sample of the recording after the last part.
    """

    def __init__(self, recording: Recording, parts: Iterable[tuple[int, int]]) -> None:
        self._recording, self._parts = recording, list(parts)
        self.stop = self._parts[-1][1] if self._parts else 0
        self._ends = [*itertools.accumulate(stop - start for start, stop in self._parts)]  # in the spliced audio

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Array:
        """Returns the samples from start to stop, in fp32."""
        pieces = [np.zeros(0, np.float32)]
        for (first, last), end in zip(self._parts, self._ends, strict=True):
            before = last - end  # samples of the recording that are left out before this part
            if max(first, start + before) < min(last, stop + before):
                pieces.append(self._recording.read(max(first, start + before), min(last, stop + before)))
        return np.concatenate(pieces)

    def restore(self, segment: Segment) -> None:
        """Turns the times of a segment and of its words into those of the recording."""
        for word in segment.words or ():
            part = self.part_of((word.start + word.end) / 2)  # both times in one part
            word.start, word.end = self.original(word.start, part), self.original(word.end, part)
        if segment.words:
            segment.start, segment.end = segment.words[0].start, segment.words[-1].end
        else:
            segment.start = self.original(segment.start, self.part_of(segment.start))
            segment.end = self.original(segment.end, self.part_of(segment.end, is_end=True))

    def part_of(self, seconds: float, is_end: bool = False) -> int:
        """Returns the index of the part that holds a time; a border belongs to the part before it if it is an end."""
        find = bisect.bisect_left if is_end else bisect.bisect
        return min(find(self._ends, int(seconds * RATE)), len(self._ends) - 1)

    def original(self, seconds: float, part: int) -> float:
        """Returns the time in the recording of a time in a part."""
        return round((self._parts[part][1] - self._ends[part]) / RATE + seconds, 2)


def open_audio(source: Source | Recording, *, max_seconds: float | None = None) -> Recording:
    """Reads audio: a path, a file object, bytes of a file, or an array of samples at 16 kHz.

    Args:
        source: the audio.
        max_seconds: the longest audio that is read; None: any.

    Raises:
        ValueError: the file holds no audio that can be read here, or more than max_seconds.
        OSError: the file can't be opened.
    """
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            return open_audio(file, max_seconds=max_seconds)
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(source)
    if not isinstance(source, Recording):
        source = _decoded(source, max_seconds) if hasattr(source, "read") else Recording.of(source)
    _check_length(len(source), max_seconds)
    return source


def decode_audio(input_file: Source, sampling_rate: int = RATE, split_stereo: bool = False) -> Array:
    """Returns the samples of audio at 16 kHz, in fp32, as faster-whisper's function of this name does.

    Raises:
        ValueError: see `open_audio`; or another rate than 16 kHz, or separate channels.
    """
    if sampling_rate != RATE or split_stereo:
        raise ValueError(f"expected one channel at {RATE} Hz, got {sampling_rate} Hz and split_stereo={split_stereo}")
    recording = open_audio(input_file)
    return recording.read(0, len(recording))


def _check_length(num_samples: int, max_seconds: float | None) -> None:
    if max_seconds is not None and num_samples > max_seconds * RATE:
        raise ValueError(f"expected audio of at most {max_seconds:g} seconds, got a longer recording")


def _decoded(file: Any, max_seconds: float | None) -> Recording:
    """Reads a file. One that ends in the middle gives the samples before."""
    name = getattr(file, "name", None)
    name = name if isinstance(name, str | os.PathLike) else "the audio"  # that of a temporary file may be a number
    if not hasattr(file, "seekable") or not file.seekable():
        file = io.BytesIO(file.read())
    file.seek(0)
    if not file.read(1):
        raise ValueError(f"{name} is empty: expected audio")
    file.seek(0)
    blocks = _plain_wav(file)
    if blocks is None:
        file.seek(0)
        if importlib.util.find_spec("av") is None:
            raise ValueError(
                f"expected WAV of one channel at {RATE:,} Hz in 16 bits, got another format in {name}: for all others "
                "pip install 'fastformer[audio]'"
            )
        blocks = _with_av(file, name)
    return _stored(blocks, max_seconds)


def _stored(blocks: Iterable[bytes], max_seconds: float | None) -> Recording:
    """Stores the bytes of 16-bit samples at `RATE`, those of a long recording on disk."""
    file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
    size = 0
    try:
        for block in blocks:
            file.write(block)
            size += len(block)
            _check_length(size // 2, max_seconds)
    except BaseException:
        file.close()
        raise
    return Recording(size // 2, file=file)


def _plain_wav(file: Any) -> Iterator[bytes] | None:
    """Returns the samples of a WAV file that has them as they are stored here; None: it has another form."""
    try:
        audio = wave.open(file, "rb")  # noqa: SIM115  # the file's own mode may be one that `wave` refuses, as "w+b"
    except (wave.Error, EOFError, RuntimeError):  # the last: of a chunk whose size is damaged
        return None
    if audio.getparams()[:3] != (1, 2, RATE):
        return None
    return _parts(file, 2 * audio.getnframes() or sys.maxsize)  # a size of 0 was never written


def _parts(file: Any, size: int) -> Iterator[bytes]:
    """Yields the next bytes of a file. (`readframes` stops at the end of RIFF, whose size is wrong in some files.)"""
    while size and (part := file.read(min(size, 2 * _BLOCK))):
        size -= len(part)
        yield part


def _with_av(file: Any, name: Any) -> Iterator[bytes]:
    import av

    try:
        with av.open(file, mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"expected audio in {name}, got a file without any")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            frames = (frame for packet in container.demux(audio=0) for frame in _frames(packet, av.error.FFmpegError))
            for frame in itertools.chain(frames, [None]):
                for part in resampler.resample(frame):
                    yield part.to_ndarray().tobytes()
    except av.error.FFmpegError as error:
        raise ValueError(f"expected audio in {name}, which FFmpeg can't read: {error.strerror}") from error


def _frames(packet: Any, errors: type[Exception]) -> list[Any]:
    """Returns the frames of a packet, none of a damaged one."""
    try:
        return list(packet.decode())
    except errors:
        return []
