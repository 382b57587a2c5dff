"""Reads a Dockerfile's instructions, and runs them as far as a machine without Docker can."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@dataclass
class Stage:
    """The part of a Dockerfile between two FROMs.

    Attributes:
        image: the base image.
        name: the name after AS, or "".
        instructions: pairs of an instruction and its arguments, in order.
    """

    image: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        """Returns the arguments of all instructions with this name."""
        return [rest for found, rest in self.instructions if found == word]

    def environment(self) -> dict[str, str]:
        """Returns all variables of ENV, unexpanded."""
        pairs = (pair.partition("=") for rest in self.of("ENV") for pair in shlex.split(rest))
        return {name: value for name, _, value in pairs}


def stages(text: str) -> list[Stage]:
    """Returns the stages of a Dockerfile."""
    without_comments = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", without_comments).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            found.append(Stage(image, name))
        elif word:
            found[-1].instructions.append((word, rest.strip()))
    return found


def health_command(stage: Stage) -> list[str]:
    """Returns the command of HEALTHCHECK."""
    (check,) = stage.of("HEALTHCHECK")
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


def copied(ignore: str, root: Path) -> list[Path]:
    """Returns the entries of the root that `COPY . .` copies, given a .dockerignore of "*" and exceptions."""
    lines = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    return [root / line[1:] for line in lines if line.startswith("!")]
