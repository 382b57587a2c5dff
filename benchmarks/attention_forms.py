"""Decides which form of attention sm_90 keeps, for each head_dim and direction: the plain form or the Gluon form.

    python -m benchmarks.attention_forms RESULTS [--apply]

RESULTS is the folder of a finished `benchmarks.gpu_run_plan`: cuda.jsonl and cuda_hopper.jsonl have the times of both
forms, gpu_run_plan.jsonl the results of the tests of the kernels for sm_90, including 100 runs with the same bits. The
rule: a kernel for sm_90 is promoted if its tests passed and it is 1.15 times as fast as the plain form, and in no case
slower. Otherwise it is deleted, because two forms of one kernel cost more than a smaller gain. A form without
measurements stays open.

--apply writes the promotions into kernels/_attention_hopper.py. The command prints the names of the forms to delete.
The exit status is 2 if a form stays open.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import record

ROOT = record.ROOT
LEAST = 1.15  # the least speed-up
KERNELS = {"fwd": "_attention_hopper_fwd_kernel", "bwd": "_attention_hopper_bwd_kernel"}
_SWITCH = ROOT / "kernels" / "_attention_hopper.py"
_FILES = {
    "fwd": "kernels/_attention_hopper_forward.py",
    "bwd": "kernels/_attention_hopper_backward.py",
    "": "kernels/_attention_hopper.py, benchmarks/machine_code/cases/attention_hopper.py, "
    "tests/kernels/test_attention_hopper.py, tests/kernels/test_attention_hopper_gpu.py, "
    "tests/kernels/gluon_emulator.py, tests/kernels/gluon_values.py",
}
Row = dict[str, Any]


class Verdict(NamedTuple):
    """The decision for one head_dim and direction.

    Attributes:
        ratios: plain time / Gluon time, for each shape that both have.
        decision: "promote", "delete" or "open", with the reason.
    """

    head_dim: int
    direction: str
    ratios: list[float]
    decision: str
    reason: str


def verdicts(plain: Sequence[Row], own: Sequence[Row], steps: Sequence[Row]) -> list[Verdict]:
    """Applies the rule.

    Args:
        plain, own: rows of the runner, without and with the kernels for sm_90.
        steps: the lines of the plan's results.
    """
    tested = {line["key"]: line for line in steps}.get("tests hopper")
    found = []
    for head_dim, direction in _forms():
        ratios = _ratios(plain, own, head_dim, direction)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        if tested is None:
            decision, reason = "open", "its tests have not run"
        elif not tested["ok"]:
            decision, reason = "delete", f"its tests failed: {tested.get('failed') or tested.get('tails')}"
        elif not ratios:
            decision, reason = "open", "no shape was timed with both forms on one device"
        elif min(ratios) < 1.0:
            decision, reason = "delete", f"it is slower in places, by {1 / min(ratios) - 1:.0%}"
        else:
            decision = "promote" if mean >= LEAST else "delete"
            reason = f"{mean:.2f} times as fast, {LEAST} asked"
        found.append(Verdict(head_dim, direction, ratios, decision, reason))
    return found


def _forms() -> list[tuple[int, str]]:
    """Returns each head_dim and direction that has a kernel for sm_90."""
    from fastformer.kernels._attention_hopper import BLOCK_DS

    return [(head_dim, direction) for direction in KERNELS for head_dim in BLOCK_DS]


def _ratios(plain: Sequence[Row], own: Sequence[Row], head_dim: int, direction: str) -> list[float]:
    """Returns the speed-ups of the kernel for sm_90, by shape: of the time on the device, without the host's."""
    times: list[dict[tuple[object, ...], float]] = []
    for rows, launches in ((plain, False), (own, True)):
        times.append({})
        for row in rows:
            if row["op"] != "attention" or row["provider"] != "fastformer" or row.get("mode") != direction:
                continue
            ran = any(KERNELS[direction] in name for name in row.get("kernels", ()))
            if row["shape"]["head_dim"] == head_dim and row.get("ms_device") and ran == launches:
                key = (row["device"], row["dtype"], *sorted(row["shape"].items()))
                times[-1][key] = row["ms_device"]
    slow, fast = times
    return [slow[key] / fast[key] for key in sorted(slow.keys() & fast.keys(), key=repr)]


def promote(text: str, forms: Sequence[tuple[int, str]]) -> str:
    """Returns the source of the switch with the given forms promoted."""
    items = ", ".join(f'({head_dim}, "{direction}")' for head_dim, direction in sorted(forms))
    value = f"frozenset({{{items}}})" if items else "frozenset()"
    new, count = re.subn(r"^(PROMOTED: [^=]+= ).*$", rf"\g<1>{value}", text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"expected one line 'PROMOTED: ... = ...' in {_SWITCH}, found {count}")
    return new


def deletions(found: Sequence[Verdict]) -> list[str]:
    """Describes the forms to delete."""
    lines = []
    for direction in KERNELS:
        goes = [each for each in found if each.direction == direction and each.decision == "delete"]
        if goes and len(goes) == sum(each.direction == direction for each in found):
            lines.append(f"delete {_FILES[direction]}, and what calls it")
        else:
            name = "takes" if direction == "fwd" else "takes_backward"
            lines += [f"let {name} in {_SWITCH.relative_to(ROOT)} refuse head_dim {each.head_dim}" for each in goes]
    if all(each.decision == "delete" for each in found):
        lines.append(f"delete {_FILES['']}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Prints the decisions, and with --apply carries out the promotions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_forms", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of the plan's results")
    parser.add_argument("--apply", action="store_true", help="write the promotions into the switch")
    options = parser.parse_args(arguments)
    names = ("cuda.jsonl", "cuda_hopper.jsonl", "gpu_run_plan.jsonl")
    files = [options.results / name for name in names]
    found = verdicts(*(record.read(file) if file.is_file() else [] for file in files))
    for each in found:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each.ratios)
        print(f"head_dim {each.head_dim} {each.direction}: {each.decision} ({each.reason}) [{ratios}]")
    forms = [(each.head_dim, each.direction) for each in found if each.decision == "promote"]
    if options.apply:
        _SWITCH.write_text(promote(_SWITCH.read_text(), forms))
        print(f"{_SWITCH.relative_to(ROOT)}: {len(forms)} promoted")
    print("\n".join(deletions(found)))
    return 2 if any(each.decision == "open" for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
