"""The most that a server accepts from its clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastformer.settings import Amount, Count, Positive, Range, check_settings


@dataclass(frozen=True)
class Limits:
    """The most that a server accepts from its clients. Each limit is a flag of `fastformer serve`.

    Attributes:
        max_waiting: requests that may wait for the batch; one more is answered 429
        max_waiting_tokens: tokens of the sources and prompts that may wait for the batch
        max_body_bytes: the size of a request's body; a larger one is answered 413
        max_audio_bytes: the size of a body with audio
        max_audio_seconds: the length of a recording
        max_texts: texts in one request
        max_text_chars: characters of each text
        max_chat_chars: characters of all messages of a chat together
        max_sentences: sentences in one request to a translator, in all of its texts
        max_new_tokens: new tokens that a request may ask for
        max_alternatives: further answers for one text
        max_beams: beams of a search; also the most samples, and the most of both together
        timeout_s: seconds that a request may take; a request may ask for less by its field `timeout`
        max_connections: connections at a time, or fewer if the process may open few files; one more is answered 503
        body_s: seconds in which the head of a request has to arrive, and then its body
        write_s: seconds without progress after which a client that doesn't read its answer is disconnected
        drain_s: seconds that running requests have to end after SIGTERM
        drain_delay_s: seconds between SIGTERM, when /ready begins to fail, and the refusal of new requests
    """

    max_waiting: Positive = 256
    max_waiting_tokens: Positive = 65_536
    max_body_bytes: Positive = 8 << 20
    max_audio_bytes: Positive = 25 << 20
    max_audio_seconds: Positive = 3_600
    max_texts: Positive = 2_048
    max_text_chars: Positive = 200_000
    max_chat_chars: Positive = 500_000
    max_sentences: Positive = 4_096
    max_new_tokens: Positive = 4_096
    max_alternatives: Count = 4
    max_beams: Positive = 8
    timeout_s: Annotated[float, Range(above=0)] = 60.0
    max_connections: Positive = 1_024
    body_s: Annotated[float, Range(above=0)] = 30.0
    write_s: Annotated[float, Range(above=0)] = 30.0
    drain_s: Amount = 30.0
    drain_delay_s: Amount = 2.0

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def queue(self) -> dict[str, Any]:
        """The arguments of a `Session` that bound its queue."""
        return {
            "max_waiting": self.max_waiting,
            "max_waiting_tokens": self.max_waiting_tokens,
            "when_full": "refuse",
        }

    def why_not(self, texts: Sequence[str], count: int | None = None) -> str | None:
        """Returns why texts exceed the limits: there are too many, or one is too long; None: they don't.

        Args:
            texts: the texts.
            count: how many they count as; None: each counts.
        """
        if (count := len(texts) if count is None else count) > self.max_texts:
            return f"expected at most {self.max_texts:,} texts, got {count:,}"
        if (longest := max(map(len, texts), default=0)) > self.max_text_chars:
            return f"expected texts of at most {self.max_text_chars:,} characters, got one of {longest:,}"
        return None
