"""Work that is captured once and replayed with a single launch: CUDA graphs, and their substitute on a CPU.

A captured function has no arguments and no result. It reads tensors at fixed addresses, which the caller fills before a
replay, and writes its results into such tensors. Python runs only once, while capturing, and so do its decisions; a
read of a value on the host is an error there. Random numbers come from the device's default generator, whose offset
PyTorch advances with every replay, by as much as an uncaptured call would have: a replay draws what a call would draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Repeats the work on the present contents of its tensors."""


class CaptureError(RuntimeError):
    """The work can't be captured; the message says why."""


# The graph whose capture broke, and the reason. PyTorch's allocator still asks it for its memory, so it has to stay
# alive; and this process begins no other capture.
_broken: list[tuple[torch.cuda.CUDAGraph, str]] = []


class _Call:
    """A substitute for a graph on a CPU: the function itself."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Graphs:
    """Captures functions on one device.

    All graphs share one pool of memory, so that many of them need little more than the largest. So no graph may rely
    on values that another one, or its own last replay, has left there: lasting values belong in tensors that were
    allocated before the capture. The graphs are replayed one after another, on one stream.

    On a CPU a graph is a plain call of its function, so that the code around the graphs can be tested without a GPU.

    Args:
        device: "cuda", or "cpu" for plain calls.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._on_cuda = self.device.type == "cuda"
        if self._on_cuda:
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Calls the function, uncaptured, on the stream on which it will be captured.

        Call this once before `capture`: the objects that the first call makes (compiled kernels, libraries' handles and
        workspaces, an optimizer's state) can't be made while capturing.
        """
        if not self._on_cuda:
            function()
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def capture(self, function: Callable[[], None]) -> Graph:
        """Captures the function as a graph. Nothing is computed before the first replay.

        Raises:
            CaptureError: the function raised, or it did something that a graph can't hold, such as reading a value on
                the host. The latter breaks the capture, which PyTorch still considers active: from then on this process
                captures nothing.
        """
        if not self._on_cuda:
            return _Call(function)
        if _broken:
            raise CaptureError(f"an earlier capture of this process broke: {_broken[0][1]}")
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        raised: Exception | None = None
        try:
            with (
                torch.cuda.device(self.device),
                # Other threads (a progress bar's, a loader's) may do things that the capture forbids this thread.
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    function()
                except Exception as error:
                    raised = error
                    raise
        except Exception as error:
            cause = raised or error
            reason = f"{type(cause).__name__}: {cause}"
            torch.cuda.set_stream(current)
            if error is not raised:  # the end of a broken capture raises, too, and leaves its stream current
                _broken.append((graph, reason))
                self._free_generator()
            raise CaptureError(reason) from cause
        return graph

    def _free_generator(self) -> None:
        """Replaces the generator's state by a copy; the state itself would draw nothing until the capture ends."""
        generator = torch.cuda.default_generators[self._stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
