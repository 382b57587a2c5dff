"""The table of prefixes compares the tokens and everything before them, even if hashes are equal."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
