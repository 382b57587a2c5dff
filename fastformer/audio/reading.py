"""Reads audio from files, bytes and arrays: one channel of 16 kHz, at once or a part at a time.

With `av` (an extra) all formats of FFmpeg are read, with `soundfile` those of libsndfile, without either WAV.
"""

from __future__ import annotations

import bisect
import importlib.util
import io
import itertools
import math
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from fastformer.audio.features import RATE, Array
from fastformer.audio.results import Segment

Source: TypeAlias = "str | os.PathLike[str] | BinaryIO | bytes | np.ndarray[Any, Any]"

_IN_MEMORY = 64 << 20  # bytes; a longer recording is held in a temporary file
_BLOCK = 1 << 16  # samples, or frames of a file, that are read together
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # the encodings of WAV
_FORMAT_BYTES = 40  # of WAV's longest description of an encoding
_ZEROS, _ROLLOFF = 6, 0.99  # of the resampling filter


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


def decode_audio(
    input_file: Source, sampling_rate: int = RATE, split_stereo: bool = False
) -> Array | tuple[Array, Array]:
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
    name = getattr(file, "name", "the audio")
    if not hasattr(file, "seekable") or not file.seekable():
        file = io.BytesIO(file.read())
    head = _read(file, 12)
    if not head:
        raise ValueError(f"{name} is empty: expected audio")
    wav = _wav_form(file) if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE" else None
    is_plain = wav is not None and wav[:4] == (_PCM, 1, RATE, 16) and wav.size > 0 and head[:4] == b"RIFF"
    package = None if is_plain else next(filter(importlib.util.find_spec, _PACKAGES), None)
    if package is not None:
        file.seek(0)
        return _stored(_PACKAGES[package](file, name), max_seconds)
    if wav is None:
        raise ValueError(
            f"expected audio as WAV, got another format in {name}: for other formats pip install 'fastformer[audio]'"
        )
    return _stored(_as_int16(_wav_samples(file, wav, name), wav.rate), max_seconds)


def _stored(blocks: Iterable[np.ndarray[Any, Any]], max_seconds: float | None) -> Recording:
    """Stores blocks of 16-bit samples at `RATE`, those of a long recording on disk."""
    file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
    length = 0
    try:
        for block in blocks:
            file.write(block.tobytes())
            length += block.size
            _check_length(length, max_seconds)
    except BaseException:
        file.close()
        raise
    return Recording(length, file=file)


def _with_av(file: Any, name: Any) -> Iterator[np.ndarray[Any, Any]]:
    import av

    try:
        with av.open(file, mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"expected audio in {name}, got a file without any")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            frames = (frame for packet in container.demux(audio=0) for frame in _frames(packet, av.error.FFmpegError))
            for frame in itertools.chain(frames, [None]):
                if frame is not None:
                    frame.pts = None  # times that jump are no reason to stop
                for part in resampler.resample(frame):
                    yield part.to_ndarray().reshape(-1)
    except av.error.FFmpegError as error:
        raise ValueError(f"expected audio in {name}, which FFmpeg can't read: {error.strerror}") from error


def _frames(packet: Any, errors: type[Exception]) -> list[Any]:
    """Returns the frames of a packet, none of a damaged one."""
    try:
        return list(packet.decode())
    except errors:
        return []


def _with_soundfile(file: Any, name: Any) -> Iterator[np.ndarray[Any, Any]]:
    import soundfile

    try:
        with soundfile.SoundFile(file) as audio:
            blocks = (block.mean(1) for block in audio.blocks(_BLOCK, dtype="float32", always_2d=True))
            yield from _as_int16(blocks, audio.samplerate)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"expected audio in {name}, which libsndfile can't read: {error}") from error


_PACKAGES = {"av": _with_av, "soundfile": _with_soundfile}  # the first that is installed reads what isn't plain WAV


class _Wav(NamedTuple):
    """The form of a WAV file: its encoding, and the bytes of its samples; -1: it has none, not even an empty chunk."""

    kind: int = 0
    channels: int = 0
    rate: int = 0
    bits: int = 0
    size: int = -1


