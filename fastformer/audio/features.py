"""Log-mel features of 16 kHz audio, as Whisper reads them: 100 frames a second, computed a window at a time."""

from __future__ import annotations

import functools
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]

RATE = 16_000  # samples a second
HOP = 160  # samples between two frames
FRAMES_PER_SECOND = RATE // HOP
_FFT = 400  # samples of a frame
_SILENCE = -10.0  # the least logarithm of a band
_BLOCK_FRAMES = 6_000  # computed together where the loudest frame of a recording is searched
_TOGETHER = 256  # frames whose spectra stay in the cache
_ALONE = 16  # frames of a product that OpenBLAS leaves to one thread: its others would hold up those of the engine
_LINEAR_MELS, _MEL_HZ = 15, 200 / 3  # Slaney's scale: linear up to 1 kHz, then logarithmic, 27 mels for a factor 6.4
_LOG_STEP = np.log(6.4) / 27
_WINDOW: Array = (0.5 - 0.5 * np.cos(2 * np.pi / _FFT * np.arange(_FFT))).astype(np.float32)


class Samples(Protocol):
    """Audio of one channel at `RATE`, which is read in parts."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Array:
        """Returns the samples from start to stop, in fp32."""


@functools.cache
def mel_filters(n_mels: int) -> Array:
    """Returns the weights of each frequency in each band, (n_mels, frequencies), as triangles of equal area."""
    top = _LINEAR_MELS + np.log(RATE / 2 / 1000) / _LOG_STEP
    mels = np.linspace(0, top, n_mels + 2)
    corners = np.where(mels < _LINEAR_MELS, mels * _MEL_HZ, 1000 * np.exp((mels - _LINEAR_MELS) * _LOG_STEP))
    frequencies = np.linspace(0, RATE / 2, _FFT // 2 + 1)
    widths = np.diff(corners)
    rising = (frequencies - corners[:-2, None]) / widths[:-1, None]
    falling = (corners[2:, None] - frequencies) / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling)) * (2 / (corners[2:] - corners[:-2]))[:, None]
    filters: Array = triangles.astype(np.float32)
    return filters


class Features:
    """The features of a recording: those of a whole recording, of which `window` computes a part at a time.

    The loudest frame of the recording bounds the range of all frames below it, so it is searched once.

    Args:
        samples: the audio.
        n_mels: the number of bands.
        width: the number of frames of a window.
        padding: samples of silence after the audio.

    Attributes:
        num_frames: the number of frames that begin in the audio, without its padding.
        all_frames: the number of frames with those of the padding.
    """

    def __init__(self, samples: Samples, n_mels: int, width: int, padding: int = HOP) -> None:
        self.samples, self.n_mels, self.width = samples, n_mels, width
        self._length = len(samples) + padding
        self.num_frames, self.all_frames = len(samples) // HOP, self._length // HOP
        self._all: Array | None = None  # of a short recording, whose loudest frame is searched among all

    @functools.cached_property
    def _least(self) -> float:
        """The least value of a frame: 80 dB below the loudest one."""
        if self.all_frames <= _BLOCK_FRAMES:
            self._all = self._log_mel(0, self.all_frames)
            return float(self._all.max()) - 8
        # A band has at most the energy of its frame times its largest weight: most frames can't be the loudest one.
        starts = range(0, self.all_frames, _BLOCK_FRAMES)
        blocks = [(start, self._bounds(start, min(start + _BLOCK_FRAMES, self.all_frames))) for start in starts]
        loudest = _SILENCE
        for start, bounds in sorted(blocks, key=lambda block: -block[1].max()):
            places = np.flatnonzero(bounds > loudest)
            if len(places):
                frames = self._frames(start, start + len(bounds))[places]
                loudest = max(loudest, float(_log_mel(frames, self.n_mels).max()))
        return loudest - 8

    def _bounds(self, start: int, stop: int) -> Array:
        """Returns what the bands of frames don't exceed."""
        # A frame is within the 4 hops around its middle.
        hops = self._padded((start - 2) * HOP, (stop + 1) * HOP).reshape(-1, HOP)
        energies = np.einsum("ij,ij->i", hops, hops)
        sums = energies[:-3] + energies[1:-2] + energies[2:-1] + energies[3:]
        most: Array = np.log10(np.maximum(sums * (1.001 * _FFT / 2 * mel_filters(self.n_mels).max()), 10**_SILENCE))
        return most

    def window(self, start: int, num_frames: int) -> Array:
        """Returns the features (n_mels, width) of frames, followed by zeros.

        Args:
            start: the first frame.
            num_frames: the number of frames; those beyond the end are zeros too.
        """
        result = np.zeros((self.n_mels, self.width), np.float32)
        stop = min(start + min(num_frames, self.width), self.all_frames)
        if start < stop:
            least = np.float32(self._least)
            result[:, : stop - start] = (np.maximum(self._log_mel(start, stop), least) + 4) / 4
        return result

    def _log_mel(self, start: int, stop: int) -> Array:
        return _log_mel(self._frames(start, stop), self.n_mels) if self._all is None else self._all[:, start:stop]

    def _frames(self, start: int, stop: int) -> Array:
        audio = self._padded(start * HOP - _FFT // 2, (stop - 1) * HOP + _FFT // 2)
        return np.lib.stride_tricks.sliding_window_view(audio, _FFT)[::HOP]

    def _padded(self, start: int, stop: int) -> Array:
        """Returns samples, of which those outside of the padded audio are its reflection."""
        before, behind = max(0, -start), max(0, stop - self._length)
        first, last = max(0, start), min(max(stop, before + 1), self._length)  # with what is reflected
        samples = self.samples.read(first, min(last, len(self.samples)))
        if len(samples) < stop - start:  # at an end of the recording
            samples = np.pad(samples, (0, last - first - len(samples)))
            samples = np.pad(samples, (before, behind), "reflect")[: stop - start]
        return samples


def _log_mel(frames: Array, n_mels: int) -> Array:
    """Returns the logarithms of the bands' energies in frames of samples, (n_mels, frames)."""
    bands, filters = np.empty((n_mels, len(frames)), np.float32), mel_filters(n_mels).T
    power = np.zeros((_TOGETHER, len(filters)), np.float32)
    for at in range(0, len(frames), _TOGETHER):
        spectrum = np.fft.rfft(frames[at : at + _TOGETHER] * _WINDOW)
        power[: len(spectrum)] = spectrum.real**2 + spectrum.imag**2
        energies = (power.reshape(-1, _ALONE, len(filters)) @ filters).reshape(_TOGETHER, n_mels)
        bands[:, at : at + _TOGETHER] = energies[: len(spectrum)].T
    return np.log10(np.maximum(bands, np.float32(10**_SILENCE), out=bands), out=bands)
