"""The shared part of the benchmarks' commands: their parsers, and the types of their arguments."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def parser_of(name: str, about: str | None, *, out: bool = False) -> argparse.ArgumentParser:
    """Makes the parser of the command `python -m benchmarks.NAME`.

    Args:
        name: the command's name.
        about: the docstring of its module, whose first line describes it.
        out: whether it has --out, the file of its rows.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(about or "").splitlines()[0])
    if out:
        parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser


def refuse_interpreter(parser: argparse.ArgumentParser) -> None:
    """Ends a command that compiles kernels if TRITON_INTERPRET is set."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("expected TRITON_INTERPRET unset: interpreted functions can't be compiled")


def positive(text: str) -> int:
    """Converts an argument for argparse to an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text}")
    return value


def count(default: int, about: str) -> dict[str, Any]:
    """Describes an option that is an integer above 0, for `add_argument`."""
    return {"type": positive, "default": default, "help": about}
