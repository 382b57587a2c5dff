"""The commands of `fastformer`, one function a module.

The signature of a command is its command line: positional parameters are arguments, keyword-only parameters are flags,
and the docstring is the help. `fastformer.cli` imports the module of the command that was chosen, and no other.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def command_line(*words: object) -> str:
    """A `fastformer` command that works as pasted: where the one that runs is not on the PATH, with its own path."""
    script, found = Path(sys.argv[0]), shutil.which("fastformer")
    if script.name == "cli.py":  # python -m fastformer.cli
        start = [sys.executable, "-m", "fastformer.cli"]
    elif script.name == "fastformer" and (found is None or Path(found).resolve() != script.resolve()):
        start = [str(script)]
    else:
        start = ["fastformer"]
    return shlex.join([*start, *map(str, words)])


def listed_paths(text: str) -> list[str]:
    """Paths that commas separate; what exists as a whole is one path, whatever is in its name."""
    if "," not in text or Path(text).exists():
        return [text]
    paths = text.split(",")
    if not all(paths):
        raise ValueError(f"expected paths separated by commas, got an empty one in {text!r}")
    return paths


def listed_numbers(flag: str, text: str) -> list[float]:
    """Numbers that commas separate; the flag is named where one is none."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"expected {flag} as numbers separated by commas, got {text!r:.60}") from error
