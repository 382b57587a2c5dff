"""Finds the C++ extension: one module per instruction set, the best one that this CPU can run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("fastformer")

# Best first. The names on the right are what torch.backends.cpu.get_cpu_capability() answers; it honours
# ATEN_CPU_CAPABILITY, so that the lesser module can be tested on a better CPU.
_MODULES = {"avx512": ("AVX512",), "avx2": ("AVX512", "AVX2")}


@cache
def load() -> str | None:
    """Loads the extension that fits this CPU. Returns its instruction set ("avx512", "avx2"), or None without one."""
    capability = torch.backends.cpu.get_cpu_capability()
    for isa, capabilities in _MODULES.items():
        if capability in capabilities and importlib.util.find_spec(f"fastformer._C_{isa}") is not None:
            module = importlib.import_module(f"fastformer._C_{isa}")
            return str(module.instruction_set)
    logger.warning(
        "no C++ extension for this CPU (%s): the ops run on plain PyTorch. See `fastformer doctor`.", capability
    )
    return None


@cache
def function(op_name: str) -> Callable[..., Any] | None:
    """`torch.ops.fastformer_cpp.<op_name>`, or None where the extension is missing or lacks the op."""
    if load() is None:
        return None
    packet = getattr(torch.ops.fastformer_cpp, op_name, None)
    return None if packet is None else packet.default
