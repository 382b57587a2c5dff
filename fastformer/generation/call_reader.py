"""`CallReader`: what the readers of calls have in common, whatever the format."""

from __future__ import annotations

from collections.abc import Callable


class CallReader:
    """Reads a call character by character.

    Attributes:
        name: the name of the tool; None: it has not come yet.
        is_done: whether the call is complete.
        is_broken: whether the text is no call.
        is_told: for the caller: whether it has told the name.
    """

    _reads: Callable[[str], None]  # takes a character

    def __init__(self, name: str | None = None) -> None:
        self.name, self.is_done, self.is_broken, self.is_told = name, False, False, False
        self._arguments: list[str] = []

    def take(self) -> str:
        """Returns the JSON of the arguments since the last call."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def add(self, text: str) -> int:
        """Reads characters up to the end of the call, and returns their number."""
        for place, character in enumerate(text):
            if self.is_done:
                return place
            self._reads(character)
            if self.is_broken:
                return place
        return len(text)
