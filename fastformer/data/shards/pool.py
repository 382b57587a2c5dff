"""The processes that prepare data in parallel."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import TypeVar

from fastformer.data.shards.encode import Recipe, encode_block
from fastformer.data.streams import PairBlock, TextBlock
from fastformer.data.tokenizer import Tokenizer
from fastformer.data.tokenizer_files import load_tokenizer

Result = TypeVar("Result")
_AHEAD = 2  # waiting tasks for each process, so that none is idle and memory is bounded
_own: dict[Path, Tokenizer] = {}  # a process reads its tokenizer once


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Runs tasks in several processes, or in this one if there is only one; results come in the order of the tasks."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:  # a forked process would inherit locks held by threads of libraries
            self._pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin)

    def run(self, function: Callable[..., Result], tasks: Iterable[tuple[object, ...]]) -> Iterator[Result]:
        """Yields the result of each task. The arguments of a task are read only when a process becomes free.

        Raises:
            RuntimeError: the system ended a process.
        """
        if self._pool is None:
            yield from (function(*task) for task in tasks)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(self._pool.submit(function, *task))
                if len(waiting) > _AHEAD * self._processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that prepared data was killed, perhaps for lack of memory: give the "
                "command again with fewer --processes to continue"
            ) from error

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def encode_task(block: PairBlock | TextBlock, recipe: Recipe, tokenizer: Path, path: Path, seeds: list[int]) -> None:
    """Runs `encode_block`, with the tokenizer of a folder."""
    if tokenizer not in _own:
        _own[tokenizer] = load_tokenizer(tokenizer)
    encode_block(block, recipe, _own[tokenizer], path, seeds)


def _begin() -> None:
    """Sets up a new process: one thread, no signals of the terminal, and an end together with its parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
