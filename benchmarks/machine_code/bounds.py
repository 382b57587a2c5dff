"""Upper bounds for the speed of attention's kernels on an H100, by the model of `schedule.py`. They are not speeds.

    python -m benchmarks.machine_code.bounds [--label after] [--out benchmarks/results/machine_code_bounds.jsonl]

Each kernel is compiled, without a GPU, for causal bf16 calls of 4096 keys. The bound is for the loop without a mask,
which runs for all blocks but those at the diagonal. For this loop, a line gives the work of one warp (instructions,
exp2, products, spilled registers), the clocks of each unit, the speed that the busiest unit allows (`unit_tflops`), the
share of the time in which the model's tensor cores are busy (`tensor_share`), and the bound: that share of the
sustained speed of matrix products on an H100, times REACHED. REACHED is an assumption, so a device may exceed the
bound: on an H200, the generic kernel reached 453 TFLOP/s forward at head_dim 128, and 429 at 64 (`ms_device` of 2 x
8,192 tokens in `results/cuda.jsonl`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine_code import report, sass, schedule
from benchmarks.machine_code.cases.attention import attention_call
from benchmarks.measure.commands import parser_of

# The sustained speed of a large bf16 product of cuBLAS on one H100 SXM, which has a peak of 989.
SUSTAINED_TFLOPS = 798
# The share of a bound that is assumed to remain after all effects that the model omits, by head_dim: a scale for
# comparisons. It compares FlashAttention-3's published speed of the forward pass with a count of its units' clocks.
REACHED = {64: 0.68, 128: 0.81}
# The warps of a program that run the loop in a quarter of an SM: one of each consumer of a Gluon program, and a quarter
# of the eight warps of a program of the generic kernel.
CONSUMERS, PLAIN_WARPS = 2, 2


def line_of(launch: report.RecordedLaunch, head_dim: int) -> dict[str, Any]:
    """Returns the line of one launch."""
    import triton

    from fastformer.kernels._binaries import compile_kernel

    compiled = compile_kernel(launch.kernel, launch.signature, launch.options, 90)
    usage, instructions = report.disassembled(compiled.asm["cubin"])
    metadata = compiled.metadata
    loops = [loop for loop in sass.loops(instructions) if sass.count(loop).wgmma]
    loop = min(loops, key=len)  # the loop without a mask, of one consumer
    counts = sass.count(loop)
    is_gluon = launch.kernel.fn.__name__.startswith("_attention_hopper")
    programs, _ = sass.ctas_an_sm(90, metadata.num_warps, int(usage["REG"]), metadata.shared)
    warps = CONSUMERS if is_gluon else PLAIN_WARPS
    shares = schedule.shares(loop, warps, programs)
    clocks = sass.clocks(counts, 4 * warps)
    return {
        "kernel": launch.kernel.fn.__name__,
        "head_dim": head_dim,
        "triton": triton.__version__,
        "tile": "x".join(str(launch.arguments[name]) for name in ("BLOCK_M", "BLOCK_N") if name in launch.arguments)
        or f"{CONSUMERS} consumers{', 2 programs' if programs == 2 else ''}",
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": metadata.shared,
        "instructions": counts.instructions,
        "exp2": counts.exp2,
        "wgmma": counts.wgmma,
        "atomics": counts.atomics,
        "local": counts.local,
        "clocks": {name: round(value) for name, value in clocks.items() if value},
        "unit_tflops": round(sass.bound(counts, 4 * warps).tflops),
        "tensor_share": round(shares.tensor, 3),
        "bound_tflops": round(shares.tensor * SUSTAINED_TFLOPS * REACHED[head_dim]),
    }


def lines() -> Iterator[dict[str, Any]]:
    """Yields a line for each kernel with products that a causal call launches: generic kernels, then Gluon kernels."""
    for head_dim in REACHED:
        for generic in (True, False):
            call = attention_call(torch.bfloat16, head_dim, ("causal",), 4096, generic=generic)
            for launch in report.launches_of(call, 90):
                is_gluon = launch.kernel.fn.__name__.startswith("_attention_hopper")
                if report.products_of(launch) and is_gluon != generic:
                    yield line_of(launch, head_dim)


def main() -> int:
    parser = parser_of("machine_code.bounds", __doc__)
    parser.add_argument("--label", default="", help='such as "before": what of this code a line stands for')
    parser.add_argument("--out", type=Path, help="JSON lines, in the place of those with the same label and compiler")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("expected TRITON_INTERPRET unset: interpreted functions can't be compiled")
    new = []
    for line in lines():
        new.append({"label": options.label} | line)
        print(json.dumps(new[-1]), flush=True)
    if options.out is not None:
        old = options.out.read_text().splitlines() if options.out.exists() else []
        same = ("label", "triton")
        others = [line for line in map(json.loads, old) if [line[key] for key in same] != [new[0][key] for key in same]]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in others + new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
