"""Starts `python -m MODULE ...` from a process that has already imported the slow packages.

A child is a fork: it begins in the state after `import torch`. If a process has called the CUDA driver, its forks can't
use CUDA, and packages may call the driver when they are imported. So few packages are imported here, and children find
out whether there is a GPU, and list the steps. If forks can't use CUDA, they start Python anew.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.measure import record

Result = TypeVar("Result")

# Not fastformer, which reads some settings from the environment when it is imported: steps change them.
_SLOW_TO_IMPORT = ("numpy", "torch", "triton", "pytest")

_forks = False  # whether children stay forks; set by `import_ahead`


class PlanStep(NamedTuple):
    """One unit of work.

    Attributes:
        key: the name of its line and of its log.
        commands: the commands, which run in parallel, each with its additions to the environment.
        seconds: roughly how long it takes.
        after: the key of a step that has to succeed first; otherwise this one is omitted.
        rivals: the providers that were chosen to be timed beside fastformer and the baseline; empty = all, or none.
    """

    key: str
    commands: Sequence[tuple[list[str], dict[str, str]]]
    seconds: float
    after: str = ""
    rivals: Sequence[str] = ()


class Child:
    """A process that `spawn` started; it leads a process group of its own. pid: its id."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Returns the exit status, or None if the process still runs after the given seconds."""
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


def _in_fork(function: Callable[..., Result], *arguments: object) -> Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def has_device() -> bool:
    """Returns whether PyTorch finds a CUDA device."""
    import torch

    return _in_fork(torch.cuda.is_available)


def listed(out: Path) -> list[PlanStep]:
    """Returns the steps, as listed by a child."""
    return _in_fork(_steps, out)


def _steps(out: Path) -> list[PlanStep]:
    from benchmarks.gpu.steps import steps

    return list(steps(out))


def _can_use_cuda() -> bool:
    import torch

    try:
        return bool(torch.zeros(1, device="cuda").item() == 0)
    except (AssertionError, RuntimeError):
        return False


def import_ahead() -> bool:
    """Imports the packages that steps use, if they are installed. Returns whether children will be forks."""
    global _forks
    for name in _SLOW_TO_IMPORT:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _forks = _in_fork(_can_use_cuda)
    return _forks


def spawn(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Child:
    """Runs `[sys.executable, "-m", module, *arguments]` or `[program, "-c", code]` in the checkout's root.

    Args:
        variables: additions to the environment.
        log: the file for its output.
    """

    def work() -> int:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(variables)
        return _run(list(command))

    pid = forked(work, log)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both processes do this, so that neither has to wait for the other
    return Child(pid)


def forked(work: Callable[[], int], log: Path) -> int:
    """Starts a fork that runs `work` in the checkout's root, with its output in a file.

    Args:
        work: a function that returns the exit status; if it raises, the status is 70, and the log has the traceback.
        log: the file for its output.

    Returns:
        The process id.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 70
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        # The parent may have replaced its streams, as pytest does.
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.chdir(record.ROOT)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(command: list[str]) -> int:
    program, option, what, *arguments = command
    if option == "-c" or not _forks:
        os.execvp(program, command)
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
