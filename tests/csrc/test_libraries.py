"""The engine's library needs nothing of PyTorch, the ops only its C functions, and none a second OpenMP."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NM, READELF = shutil.which("nm"), shutil.which("readelf")
pytestmark = pytest.mark.skipif(NM is None or READELF is None, reason="binutils are not installed")


def library(name: str) -> Path:
    spec = importlib.util.find_spec(f"fastformer.{name}")
    if spec is None or spec.origin is None:
        pytest.skip("the C++ libraries are not built for this CPU")
    return Path(spec.origin)


def undefined(path: Path) -> set[str]:
    """Returns the symbols that a library imports."""
    lines = subprocess.run([str(NM), "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in lines.stdout.splitlines()}


def needed(path: Path) -> set[str]:
    lines = subprocess.run([str(READELF), "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.partition("[")[2].partition("]")[0] for line in lines.splitlines() if "(NEEDED)" in line}


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_the_engine_serves_every_pytorch(isa: str) -> None:
    path = library(f"_engine_{isa}")
    assert path.name.endswith(".abi3.so")
    assert not [
        name for name in undefined(path) if any(part in name for part in ("c10", "2at", "torch", "omp_", "GOMP"))
    ]
    assert not [name for name in needed(path) if name.startswith(("libtorch", "libc10", "libgomp", "libpython"))]
    assert "libfastformer_common.so" in needed(path)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_the_ops_use_only_c_functions_of_pytorch(isa: str) -> None:
    path = library(f"_ops_{isa}")
    symbols = undefined(path)
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in symbols)
    assert not [name for name in symbols if name.startswith(("_ZN3c10", "_ZNK3c10", "_ZN2at", "_ZNK2at", "Py", "_Py"))]
    assert "libfastformer_common.so" in needed(path)  # one team of threads in a process


def test_process_wide_state_needs_only_the_c_libraries() -> None:
    path = library("libfastformer_common")
    assert not [
        name
        for name in needed(path)
        if not name.startswith(("libstdc++", "libm.", "libgcc", "libc.", "ld-", "libdl", "libpthread"))
    ]


# The table of prefixes compares the tokens and everything before them, even if hashes are equal.


ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the C++ sources aren't here")
def test_the_table_equals_a_plain_one_for_any_hash(tmp_path: Path) -> None:
    program, sources = tmp_path / "prefix_table", ["tests/csrc/prefix_table.cpp", "csrc/engine/prefix_table.cpp"]
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++20", "-Icsrc", *sources, "-o", str(program)], cwd=ROOT, check=True)
    proc = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert proc.returncode == 0, proc.stdout
