"""Errors of inputs: which text can't be translated and why, and whether that stops the work or skips the text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastformer.generation.requests import Request

logger = logging.getLogger("fastformer")

_SHOWN_SKIPS = 10  # warnings; a file of another encoding would fill the screen


class TextError(ValueError):
    """A text that can't be translated.

    Attributes:
        is_long: whether the reason is its length.
    """

    def __init__(self, message: str, *, is_long: bool = False) -> None:
        super().__init__(message)
        self.is_long = is_long


def failure(name: str, error: Exception) -> Exception:
    """The error that names the text: a ValueError for a ValueError, else a RuntimeError. Raise it from the first."""
    if isinstance(error, ValueError):
        return ValueError(f"{name}: {error}")
    return RuntimeError(f"{name}: {type(error).__name__}: {error}")


def check_request(request: Request | None, name: object) -> None:
    """Raises the error of a request, if there is one, with the name of its text."""
    if request is not None and request.error is not None:
        raise failure(f"text {name}", request.error) from request.error


class ErrorPolicy:
    """Whether texts that can't be translated stop the work or are skipped.

    Args:
        on_error: "stop" raises the first error; "skip" logs a warning and leaves the answer empty.
        skip_long: skip what is only too long, whatever on_error says.
        left: what skipping leaves, for messages: of one text, and of several.

    Attributes:
        skipped: how many were skipped.
    """

    def __init__(
        self,
        on_error: str = "stop",
        skip_long: bool = False,
        left: tuple[str, str] = ("its translation empty", "their translations are empty"),
    ) -> None:
        if on_error not in ("stop", "skip"):
            raise ValueError(f"expected on_error to be 'stop' or 'skip', got {on_error!r}")
        self.on_error, self.skip_long, self.skipped, self._left = on_error, skip_long, 0, left

    def handle(self, error: TextError) -> None:
        """Raises the error, or skips its text."""
        if self.on_error != "skip" and not (self.skip_long and error.is_long):
            advice = "skip_long or on_error skip leaves" if error.is_long else "on_error skip leaves"
            raise TextError(f"{error}; {advice} {self._left[0]}", is_long=error.is_long) from error
        self.skipped += 1
        if self.skipped <= _SHOWN_SKIPS:
            logger.warning("skipped %s", error)

    def report(self, total: int) -> None:
        """Says at the end how many were skipped, if any were."""
        if self.skipped:
            logger.warning("skipped %s of %s texts; %s", f"{self.skipped:,}", f"{total:,}", self._left[1])
