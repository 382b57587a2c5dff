"""The commands of `fastformer`, one function in each module.

The signature of a command is its command line: positional parameters are arguments, keyword-only parameters are flags,
and the docstring is the help. `fastformer.cli` imports only the module of the chosen command.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def command_line(*words: object) -> str:
    """Returns a `fastformer` command to paste into a shell, with the script's own path if it is not on the PATH."""
    script, installed = Path(sys.argv[0]), shutil.which("fastformer")
    if script.name == "cli.py":  # python -m fastformer.cli
        start = [sys.executable, "-m", "fastformer.cli"]
    elif script.name == "fastformer" and (installed is None or Path(installed).resolve() != script.resolve()):
        start = [str(script)]
    else:
        start = ["fastformer"]
    return shlex.join([*start, *map(str, words)])


def listed_paths(text: str) -> list[str]:
    """Splits a list of paths at its commas; see `paths_of`."""
    from fastformer.data.tables import paths_of

    paths = paths_of(text)
    if len(paths) > 1 and not all(paths):
        raise ValueError(f"expected paths separated by commas, got an empty one in {text!r}")
    return paths


def listed_numbers(flag: str, text: str) -> list[float]:
    """Splits a text at its commas into numbers; `flag` names it in the error for a word that is no number."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"expected {flag} as numbers separated by commas, got {text!r:.60}") from error
