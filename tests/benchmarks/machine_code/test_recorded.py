"""The committed figures of machine code and of the host's time stay within their limits."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.machine_code.report import ARCHITECTURES, recorded

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
COMPILERS = ("3.6.0", "3.7.1")  # of PyTorch 2.11, and of 2.12 and 2.13
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read(RESULTS / "machine_code.jsonl")


def launches(rows: list[Row], triton: str, arch: int) -> set[tuple[str, str, str]]:
    """Returns (op, kernel, case) of everything that a compiler compiled for an architecture."""
    found = (row for row in rows if (row["triton"], row["arch"]) == (triton, arch))
    return {(row["op"], row["kernel"], case) for row in found for case in row["cases"]}


def test_both_compilers_compiled_the_same_for_every_architecture(rows: list[Row]) -> None:
    assert {(row["triton"], row["arch"]) for row in rows} == {(v, arch) for v in COMPILERS for arch in ARCHITECTURES}
    for arch in ARCHITECTURES:
        one, other = (launches(rows, triton, arch) for triton in COMPILERS)
        assert one == other and len(one) > 300
        assert {op for op, *_ in one} >= {
            "add_layer_norm", "attention", "decode_attention", "embedding", "feed_forward", "linear_cross_entropy",
            "rotary",
        }  # fmt: skip
    keys = [(row["triton"], row["arch"], row["op"]) for row in rows]
    assert keys == sorted(keys)


def test_nothing_spills(rows: list[Row]) -> None:
    """There is no stack, no load from it in a loop, and no other problem in the report."""
    for row in rows:
        where = row["triton"], row["arch"], row["kernel"], row["cases"][0]
        assert row["spilled"] == 0 and row["problems"] == [], where
        assert row["loops"] and not any("local" in loop for loop in row["loops"]), where


# Microseconds that a call may take the host, its launch stubbed.
@pytest.mark.parametrize("call, most", [
    ("attention fwd", 30), ("attention bwd", 40), ("add_layer_norm fwd", 25), ("add_layer_norm bwd", 35),
    ("decode_attention plan", 8),
])  # fmt: skip
def test_the_hosts_time_of_a_call(call: str, most: float) -> None:
    recorded = read(RESULTS / "host_time.jsonl")
    assert sorted(row["triton"] for row in recorded) == list(COMPILERS)
    for row in recorded:
        assert not row["dirty"] and 0 < row["microseconds"][call] <= most, row["triton"]


def test_decode_attention_counts_on_as_many_programs_as_share_an_sm(rows: list[Row]) -> None:
    """A walk is split by the number of concurrent programs, which must be possible for the launches of every kind."""
    pytest.importorskip("triton")
    from fastformer.kernels._decode_attention_configs import PROGRAMS, programs_at_once
    from fastformer.kernels._launch import num_sms

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    found = defaultdict(list)
    for row in rows:
        if row["kernel"] == "_decode_attention_kernel":
            dtype, head_dim = row["cases"][0].split()[:2]
            found[row["arch"], dtypes[dtype], int(head_dim[1:]), int(row["tile"].split("x")[0])].append(row["ctas"])
    kinds = {(dtype == torch.float32, head_dim, block_m > 16) for _, dtype, head_dim, block_m in found}
    assert kinds == PROGRAMS.keys()
    for (arch, dtype, head_dim, block_m), programs in found.items():
        with FakeTensorMode(), recorded(arch):
            q = torch.empty(1, 1, 1, head_dim, dtype=dtype, device="cuda")
            due = programs_at_once(q, block_m) / num_sms(q.device)
        assert min(programs) <= due <= max(programs), (arch, dtype, head_dim, block_m, programs)
