"""Standard output and standard error: text goes there in UTF-8, and work outlives them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

logger = logging.getLogger("fastformer")

# Controls of a terminal, line ends that no file has, and what turns the direction of the text around.
_UNSEEN = {"Cc", "Cs", "Zl", "Zp"}
_TURNS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


class OutputLostError(OSError):
    """A standard stream takes no more text.

    Args:
        name: of the stream.
        reason: why it takes none.
        has_left: whether its reader went away, as that of `fastformer translate ... | head` does.
    """

    def __init__(self, name: str, reason: str, *, has_left: bool = False) -> None:
        super().__init__(f"{name} takes no more text ({reason}): what follows is lost")
        self.has_left = has_left


class Output:
    """A standard stream that is written to until it fails; afterwards what is written is dropped.

    Characters that its encoding lacks are escaped. Everything but `write` and `flush` is the stream's own.

    Args:
        stream: the stream; None: it was closed when the process began.
        name: in messages.
        outlived: whether the work goes on after a failure, with a warning in the log. Otherwise a write raises.

    Attributes:
        outlived: as above; it may be set later.
        lost: why nothing is written any more; None: all is well.
    """

    def __init__(self, stream: TextIO | None, name: str, *, outlived: bool) -> None:
        self._stream: TextIO = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.name, self.outlived = name, outlived
        self.lost: str | None = "it is closed" if stream is None else None
        self._has_left = False

    def write(self, text: str) -> int:
        """Writes a text, and gives its length.

        Raises:
            OutputLostError: the stream fails, or did so before, and is not outlived.
        """
        if self.lost is None:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # a ValueError for a stream that was closed meanwhile
                self._lose(error)
        if self.lost is not None and not self.outlived:
            raise OutputLostError(self.name, self.lost, has_left=self._has_left)
        return len(text)

    def flush(self) -> None:
        """Brings out what was written; errors as those of `write`."""
        if self.lost is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)
                if not self.outlived:
                    raise OutputLostError(self.name, str(self.lost), has_left=self._has_left) from error

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _lose(self, error: Exception) -> None:
        self.lost = getattr(error, "strerror", None) or str(error)
        self._has_left = isinstance(error, BrokenPipeError)
        if self.outlived:
            logger.warning("%s takes no more text (%s): the work goes on without it", self.name, self.lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlived_output() -> Output:
    """Standard output for work that must not end with it."""
    if isinstance(sys.stdout, Output):
        return sys.stdout
    return Output(sys.stdout, "standard output", outlived=True)


def losses() -> list[str]:
    """What is lost of the standard streams: "standard output (Broken pipe)"."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Output)]
    return [f"{stream.name} ({stream.lost})" for stream in streams if stream.lost is not None]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads a standard stream, or types into it; one that is closed has no reader."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Standard output and error as `Output`s in UTF-8, whatever the locale; at first only standard error is outlived.

    A stream that fails is given /dev/null for the end of the process, for Python itself would fail at its last flush.
    """
    _fill_closed_descriptors()
    before = sys.stdout, sys.stderr
    encodings = [_in_utf8(sys.stdout, "surrogateescape"), _in_utf8(sys.stderr, "backslashreplace")]
    outputs = (
        Output(sys.stdout, "standard output", outlived=False),
        Output(sys.stderr, "standard error", outlived=True),
    )
    sys.stdout, sys.stderr = outputs
    try:
        yield
    finally:
        for output, stream, encoding in zip(outputs, before, encodings, strict=True):
            output.outlived = True
            output.flush()
            if output.lost is not None:
                _to_nowhere(stream)
            elif encoding is not None:
                stream.reconfigure(encoding=encoding[0], errors=encoding[1])  # type: ignore[union-attr]
        sys.stdout, sys.stderr = before


def typed(text: str) -> str:
    """A word of the command line as text: UTF-8 where it is that, whatever the locale took its bytes for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def printable(text: str, most: int | None = None) -> str:
    """A text as it may be shown on a terminal: without control characters, and cut.

    Args:
        text: of any kind.
        most: characters that are shown; None: all.
    """
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(_escaped(character) if not character.isprintable() else character for character in text)


def shown(text: str, stream: TextIO | None) -> str:
    """A text as it may go to a stream: on a terminal without control characters but line ends and tabs, else as is."""
    if not is_terminal(stream):
        return text
    return "".join(part if part in "\n\t" else printable(part) for part in re.split("([\n\t])", text))


def _escaped(character: str) -> str:
    unseen = unicodedata.category(character) in _UNSEEN or ord(character) in _TURNS
    return character.encode("unicode_escape").decode() if unseen else character


def _in_utf8(stream: TextIO | None, errors: str) -> tuple[str, str] | None:
    """Sets a stream to UTF-8. Returns what it had, if that was something else and can be set."""
    reconfigure = getattr(stream, "reconfigure", None)
    if stream is None or reconfigure is None:
        return None
    before = stream.encoding, stream.errors or "strict"
    if before == ("utf-8", errors):
        return None
    with contextlib.suppress(ValueError):  # it was closed
        reconfigure(encoding="utf-8", errors=errors)
        return before
    return None


def _fill_closed_descriptors() -> None:
    """Opens /dev/null in place of each closed standard stream: the next file would get its number and its output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)


def _to_nowhere(stream: TextIO | None) -> None:
    """Sends the rest of the buffers of a standard stream of the process to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None and (descriptor := stream.fileno()) in (1, 2):
            _open_null(descriptor)


def _open_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
