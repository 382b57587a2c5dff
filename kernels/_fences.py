"""Adds the proxy fences that Triton before 3.7.1 omits.

On sm_90, cp.async writes a tile to shared memory through the generic proxy, and wgmma reads it through the async proxy.
PTX requires a `fence.proxy.async` in between; otherwise the product may read stale values. Triton 3.6.0 emits no fence
(fixed by its pull request 9610, in 3.7.1). So each kernel that is compiled inside `inserted` gets a fence after each
wait for copies: it makes a thread's own copies visible to the async proxy, and the barrier that follows extends this
to all threads.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import triton
from triton import knobs

FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(
    r"^([ \t]*)cp\.async\.wait_(?:group[ \t]+\d+|all)[ \t]*;.*$(?!\n[ \t]*fence\.proxy\.async)", re.MULTILINE
)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


# Whether this Triton omits fences.
IS_OLD = _version(triton.__version__) < (3, 7, 1)
_lock = threading.RLock()  # Triton's hook is global


def fenced(ptx: str) -> str:
    """Returns the PTX with a fence after each wait for copies; unchanged if no product reads shared memory itself."""
    return _WAIT.sub(rf"\g<0>\n\1{FENCE}", ptx) if "wgmma.mma_async" in ptx else ptx


@contextlib.contextmanager
def inserted(kernel: Any) -> Iterator[dict[str, str]]:
    """Adds the fences to every kernel that is compiled inside the context, under each Triton.

    Args:
        kernel: a result of `triton.jit`; the interpreter's kernels need no fences.

    Yields:
        Options for the compiler. They only change the key in Triton's cache on disk, which doesn't include hooks, so
        that no binary without fences is found there.
    """
    if not (IS_OLD and isinstance(kernel, triton.runtime.JITFunction)):
        yield {}
        return
    with _lock:
        before = knobs.runtime.add_stages_inspection_hook

        def hook(*arguments: Any) -> Any:
            result = None if before is None else before(*arguments)
            if len(arguments) > 1:  # (backend, stages, options, language, capability)
                stages = arguments[1]
                make_ptx = stages["ptx"]
                stages["ptx"] = lambda source, metadata: fenced(make_ptx(source, metadata))
            return result if result is not None or arguments else ("fences", "fences")

        knobs.runtime.add_stages_inspection_hook = hook
        try:
            yield {"ptx_options": " ".join(filter(None, [knobs.nvidia.ptxas_options, "-v"]))}
        finally:
            knobs.runtime.add_stages_inspection_hook = before
