"""Tests the kernels for sm_90 on a device: against fp64, against the plain kernels, and for repeatability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import _attention_hopper as hopper  # noqa: E402
from fastformer.kernels import _plans  # noqa: E402
from fastformer.kernels import attention as kernels  # noqa: E402
from tests.conftest import CallsOf  # noqa: E402
from tests.kernels.attention_cases import SEED, Case, case_of, check, make_inputs, run_triton  # noqa: E402
from tests.kernels.repeats import assert_repeats  # noqa: E402

pytestmark = pytest.mark.gpu

NAMES = ("causal", "window", "left", "before", "seqlens_k", "packed", "gqa", "mqa", "dropout", "one_block")
SINGLES = [case_of(), *(case for name in NAMES if (case := case_of(name)) is not None)]
FORWARD = [(head_dim, dropout_p) for head_dim in (72, 128) for dropout_p in (0.0, 0.1)]
PAIRS = [case for names in combinations(NAMES, 2) if (case := case_of(*names)) is not None]


@pytest.fixture(autouse=True)
def _on_hopper(calls_of: CallsOf) -> Iterator[None]:
    """Checks that each test reaches the kernels."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    launched = calls_of(hopper.Plan, "__call__")
    _plans.forget()  # what chose the plain form in a test before, and afterwards what chose these
    yield
    _plans.forget()
    assert launched, "the plain form ran"


