"""Speech: Whisper models behind faster-whisper's names, and what they need: audio, features, voice activity."""

from __future__ import annotations

from fastformer.audio.reading import decode_audio as decode_audio
from fastformer.audio.voice import VadOptions as VadOptions
from fastformer.audio.whisper import BatchedInferencePipeline as BatchedInferencePipeline
from fastformer.audio.whisper import WhisperModel as WhisperModel

__all__ = ["BatchedInferencePipeline", "VadOptions", "WhisperModel", "decode_audio"]
