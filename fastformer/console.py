"""Standard output and standard error in UTF-8, for work that may continue after they close."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, TextIO

logger = logging.getLogger("fastformer")

# Control characters, unusual line ends, and characters that change the direction of the text.
_UNSEEN = {"Cc", "Cs", "Zl", "Zp"}
_TURNS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


class OutputLostError(OSError):
    """A standard stream accepts no more text.

    Args:
        name: the name of the stream.
        reason: why it accepts no text.
        has_left: whether its reader has closed it, as in `fastformer translate ... | head`.
    """

    def __init__(self, name: str, reason: str, *, has_left: bool = False) -> None:
        super().__init__(f"{name} takes no more text ({reason}): what follows is lost")
        self.has_left = has_left


class Output:
    """A standard stream that accepts text until it fails; later texts are dropped.

    Characters that its encoding lacks are escaped. All methods but `write` and `flush` are the stream's own.

    Args:
        stream: the stream; None: it was closed when the process began.
        name: the stream's name in messages.
        outlived: whether the work continues after a failure, with a warning in the log. Otherwise a write raises.

    Attributes:
        outlived: see the argument; it may be set later.
        lost: the reason why the stream accepts no text; None: it accepts text.
    """

    def __init__(self, stream: TextIO | None, name: str, *, outlived: bool) -> None:
        self._stream: TextIO = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.name, self.outlived = name, outlived
        self.lost: str | None = "it is closed" if stream is None else None
        self._has_left = False

    def write(self, text: str) -> int:
        """Writes a text, and returns its length.

        Raises:
            OutputLostError: the stream fails, or failed before, and `outlived` is false.
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
        """Flushes the written text; the errors are those of `write`."""
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
            logger.warning("%s accepts no more output (%s); continuing without it", self.name, self.lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlived_output() -> Output:
    """Returns standard output for work that has to continue if it closes."""
    if isinstance(sys.stdout, Output):
        return sys.stdout
    return Output(sys.stdout, "standard output", outlived=True)


def losses() -> list[str]:
    """Returns the standard streams that have failed, with the reasons: "standard output (Broken pipe)"."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Output)]
    return [f"{stream.name} ({stream.lost})" for stream in streams if stream.lost is not None]


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a standard stream is a terminal; a closed stream is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


def progress_bar(*, is_shown: bool = True, **options: Any) -> Any:
    """Makes a progress bar of tqdm on standard error; returns None without a terminal, without tqdm, or if not shown.

    Args:
        is_shown: whether the caller wants a bar.
        options: see `tqdm.tqdm`.
    """
    if not is_shown or not is_terminal(sys.stderr):
        return None
    try:
        from tqdm import tqdm
    except ImportError:  # a missing progress bar is no reason to stop
        return None
    return tqdm(file=sys.stderr, **options)


@contextlib.contextmanager
def progress(**options: Any) -> Iterator[Callable[[float], object]]:
    """Yields a function that advances a progress bar, if `progress_bar` makes one of these options."""
    bar = progress_bar(**options)
    with contextlib.nullcontext() if bar is None else bar:
        yield (lambda count: None) if bar is None else bar.update


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Makes standard output and error `Output`s in UTF-8, whatever the locale; first only standard error is outlived.

    A stream that fails is redirected to /dev/null at the end of the process, since Python's last flush would fail.
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
                _redirect_to_null(stream)
            elif encoding is not None:
                stream.reconfigure(encoding=encoding[0], errors=encoding[1])  # type: ignore[union-attr]
        sys.stdout, sys.stderr = before


def typed(text: str) -> str:
    """Decodes a word of the command line as UTF-8, whatever the locale; a word that is not UTF-8 stays the same."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def printable(text: str, most: int | None = None) -> str:
    """Makes a text safe to show on a terminal: without control characters, and of a limited length.

    Args:
        text: the text.
        most: the most characters to show; None: all.
    """
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(_escaped(character) if not character.isprintable() else character for character in text)


def shown(text: str, stream: TextIO | None) -> str:
    """Makes a text safe for a stream: on a terminal without control characters, except line ends and tabs."""
    if not is_terminal(stream):
        return text
    return "".join(part if part in "\n\t" else printable(part) for part in re.split("([\n\t])", text))


def _escaped(character: str) -> str:
    unseen = unicodedata.category(character) in _UNSEEN or ord(character) in _TURNS
    return character.encode("unicode_escape").decode() if unseen else character


def _in_utf8(stream: TextIO | None, errors: str) -> tuple[str, str] | None:
    """Sets a stream to UTF-8. Returns its earlier encoding and error handler if it could be set and they differed."""
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
    """Opens /dev/null for each closed standard stream: otherwise the next file would get its descriptor and output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)


def _redirect_to_null(stream: TextIO | None) -> None:
    """Redirects the rest of a standard stream's buffers to /dev/null."""
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
