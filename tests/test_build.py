"""setup.py on a few small sources: headers are precompiled where the compiler can use them, and never needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GXX = shutil.which("g++-12", path="/usr/bin") or shutil.which("g++", path="/usr/bin:/usr/local/bin")
pytestmark = [
    pytest.mark.slow,  # compiles thrice: a result that the compiler can't use must not fail a build
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the sources are not here"),
    pytest.mark.skipif(GXX is None or "clang" in GXX, reason="GCC is not installed"),
]
SOURCES = {
    "common/precompiled.h": "#include <vector>\n",
    "common/gemm.cpp": "#include <vector>\nint size(const std::vector<int>& of) { return of.size(); }\n",  # shared
    "common/thread_team.cpp": "int team() { return 1; }\n",  # for no instruction set
    "common/tensor.cpp": "#include <vector>\nint first(const std::vector<int>& of) { return of[0]; }\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    pytest.importorskip("setuptools", reason="building the package needs setuptools")
    for name, text in SOURCES.items():
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text(text)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "fastformer").mkdir()
    (tmp_path / "fastformer/__init__.py").write_text('__version__ = "1.0"\n')
    return tmp_path


def build(sources: Path, compiler: str) -> tuple[dict[str, int], str]:
    """Builds the library of the ops; returns the bytes of the precompiled header, and the output."""
    proc = subprocess.run(
        [sys.executable, "setup.py", "-v", "build_ext", "--inplace", "--build-temp", "temp"],
        cwd=sources,
        env={**os.environ, "CXX": compiler, "CCACHE_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert proc.returncode == 0, proc.stdout + proc.stderr
    assert (sources / "fastformer/_ops_avx2.so").is_file()
    headers = sorted((sources / "temp").glob("**/*.gch"))
    return {str(path): path.stat().st_size for path in headers}, proc.stdout


def test_headers_are_compiled_once_and_again_when_they_change(sources: Path) -> None:
    headers, output = build(sources, f"{GXX} -H")  # which tells of each header
    assert headers and all(headers.values())
    assert all(f"! {path}" in output for path in headers), "it is used"
    objects = [*(sources / "temp").glob("*/*/gemm.o"), *(sources / "temp").glob("*/*/tensor.o")]
    assert len(objects) == 4, "for each of two instruction sets"
    before = [path.stat().st_mtime_ns for path in objects]
    build(sources, f"{GXX} -H")
    assert [path.stat().st_mtime_ns for path in objects] == before, "nothing has changed"
    time.sleep(0.01)
    (sources / "csrc/common/precompiled.h").write_text("#include <vector>\n#include <string>\n")
    build(sources, f"{GXX} -H")
    assert all(path.stat().st_mtime_ns > was for path, was in zip(objects, before, strict=True))


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param('case "$*" in *c++-header*) exit 1;; esac', id="cannot-make"),
        pytest.param('case "$*" in *invalid-pch*) exit 1;; esac', id="cannot-use"),
    ],
)
def test_a_compiler_without_precompiled_headers_builds(sources: Path, failure: str) -> None:
    compiler = sources / "compiler"
    compiler.write_text(f'#!/bin/sh\n{failure}\nexec {GXX} "$@"\n')
    compiler.chmod(0o755)
    headers, _ = build(sources, str(compiler))
    assert not any(headers.values())


def test_a_cached_compiler_is_left_alone(sources: Path) -> None:
    headers, _ = build(sources, f"env {GXX}")
    assert not headers


def test_a_compiler_that_fails_leaves_the_choice_to_the_user(sources: Path) -> None:
    """No package without the libraries is made in silence, and the message says how to make one."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", "temp"]
    failed = subprocess.run(command, cwd=sources, env={**os.environ, "CXX": "false"}, capture_output=True, text=True)
    assert failed.returncode != 0 and "FASTFORMER_BUILD_CPP=0" in failed.stderr and "Traceback" not in failed.stderr
    environment = {**os.environ, "CXX": "false", "FASTFORMER_BUILD_CPP": "0"}
    assert subprocess.run(command, cwd=sources, env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.10.0+cu128"), ("numpy", "1.26.4"), ("setuptools", "65.5")]
)
def test_a_package_that_is_too_old_is_named(sources: Path, package: str, version: str) -> None:
    """pip's --no-build-isolation doesn't look at versions."""
    code = (
        "import importlib.metadata as found, runpy, sys\n"
        "version = found.version\n"
        f"found.version = lambda name: '{version}' if name == '{package}' else version(name)\n"
        "sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py')"
    )
    failed = subprocess.run([sys.executable, "-c", code], cwd=sources, capture_output=True, text=True)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert package in failed.stderr and version in failed.stderr
