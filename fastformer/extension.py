"""Finds the C++ engine that fits this CPU, and the number of threads that it uses. It needs no PyTorch.

The engine is a library per instruction set, `_engine_<isa>`, which works with every Python. `ops/_extension.py` loads
the other libraries, which belong to a PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("fastformer")

# Best first. The names on the right are values of torch.backends.cpu.get_cpu_capability(), which follows
# ATEN_CPU_CAPABILITY: so the AVX2 library can be tested on a CPU with AVX-512.
_INSTRUCTION_SETS = {"avx512": ("AVX512",), "avx2": ("AVX512", "AVX2")}
# The flags of a CPU that PyTorch asks for.
_FLAGS = {
    "AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "AVX2": {"avx2", "fma"},
}
_CPUS = Path("/proc/cpuinfo")

# pip keeps a wheel that it built, also one without the extension.
INSTALL_AGAIN = (
    "run `pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir .` in the folder of its sources"
)
NOT_BUILT = "the C++ extension is not built for this CPU; `fastformer doctor` says how"
# The reason why an existing library could not be loaded, by its name.
failures: dict[str, str] = {}


def instruction_sets() -> list[str]:
    """Returns the instruction sets that this CPU can run, best first."""
    capability = cpu_capability()
    return [isa for isa, capabilities in _INSTRUCTION_SETS.items() if capability in capabilities]


def cpu_capability() -> str:
    """Returns torch.backends.cpu.get_cpu_capability(), without importing PyTorch if this program hasn't."""
    flags = cpu_flags()
    if "torch" in sys.modules or not flags:
        import torch

        return torch.backends.cpu.get_cpu_capability()
    known = [name for name, needed in _FLAGS.items() if needed <= flags]
    wanted = os.environ.get("ATEN_CPU_CAPABILITY", "").upper()
    return wanted if wanted in known else "DEFAULT" if wanted == "DEFAULT" or not known else known[0]


@cache
def cpu_flags() -> frozenset[str]:
    """Returns the flags of the CPU; empty if the system doesn't list them."""
    try:
        lines = _CPUS.read_text(encoding="utf-8").split("\n")
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@cache
def host() -> ModuleType | None:
    """Loads the library for this PyTorch and Python. It has to come first: the other libraries use its functions."""
    import torch

    version = "_".join(torch.__version__.split(".")[:2])
    return _imported(f"_host_torch{version}")


@cache
def engine() -> ModuleType | None:
    """Returns the best library of the engine that this CPU can run and that can be loaded."""
    # Attention uses AMX by PyTorch's oneDNN; where PyTorch is not installed, it uses AVX-512.
    has_amx = "amx_tile" in cpu_flags() and importlib.util.find_spec("torch") is not None
    if "torch" in sys.modules or not cpu_flags() or has_amx:
        host()
    return next((library for isa in instruction_sets() if (library := _imported(f"_engine_{isa}")) is not None), None)


@cache
def extension_module() -> Any:
    """Returns the engine; raises a RuntimeError if there is none for this CPU."""
    module = engine()
    if module is None:
        raise RuntimeError(NOT_BUILT)
    return module


def _imported(name: str) -> ModuleType | None:
    """Imports the module `fastformer.<name>`; None if it doesn't exist, or with a warning if it doesn't load."""
    if importlib.util.find_spec(f"fastformer.{name}") is None:
        return None
    try:
        return importlib.import_module(f"fastformer.{name}")
    except (ImportError, OSError, RuntimeError) as failure:
        warn_failure(name, failure)
        return None


def warn_failure(name: str, failure: Exception) -> None:
    """Notes that a library doesn't load, and warns."""
    failures[name] = str(failure)
    logger.warning("fastformer.%s does not load and has to be built again for this PyTorch: %s", name, failure)


def num_threads() -> int:
    """Returns the number of threads of a call: PyTorch's, or the number that it would have if it were imported."""
    if "torch" in sys.modules:
        import torch

        return torch.get_num_threads()
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() and int(wanted) else _num_cores()


@cache
def _num_cores() -> int:
    """Returns the number of cores that this process may use; two threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}
    files = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    try:
        return len({file.read_text(encoding="utf-8") for file in files})
    except OSError:
        return len(usable)
