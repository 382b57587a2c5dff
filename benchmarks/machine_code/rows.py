"""The rows of the compile report: their fields, their text, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import record

LoopLine = dict[str, Any]  # the figures of one loop, by name


class MachineCodeRow(NamedTuple):
    """A compiled launch: a line of the report."""

    op: str  # the stem of its cases
    kernel: str
    arch: int
    triton: str  # the compiler's version
    cases: tuple[str, ...]  # the titles of all cases with this launch, "title #2" for the second launch of a case
    tile: str
    registers: int = 0
    spilled: int = 0  # bytes of stack per thread
    shared: int = 0  # bytes per program
    ctas: int = 0  # programs per SM
    limit: str = ""  # the resource that limits the programs per SM
    wide: int = 0  # wgmma or tcgen05.mma instructions in the PTX
    narrow: int = 0  # mma.sync instructions
    loops: tuple[LoopLine, ...] = ()  # the inner loops, or the whole kernel if it has no loop
    problems: tuple[str, ...] = ()


def merge(path: Path, rows: list[MachineCodeRow], archs: list[int], stems: list[str]) -> None:
    """Writes rows, one JSON line each; they replace the file's rows of the same compilers, archs and ops."""
    import triton

    lines = [
        line
        for line in (record.read(path) if path.exists() else [])
        if not (line["triton"] == triton.__version__ and line["arch"] in archs and line["op"] in stems)
    ]
    lines += [row._asdict() for row in rows]
    ordered = sorted(lines, key=lambda line: (line["triton"], line["arch"], line["op"]))
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered))


def show(row: MachineCodeRow) -> str:
    """Formats a row as text: the launch, then its loops."""
    lines = [
        f"{row.arch:>4} {row.kernel:24} {row.tile:16} {row.registers:>4} {row.spilled:>5} {row.shared:>7} "
        f"{row.ctas:>4} {row.wide:>5} {row.narrow:>5}  {row.cases[0]}"
        + "".join(f"  !! {problem}" for problem in row.problems)
    ]
    for loop in row.loops:
        lines.append("       " + ", ".join(f"{name} {value}" for name, value in loop.items()))
    return "\n".join(lines)
