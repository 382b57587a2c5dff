"""A mode that fails if an operation would make the host wait for a GPU, for tests on CPU tensors.

    with NoSync():
        step()

On a GPU these operations wait until all earlier work is done; on a CPU they cost nothing, so only a test of this kind
notices them. Forbidden are reading a value (`.item()`, `bool(t)`, `.tolist()` of a computed tensor, ...), results whose
size depends on values (`nonzero`, boolean indexing, `unique`, ...), and copies to or from the host's memory. A CUDA
graph can't contain them either.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The package has functions with these names.
linear_cross_entropy_module = importlib.import_module("fastformer.ops.linear_cross_entropy")
linear_topk_module = importlib.import_module("fastformer.ops.linear_topk")

_ATEN = torch.ops.aten
READS = {
    _ATEN._local_scalar_dense: "it reads a value",
    _ATEN.item: "it reads a value",
    _ATEN.is_nonzero: "it reads a value",
    _ATEN.equal: "it reads a value",
    _ATEN.allclose: "it reads a value",
    _ATEN.nonzero: "the size of its result depends on values",
    _ATEN.masked_select: "the size of its result depends on values",
    _ATEN.bincount: "the size of its result depends on values",
    _ATEN._unique2: "the size of its result depends on values",
    _ATEN.unique_consecutive: "the size of its result depends on values",
    _ATEN.unique_dim: "the size of its result depends on values",
}
INDEXING = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)
# Functions that read values only if these are on a CPU: each checks the device first.
CHECKS_OF_CPU_VALUES = {"check_range", "check_ids", "trailing_padding", "_check_lengths", "_check_sequences"}


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Makes PyTorch raise an error at each operation that waits for a real GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class HostSync(AssertionError):
    """An operation that would make the host wait for a GPU."""


class NoSync(TorchDispatchMode):
    """Raises `HostSync` at an operation for which the host would wait if its tensors were on a GPU.

    Args:
        allowed: the names of more functions that may do anything.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        super().__init__()
        self.allowed = CHECKS_OF_CPU_VALUES | set(allowed)
        self.calls = 0  # the number of operations so far
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> NoSync:
        # These methods read memory without the dispatcher.
        for name in ("tolist", "numpy", "cpu", "cuda"):
            self._patch.setattr(Tensor, name, self._guarded(name, getattr(Tensor, name)))
        self._patch.setattr(linear_topk_module, "reading_is_free", lambda x: False)
        self._patch.setattr(linear_cross_entropy_module, "is_readable", lambda x: False)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patch.undo()

    def _guarded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self._forbid(f"Tensor.{name}", "it copies to the host")
            return original(tensor, *args, **options)

        return method

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        options = kwargs or {}
        if func.overloadpacket in READS:
            self._forbid(str(func), READS[func.overloadpacket])
        if func.overloadpacket in INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self._forbid(str(func), "a boolean index has as many elements as are true")
        if func is _ATEN.repeat_interleave.Tensor and options.get("output_size") is None:
            self._forbid(str(func), "without output_size its size depends on values")
        if func is _ATEN.lift_fresh.default:  # the last operation of torch.tensor([...])
            self._forbid(str(func), "it copies a value from the host's memory")
        return func(*args, **options)

    def _forbid(self, what: str, why: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in self.allowed:
                return
            frame = frame.f_back  # type: ignore[assignment]
        raise HostSync(f"{what}: {why}, for which the host would wait for a GPU")
