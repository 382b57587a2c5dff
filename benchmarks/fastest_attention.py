"""Fills the table of the fastest attention from a GPU's rows: `python -m benchmarks.fastest_attention ROWS.jsonl ...`.

The rows are those of the runner's case "attention" (`benchmarks.run`, `benchmarks.gpu_run_plan`). For each shape
without dropout, the medians of fastformer's kernels are compared with those of PyTorch's, forward and backward
separately. Another kernel gets a line of the table (fastformer/ops/fastest_attention.json) if it is faster by 5 % or
more. Lines of other devices stay; those of the rows' devices are replaced.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from fastformer.ops._fastest import KERNELS, OURS, TABLE, FastestEntry

# The runner's names of PyTorch's kernels.
PROVIDERS = {"fastformer": OURS, "sdpa cudnn": "cudnn", "sdpa flash": "flash2", "sdpa flash3": "flash3"}
FASTER = 1.05  # the factor by which another kernel has to be faster than fastformer's


def capability_of(row: Mapping[str, Any]) -> int:
    """Returns a row's compute capability, 90 for "9.0" and for "sm_90"."""
    return int("".join(character for character in str(row["capability"]) if character.isdigit()))


def times(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str, int, bool, int], dict[str, float]]:
    """Returns the milliseconds of each kernel, by (capability, direction, head_dim, is_causal, seqlen).

    Of several batch sizes the largest counts.
    """
    by_case: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        shape = row["shape"]
        if row["op"] != "attention" or row["provider"] not in PROVIDERS or shape.get("dropout_p"):
            continue
        if row.get("dtype") != "bfloat16" or row.get("ms_p50") is None or row["mode"] not in ("fwd", "bwd"):
            continue
        call = capability_of(row), row["mode"], shape["head_dim"], bool(shape["causal"]), shape["seqlen"]
        by_case[call, shape["batch"]][PROVIDERS[row["provider"]]] = float(row.get("ms_device") or row["ms_p50"])
    # The largest batch comes last.
    return {call: by_case[call, batch] for call, batch in sorted(by_case) if OURS in by_case[call, batch]}


def entries(by_call: Mapping[tuple[int, str, int, bool, int], Mapping[str, float]]) -> list[FastestEntry]:
    """Returns the table's lines, without those that repeat the line before."""
    table: list[FastestEntry] = []
    kind: tuple[Any, ...] = ()
    before = OURS
    for call in sorted(by_call):
        kernels = by_call[call]
        best = min(kernels, key=lambda kernel: kernels[kernel])
        if kernels[OURS] < FASTER * kernels[best]:
            best = OURS
        if call[:4] != kind:
            kind, before = call[:4], OURS
        if best != before:
            table.append(FastestEntry(*call, best))
            before = best
    return table


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = parser_of("fastest_attention", __doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table (default: %(default)s)")
    args = parser.parse_args(arguments)
    rows = [row for path in args.rows for row in record.read(path)]
    by_call = times(rows)
    if not by_call:
        parser.error("expected rows of attention in bfloat16 without dropout, ours among them, got none")
    new = entries(by_call)
    assert all(entry.kernel in (OURS, *KERNELS) for entry in new)
    measured = {call[0] for call in by_call}
    old = [FastestEntry(**line) for line in json.loads(args.out.read_text())] if args.out.exists() else []
    lines = sorted([entry for entry in old if entry.capability not in measured] + new)
    args.out.write_text("[" + ",".join("\n  " + json.dumps(line._asdict()) for line in lines) + "\n]\n")
    for entry in new:
        print(" ".join(map(str, entry)))
    print(f"{args.out}: {len(lines)} lines, of {len(by_call)} shapes that were measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
