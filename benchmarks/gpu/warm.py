"""Starts `python -m MODULE ...` from a process that has already imported what takes seconds to import.

A child is a fork: it begins where an interpreter would be after `import torch`. So this process must not ask CUDA's
driver anything, which no fork could use afterwards; even whether there is a GPU is a question for a child.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import record

# Nothing of fastformer: some of its settings are read from the environment when it is imported, which steps change.
_SLOW_TO_IMPORT = ("numpy", "torch", "torch._dynamo", "triton", "triton.experimental.gluon", "pytest", "transformers")


class Child:
    """A process that was started by `spawn`, the first of a group of its own."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Returns the exit status, or None if the process still runs after so many seconds."""
        end = time.monotonic() + seconds
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                break
            else:
                time.sleep(0.05)
        return self._status

    def kill(self) -> None:
        """Ends the process with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.wait(60.0)


def has_device() -> bool:
    """Returns whether PyTorch finds a CUDA device."""
    import torch

    pid = os.fork()
    if not pid:
        os._exit(0 if torch.cuda.is_available() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def import_ahead() -> None:
    """Imports what steps import, where it is installed."""
    for name in _SLOW_TO_IMPORT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def spawn(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Child:
    """Runs `[sys.executable, "-m", module, *arguments]` or `[sys.executable, "-c", code]` in the checkout's root.

    Args:
        variables: are added to the environment.
        log: the file for all that it prints.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # both do it: neither has to wait for the other
        return Child(pid)
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(variables)
        os.chdir(record.ROOT)
        status = _run(list(command))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(command: list[str]) -> int:
    _, option, what, *arguments = command
    if option == "-c":
        os.execv(command[0], command)
    sys.argv = [what, *arguments]
    if "" not in sys.path and str(record.ROOT) not in sys.path:
        sys.path.insert(0, str(record.ROOT))
    try:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    return 0
