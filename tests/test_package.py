"""Tests the package as a whole: the names at its root, and the contents of an installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.specifiers import SpecifierSet

import fastformer
from tests.docs.workshop import workshop
from tests.frozen.names import public_names

ROOT = Path(__file__).parent.parent


def test_names_and_flags_need_no_pytorch() -> None:
    code = (
        "import sys, fastformer\n"
        "from fastformer.cli import main\n"
        "for command in ('translate', 'generate', 'chat', 'embed', 'report', 'score', 'serve', 'warmup'):\n"
        "    assert main([command, '--nonsense']) == 2\n"  # refused at once
        "assert 'torch' not in sys.modules\n"
        "assert {'GPT', 'Transformer', 'Translator', 'generate', 'nn', 'functional'} <= set(dir(fastformer))"
    )
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert proc.returncode == 0, proc.stderr


# Each takes a tenth of a second or more, and no text needs it before a model of its own does.
HEAVY = {
    "torch._dynamo", "torch._inductor", "triton", "sympy", "transformers", "sentencepiece", "matplotlib", "sacrebleu",
    "onnxruntime", "fastapi", "jinja2", "huggingface_hub", "pyarrow", "tensorboard", "regex", "av",
}  # fmt: skip


def test_a_first_translation_imports_what_it_needs_and_no_more() -> None:
    code = (
        "import atexit, gc, sys\n"
        "from fastformer.cli import main\n"
        "atexit.register(lambda: print('not searched at the end:', gc.get_freeze_count() > 9999))\n"
        "assert main() == 0\n"
        "import fastformer\n"
        "fastformer.Encoder, fastformer.CrossEncoder, fastformer.Chat, fastformer.WhisperModel, fastformer.nn\n"
        "print(*sys.modules)"
    )
    command = ["translate", str(ROOT / "tests/frozen/run"), "forty-two", "--max_new_tokens=3"]
    proc = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert proc.returncode == 0, proc.stderr
    assert not HEAVY & set(proc.stdout.split())
    assert "not searched at the end: True" in proc.stdout  # the end would take a quarter of a second


def test_every_exported_name_is_there() -> None:
    assert fastformer.GPT is fastformer.models.GPT and fastformer.generate is fastformer.generation.generate
    assert all(getattr(fastformer, name) is not None for name in fastformer.__all__)
    with pytest.raises(AttributeError, match="'Tranformer'"):
        fastformer.Tranformer  # noqa: B018


@pytest.mark.parametrize("package", ["fastformer", "fastformer.generation"])
def test_a_star_imports_what_is_public(package) -> None:
    found: dict[str, object] = {}
    exec(f"from {package} import *", found)
    assert {*public_names(package)} - {"__version__"} <= {*found}
    assert {*found} - {"__builtins__"} <= {*public_names(package)}


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


@pytest.mark.parametrize(
    ("tag", "heading", "error"),
    [
        ("v1.2.3", "1.2.3 - 2026-12-01", ""),
        ("1.2.3", "1.2.3", "v1.2.3"),
        ("v1.2.4", "1.2.4", "v1.2.3"),
        ("v1.2.3", "1.2.3 (unreleased)", "the date"),
        ("v1.2.3", "1.2.30", "a heading"),
    ],
)
def test_a_release_has_the_notes_of_its_tag(tag: str, heading: str, error: str, tmp_path: Path) -> None:
    script = ROOT / ".github/release_notes.py"
    if not script.exists():
        pytest.skip("the sources are not here")
    files = {
        "fastformer/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
        "CHANGELOG.md": f"# Changelog\n\n## {heading}\n\n### Speed\n\n- More.\n\n## 1.2.2\n\n- Less.\n",
        ".github/release_notes.py": script.read_text(encoding="utf-8"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = [sys.executable, str(tmp_path / ".github/release_notes.py"), tag]
    proc = subprocess.run(words, capture_output=True, text=True)
    assert proc.stdout == ("" if error else "### Speed\n\n- More.\n")
    assert bool(proc.returncode) == bool(error) and error in proc.stderr and "Traceback" not in proc.stderr


def test_the_next_release_is_the_first_in_the_changelog() -> None:
    if not (ROOT / "CITATION.cff").exists():
        pytest.skip("the sources are not here")
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", fastformer.__version__)
    assert f"version: {fastformer.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_conda_package_needs_what_pip_installs() -> None:
    recipe = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == fastformer.__version__
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(rf"^{name} = \[(.*)\]", text, re.MULTILINE)[1] for name in ("dependencies", "train")]
    needed = re.findall(r'"([\w-]+)(?:\[.*?\])?(>=[\d.]+)', "".join(lists))
    assert len(needed) >= 7
    run = recipe["requirements"]["run"]
    assert {f"{'pytorch' if name == 'torch' else name} {least}" for name, least in needed} <= {*run}


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.15.3", "5.16.0", "5.24.0"])
def test_the_conda_package_refuses_the_transformers_that_pip_refuses(version: str) -> None:
    recipe = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text(encoding="utf-8"))
    (constraint,) = recipe["requirements"]["run_constraints"]
    name, _, ranges = constraint.partition(" ")
    pip = re.search(r'^hf = \["transformers(.*)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert name == "transformers"
    is_accepted = version in ("5.16.0", "5.24.0")
    assert (version in SpecifierSet(ranges)) == (version in SpecifierSet(pip)) == is_accepted


# README's Python runs; `tests/docs/test_pages.py` tests its commands and its links.


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    (match,) = [block for language, block in BLOCKS if language == "python" and text in block]
    return match


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    """Nothing is downloaded: small models with random weights are in folders of the names."""
    monkeypatch.chdir(workshop(tmp_path))


def test_a_model_that_exists_is_accelerated(here, capsys) -> None:
    exec(block_with("accelerate(model)"), {"batch": {"input_ids": torch.randint(5, 20, (2, 7))}})
    assert "2 BertLayer" in capsys.readouterr().out


def test_a_marian_translates_and_others_embed_and_transcribe(here, capsys) -> None:
    names: dict[str, Any] = {}
    exec(block_with("Translator"), names)
    whole, pieces = capsys.readouterr().out.split("\n")
    assert whole and pieces == whole, "what is streamed is the whole translation"
    assert len(names["vectors"]) == 2 and names["info"].duration > 0
