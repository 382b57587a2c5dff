"""WAV as recordings are stored is read without other packages, all else by PyAV; what is no audio is refused."""

from __future__ import annotations

import importlib.util
import io
import struct
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

from fastformer.audio import decode_audio
from fastformer.audio.reading import open_audio
from tests.audio.speech import sound

needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="the extra `audio` is not installed")


@pytest.fixture
def without_av(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)


def wav(samples: Any, rate: int = 16_000, kind: str = "i2", channels: int = 1, *, extensible: bool = False) -> bytes:
    """Returns the file of samples from -1 to 1, the same in all channels."""
    samples = np.repeat(np.asarray(samples, np.float64), channels)
    size = int(kind[1])
    if kind[0] == "f":
        data = samples.astype(f"<{kind}").tobytes()
    elif kind == "i1":
        data = (np.round(samples * 127) + 128).astype(np.uint8).tobytes()
    elif kind == "i3":
        data = np.round(samples * (2**23 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        data = np.round(samples * (2 ** (8 * size - 1) - 1)).astype(f"<{kind}").tobytes()
    code = 3 if kind[0] == "f" else 1
    fields = [0xFFFE if extensible else code, channels, rate, rate * channels * size, channels * size, 8 * size]
    head = struct.pack("<HHIIHH", *fields)
    if extensible:
        head += struct.pack("<HHIH14s", 22, 8 * size, 0, code, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71")
    body = b"junk" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(head)) + head
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


@needs_av
@pytest.mark.parametrize("kind", ["i1", "i2", "i3", "i4", "f4", "f8"])
@pytest.mark.parametrize("channels", [1, 5])
def test_every_kind_of_wav(kind, channels) -> None:
    samples = sound(1)
    read = decode_audio(wav(samples, kind=kind, channels=channels, extensible=channels > 2))
    np.testing.assert_allclose(read, samples, atol=0.02 if kind == "i1" else 1e-4)


@needs_av
@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_keep_the_sound(rate) -> None:
    times = np.arange(rate * 2 + 77) / rate
    read = decode_audio(wav(np.sin(2 * np.pi * 440 * times) * 0.5, rate))
    assert len(read) == -(-len(times) * 16_000 // rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(read)) / 16_000) * 0.5
    np.testing.assert_allclose(read[200:-200], expected[200:-200], atol=2e-3)


@needs_av
def test_a_frequency_that_16_khz_cannot_hold_is_removed() -> None:
    times = np.arange(48_000) / 48_000
    read = decode_audio(wav(np.sin(2 * np.pi * 12_000 * times) * 0.5, 48_000))
    assert np.abs(read[200:-200]).max() < 0.01


@needs_av
def test_samples_beyond_one_are_clipped() -> None:
    assert np.abs(decode_audio(wav(np.full(100, 7.5), kind="f4"))).max() == pytest.approx(1, abs=1e-4)


def test_paths_files_bytes_and_arrays_are_the_same(tmp_path, without_av) -> None:
    samples = sound(1)
    data = wav(samples)
    (tmp_path / "a.wav").write_bytes(data)

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.rest = io.BytesIO(data)

        def readinto(self, buffer: Any) -> int:
            return self.rest.readinto(buffer)

        def readable(self) -> bool:
            return True

    expected = decode_audio(data)
    whole = np.round(samples.astype(np.float64) * 32767).astype(np.int16)
    with tempfile.TemporaryFile() as temporary, open(tmp_path / "a.wav", "r+b") as changing:
        temporary.write(data)
        files = (io.BytesIO(data), io.BufferedReader(Pipe()), temporary, changing)
        for source in (tmp_path / "a.wav", str(tmp_path / "a.wav"), *files, whole):
            np.testing.assert_array_equal(decode_audio(source), expected)


@needs_av
def test_a_file_that_returns_fewer_bytes_than_it_is_asked_for() -> None:
    class Short(io.BytesIO):
        def read(self, size: Any = -1) -> bytes:
            return super().read(min(size, 3 if size < 100 else 1_001))

    for channels in (1, 2):
        data = wav(sound(1), channels=channels)
        np.testing.assert_array_equal(decode_audio(Short(data)), decode_audio(data))


def test_a_file_that_ends_in_the_middle_gives_what_is_there(without_av) -> None:
    data = wav(sound(1))
    whole = decode_audio(data)
    for missing in (1, 2, 16_001):  # the first is half of a sample
        np.testing.assert_array_equal(decode_audio(data[:-missing]), whole[: -((missing + 1) // 2)])
    assert len(decode_audio(data[: data.index(b"data") + 9])) == 0


def test_the_size_of_a_damaged_chunk_is_not_read(without_av) -> None:
    class Watched(io.BytesIO):
        def read(self, size: Any = -1) -> bytes:
            most.append(size)
            return super().read(size)

    most, data = list[int](), wav([0.1] * 9)
    for tag in (b"junk", b"fmt "):
        place = data.index(tag) + 4
        damaged = data[:place] + b"\xfe\xff\xff\xff" + data[place + 4 :]
        with pytest.raises(ValueError, match="expected"):
            decode_audio(Watched(damaged))
    assert max(most) < 100


@pytest.mark.parametrize(
    "source",
    [
        b"", b"this is no audio, but a text", wav([])[:20], wav([0.1] * 9)[:50],
        wav([0.1] * 9, kind="i2").replace(b"\x01\0\x01\0", b"\x55\0\x01\0"),
        wav([np.nan] * 9, kind="f4"), np.full(9, np.nan), np.zeros((2, 9)), np.zeros(9, np.int32), np.array(["a"]),
    ],
)  # fmt: skip
def test_what_is_no_audio_is_refused(source, without_av) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode_audio(source)


@pytest.mark.parametrize(
    "other",
    [{"channels": 2}, {"rate": 8_000}, {"rate": 44_100}, {"kind": "i1"}, {"kind": "f4"}, {"extensible": True}],
    ids=str,
)
def test_other_forms_of_wav_need_a_package(other, without_av) -> None:
    """`extensible` of one channel is one that Python reads since 3.12."""
    data = wav(sound(1), **other)
    if other == {"extensible": True} and sys.version_info >= (3, 12):
        return np.testing.assert_array_equal(decode_audio(data), decode_audio(wav(sound(1))))
    with pytest.raises(ValueError, match="audio"):
        decode_audio(data)


def test_a_long_recording_is_refused_and_one_without_samples_is_not() -> None:
    with pytest.raises(ValueError, match="0.5 seconds"):
        open_audio(wav(sound(1)), max_seconds=0.5)
    assert len(open_audio(wav(sound(1)), max_seconds=1)) == 16_000
    assert len(open_audio(wav([]))) == 0
    with pytest.raises(FileNotFoundError):
        open_audio("no such file.wav")


def test_no_more_is_read_than_a_recording_may_have() -> None:
    file = io.BytesIO(wav(np.zeros(16_000 * 60)))
    with pytest.raises(ValueError, match="10 seconds"):
        open_audio(file, max_seconds=10)
    assert file.tell() < len(file.getvalue()) // 2


@needs_av
def test_what_needs_no_package_is_the_same_by_one() -> None:
    samples = sound(1)
    np.testing.assert_array_equal(decode_audio(wav(samples)), decode_audio(wav(samples, channels=2)))
    for bad in (b"", b"no audio at all, but a text", wav([])[:20], wav([0.1] * 9)[:50]):
        with pytest.raises(ValueError, match="expected"):
            decode_audio(bad)


def with_sizes(file: bytes, **sizes: int) -> bytes:
    """Returns a file with other sizes of its chunks."""
    for tag, size in sizes.items():
        place = file.index(tag.encode()) + 4
        file = file[:place] + struct.pack("<I", size) + file[place + 4 :]
    return file


@pytest.mark.parametrize(
    "sizes", [{"data": 0}, {"data": 2**32 - 1}, {"RIFF": 1000}, {"RIFF": 2**32 - 1, "data": 2**32 - 1}], ids=str
)
def test_a_size_that_was_never_written_is_none(sizes, without_av) -> None:
    """Programs that write to a pipe leave the size of the samples 0, or the largest; others miscount the whole."""
    data = wav(sound(1))
    np.testing.assert_array_equal(decode_audio(with_sizes(data, **sizes)), decode_audio(data))


@needs_av
def test_a_file_without_any_size_is_read_by_the_package() -> None:
    data = wav(sound(1))
    np.testing.assert_array_equal(decode_audio(with_sizes(data, RIFF=0, data=0)), decode_audio(data))


def test_what_follows_the_samples_is_none() -> None:
    data = wav(sound(1))
    np.testing.assert_array_equal(decode_audio(data + b"LIST\4\0\0\0abcd"), decode_audio(data))


def test_a_file_that_has_a_number_for_a_name_is_not_called_by_it(without_av) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"no audio at all, but a text")
        with pytest.raises(ValueError, match="in the audio"):
            decode_audio(file)


@needs_av
def test_damage_in_the_middle_loses_little() -> None:
    import av

    with av.open(file := io.BytesIO(), "w", format="adts") as container:
        stream = container.add_stream("aac", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((sound(10)[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    whole, data = decode_audio(file.getvalue()), bytearray(file.getvalue())
    place = len(data) // 3
    data[place : place + 500] = np.random.default_rng(0).bytes(500)
    assert 0.9 * len(whole) < len(decode_audio(bytes(data))) < len(whole)
