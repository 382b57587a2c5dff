"""Tests the command line as users type it: results, and messages instead of tracebacks."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fastformer import cli
from fastformer.cli import main
from tests.covering import each


def test_summaries_are_the_first_lines_of_the_docstrings() -> None:
    for name, summary in cli.COMMANDS.items():
        function = getattr(importlib.import_module(f"fastformer.commands.{name}"), name)
        assert function.__doc__.partition("\n")[0] == summary


def test_a_command_collects_little_garbage_and_restores_the_threshold(monkeypatch) -> None:
    before, seen = gc.get_threshold(), []

    def command() -> None:
        seen.append(gc.get_threshold())
        if len(seen) == 1:
            raise ValueError("an error at first")

    monkeypatch.setattr("fastformer.commands.doctor.doctor", command)
    for code in (1, 0):
        assert main(["doctor"]) == code and gc.get_threshold() == before
    assert len(seen) == 2 and min(threshold[0] for threshold in seen) > 10 * before[0]


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@each(
    "error, code, message",
    [
        (ValueError("expected this, got\nthat"), 1, "fastformer: expected this, got that"),
        (FileNotFoundError(2, "No such file", "x.txt"), 1, "fastformer: x.txt: No such file"),
        (PermissionError(13, "could not write x.txt"), 1, "fastformer: could not write x.txt"),
        (ImportError("drawing needs matplotlib"), 1, "fastformer: drawing needs matplotlib"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), 1, "pip install 'fastformer[train]'"),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure"), 1, "fastformer[plot]'"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), 1, "smaller batches"),
        (MemoryError(), 1, "fastformer: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TypeError("'NoneType' is not iterable"), 1, "TypeError: 'NoneType' is not iterable"),
        (KeyError("step"), 1, "KeyError"),
        (AssertionError(), 1, "AssertionError"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1, "RuntimeError"),
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.lib"), 1, "pip install 'fastformer[train]'"),
        (NotImplementedError("fastformer::op: no kernel"), 1, "fastformer: fastformer::op: no kernel"),
        (NotImplementedError("aten::op: no kernel"), 1, "a bug"),
        (ModuleNotFoundError("No module named 'fastformer.x'", name="fastformer.x"), 1, "No module named"),
    ],
)
def test_each_error_is_one_line(error, code, message, monkeypatch, ran) -> None:
    monkeypatch.setattr("fastformer.commands.doctor.doctor", raising(error))
    stderr = ran("doctor", code=code).err
    assert message in stderr and stderr.count("\n") == 1, stderr
    assert ("--debug" in stderr) == ("a bug" in stderr)
    for words in (["--debug", "doctor"], ["doctor", "--debug"]):
        stderr = ran(*words, code=code).err
        assert message in stderr and "Traceback" in stderr and "in raising" not in stderr and "in command" in stderr


def test_libraries_are_quiet_and_fastformers_messages_are_not(monkeypatch, ran) -> None:
    def noisy() -> None:
        warnings.warn("a glyph is missing", UserWarning, stacklevel=1)
        logging.getLogger("torch._subclasses.fake_tensor").info("FakeTensor cache stats:")
        logging.getLogger("some.library").info("opened a file")
        logging.getLogger("fastformer").info("left out 3 examples")

    monkeypatch.setattr("fastformer.commands.doctor.doctor", noisy)
    # pytest has handlers of its own, with which basicConfig does nothing.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    assert ran("doctor").err == "left out 3 examples\n"
    monkeypatch.setattr(sys, "warnoptions", ["default"])  # python -W default
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.warns(UserWarning, match="a glyph"):
        main(["doctor"])


def test_a_missing_package_is_in_the_extra_that_is_named(monkeypatch, ran) -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text().partition("optional-dependencies]")[2]
    extras = {
        name: {each.replace("-", "_").lower() for each in re.findall(r'"([\w-]+)', packages)}
        for name, packages in re.findall(r"^(\w+) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    }
    for package, command in [(package, "doctor") for package in cli.EXTRAS] + [("pyarrow", "prepare")]:
        error = ModuleNotFoundError(f"No module named {package!r}", name=package)
        monkeypatch.setattr(f"fastformer.commands.{command}.{command}", raising(error))
        monkeypatch.setattr("fastformer.commands._parsing.parse", lambda *_: {})
        named = re.search(r"fastformer\[([\w,]+)\]", ran(command, code=1).err)
        along = {"fastapi": {"starlette", "pydantic"}}  # come with another package
        assert named is not None
        installed = {
            each for name in named[1].split(",") for one in extras[name] for each in (one, *along.get(one, ()))
        }
        assert package in installed


@each("command", cli.COMMANDS)
def test_what_a_folder_saves_is_finished_without_an_output(command, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("fastformer.commands._parsing.parse", lambda *_: {})
    monkeypatch.setattr(f"fastformer.commands.{command}.{command}", lambda: seen.append(sys.stdout.outlived))
    assert main([command]) == 0
    assert seen == [command in ("prepare", "train", "report", "average", "quantize", "demo")]


# Tests the exit status of the process `python -m fastformer`.


SCRIPT = """
import atexit, sys
from fastformer.__main__ import leave
atexit.register(print, "taken apart", flush=True)
sys.stdout.write("said ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "launched", "taken_apart"), [(143, True, False), (1, True, False), (0, True, True), (143, False, True)]
)
def test_one_of_several_processes_ends_at_once_after_a_signal(code, launched, taken_apart) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"RANK": "0", "WORLD_SIZE": "2"} if launched else {}
    words = [sys.executable, "-c", SCRIPT, str(code)]
    proc = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert proc.returncode == code, proc.stderr
    assert proc.stdout.split() == ["said", *(["taken", "apart"] if taken_apart else [])]
