"""Finds the code blocks of a page, and runs them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sybil.document import Document
from sybil.example import Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from fastformer.cli import COMMANDS, main
from fastformer.commands import _parsing
from fastformer.training import TrainConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "generated" not in page.parts and "tutorials" not in page.parts)
TIMEOUT = 120  # seconds for one console block
# A command of ours with files at most, which needs no shell.
_PLAIN = re.compile(r"fastformer (?!doctor)(?:[^|<>&;$()`]|\\\n)*(?:\s[<>] [\w./-]+)*\s*")
_FENCE = re.compile(r"^ *```+(\S[^\n]*)?$", re.MULTILINE)


def run_console(example: Example) -> None:
    """Runs the lines of a block that begin with `$ `, with their continuation lines. Each command has to succeed."""
    found = commands(example.parsed)
    assert found, f"expected a line that begins with '$ ', got {example.parsed!r}"
    for command in found:
        if _PLAIN.fullmatch(command):
            run_here(example, command)
        else:
            run_in_bash(example, command)


def run_here(example: Example, command: str) -> None:
    """Runs a `fastformer` command in this process, which saves the seconds of imports."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    files = {sign: words[words.index(sign) + 1] for sign in "<>" if sign in words}
    words = words[: min((words.index(sign) for sign in files), default=len(words))]
    with contextlib.ExitStack() as stack:
        standard_in, standard_out = sys.stdin, sys.stdout
        sys.stdin = stack.enter_context(open(files.get("<", os.devnull), encoding="utf-8"))
        sys.stdout = stack.enter_context(open(files.get(">", os.devnull), "w", encoding="utf-8"))
        try:
            code = main(words[1:])
        finally:
            sys.stdin, sys.stdout = standard_in, standard_out
    assert code == 0, f"{example.path}:{example.line}: {command} ended with {code}"


def run_in_bash(example: Example, script: str) -> None:
    """Runs any other command in bash."""
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=TIMEOUT, env=environment(),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert found.returncode == 0, f"{example.path}:{example.line}\n{script}\n{found.stdout}{found.stderr}"


def environment() -> dict[str, str]:
    """Returns the environment of this process, with this Python's commands first and without a network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }  # fmt: skip


def commands(block: str) -> list[str]:
    """Yields the commands of a console block, each with its continuation lines."""
    found: list[str] = []
    is_open = False
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif is_open:
            found[-1] += "\n" + line.removeprefix("> ")
        else:
            continue  # what the command prints
        is_open = found[-1].endswith("\\")
    return found


def examples(page: Path) -> Iterator[Example]:
    """Returns the blocks of a page that run, in order. Python blocks share their variables."""
    document = Document.parse(str(page), PythonCodeBlockParser(), CodeBlockParser("console", run_console))
    yield from document.examples()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Yields each fenced block: the text after the fence, and the contents."""
    found, opened, start = [], None, 0
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened, start = (fence[1] or "").strip(), fence.end() + 1
        elif not fence[1]:
            found.append((opened, text[start : fence.start()]))
            opened = None
    assert opened is None, f"{page}: a block doesn't end"
    return found


def own_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each `fastformer` command in a block, without redirections and pipes."""
    for command in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:\||&&|;)\s", command.removeprefix("$ ")):
            if part.startswith("fastformer "):
                yield shlex.split(re.sub(r"\s\d?[<>]\s*\S+", "", part), comments=True)[1:]


def understood(words: list[str]) -> None:
    """Checks that the words after `fastformer` are a command with flags that exist and settings that fit."""
    name, *others = words
    assert name in COMMANDS, f"{name} is no command"
    if name == "doctor":
        return
    values = _parsing.parse(importlib.import_module(f"fastformer.commands.{name}"), name, others)
    if name == "train":
        TrainConfig.from_dict({k: v for k, v in values.items() if k not in ("run", "config", "resume")})