def test_one_block() -> None:
    check(Case(head_dim=128, seqlen_q=64, seqlen_k=128), torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", SINGLES, ids=str)
def test_option(case: Case, head_dim: int) -> None:
    """Checks out, lse and gradients, with several tiles and several rounds through the rings."""
    check(replace(case.times(11), head_dim=head_dim), torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pair(case: Case, head_dim: int) -> None:
    check(replace(case.times(11), head_dim=head_dim), torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16(head_dim: int) -> None:
    check(replace(case_of("causal", "dropout").times(11), head_dim=head_dim), torch.float16, "cuda")


@pytest.mark.parametrize("head_dim", [40, 64, 72, 120, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (128, 128), (129, 257), (513, 777), (777, 513), (2000, 2000)])
def test_lengths(lengths: tuple[int, int], dropout_p: float, head_dim: int) -> None:
    case = Case(
        batch=1, heads=4, kv_heads=2, head_dim=head_dim, seqlen_q=lengths[0], seqlen_k=lengths[1], window=(None, 0),
        dropout_p=dropout_p,
    )  # fmt: skip
    check(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim, dropout_p", FORWARD)
def test_beside_the_plain_form(head_dim: int, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tiles per program, both kernels round the same sums in different orders, and drop the same elements."""
    q, k, v = (torch.randn(8, 2048, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seed = torch.tensor(SEED, device="cuda")
    rest = (None, None, head_dim**-0.5, None, 0, dropout_p, seed)
    out, lse = kernels.attention_fwd(q, k, v, *rest)
    monkeypatch.setattr(hopper, "takes", lambda *_: False)
    _plans.forget()
    plain_out, plain_lse = kernels.attention_fwd(q, k, v, *rest)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-5)
    # One wrongly dropped element of a short row would differ by tenths.
    torch.testing.assert_close(out, plain_out, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("head_dim, dropout_p", FORWARD)
def test_repeats_to_the_bit(head_dim: int, dropout_p: float) -> None:
    """A race would show as a different run among 100, with concurrent work that shifts the timing."""
    case = Case(batch=4, heads=8, kv_heads=4, head_dim=head_dim, seqlen_q=1500, seqlen_k=1500, window=(None, 0))
    q, k, v = (make_inputs(case, torch.bfloat16, "cuda")[name] for name in ("q", "k", "v"))
    rest = (None, None, case.scale, None, 0, dropout_p, torch.tensor(SEED, device="cuda"))
    assert_repeats(lambda: kernels.attention_fwd(q, k, v, *rest))


BACKWARD = [(64, 0.0), (64, 0.1), (128, 0.0)]


@pytest.mark.parametrize("head_dim, dropout_p", BACKWARD)
def test_backward_repeats_to_the_bit(head_dim: int, dropout_p: float) -> None:
    """dk and dv repeat in 100 runs; atomics sum dq in any order."""
    q, k, v, dout = (torch.randn(4, 1500, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    rest = (None, None, 0.125, None, 0, dropout_p, torch.tensor(SEED, device="cuda") if dropout_p else None)
    out, lse = kernels.attention_fwd(q, k, v, *rest)
    assert_repeats(lambda: kernels.attention_bwd(dout, q, k, v, out, lse, *rest, False)[1:3])


@pytest.mark.parametrize("head_dim, dropout_p", BACKWARD)
def test_backward_beside_the_plain_form(
    head_dim: int, dropout_p: float, calls_of: CallsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dk and dv are bit-identical from run to run; atomics sum dq in any order."""
    q, k, v, dout = (torch.randn(4, 1500, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    rest = (None, None, 0.125, None, 0, dropout_p, torch.tensor(SEED, device="cuda") if dropout_p else None)
    out, lse = kernels.attention_fwd(q, k, v, *rest)
    launched = calls_of(hopper.Plan, "__call__")
    runs = [kernels.attention_bwd(dout, q, k, v, out, lse, *rest, False)[:3] for _ in range(20)]
    assert len(launched) == 20
    for dq, dk, dv in runs[1:]:
        assert torch.equal(dk, runs[0][1]) and torch.equal(dv, runs[0][2])
        torch.testing.assert_close(dq, runs[0][0], rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(hopper, "takes_backward", lambda *_: False)
    _plans.forget()
    for actual, expected in zip(runs[0], kernels.attention_bwd(dout, q, k, v, out, lse, *rest, False)[:3], strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_values_beyond_a_length_are_not_read() -> None:
    """NaN in the padding, and in the next packed sequence, must not be multiplied by a weight of 0."""
    case = Case(batch=2, heads=2, kv_heads=2, head_dim=128, seqlen_q=300, seqlen_k=700, lengths=(333, 64))
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    for name in ("k", "v"):
        for batch, length in enumerate((333, 64)):
            inputs[name][batch, length:] = float("nan")
    lengths = torch.tensor((333, 64), dtype=torch.int32, device="cuda")
    out, lse = kernels.attention_fwd(
        inputs["q"], inputs["k"], inputs["v"], None, lengths, case.scale, None, None, 0.0, None
    )
    assert out.isfinite().all() and lse.isfinite().all()


def test_strides() -> None:
    """Slices of one projection, and SDPA's layout, need descriptors with strides in any order."""
    joint = torch.randn(3, 400, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = joint.unbind(2)
    rest = (None, None, 0.125, None, 0, 0.0, None)
    expected = kernels.attention_fwd(q.contiguous(), k.contiguous(), v.contiguous(), *rest)
    as_sdpa = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for x, y, z in ((q, k, v), as_sdpa):
        ours = kernels.attention_fwd(x, y, z, *rest)
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def test_cuda_graph() -> None:
    """A captured call replays on new data: descriptors hold addresses; lengths and the seed are on the device."""
    q, k, v = (torch.randn(2, 500, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths, seed = torch.tensor([500, 77], dtype=torch.int32, device="cuda"), torch.tensor([1, 2], device="cuda")
    rest = (None, lengths, 0.125, None, 0, 0.1, seed)
    kernels.attention_fwd(q, k, v, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.attention_fwd(q, k, v, *rest)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    lengths.copy_(torch.tensor([130, 499], dtype=torch.int32))
    seed.copy_(torch.tensor([3, 4]))
    graph.replay()
    expected = kernels.attention_fwd(q, k, v, *rest)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_gradients_through_the_op() -> None:
    """The op, its autograd formula and torch.compile also reach the kernels."""
    from fastformer.ops import attention

    leaves = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    seed = torch.tensor([3, 4], device="cuda")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, is_causal=True, dropout_p=0.1, dropout_seed=seed), fullgraph=True
    )
    assert torch.equal(compiled(*leaves), attention(*leaves, is_causal=True, dropout_p=0.1, dropout_seed=seed))
    inputs = make_inputs(case_of("causal", "dropout").times(11), torch.bfloat16, "cuda")
    results = run_triton(case_of("causal", "dropout").times(11), inputs)
    assert all(x.isfinite().all() for x in results.values())
