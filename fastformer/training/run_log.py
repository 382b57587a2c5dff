"""Writes train.log, the messages of a training with their times, independent of its terminal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from fastformer import console

logger = logging.getLogger("fastformer")

_MARK = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d fastformer train: ")


class RunLog(logging.Handler):
    """The log of a run folder. It buffers messages until it is entered, and then writes them.

    The file is train.log, or train-2.log and so on if a file that no run wrote has that name (`| tee run/train.log`).
    If the log can't be written, a warning says so, and training continues.

    Args:
        run: the folder; it must exist when the log is entered.
    """

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run = run
        self._kept: list[str] = []
        self._file: TextIO | None = None
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of Python's logging."""
        self.write(record.getMessage())

    def write(self, text: str) -> None:
        """Adds a text, which may have several lines."""
        self._kept.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if self._file is not None:
            try:
                self._file.write("".join(self._kept))
                self._file.flush()
            except OSError as error:
                self._fail(error)
            self._kept.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Records the messages that are logged inside."""
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)

    def __enter__(self) -> RunLog:
        logger.addHandler(self)
        before, self._kept = self._kept, []
        try:
            self._file = _open(_own_path(self._run))
        except OSError as error:
            self._fail(error)
        self.write(f"fastformer train: process {os.getpid()} in {console.printable(str(self._run.absolute()))}")
        self._kept += before
        for loss in console.losses():
            self.write(f"{loss} takes no text: this file alone has the log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.write(f"ended by {type(error).__name__}: {error}")
        logger.removeHandler(self)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file, self._kept, self._failed = None, [], False

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True  # first, because this handler also receives the warning
            logger.warning("the log in %s can't be written (%s): the training goes on", self._run, error.strerror)


def _own_path(run: Path) -> Path:
    """Returns the first name that is free, or whose file a run wrote."""
    paths = (run / ("train.log" if number == 1 else f"train-{number}.log") for number in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path) or wrote(path))


def wrote(path: Path) -> bool:
    """Returns whether a file is the log of a run."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _MARK.match(file.readline(200)) is not None


def _open(path: Path) -> TextIO:
    # O_NOFOLLOW: a symbolic link with this name could redirect the write to another file.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o666)
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
