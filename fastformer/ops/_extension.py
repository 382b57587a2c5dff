"""Finds the C++ extension: one module per instruction set, the best one that this CPU can run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger("fastformer")

# Best first. The names on the right are what torch.backends.cpu.get_cpu_capability() answers; it honours
# ATEN_CPU_CAPABILITY, so that the lesser module can be tested on a better CPU.
_MODULES = {"avx512": ("AVX512",), "avx2": ("AVX512", "AVX2")}

NOT_BUILT = "the C++ extension is not built for this CPU; `fastformer doctor` says how"
# Why a module that is there could not be loaded, by its instruction set.
failures: dict[str, str] = {}


@cache
def load() -> str | None:
    """Loads the extension that fits this CPU. Returns its instruction set ("avx512", "avx2"), or None without one.

    A module that does not load (built against another torch, say) is passed over with a warning: the ops run on plain
    PyTorch then. FASTFORMER_STRICT=1 makes the missing kernels errors.
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
    """That of the module which fits this CPU and loads; None without one, and then no warning is logged."""
    capability = torch.backends.cpu.get_cpu_capability()
    for isa, capabilities in _MODULES.items():
        name = f"fastformer._C_{isa}"
        if capability not in capabilities or importlib.util.find_spec(name) is None:
            continue
        try:
            return str(importlib.import_module(name).instruction_set)
        except (ImportError, OSError, RuntimeError) as failure:
            failures[isa] = str(failure)
            logger.warning("%s does not load and has to be built again for this PyTorch: %s", name, failure)
    return None


@cache
def host_function(name: str) -> Callable[..., Any] | None:
    """A function that saves time in every call, on a GPU too; None, without a warning, where the module lacks it."""
    isa = instruction_set()
    return None if isa is None else getattr(importlib.import_module(f"fastformer._C_{isa}"), name, None)


@cache
def module() -> ModuleType | None:
    """The extension as a Python module, for what isn't an op; None where there is none."""
    isa = load()
    return None if isa is None else importlib.import_module(f"fastformer._C_{isa}")


def why_missing(name: str) -> str | None:
    """Why the extension has no function or class of this name that isn't an op; None where it has."""
    found = module()
    if found is None:
        return NOT_BUILT
    if not hasattr(found, name):
        return "the C++ extension is older than it: run `pip install -e . --no-build-isolation` again"
    return None


@cache
def function(op_name: str) -> Callable[..., Any] | None:
    """`torch.ops.fastformer_cpp.<op_name>`, or None where the extension is missing or lacks the op."""
    if load() is None:
        return None
    packet = getattr(torch.ops.fastformer_cpp, op_name, None)
    return None if packet is None else packet.default
