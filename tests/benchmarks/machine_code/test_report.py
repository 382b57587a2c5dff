"""Every kernel compiles; the compile report is green, and the machine code of attention keeps its important properties.

Kernels compile in a process of their own, because interpreted ones can't. The report, which disassembles them, is slow.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastformer.kernels
from benchmarks.machine_code import report
from benchmarks.machine_code.rows import MachineCodeRow, merge

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


Row = dict[str, Any]
ATTENTION = ("causal", "causal+packed", "bool_keys", "bool", "causal+dropout")
CAUSAL = "deterministic causal"  # the forward is the same
KERNELS = {
    name
    for path in Path(fastformer.kernels.__path__[0]).glob("*.py")
    for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())
}
# They take two thirds of the time: the front end reads them here, which refuses most of what the compiler refuses, and
# the slow tests compile them.
LONG = ("_attention_fwd_kernel", "_dkdv_kernel", "_dq_kernel", "_attention_hopper_fwd_kernel",
        "_attention_hopper_bwd_kernel")  # fmt: skip
# Compiles a launch of each kernel, and prints the names of those that spill no register.
COMPILES = """
import contextlib, sys
from unittest import mock
from triton.backends.nvidia.compiler import CUDABackend
from benchmarks.machine_code.report import STEMS, distinct_launches, usage_of
from fastformer.kernels._binaries import compile_kernel
for work in distinct_launches([90], STEMS, "once"):
    launch = work.launch
    print(launch.kernel.fn.__name__)
    with contextlib.ExitStack() as stack:
        if launch.kernel.fn.__name__ in sys.argv:
            behind = dict.fromkeys(("make_ttgir", "gluon_to_ttgir"), mock.Mock(side_effect=InterruptedError))
            stack.enter_context(contextlib.suppress(InterruptedError))
            stack.enter_context(mock.patch.multiple(CUDABackend, **behind))
        usage = usage_of(compile_kernel(launch.kernel, launch.signature, launch.options, 90).asm["cubin"])
        assert usage["STACK"] == "0" and 0 < int(usage["REG"]) <= 255, (work.titles, usage)
"""


def run(*arguments: str) -> str:
    if not importlib.metadata.version("triton").startswith(("3.6.", "3.7.")):
        pytest.skip("later versions spill a few registers: the kernels of a released wheel are compiled by 3.7.1")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Returns rows for sm_90, one per case."""
    out = tmp_path_factory.mktemp("quick") / "report.jsonl"
    run("-m", "benchmarks.compile_report", "--quick", "--arch", "90", "--out", str(out))
    return [json.loads(line) for line in out.read_text().splitlines()]


def of_attention(rows: list[Row], options: str, *kernels: str) -> list[Row]:
    """Returns the launches of a case of attention at head_dim 64, limited to the named kernels."""
    case = f"bf16 d64 {CAUSAL if options == 'causal' else options}"
    of_op = [row for row in rows if row["op"] == "attention" and case in row["cases"]]
    matches = [row for row in of_op if row["kernel"] in kernels]
    assert len(matches) == len(kernels), case
    return matches


def test_every_kernel_compiles_without_spills() -> None:
    """The compiler may refuse code that the interpreter accepts."""
    assert set(run("-c", COMPILES, *LONG).split()) == KERNELS >= {*LONG}


