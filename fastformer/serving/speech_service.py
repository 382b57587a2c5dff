"""A Whisper model as a service without HTTP: it transcribes the recordings of many callers at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastformer.audio.plans import SpeechRequest
from fastformer.audio.results import Segment, TranscriptionInfo
from fastformer.audio.scheduler import MAX_WINDOWS, SpeechScheduler
from fastformer.audio.whisper import WhisperModel
from fastformer.generation.jobs import Job
from fastformer.generation.session import Session
from fastformer.serving.limits import Limits
from fastformer.serving.service import Kind, Service


class SpeechService(Service):
    """A Whisper model as a service.

    Args:
        model: transcribes.
        name: the name of the model.
        limits: see `Limits`.
        max_windows: the most windows that are decoded together.
    """

    kind: Kind = "speech"
    session: Session[SpeechRequest]

    def __init__(
        self, model: WhisperModel, name: str, *, limits: Limits | None = None, max_windows: int = MAX_WINDOWS
    ) -> None:
        super().__init__(name, limits or Limits())
        self.model = model
        self.session = Session(
            model.model,
            lambda: SpeechScheduler(model.model, max_windows),
            name="transcriber",
            **self.limits.queue,
        )

    @property
    def languages(self) -> list[str]:
        """The codes of the languages."""
        return self.model.supported_languages

    async def submit(self, audio: bytes, *, streams: bool = False, **options: Any) -> Job[SpeechRequest]:
        """Submits a recording.

        Args:
            audio: the bytes of a file.
            streams: whether its segments are taken as they come.
            options: those of `WhisperModel.request`.

        Raises:
            ValueError: the audio can't be read or is too long, or an option is out of its bounds.
            QueueFull, TooLate, NotRunning: see `Session.submit`.
        """
        deadline = self.deadline()

        def build() -> SpeechRequest:
            return self.model.request(audio, max_seconds=self.limits.max_audio_seconds, **options)

        request = await self.session.aside(build, len(audio), deadline=deadline, is_slow=True)
        return self.session.submit([request], deadline=deadline, streams=streams)

    async def transcribe(self, audio: bytes, **options: Any) -> tuple[list[Segment], TranscriptionInfo]:
        """Returns the segments of a recording, and facts about it; see `submit`."""
        (request,) = await (await self.submit(audio, **options)).results()
        return request.take(), request.facts()


async def segments_of(job: Job[SpeechRequest]) -> AsyncGenerator[Segment, None]:
    """Yields the segments of a streamed recording; when it is closed, the recording is cancelled."""
    try:
        async for segments in job.stream(0):
            for segment in segments:
                yield segment
    finally:
        job.leave()


def open_speech(
    folder: Any,
    name: str,
    *,
    precision: str | None,
    device: Any = None,
    limits: Limits | None,
    max_windows: int | None,
) -> SpeechService:
    """Opens the service of a Whisper's folder.

    Raises:
        ValueError: see `WhisperModel`; or another precision.
    """
    if precision not in (None, "fp32", "bf16", "int8"):
        raise ValueError(f"expected precision fp32, bf16 or int8 for speech, got {precision!r}")
    model = WhisperModel(folder, str(device or "auto"), compute_type=precision or "default")
    return SpeechService(model, name, limits=limits, max_windows=max_windows or MAX_WINDOWS)
