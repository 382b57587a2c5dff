"""Features are those of transformers, in one piece and in windows."""

from __future__ import annotations

import numpy as np
import pytest

from fastformer.audio.features import Array, Features
from fastformer.audio.reading import Recording, Spliced
from tests.audio.speech import sound


def log_mel(samples: Array, n_mels: int, *, padding: int = 0) -> Array:
    width = (len(samples) + padding) // 160
    return Features(Recording.of(samples), n_mels, width, padding).window(0, width)


@pytest.mark.parametrize("seconds", [0.1, 3.123, 29])
@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_are_those_of_transformers(n_mels, seconds) -> None:
    transformers = pytest.importorskip("transformers")
    extractor, samples = transformers.WhisperFeatureExtractor(n_mels), sound(seconds)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np", padding="do_not_pad").input_features[0]
    np.testing.assert_allclose(log_mel(samples, n_mels)[:, : expected.shape[1]], expected, atol=1e-4)


def test_windows_are_parts_of_the_whole() -> None:
    samples = sound(9.87)
    whole = log_mel(samples, 80, padding=160)
    features = Features(Recording.of(samples), 80, 300)
    assert features.num_frames == 987 and whole.shape[1] == 988
    for start, size in [(0, 300), (1, 299), (500, 300), (800, 188), (987, 1)]:
        window = features.window(start, size)
        np.testing.assert_allclose(window[:, :size], whole[:, start : start + size], atol=1e-5)
        assert not window[:, size:].any()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_loudest_frame_of_many_blocks(seed, monkeypatch) -> None:
    # The noise has more energy than the tone, and less in any band.
    noise = np.random.default_rng(seed).standard_normal(78_960).astype(np.float32)
    samples = np.concatenate([noise / 2, np.sin(np.arange(78_960, dtype=np.float32) * seed / 3) / 2])
    samples[seed * 20_000 :] *= np.linspace(1, 1e-5, len(samples) - seed * 20_000, dtype=np.float32)
    whole = log_mel(samples, 80, padding=160)
    monkeypatch.setattr("fastformer.audio.features._BLOCK_FRAMES", 90)
    np.testing.assert_allclose(Features(Recording.of(samples), 80, 300).window(687, 300), whole[:, 687:987], atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 159, 160, 399])
def test_the_shortest_recordings_have_features(length) -> None:
    samples = sound(1)[:length]
    padded = np.pad(samples, (0, 160))
    expected = log_mel(padded, 80)[:, : len(padded) // 160]
    np.testing.assert_allclose(log_mel(samples, 80, padding=160), expected, atol=1e-5)


def test_parts_are_spliced() -> None:
    samples = sound(2)
    spliced = Spliced(Recording.of(samples), [(10, 500), (700, 701), (9_000, 20_000)])
    whole = np.concatenate([samples[10:500], samples[700:701], samples[9_000:20_000]])
    assert len(spliced) == len(whole)
    for start, stop in [(0, len(whole)), (480, 495), (489, 492), (5_000, 99_999), (7, 7)]:
        np.testing.assert_array_equal(spliced.read(start, stop), whole[start:stop])
