"""The kernels for sm_90, run by the emulator of Gluon: their numbers, and that no order of events makes them wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from fastformer.kernels import _attention_hopper as hopper  # noqa: E402
from fastformer.kernels._attention_common import Problem, describe  # noqa: E402
from fastformer.kernels._attention_hopper_forward import _attention_hopper_fwd_kernel  # noqa: E402
from fastformer.kernels.attention import describe_dense  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    SEED,
    Case,
    cumulative,
    lengths_of,
    make_inputs,
    pack,
    packed_results,
    plain,
)
from tests.kernels.gluon_emulator import Schedule, eager, emulate, shuffled  # noqa: E402

# The producer as far ahead as it may be, then as late, then copies that land at the last moment.
SCHEDULES = {
    "producer first": eager("2", "copy", "0", "1"),
    "consumers first": eager("0", "1", "copy", "2"),
    "copies last": eager("1", "2", "0", "copy"),
    "shuffled": shuffled(0),
}


def problem_of(case: Case, q: Tensor, k: Tensor) -> Problem:
    """A case as the launcher describes it."""
    lengths_q, lengths_k = lengths_of(case)
    seed = torch.tensor(SEED) if case.dropout_p else None
    if case.packed:
        return describe(
            q, k, lengths="packed", seqlens_q=cumulative(lengths_q, "cpu"), seqlens_k=cumulative(lengths_k, "cpu"),
            seqlen_q=max(lengths_q), seqlen_k=max(lengths_k), softmax_scale=case.scale, window_left=case.window[0],
            window_right=case.window[1], dropout_p=case.dropout_p, dropout_seed=seed,
        )  # fmt: skip
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    return describe_dense(q, k, lengths, case.scale, *case.window, case.dropout_p, seed)


def run(
    case: Case, inputs: dict[str, Any], schedule: Schedule, programs: int = 2, **mistakes: Any
) -> dict[str, Tensor]:
    """out and lse of a case by the emulated kernel."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    lengths_q, lengths_k = lengths_of(case)
    if case.packed:
        q, k, v = pack(q, lengths_q), pack(k, lengths_k), pack(v, lengths_k)
    problem = problem_of(case, q, k)
    assert hopper.fits(problem, q, k, v, None)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    shape = (q.shape[1], q.shape[0]) if case.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(shape, float("nan"))
    arguments, constants, _ = hopper.forward_arguments(q, k, v, out, lse, problem)
    emulate(_attention_hopper_fwd_kernel, programs, arguments, constants, [q, k, v], schedule, mistakes)
    return {"out": out, "lse": lse}


def check(case: Case, dtype: torch.dtype, schedule: Schedule, programs: int = 2) -> None:
    inputs = make_inputs(case, dtype)
    ours = run(case, inputs, schedule, programs)
    exact, eager_results = plain(case, inputs, torch.float64), plain(case, inputs, dtype)
    if case.packed:
        exact, eager_results = packed_results(case, exact), packed_results(case, eager_results)
    assert_accurate(ours["out"], eager_results["out"], exact["out"], "out")
    assert_accurate(ours["lse"], eager_results["lse"].float(), exact["lse"], "lse")


BASE = Case(batch=1, heads=2, kv_heads=1, seqlen_q=200, seqlen_k=300)
CASES = {
    "full": BASE,
    "causal": replace(BASE, window=(None, 0)),
    "causal, more queries than keys": replace(BASE, seqlen_q=300, seqlen_k=130, window=(None, 0)),
    "window": replace(BASE, seqlen_q=270, seqlen_k=400, window=(130, 7)),
    "before": replace(BASE, seqlen_q=130, window=(150, -40)),
    "seqlens_k": replace(BASE, batch=2, seqlen_q=70, lengths=(129, 0)),
    "packed": replace(BASE, batch=3, packed=True, lengths_q=(130, 0, 200), lengths=(257, 40, 300), window=(None, 0)),
    "dropout": replace(BASE, dropout_p=0.3, window=(None, 0)),
    "head_dim 128": replace(BASE, head_dim=128, window=(None, 0), dropout_p=0.1),
    "head_dim 72": replace(BASE, head_dim=72, seqlen_q=100),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64(name: str) -> None:
    """Several tiles a program, rings that turn over, tails in rows and keys."""
    dtype = torch.float16 if name in ("window", "dropout") else torch.bfloat16
    check(CASES[name], dtype, shuffled(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_order_of_events(schedule: str) -> None:
    case = replace(BASE, seqlen_q=400, seqlen_k=700, window=(None, 0), dropout_p=0.2)
    check(case, torch.bfloat16, SCHEDULES[schedule], programs=3)
