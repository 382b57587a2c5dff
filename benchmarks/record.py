"""Results as JSON lines: what was measured, on what, from which commit, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def environment(device: str) -> dict[str, Any]:
    """The fields that all lines of a run share."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": None if changes is None else bool(changes),  # None: nobody knows
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability()
        if device == "cpu"
        else torch.cuda.get_device_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "command": command(sys.argv),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def command(arguments: list[str]) -> str:
    """A command line as a reader would type it: a module of benchmarks, and paths without what is this machine's."""
    program = Path(arguments[0]).resolve()
    if program.stem == "__main__":  # of a package
        program = program.parent
    inside = program.relative_to(ROOT / "benchmarks") if program.is_relative_to(ROOT / "benchmarks") else program
    module = ".".join(inside.with_suffix("").parts) if inside is not program else program.stem
    shown = [Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments[1:]]
    return " ".join([f"python -m benchmarks.{module}", *shown])


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file.

    Raises:
        ValueError: no such file, or a line that is not a JSON object; it is named.
    """
    if not path.is_file():
        raise ValueError(f"expected a file of results, but there is no file {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}")
        rows.append(row)
    return rows


# What was measured, as against what came out and on what: a line has some of these, whichever program wrote it.
_IDENTITY = (
    "op", "mode", "dtype", "precision", "shape", "batching", "model", "data", "provider",
    "kernel", "arch", "triton", "cases",
)  # fmt: skip


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes two lines comparable: two of the same kind, about the same thing."""
    parts = []
    for name in _IDENTITY:
        value = row.get(name)
        if isinstance(value, dict):
            value = " ".join(f"{inner}={each}" for inner, each in value.items())
        if value is not None:
            parts.append(str(value))
    return tuple(parts)


def seconds(row: dict[str, Any]) -> float | None:
    """What a line says about time: of a call, or of a token where it has that alone; None where it says nothing."""
    if row.get("ms_p50"):
        return float(row["ms_p50"]) / 1e3
    return 1 / float(row["tokens_s"]) if row.get("tokens_s") else None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
