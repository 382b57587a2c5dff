"""Records which Triton kernels a call launches: a proof that kernels which are off by default were used."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """Collects the names of kernels launched in the block; those with a fixed grid end in "[persistent]".

    The decisions of ops are forgotten first, because a prepared plan launches its kernels directly.
    """
    from fastformer.kernels import _launch, _plans

    names: set[str] = set()
    launch = _launch.launch

    def noted(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> object:
        names.add(kernel.fn.__name__ + ("[persistent]" if options.get("PERSISTENT") else ""))
        return launch(kernel, grid, *args, **options)

    _plans.forget()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("fastformer.kernels.") and getattr(module, "launch", None) is launch:
                stack.enter_context(mock.patch.object(module, "launch", noted))
        yield names
