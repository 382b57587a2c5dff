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
