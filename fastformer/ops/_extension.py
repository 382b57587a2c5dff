"""Finds and loads the versions of the C++ libraries that fit this CPU, this PyTorch and this Python.

- `_ops_<isa>`: the ops, one library per instruction set. It calls only PyTorch's stable C functions: it works with
  every PyTorch from 2.11 on, and doesn't depend on Python.
- `_engine_<isa>`: the decoding engine, searches and encoders, one library per instruction set. It doesn't depend on
  PyTorch, and works with every Python.
- `_host_torch<version>`: the code that reads PyTorch's own objects. It is built for one PyTorch and one Python, and is
  optional.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from fastformer import extension
from fastformer.extension import NOT_BUILT, instruction_sets, warn_failure
from fastformer.extension import host as _host

logger = logging.getLogger("fastformer")

# The bytes that the engine's packed copy takes for each number of a matrix, by its precision. In int4, 32 numbers share
# a scale.
PACKED_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5625}


@cache
def load() -> str | None:
    """Loads the ops that fit this CPU. Returns their instruction set ("avx512", "avx2"), or None without any.

    If a library can't be loaded (it was built for another torch, say), a warning is logged, and the ops run in plain
    PyTorch. With FASTFORMER_STRICT=1 missing kernels are errors.
    """
    isa = instruction_set()
    if isa is None:
        logger.warning(
            "no C++ extension for this CPU (%s): the ops run on plain PyTorch. See `fastformer doctor`.",
            torch.backends.cpu.get_cpu_capability(),
        )
    return isa


@cache
def instruction_set() -> str | None:
    """Returns the instruction set of the ops that fit this CPU and load; None without any, and without a warning."""
    _host()
    return next((isa for isa in instruction_sets() if _has_loaded(f"_ops_{isa}")), None)


def _has_loaded(name: str) -> bool:
    """Loads `fastformer/<name>.so`, whose ops register themselves; logs a warning if that fails."""
    spec = importlib.util.find_spec(f"fastformer.{name}")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as failure:
        warn_failure(name, failure)
        return False
    return True


@cache
def _engine() -> ModuleType | None:
    """Returns the library of the engine, which reads tensors from now on; see `extension.engine`."""
    _host()
    engine = extension.engine()
    if engine is not None and hasattr(engine, "read_torch"):
        engine.read_torch(engine)
    return engine


@cache
def host_function(name: str) -> Callable[..., Any] | None:
    """Returns a function that saves time in each call, on a GPU too; None, without a warning, if no library has it."""
    for module in (_host(), _engine()):
        if hasattr(module, name):
            return getattr(module, name)
    return None


@cache
def module() -> ModuleType | None:
    """Returns the engine as a Python module; None, with a warning, if the extension is missing."""
    engine = _engine()
    if engine is None:
        load()  # logs the warning
    return engine


def why_missing(name: str) -> str | None:
    """Returns why the extension lacks a function or class of this name (other than an op); None if it has it."""
    engine = module()
    if engine is None:
        return NOT_BUILT
    if not hasattr(engine, name):
        return "the C++ extension is older than the Python code: run `pip install -e . --no-build-isolation` again"
    return None


@cache
def function(op_name: str) -> Callable[..., Any] | None:
    """Returns `torch.ops.fastformer_cpp.<op_name>`; None if the extension is missing or lacks the op."""
    if load() is None:
        return None
    packet = getattr(torch.ops.fastformer_cpp, op_name, None)
    return None if packet is None else packet.default
