"""How an op meets its backends: one schema, one reference, and a dispatcher that picks what runs.

PyTorch's own dispatcher is the registry. The schema lives in Python, so that every op exists without the C++ extension;
the reference serves every device that has no kernel; on CUDA and CPU a small implementation asks the kernel whether it
can take the call and, if not, runs the reference and says so once with the kernel's own reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("fastformer")

LIBRARY = torch.library.Library("fastformer", "DEF")
BACKENDS = ("triton", "cpp", "reference")

_forced_backend: ContextVar[str | None] = ContextVar("fastformer_backend", default=None)
_told: set[tuple[str, str]] = set()


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Runs every op of the block on one backend, whatever the device suggests. For tests and benchmarks.

    Args:
        name: "triton" (on CPU tensors: through Triton's interpreter), "cpp", "reference", or None for the usual choice.

    Raises:
        ValueError: another name.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"expected a backend out of {BACKENDS} or None, got {name!r}")
    token = _forced_backend.set(name)
    try:
        yield
    finally:
        _forced_backend.reset(token)


def is_strict() -> bool:
    """Whether a call that the fast path can't take is an error (FASTFORMER_STRICT=1) instead of a logged fallback."""
    return os.environ.get("FASTFORMER_STRICT", "0") == "1"


@functools.cache
def triton_kernel(stem: str) -> ModuleType | None:
    """The module `fastformer.kernels.<stem>`, or None where there is none or no triton. Imported on first use only."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(f"fastformer.kernels.{stem}") is None:
        return None
    return importlib.import_module(f"fastformer.kernels.{stem}")


def cpp_kernel(op_name: str) -> Callable[..., Any] | None:
    """The C++ function of an op (`torch.ops.fastformer_cpp.<op_name>`), or None where it was not built."""
    from fastformer.ops import _extension

    return _extension.function(op_name)


def why_not(
    op_name: str, stem: str, backend: str, cpp_unsupported: Callable[..., str | None] | None, args: tuple
) -> str | None:
    """Why `backend` can't take this call, in words; None if it can."""
    if backend == "triton":
        kernel = triton_kernel(stem)
        return "there is no Triton kernel here" if kernel is None else kernel.why_unsupported(op_name, *args)
    if backend == "cpp":
        if cpp_kernel(op_name) is None:
            return "the C++ extension is not built or lacks this op"
        return None if cpp_unsupported is None else cpp_unsupported(op_name, *args)
    return None


def define_op(
    schema: str,
    reference: Callable[..., Any],
    *,
    stem: str,
    fake: Callable[..., Any],
    cpp_unsupported: Callable[..., str | None] | None = None,
) -> Any:
    """Defines `fastformer::<name>` with its reference, its fake and the choice of a backend on CUDA and CPU.

    Args:
        schema: "name(Tensor x, ...) -> ...". The Triton launcher `fastformer.kernels.<stem>.<name>` and the C++
            function `torch.ops.fastformer_cpp.<name>` take the same positional arguments.
        reference: plain PyTorch, right in every dtype up to fp64.
        stem: the file name that the op has in kernels/, csrc/, ops/, tests/ops/ and benchmarks/.
        fake: shapes, dtypes and strides of the outputs; reads no data.
        cpp_unsupported: (op_name, *args) -> why the C++ function can't take the call, or None.

    Returns:
        The overload to call, `torch.ops.fastformer.<name>.default`.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)

    def plain(*args: Any) -> Any:
        # The public function has cast already; inside, autocast would take the fp32 statistics down again.
        with torch._C._DisableAutocast():
            return reference(*args)

    LIBRARY.impl(name, plain, "CompositeExplicitAutograd")

    def run(preferred: str, args: tuple) -> Any:
        forced = _forced_backend.get()
        backend = forced or preferred
        if backend == "reference":
            return plain(*args)
        if forced is None and not _has_kernel(name, stem, backend):
            return plain(*args)
        reason = why_not(name, stem, backend, cpp_unsupported, args)
        if reason is not None:
            if is_strict() or forced is not None:
                raise NotImplementedError(f"fastformer::{name} can't run on {backend}: {reason}")
            if (name, reason) not in _told:
                _told.add((name, reason))
                logger.warning("%s runs on the reference, not on %s: %s", name, backend, reason)
            return plain(*args)
        if backend == "triton":
            kernel = triton_kernel(stem)
            with _device_guard(args):
                return getattr(kernel, name)(*args)
        return cpp_kernel(name)(*args)  # type: ignore[misc]

    LIBRARY.impl(name, lambda *args: run("triton", args), "CUDA")
    LIBRARY.impl(name, lambda *args: run("cpp", args), "CPU")
    torch.library.register_fake(f"fastformer::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastformer, name).default


def register_autograd(name: str, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
    """Gives `fastformer::<name>` its gradient. `backward` calls the `_bwd` op, whose own gradient is an error."""
    torch.library.register_autograd(f"fastformer::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def forbid_double_backward(name: str) -> None:
    """Makes differentiating `fastformer::<name>` (a backward op) an error that says so, instead of a silent zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastformer::{name} has no double backward: no gradients of gradients")

    torch.library.register_autograd(f"fastformer::{name}", backward, lib=LIBRARY)


def _has_kernel(name: str, stem: str, backend: str) -> bool:
    if backend == "triton":
        kernel = triton_kernel(stem)
        return kernel is not None and hasattr(kernel, name)
    return cpp_kernel(name) is not None


def _device_guard(args: tuple) -> contextlib.AbstractContextManager:
    # Triton launches on the current device, which need not be the tensors'.
    device = next(a.device for a in args if isinstance(a, Tensor))
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# The one autocast table. "cast": matrix products run in the autocast dtype (their softmax and loss stay fp32 inside).
# "keep": inputs stay as they come; statistics are fp32 inside whatever the dtype.
AUTOCAST = {
    "attention": "cast",
    "varlen_attention": "cast",
    "attention_weights": "cast",
    "decode_attention": "cast",
    "feed_forward": "cast",
    "linear_cross_entropy": "cast",
    "add_layer_norm": "keep",
    "embedding": "keep",
    "rotary": "keep",
}


def autocast(op: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The op's floating-point inputs as autocast wants them: cast if it is on and AUTOCAST says so, else unchanged.

    fp64 is never cast, as in PyTorch. Integer and boolean tensors and None pass through.
    """
    if AUTOCAST[op] == "keep":
        return tensors
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )
