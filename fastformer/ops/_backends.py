"""The backends of an op: which exist on this machine, which can compute a call, and which one is chosen for it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from fastformer.extension import NOT_BUILT
from fastformer.ops import _extension

# (op_name, **the arguments by the schema's names) -> why a kernel can't compute the call, or None.
WhyUnsupported = Callable[..., str | None]

logger = logging.getLogger("fastformer")

_DESCRIBED = {"reference": "the reference", "torch": "PyTorch's own kernel"}
_told: set[tuple[str, str]] = set()


def is_strict() -> bool:
    """Returns whether an unsupported call is an error (FASTFORMER_STRICT=1) instead of a logged fallback."""
    return os.environ.get("FASTFORMER_STRICT", "0") == "1"


@functools.cache
def triton_kernel(stem: str) -> ModuleType | None:
    """Returns the module `fastformer.kernels.<stem>`, imported on first use; None if it or triton doesn't exist."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(f"fastformer.kernels.{stem}") is None:
        return None
    return importlib.import_module(f"fastformer.kernels.{stem}")


class SharedReason(str):
    """A reason that is the same for all ops why a backend's kernels can't compute a call; it is logged only once."""

    __slots__ = ()


@dataclass(eq=False, kw_only=True)
class Backends:
    """The backends of an op. The arguments are those of `define_op`.

    Attributes:
        name: the schema's name, `torch.ops.fastformer.<name>`.
        arguments: the names of the schema's arguments, in order.
    """

    name: str
    stem: str
    arguments: tuple[str, ...]
    cpp_unsupported: WhyUnsupported | None
    reference_only: Mapping[str, str]
    torch_function: Callable[..., Any] | None
    torch_unsupported: WhyUnsupported | None

    def bind(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the arguments of a call by the schema's names."""
        return dict(zip(self.arguments, args, strict=True))

    def missing_kernel(self, backend: str) -> str | None:
        """Returns why `backend` has no kernel for an op; None if it has one."""
        if backend == "triton":
            kernel = triton_kernel(self.stem)
            if kernel is not None and hasattr(kernel, self.name):
                return None
            if importlib.util.find_spec("triton") is None:
                return "triton is not installed"
            return "there is no Triton kernel for it"
        if backend == "cpp" and _extension.function(self.name) is None:
            if _extension.load() is None:
                return NOT_BUILT
            return "the C++ extension lacks this op"
        if backend == "torch" and self.torch_function is None:
            return "PyTorch has no fused function for it"
        return None

    def why_not(self, backend: str, args: tuple[Any, ...]) -> str | None:
        """Returns why `backend` can't compute a call; None if it can."""
        if (missing := self.missing_kernel(backend)) is not None:
            return missing
        if backend == "triton":
            return cast("str | None", cast(Any, triton_kernel(self.stem)).why_unsupported(self.name, **self.bind(args)))
        unsupported = {"cpp": self.cpp_unsupported, "torch": self.torch_unsupported}.get(backend)
        return None if unsupported is None else unsupported(self.name, **self.bind(args))

    def choose(self, preferred: str, forced: str | None, args: tuple[Any, ...]) -> str:
        """Chooses the backend that runs a call.

        Args:
            preferred: the backend of the device.
            forced: the backend that `use_backend` forces, or None.
            args: the arguments, in the schema's order.

        Raises:
            NotImplementedError: the backend can't compute it, and was forced, or FASTFORMER_STRICT=1 forbids the
                reference.
        """
        backend = preferred if forced is None else forced
        if backend == "reference" or (forced is None and backend in self.reference_only):
            return "reference"
        reason = self.why_not(backend, args)
        if reason is None:
            return backend
        if is_strict() or forced is not None:
            raise NotImplementedError(f"fastformer::{self.name} can't run on {backend}: {reason}")
        instead = "reference" if self.why_not("torch", args) else "torch"
        # If the extension is missing altogether, the loader has logged that once for all ops.
        if (self.name, reason) not in _told and not (backend == "cpp" and _extension.load() is None):
            # An fp16 model on a CPU would otherwise log the same reason for each op.
            is_known = isinstance(reason, SharedReason) and any(other == reason for _, other in _told)
            _told.add((self.name, reason))
            level = logging.DEBUG if is_known else logging.WARNING
            logger.log(level, "%s runs on %s, not on %s: %s", self.name, _DESCRIBED[instead], backend, reason)
        return instead
