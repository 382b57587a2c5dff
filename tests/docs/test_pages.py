"""The documentation's examples run, in a folder with small models and without a network."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from fastformer.training import TrainConfig
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, commands, examples, own_commands
from tests.docs.workshop import workshop

README = ROOT / "README.md"
# Blocks that aren't run: output, diagrams, files.
SHOWN = {"", "text", "yaml", "json", "toml", "nginx", "dockerfile", "ini", "cpp", "html", "http"}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_runs_or_says_why_not(page: Path) -> None:
    """No test runs blocks in other languages, which would go unnoticed."""
    for head, text in blocks(page):
        if head.startswith("{code-block}") and head.split()[1] in ("python", "console"):
            assert ":class: no-test" in text, f"{page}: {text}"
        elif not head.startswith("{"):
            assert head in SHOWN | {"python", "console"}, f"{page}: {head}"
            assert head != "console" or commands(text), f"{page}: no line begins with '$ ' in {text}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_a_command_line_is_understood(page: Path) -> None:
    """This includes blocks that don't run: their flags exist, and their settings are consistent."""
    for head, text in blocks(page):
        if head and "console" not in head:
            continue
        for name, *words in own_commands(text):
            assert name in COMMANDS, f"{page}: {name}"
            if name == "doctor":
                continue
            values = _parsing.parse(importlib.import_module(f"fastformer.commands.{name}"), name, words)
            if name == "train":
                TrainConfig.from_dict({k: v for k, v in values.items() if k not in ("run", "config", "resume")})


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files are tested; Sphinx checks anchors. (GitHub shows these pages as well.)"""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            path = page.parent / target.partition("#")[0]
            made = "generated" in path.parts or path.exists()
            if not made and target.startswith("fastformer/"):
                pytest.skip("the sources are not here")
            assert made, f"{page}: {target}"


def test_pages_are_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    for page in PAGES:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 250, page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks and console blocks of a page run, in order."""
    found = list(examples(page))
    if not found:
        return
    monkeypatch.chdir(workshop(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(os.getcwd())  # as `python file.py` does
    for example in found:
        example.evaluate()