@pytest.mark.slow
def test_the_report_is_green(rows: list[Row]) -> None:
    """Tests all cases of each kernel."""
    assert {row["kernel"] for row in rows} == KERNELS
    assert all(row["spilled"] == 0 and 0 < row["registers"] <= 255 for row in rows)
    assert all(row["wide"] >= 4 for row in rows if row["kernel"] == "_attention_fwd_kernel")
    assert all(not loop.get("local") for row in rows for loop in row["loops"])
    assert all(row["loops"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("options", ATTENTION)
def test_the_loops_of_attention(rows: list[Row], options: str) -> None:
    """exp2 runs once a score, and once per row and block, for rescaling: 1.06 in a tile of 128 x 64.

    There is no mma.sync, which has little more than half of wgmma's speed. Asynchronous copies fetch K, V and
    (backward) Q and dO before their use, so nothing but a mask is loaded.
    """
    backward = ("_dkdv_kernel", "_dq_kernel") if options == "causal" else ("_dkdv_kernel",)
    for row in of_attention(rows, options, "_attention_fwd_kernel", *backward):
        assert row["narrow"] == 0, row["kernel"]
        for loop in row["loops"]:
            assert loop["wgmma"] > 0 and "mma_sync" not in loop, row["kernel"]
            if row["kernel"] != "_dq_kernel":
                assert 1 <= loop["exp2_a_score"] <= 1.15, row["kernel"]
                assert loop["async_loads"] >= 4, row["kernel"]
                assert "bool" in options or "loads" not in loop, row["kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("bits, tile", [(8, 16 * 128 * 2 + 32 * 128), (4, 16 * 128 * 2 + 32 * 64)], ids=str)
def test_quantised_weights_are_read_16_bytes_at_a_time(rows: list[Row], bits: int, tile: int) -> None:
    """Asynchronous copies of 16 bytes by 128 threads fetch exactly the rows and the weight of a step."""
    (row,) = [row for row in rows if f"bf16 int{bits} m16" in row["cases"]]
    (loop,) = row["loops"]
    assert loop["async_loads"] * 128 * 16 == tile and loop["mma_sync"] == 8
    assert loop.get("loads", 0) <= (bits == 4)  # the scales


@pytest.mark.slow
def test_softmax_runs_under_a_product_on_sm_90(rows: list[Row]) -> None:
    """There are two loops over blocks, with and without a mask.

    Each waits for the scores while P V is in flight.
    """
    matches = [row for row in rows if row["kernel"] == "_attention_hopper_fwd_kernel"]
    assert matches
    for row in matches:
        loops = [loop for loop in row["loops"] if "exp2" in loop]
        assert len(loops) >= 2 and row["narrow"] == 0  # the compiler may share one body among the consumers
        for loop in loops:
            assert 1 in loop["waits"] and "local" not in loop
            assert loop["exp2_a_score"] <= 1 + 1 / 16  # once a score, and for what fades: blocks of 64 keys
            assert loop["instructions"] <= 900  # 64 x 128 scores a warpgroup, with dropout and a diagonal


@pytest.mark.slow
@pytest.mark.parametrize("options, most", [("causal", 530), ("causal+dropout", 740)])
def test_a_backward_for_sm_90_that_keeps_all_in_registers(rows: list[Row], options: str, most: int) -> None:
    """Also with dropout, the wait for scores leaves dO V^T in flight, and the wait for dq leaves the product of dk in
    flight.
    """
    case = f"bf16 d64 hopper {options}"
    (row,) = (row for row in rows if row["kernel"] == "_attention_hopper_bwd_kernel" and case in row["cases"])
    assert row["spilled"] == 0 and row["narrow"] == 0
    assert not any(row["kernel"] in ("_dkdv_kernel", "_dq_kernel") for row in rows if case in row["cases"])
    loops = [loop for loop in row["loops"] if "exp2" in loop]
    assert len(loops) >= 2
    for loop in loops:
        assert loop["waits"] == [1, 0, 1, 0] and loop["exp2_a_score"] == 1 and "local" not in loop
        assert loop["barriers"] <= 5 and loop["instructions"] <= most


TWO_PROGRAMS = ("causal", "causal+packed", "bool_keys", "additive_keys", "causal+dropout")


@pytest.mark.slow
@pytest.mark.parametrize("options", TWO_PROGRAMS)
def test_two_forward_programs_an_sm(rows: list[Row], options: str) -> None:
    """Each waits for all of its products, and the other program's exp2 fills the gap."""
    (row,) = of_attention(rows, options, "_attention_fwd_kernel")
    assert row["ctas"] >= 2


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        ({"spilled": 8}, []),
        ({"shared": 233_000}, []),
        ({"wide": 1, "narrow": 3}, [64, 64]),  # a product of 64 rows by mma.sync
        ({"narrow": 1}, [16, 16]),
    ],
)
def test_forbidden_responses_are_problems(fields: dict[str, Any], products: list[int]) -> None:
    row = MachineCodeRow("attention", "_kernel", 90, "3.7.1", ("causal",), "64x64 w4 s2")
    assert len(list(report.problems_of(row._replace(**fields), products))) == 1
    assert not list(report.problems_of(row._replace(wide=len(products)), products))


def test_the_interpreter_is_refused(monkeypatch, refused) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["compile_report"])
    assert "TRITON_INTERPRET" in refused(lambda _: report.main())


def test_a_file_keeps_kernels_that_were_not_compiled_again(tmp_path: Path) -> None:
    """--out replaces the rows of this compiler, architecture and op, and preserves the others."""
    import triton

    out = tmp_path / "report.jsonl"
    others = [
        {"triton": "3.0.0", "arch": 90, "op": "rotary"},
        {"triton": triton.__version__, "arch": 80, "op": "rotary"},
        {"triton": triton.__version__, "arch": 90, "op": "attention"},
    ]
    stale = {"triton": triton.__version__, "arch": 90, "op": "rotary", "kernel": "stale"}
    out.write_text("".join(json.dumps(line) + "\n" for line in [*others, stale]))
    rows = [
        MachineCodeRow("rotary", "_rotary_kernel", 90, triton.__version__, (case,), "64x64")
        for case in ("half", "full")
    ]
    merge(out, rows, [90], ["rotary"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(line in lines for line in others) and stale not in lines
    assert [line["cases"] for line in lines if line not in others] == [["half"], ["full"]]
