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
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability()
        if device == "cpu"
        else torch.cuda.get_device_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file.

    Raises:
        ValueError: no such file, or a line that is no JSON; it is named.
    """
    if not path.is_file():
        raise ValueError(f"expected a file of results, but there is no file {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, got {line[:40]!r}") from error
    return rows


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes two lines comparable."""
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
    return row["op"], row["mode"], row["dtype"], shape, row["provider"]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
