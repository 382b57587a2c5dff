"""Results as JSON lines of one schema: the work, its result, the machine, the commit and the command.

`FIELDS` is the schema. `check` raises if a line breaks it. The lines of `machine_code` and `host_time`, which have no
provider, have forms of their own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch

SUITES = ("ops", "modules", "model", "decoding", "scaling", "experiments")
ROOT = Path(__file__).parents[2]
Row = Mapping[str, Any]


class Field(NamedTuple):
    """A field that a line may have: its types, its meaning, and whether every line has it."""

    types: tuple[type, ...]
    meaning: str
    required: bool = False


_TEXT, _NUMBER, _COUNT, _FLAG, _TABLE = (str,), (float, int), (int,), (bool,), (dict,)
_UNKNOWN = (NoneType,)  # null: not known, or it has no meaning here

FIELDS: dict[str, Field] = {
    # The work that was measured.
    "suite": Field(_TEXT, "one of `case.SUITES`", True),
    "op": Field(_TEXT, "the case: an op's stem, a job's or an experiment's name", True),
    "provider": Field(_TEXT, "what did it", True),
    "shape": Field(_TABLE, "sizes and options by name", True),
    "mode": Field(_TEXT, 'the passes: "fwd", "bwd", "fwdbwd", "step" or "replay"'),
    "dtype": Field(_TEXT, "of the inputs"),
    "precision": Field(_TEXT, "of the weights"),
    "model": Field(_TEXT, "the model, where a case has several"),
    "data": Field(_TEXT, "what it was trained or measured on"),
    "neighbours": Field(_COUNT, "busy processes beside it"),
    # Its time: medians and percentiles of undisturbed turns, if there are enough of them.
    "ms_p50": Field(_NUMBER, "milliseconds of a call, the median"),
    "ms_p20": Field(_NUMBER, "the 20th percentile"),
    "ms_p80": Field(_NUMBER, "the 80th percentile"),
    "ms_p99": Field(_NUMBER, "the 99th percentile, of requests to a server"),
    "speedup": Field(_NUMBER + _UNKNOWN, "times faster than `baseline`, from turns of the same rounds"),
    "baseline": Field(_TEXT + _UNKNOWN, "the provider that `speedup` is against"),
    "ours": Field(_NUMBER, "times that ours is faster than it, from turns of the same rounds"),
    "ours_uncertainty": Field(_NUMBER + _UNKNOWN, "of `ours`, as `uncertainty` is of `speedup`"),
    "ours_quiet": Field(_FLAG + _UNKNOWN, "of `ours`, as `quiet` is of `speedup`"),
    "rounds": Field(_COUNT, "turns that were taken"),
    "disturbed": Field(_NUMBER + _UNKNOWN, "the share of them that something disturbed; null: not watched"),
    "slow": Field(_NUMBER, "the share of them that were beside a slow clock"),
    "passes": Field(_COUNT, "with time between them, that the rounds behind `speedup` are of"),
    "uncertainty": Field(
        _NUMBER + _UNKNOWN,
        "half the 95 % interval of `speedup`, as a share of it, by how far its passes lie apart; null: it has one pass",
    ),
    "quiet": Field(
        _FLAG + _UNKNOWN, "whether `speedup` is of undisturbed turns alone, and its passes agree; null: not watched"
    ),
    "ms_device": Field(_NUMBER, "milliseconds of a call on a GPU that is never idle: without the host's time"),
    "ms_step": Field(_NUMBER, "milliseconds of a step of decoding"),
    "ms_by_threads": Field(_TABLE, "threads -> ms_p50"),
    "ms_quiet": Field(_NUMBER, "ms_p50 without the neighbours"),
    "seconds": Field(_NUMBER, "the whole took so long"),
    # Derived from the time.
    "tflop_s": Field(_NUMBER + _UNKNOWN, "useful arithmetic, 1e12 operations a second"),
    "gb_s": Field(_NUMBER + _UNKNOWN, "bytes that had to be read and written, 1e9 a second"),
    "tokens_s": Field(_NUMBER + _UNKNOWN, "tokens a second"),
    "requests_s": Field(_NUMBER, "requests a second that a server answered"),
    "floor_ms": Field(_NUMBER + _UNKNOWN, "no call can be faster, by this machine's matrix rate and bandwidth"),
    "share": Field(_NUMBER + _UNKNOWN, "of the roofline: floor_ms / ms_p50"),
    "bound": Field(_TEXT + _UNKNOWN, 'what the floor is of: "compute" or "memory"'),
    "peak_mib": Field(_NUMBER + _UNKNOWN, "most memory at once, beyond what was there before"),
    "resident_growth_mib": Field(_NUMBER, "what the process grew by"),
    "weight_bytes_step": Field(_NUMBER, "weights that a step of decoding reads"),
    "share_of_dram": Field(_NUMBER, "the rate of reading them, against that of reading 256 MiB"),
    "share_of_cached": Field(_NUMBER, "the same, against that of reading so many bytes again and again"),
    "fair_share": Field(_NUMBER, "the part of the cores that is ours beside the neighbours"),
    "backends": Field(_TABLE, "ops of this library that it called -> where they ran"),
    "kernels": Field((list,), "the Triton kernels that ours launched on a GPU, by name"),
    "extension": Field(_FLAG, "whether ours had its C++ extension, which also launches the kernels"),
    "padding": Field(_NUMBER, "the share of positions that are padding"),
    "error": Field(_NUMBER, "largest difference to what `baseline` gives, as a share of its size"),
    "difference": Field(_NUMBER, "root mean square of it, relative to the standard deviation of what `baseline` gives"),
    "same_tokens": Field(_COUNT + _UNKNOWN, "outputs that are as ours in fp32"),
    "missing": Field(_TEXT, "how to install a provider that isn't there; such a line has no times"),
    # Curves and counts.
    "curve": Field(_TABLE, 'a line to draw: "x" and "y" of equal length, "x_label", "y_label"'),
    "value": Field(_NUMBER, "a single figure"),
    "unit": Field(_TEXT, "of `value`"),
    "finding": Field(_TEXT, "what an experiment's figures say, in one sentence; only in older lines"),
    "verdict": Field(_TEXT, "of the sources' claim: supports, contradicts or undecided"),
    "quick": Field(_FLAG, "whether it is of a run with little time, which tables and pictures don't take"),
    "sacrebleu_test2016": Field(_NUMBER, "BLEU on Multi30k's test2016"),
    "chrf_test2016": Field(_NUMBER, "chrF on it"),
    "beam_4": Field(_TABLE, "the same with four beams"),
    "signature": Field(_TEXT, "sacrebleu's"),
    "decoding": Field(_TEXT, "how outputs were searched for"),
    "holds": Field(_TEXT, "which weights the run ended with"),
    "validation_bleu": Field(_TABLE, "update -> BLEU"),
    "validation_bleu_of_the_average": Field(_NUMBER, "BLEU of the averaged weights"),
    "validation_nll": Field(_TABLE, "update -> nats a token"),
    "nats_per_character": Field(_NUMBER, "on held-out text"),
    "perplexity": Field(_NUMBER, "exp of the nats a token, on held-out text"),
    "exact_match": Field(_NUMBER, "the share of outputs that are right to the letter"),
    "examples": Field(_COUNT, "that `exact_match` is of"),
    # The machine and the software.
    "commit": Field(_TEXT, "of this repository", True),
    "dirty": Field(_FLAG + _UNKNOWN, "whether there were uncommitted changes", True),
    "device": Field(_TEXT, "the CPU's or GPU's name", True),
    "capability": Field((str, list), "what PyTorch says that the device can", True),
    "cores": Field(_COUNT, "of the machine", True),
    "threads": Field(_COUNT, "that PyTorch, or the peer, computed with", True),
    "python": Field(_TEXT, "its version", True),
    "torch": Field(_TEXT, "its version", True),
    "triton": Field(_TEXT + _UNKNOWN, "its version", True),
    "command": Field(_TEXT, "as a reader would type it", True),
    "time": Field(_TEXT + _UNKNOWN, "when, in ISO 8601", True),
}  # fmt: skip

_TIMES = ("ms_p20", "ms_p50", "ms_p80")


def check(row: Row) -> None:
    """Checks a line against the schema.

    Raises:
        ValueError: a field is unknown, missing or of another type, a number is NaN or infinite, or fields contradict
            each other; the message says what was expected and what came.
    """
    if unknown := sorted(row.keys() - FIELDS.keys()):
        raise ValueError(
            f"expected fields that benchmarks/measure/record.py knows, got {', '.join(map(repr, unknown))}"
        )
    if absent := [name for name, field in FIELDS.items() if field.required and name not in row]:
        raise ValueError(f"expected a line with {', '.join(map(repr, absent))}, got {sorted(row)}")
    for name, value in row.items():
        if type(value) not in FIELDS[name].types:
            kinds = " or ".join("null" if kind is NoneType else kind.__name__ for kind in FIELDS[name].types)
            raise ValueError(f"expected {name} ({FIELDS[name].meaning}) to be {kinds}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected {name} ({FIELDS[name].meaning}) to be finite, got {value!r}")
    if row["suite"] not in SUITES:
        raise ValueError(f"expected a suite out of {', '.join(SUITES)}, got {row['suite']!r}")
    if row.get("bound") not in ("compute", "memory", None):
        raise ValueError(f'expected bound to be "compute" or "memory", got {row["bound"]!r}')
    times = [row[name] for name in _TIMES if name in row]
    if "missing" in row and (times or "speedup" in row):
        raise ValueError("expected no time of a provider that is missing, got " + ", ".join(sorted(row.keys())))
    if times and (len(times) < 3 or not 0 < times[0] <= times[1] <= times[2]):
        raise ValueError(f"expected 0 < {' <= '.join(_TIMES)}, got {times}")
    if "share" in row and (row["share"] is None) != (row.get("floor_ms") is None):
        raise ValueError(f"expected share along with floor_ms, got {row['share']} and {row.get('floor_ms')}")
    curve = row.get("curve")
    if curve is not None and not (
        curve.keys() == {"x", "y", "x_label", "y_label"} and len(curve["x"]) == len(curve["y"])
    ):
        raise ValueError(f"expected a curve with x and y of equal length, x_label and y_label, got {sorted(curve)}")


def environment(device: str) -> dict[str, Any]:
    """Returns the fields that all lines of a run share."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": None if changes is None else bool(changes),  # None: not known
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability()
        if device == "cpu"
        else list(torch.cuda.get_device_capability()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton,
        "command": command(sys.argv),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def command(arguments: list[str]) -> str:
    """Formats a command line as a reader would type it: a module of benchmarks, without this machine's paths."""
    program = Path(arguments[0]).resolve()
    if program.stem == "__main__":  # a package
        program = program.parent
    inside = program.relative_to(ROOT / "benchmarks") if program.is_relative_to(ROOT / "benchmarks") else program
    module = ".".join(inside.with_suffix("").parts) if inside is not program else program.stem
    shown = [Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments[1:]]
    return " ".join([f"python -m benchmarks.{module}", *map(shlex.quote, shown)])


def append(path: Path | None, row: dict[str, Any]) -> None:
    """Appends a line to a file, if there is one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a file.

    Raises:
        ValueError: the file doesn't exist, or a line isn't a JSON object; the message names it.
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


# The fields that identify the measured work, unlike its result and the machine: each program's lines have some of them.
_IDENTITY = (
    "suite", "op", "mode", "dtype", "precision", "shape", "model", "data", "provider",
    "kernel", "arch", "triton", "cases",
)  # fmt: skip


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the identity of a line's work: lines with equal keys are comparable."""
    parts = []
    for name in _IDENTITY:
        value = row.get(name)
        if isinstance(value, dict):
            value = " ".join(f"{inner}={v}" for inner, v in value.items())
        if value is not None:
            parts.append(str(value))
    return tuple(parts)


def seconds(row: dict[str, Any]) -> float | None:
    """Returns the time in a line: of a call, or else of a token; None if the line has no time."""
    if row.get("ms_p50"):
        return float(row["ms_p50"]) / 1e3
    return 1 / float(row["tokens_s"]) if row.get("tokens_s") else None


def _git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # git is missing
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def cpu_name() -> str:
    """Returns the name of the CPU, with family and model if a virtual machine's name contains only the vendor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        pairs = (line.partition(":") for line in info.read_text().partition("\n\n")[0].splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "model name" in fields:
            numbers = {"family": fields.get("cpu family"), "model": fields.get("model")}
            return ", ".join([fields["model name"], *(f"{name} {n}" for name, n in numbers.items() if n)])
    return platform.processor() or platform.machine()
