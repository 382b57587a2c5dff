"""Catches the signals by which users and schedulers end a training, so that the training can save its state first.

Ctrl-C (SIGINT), SIGTERM (a container or a scheduler ends the job), SIGHUP (the terminal went away) and SIGUSR1 (the
notice of a scheduler that is about to stop the machine) all mean the same: save and end. The exit code is then
128 plus the signal's number, as shells have it: 130, 143, 129, 138.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Windows lacks the last two
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal ended the work at once.

    Args:
        signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """A reentrant context manager that catches the signals.

    A signal raises `Interrupted` in the running code. Inside `held` the first signal is only recorded, and the code
    checks for it at suitable moments; a second signal raises. A signal that the process was told to ignore (nohup)
    stays ignored. Only the main thread can catch signals; elsewhere nothing is caught.

    Attributes:
        signum: the first signal that arrived; None before that.
        ignores_second: whether a second signal has no effect inside `held`. If several processes train, the launcher
            forwards signals that its processes also received themselves, and kills processes that don't end in time.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.ignores_second = False
        self._depth = 0
        self._held = False
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """The exit code that the process should end with: 128 + the signal's number, or 0."""
        return 0 if self.signum is None else 128 + self.signum

    @property
    def name(self) -> str:
        """The name of the signal, such as "SIGTERM"; empty before one arrives."""
        return "" if self.signum is None else signal.Signals(self.signum).name

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                # None: a handler that Python code didn't set, and that Python couldn't restore.
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            while self._previous:
                signum, handler = self._previous.popitem()
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Records the first signal instead of raising; the code inside checks `signum`."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets signals raise within `held`, also one that arrived before; for code that may be aborted anywhere."""
        before, self._held = self._held, False
        try:
            if self.signum is not None:
                raise Interrupted(self.signum)
            yield
        finally:
            self._held = before

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        if first:
            self.signum = signum
        if not (self._held and (first or self.ignores_second)):
            raise Interrupted(signum)
