"""Records which Triton kernels a call launches: a proof that it used some kernel."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """Collects the names of kernels launched in the block.

    The decisions of ops are forgotten first, because a prepared plan launches its kernels directly.
    """
    from fastformer.kernels import _launch, _plans

    names: set[str] = set()
    launch = _launch.launch

    def noted(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> object:
        names.add(kernel.fn.__name__)
        return launch(kernel, grid, *args, **options)

    _plans.forget()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("fastformer.kernels.") and getattr(module, "launch", None) is launch:
                stack.enter_context(mock.patch.object(module, "launch", noted))
        yield names