def _wav_form(file: Any) -> _Wav:
    """Reads a WAV file from behind its first 12 bytes up to its samples."""
    form = _Wav()
    while len(head := _read(file, 8)) == 8:
        tag, size = head[:4], struct.unpack("<I", head[4:])[0]
        if tag == b"data":
            return form._replace(size=size)
        body = _read(file, min(size, _FORMAT_BYTES)) if tag == b"fmt " else b""
        file.seek(size + size % 2 - len(body), io.SEEK_CUR)  # the size of a damaged file may be any
        if tag == b"fmt " and len(body) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            if kind == _EXTENSIBLE and len(body) >= 26:
                kind = struct.unpack("<H", body[24:26])[0]
            form = _Wav(kind, channels, rate, bits)
    return form


def _read(file: Any, size: int) -> bytes:
    """Returns as many bytes as are asked for, fewer only at the end; a file object may return fewer at a time."""
    data = b""
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


def _chunks(file: Any, form: _Wav) -> Iterator[bytes]:
    """Yields the bytes of whole frames."""
    frame, left = form.channels * form.bits // 8, form.size
    while data := _read(file, min(left, _BLOCK * frame)):
        left -= len(data)
        yield data[: len(data) // frame * frame]


def _wav_samples(file: Any, form: _Wav, name: Any) -> Iterator[Array]:
    """Returns the samples of a WAV file, the mean of its channels."""
    kind, channels, rate, bits, size = form
    is_known = (kind == _PCM and bits in (8, 16, 24, 32)) or (kind == _FLOAT and bits in (32, 64))
    if not is_known or not channels or not rate:
        raise ValueError(
            f"expected WAV of 8 to 32 bits or floats in {name}, got encoding {kind} with {bits} bits, {channels} "
            f"channels and {rate} Hz: for other formats pip install 'fastformer[audio]'"
        )
    if size < 0:
        raise ValueError(f"expected WAV with samples in {name}, got a file that ends before them or is damaged")
    blocks = (_numbers(data, kind, bits) for data in _chunks(file, form))
    return (samples.reshape(-1, channels).mean(1, dtype=np.float32) for samples in blocks)


def _numbers(data: bytes, kind: int, bits: int) -> Array:
    """Returns samples of WAV as numbers from -1 to 1."""
    if kind == _FLOAT:
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float32)
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) * np.float32(2**-7)
    if bits == 24:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return (padded.view("<i4").ravel() / 2**31).astype(np.float32)
    return (np.frombuffer(data, f"<i{bits // 8}") / 2 ** (bits - 1)).astype(np.float32)


def _as_int16(blocks: Iterable[Array], rate: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yields samples of a rate as 16-bit ones at `RATE`."""
    for block in blocks if rate == RATE else _resampled(blocks, rate):
        if not np.isfinite(block).all():
            raise ValueError("expected finite samples, got NaN or infinite ones")
        yield np.clip(np.rint(block * 32768), -32768, 32767).astype(np.int16)


def _resampled(blocks: Iterable[Array], rate: int) -> Iterator[Array]:
    """Converts blocks of samples from a rate to `RATE`, by a windowed sinc, with the same result for any blocks."""
    shared = math.gcd(rate, RATE)
    old, new = rate // shared, RATE // shared
    if old > _BLOCK or new > _BLOCK:
        raise ValueError(f"expected a usual sampling rate, got {rate:,} Hz")
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZEROS * old / cutoff)
    times = np.arange(-width, width + old) / old - np.arange(new)[:, None] / new
    phases = np.clip(times * cutoff, -_ZEROS, _ZEROS)
    kernel = np.sinc(phases) * np.cos(phases * np.pi / _ZEROS / 2) ** 2 * (cutoff / old)
    filters = kernel.astype(np.float32).T
    # A step reads `old` samples with `width` before and after them, and gives `new` samples.
    rest, total, given = np.zeros(width, np.float32), 0, 0
    silence = np.zeros(2 * width + old, np.float32)
    for block in itertools.chain(blocks, [silence]):
        total += 0 if block is silence else len(block)
        rest = np.concatenate([rest, block])
        steps = max(0, len(rest) - 2 * width) // old
        if steps:
            windows = np.lib.stride_tricks.sliding_window_view(rest, len(filters))[: steps * old : old]
            converted = (windows @ filters).reshape(-1)[: math.ceil(total * new / old) - given]
            yield converted
            given += len(converted)
            rest = rest[steps * old :]
