"""Compares the machine code before and after a change: two files of `compile_report --out`, launch by launch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
_OF_LAUNCH = ("registers", "spilled", "shared", "ctas", "narrow")
_OF_LOOP = (
    "instructions", "exp2", "wgmma", "mma_sync", "waits", "loads", "async_loads", "stores", "barriers", "atomics",
    "local",
)  # fmt: skip


class CodeChange(NamedTuple):
    """A launch whose code changed: its figures before and after, and the ratio."""

    title: str
    fields: list[str]  # "registers 183 -> 128"
    size: float


def compare(before: Path, after: Path) -> str:
    """Returns the launches that changed, largest changes first, and those that only one of the files has.

    Compilers, architectures and ops without a line in AFTER were not compiled again, and are omitted.
    """
    old, new = _by_case(before), _by_case(after)
    compiled = {_target(key) for key in old}
    groups = {_group(key) for key in new}
    old = {key: line for key, line in old.items() if _group(key) in groups}
    changes: dict[tuple[str | int, ...], list[CodeChange]] = {}
    for key in old.keys() & new.keys():
        if fields := list(_fields(old[key], new[key])):
            change = CodeChange(_title(key), [text for text, _ in fields], sum(size for _, size in fields))
            # Cases that launch the same kernel change together and share an entry.
            changes.setdefault((key.triton, key.arch, key.kernel, *change.fields), []).append(change)
    lines = []
    for group in sorted(changes.values(), key=lambda group: (-group[0].size, min(change.title for change in group))):
        titles = sorted(change.title for change in group)
        lines.append(titles[0] + (f" (and {len(titles) - 1} more)" if len(titles) > 1 else ""))
        lines += [f"    {field}" for field in group[0].fields]
    lines += [f"gone: {_title(key)}" for key in sorted(old.keys() - new.keys())]
    lines += [f"new: {_title(key)}" for key in sorted(new.keys() - old.keys()) if _target(key) in compiled]
    unmet = Counter(_target(key) for key in new if _target(key) not in compiled)
    lines += [f"new: all {count} of sm_{arch} triton {triton}" for (triton, arch), count in sorted(unmet.items())]
    same = sum(key in new for key in old) - sum(map(len, changes.values()))
    lines.append(f"{sum(map(len, changes.values()))} launches changed, {same} did not")
    return "\n".join(lines)


class Key(NamedTuple):
    """The identity of a launch of a case."""

    triton: str
    arch: int
    op: str
    kernel: str
    case: str


def _group(key: Key) -> tuple[str, int, str]:
    return key.triton, key.arch, key.op


def _target(key: Key) -> tuple[str, int]:
    return key.triton, key.arch


def _by_case(path: Path) -> dict[Key, Line]:
    """Returns the line of each launch of each case; cases with the same launch share a line."""
    by_case: dict[Key, Line] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        for case in line["cases"]:
            by_case[Key(line["triton"], line["arch"], line["op"], line["kernel"], case)] = line
    return by_case


def _title(key: Key) -> str:
    return f"sm_{key.arch} triton {key.triton} {key.kernel}: {key.op} {key.case}"


def _fields(old: Line, new: Line) -> Iterator[tuple[str, float]]:
    """Returns (the changed fields, the size of the change). Sizes are |log(ratio)|, so halving counts like doubling."""
    if old["tile"] != new["tile"]:
        yield f"tile {old['tile']} -> {new['tile']}", 0.0
    for name in _OF_LAUNCH:
        if old[name] != new[name]:
            yield f"{name} {old[name]} -> {new[name]}", _ratio(old[name], new[name])
    if len(old["loops"]) != len(new["loops"]):
        yield f"inner loops {len(old['loops'])} -> {len(new['loops'])}", 1.0
    for number, (was, now) in enumerate(zip(old["loops"], new["loops"], strict=False), 1):
        for name in _OF_LOOP:
            a, b = was.get(name, 0), now.get(name, 0)
            if a != b:
                size = 0.5 if name == "waits" else _ratio(a, b)
                yield f"loop {number}: {name} {a or 0} -> {b or 0}", size
    if old["problems"] != new["problems"]:
        yield f"problems {old['problems']} -> {new['problems']}", 3.0


def _ratio(a: float, b: float) -> float:
    return abs(math.log((1 + b) / (1 + a)))
