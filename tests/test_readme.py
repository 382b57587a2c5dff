"""README's commands are ones that exist, and its Python runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from fastformer.training import TrainConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [
    line
    for language, block in BLOCKS
    if not language
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("fastformer ")
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_understood(line: str) -> None:
    _, name, *words = shlex.split(re.sub(r"\s[<>]\s*\S+", "", line), comments=True)
    assert name in COMMANDS
    if name == "doctor":
        return
    values = _parsing.parse(importlib.import_module(f"fastformer.commands.{name}"), name, words)
    if name == "train":
        TrainConfig.from_dict({key: value for key, value in values.items() if key not in ("run", "config", "resume")})


def test_the_lines_were_found() -> None:
    assert len(LINES) >= 12 and {shlex.split(line, comments=True)[1] for line in LINES} >= {"train", "translate"}


def test_the_python_of_the_first_minute_runs() -> None:
    first = next(block for language, block in BLOCKS if language == "python")
    names: dict[str, object] = {}
    exec(first.replace('"base"', '"tiny"'), names)
    assert {"layer", "model", "tokens"} <= names.keys()
