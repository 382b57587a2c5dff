"""Runs products of the engine for another instruction set in a subprocess."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

_LOAD = """
import importlib.machinery, importlib.util, sys
import numpy as np
name, module_path, cases, results = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader(name, module_path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
loader.exec_module(module)
"""


def started(isa: str, code: str, settings: dict[str, str], *files: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has loaded the module for an instruction set.

    Skips the test if that module is missing.
    """
    if isa == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512 on this CPU")
    spec = importlib.util.find_spec(f"fastformer._engine_{isa}")
    if spec is None or spec.origin is None:
        pytest.skip(f"fastformer._engine_{isa} is not built")
    command = [sys.executable, "-c", _LOAD + code, f"_engine_{isa}", spec.origin, *files]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | settings
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def products_of(
    isa: str, code: str, settings: dict[str, str], cases: dict[str, np.ndarray], folder: Path
) -> dict[str, np.ndarray]:
    """Returns the arrays that the code saves: it reads the file `cases` and writes `results`."""
    np.savez(folder / "cases.npz", **cases)
    proc = started(isa, code, settings, str(folder / "cases.npz"), str(folder / "results.npz"))
    assert proc.returncode == 0, proc.stderr
    return dict(np.load(folder / "results.npz"))
