"""Tests the package as a whole: the names at its root, and the contents of an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastformer

ROOT = Path(__file__).parent.parent


def test_the_root_offers_its_names_lazily() -> None:
    code = (
        "import sys, fastformer\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'GPT', 'Transformer', 'Translator', 'generate', 'nn', 'functional'} <= set(dir(fastformer))"
    )
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert proc.returncode == 0, proc.stderr


def test_every_exported_name_is_there() -> None:
    assert fastformer.GPT is fastformer.models.GPT and fastformer.generate is fastformer.generation.generate
    assert all(getattr(fastformer, name) is not None for name in fastformer.__all__)
    with pytest.raises(AttributeError, match="'Tranformer'"):
        fastformer.Tranformer  # noqa: B018


def test_an_installation_is_typed(tmp_path) -> None:
    pytest.importorskip("setuptools", reason="building the package needs setuptools")
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not here")
    commands = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    proc = subprocess.run(
        [sys.executable, "setup.py", "-q", *commands],
        cwd=ROOT,
        env={**os.environ, "FASTFORMER_BUILD_CPP": "0"},
        capture_output=True,
        text=True,
    )
    assert proc.returncode == 0, proc.stderr
    assert (tmp_path / "lib" / "fastformer" / "py.typed").is_file()
    assert (tmp_path / "lib" / "fastformer" / "commands" / "train.py").is_file()
