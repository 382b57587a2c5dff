"""Tests the Triton attention kernels: every option and every pair of options, fp32 and fp16, both passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from benchmarks.measure.launches import recorded_launches  # noqa: E402
from fastformer.kernels import attention as kernels  # noqa: E402
from fastformer.kernels import attention_backward as backward_kernels  # noqa: E402
from fastformer.kernels._attention_common import describe  # noqa: E402
from fastformer.kernels._attention_configs import Config  # noqa: E402
from tests.conftest import HAS_GPU, CallsOf  # noqa: E402
from tests.covering import by_turns  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    OPTIONS,
    Case,
    case_of,
    check,
    cumulative,
    make_inputs,
    pack,
    run_triton,
    visible,
)

DTYPES = [torch.float32, torch.float16]


def few_that_hold_all(pairs: list[Case], larger: list[Case]) -> list[Case]:
    """Returns cases with several options that together contain each pair, and the remaining pairs."""

    def pairs_in(case: Case) -> set[frozenset[str]]:
        return set(map(frozenset, combinations(case.options, 2)))

    missing, selected = set().union(*map(pairs_in, pairs)), []
    while missing:
        selected.append(max([*larger, *pairs], key=lambda case: len(pairs_in(case) & missing)))
        missing -= pairs_in(selected[-1])
    return selected


# Variants of another option: alone always, in pairs only among the slow tests.
VARIANTS = {"left", "before", "bool_keys", "bias", "additive_keys", "mqa", "softcap"}
PAIRS = [case for names in combinations(OPTIONS, 2) if (case := case_of(*names)) is not None]
TRIPLES = [case for names in combinations(OPTIONS, 3) if (case := case_of(*names)) is not None]
QUADRUPLES = [case for names in combinations(OPTIONS, 4) if (case := case_of(*names)) is not None]
TOGETHER = few_that_hold_all(
    *([case for case in cases if not VARIANTS & {*case.options}] for cases in (PAIRS, QUADRUPLES))
)
HELD = {option for case in TOGETHER for option in case.options}
ALONE = [case_of(), *(case_of(option) for option in OPTIONS if option not in HELD)]


def use_tiles(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int]) -> None:
    """Uses tiles of this size everywhere, also on a GPU."""
    monkeypatch.setattr(kernels, "forward_config", lambda *_: Config(*tile, 4, 1))
    for chooser in ("backward_config", "choose_dq_config"):
        monkeypatch.setattr(backward_kernels, chooser, lambda *_: Config(*tile, 4, 1))


def forward_problem(q: Tensor, k: Tensor, window: tuple[int | None, int | None], seqlens_k: Tensor | None = None):
    return kernels.describe_dense(q, k, seqlens_k, q.shape[-1] ** -0.5, *window, 0.0, None)


@pytest.mark.parametrize(
    "case, dtype",
    # Each pair in a case of four where one holds it, and each option of none alone, in one dtype, by turns.
    [
        (case_of("packed"), torch.float16),
        *((case, DTYPES[i % 2]) for i, case in enumerate(ALONE)),
        *((case, DTYPES[1 - i % 2]) for i, case in enumerate(TOGETHER)),
    ],
    ids=str,
)
def test_options(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


def test_one_block_rounds_like_eager_pytorch(device: str) -> None:
    """With P from lse and delta from out, the error in this case was over three times eager's."""
    (case,) = (case for case in TRIPLES if str(case) == "causal-bias-one_block")
    check(case, torch.float32, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*(case_of(option) for option in OPTIONS), *PAIRS, *TRIPLES], ids=str)
def test_cross_product(case: Case, dtype: torch.dtype, device: str) -> None:
    """Tests each option, pair and triple in each dtype separately."""
    check(case, dtype, device)


@pytest.mark.parametrize(
    "options", [(), ("causal",), ("window", "dropout"), ("packed", "causal"), ("bias", "gqa", "softcap")], ids=str
)
def test_deterministic(options: tuple[str, ...], device: str) -> None:
    """The seven-product variant obeys the same rule; a separate kernel computes dq, and a shared bias is summed in
    order.
    """
    torch.use_deterministic_algorithms(True)
    check(case_of(*options), torch.float32, device)


TILES = [((32, 16), (16, 32)), ((16, 32), (32, 16)), ((64, 16), (64, 16))]


@pytest.mark.parametrize(
    "options, forward, backward",
    by_turns([["window", "bool", "softcap"], ["causal", "bias", "softcap"], ["before", "dropout"]], TILES),
)
def test_tiles(options, forward, backward, monkeypatch, device) -> None:
    """Rows and keys are never confused, for any tile."""
    monkeypatch.setattr(kernels, "forward_config", lambda *_: Config(forward[0], forward[1], 4, 1))
    monkeypatch.setattr(backward_kernels, "backward_config", lambda *_: Config(backward[0], backward[1], 4, 1))
    check(case_of(*options), torch.float32, device)


@pytest.mark.parametrize("dtype, head_dim", by_turns(DTYPES, [8, 16, 40, 80, 96, 256]))
def test_head_dims(head_dim: int, dtype: torch.dtype, device: str) -> None:
    check(Case(batch=1, head_dim=head_dim, window=(None, 0)), dtype, device)


@pytest.mark.parametrize(
    "window, seqlen_q, seqlen_k", by_turns([(None, None), (None, 0), (3, 2)], [(1, 70), (70, 2), (64, 32), (33, 65)])
)
def test_lengths(window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int, device: str) -> None:
    check(Case(batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=window), torch.float32, device)


FEW = {
    "one": {"seqlen_k": 131}, "window": {"window": (40, 0)},
    "lengths": {"seqlen_q": 2, "lengths": (90, 0), "heads": 4},
    "causal, softcap": {"seqlen_q": 3, "window": (None, 0), "softcap": 0.7, "head_dim": 40},
    "bool": {"mask": "bool", "seqlen_q": 3, "heads": 4},
    "bool_keys": {"mask": "bool", "mask_shape": (True, False, False, True), "heads": 6, "kv_heads": 1, "seqlen_q": 2},
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", by_turns(list(FEW), DTYPES))
def test_few_queries_share_the_keys_of_a_row(name: str, dtype: torch.dtype, device: str) -> None:
    """They run on the kernels of decode_attention, and the gradients take their lse."""
    case = Case(**({"seqlen_q": 1, "seqlen_k": 600 if HAS_GPU else 100} | FEW[name]))
    with recorded_launches() as names:
        check(case, dtype, device)
    assert "_decode_attention_kernel" in names and "_attention_fwd_kernel" not in names


@pytest.mark.parametrize(
    "changes",
    [{"dropout_p": 0.3}, {"mask": "additive"}, {"lengths": (37, 5), "window": (40, 0)}, {"window": (None, -3)},
     {"seqlen_k": 60}, {"seqlen_q": 33}, {"packed": True, "lengths_q": (1, 1), "lengths": (90, 99)}],
)  # fmt: skip
def test_other_calls_run_on_attentions_own_kernel(changes: dict, device: str) -> None:
    case = Case(**({"seqlen_q": 1, "seqlen_k": 100} | changes))
    with recorded_launches() as names:
        run_triton(case, make_inputs(case, torch.float32, device))
    assert "_decode_attention_kernel" not in names


@pytest.mark.parametrize("seqlen_q", [2, 33], ids=["few", "many"])
def test_a_length_beyond_the_keys_counts_all_of_them(seqlen_q: int, device: str) -> None:
    cases = [Case(seqlen_q=seqlen_q, seqlen_k=100, lengths=(length, 40)) for length in (100, 131)]
    inputs = make_inputs(cases[0], torch.float32, device)
    right, beyond = (run_triton(case, inputs) for case in cases)
    assert all(torch.equal(beyond[name], right[name]) for name in right)


def test_one_key(device: str) -> None:
    """P is 1: out is v, and dv sums dout. dS is 0 up to the rounding of dP - delta, a few ulps of their terms."""
    for seqlen_q in (1, 70):
        case = Case(batch=1, heads=1, kv_heads=1, head_dim=16, seqlen_q=seqlen_q, seqlen_k=1)
        inputs = make_inputs(case, torch.float32, device)
        results = run_triton(case, inputs)
        assert torch.equal(results["out"], inputs["v"].expand_as(results["out"]))
        terms = (inputs["dout"] * inputs["v"]).abs().sum(-1).max() * case.scale * 2**-23
        assert float(results["dq"].abs().max()) <= 4 * float(terms * inputs["k"].abs().max())
        assert float(results["dk"].abs().max()) <= 4 * float(terms * inputs["q"].abs().sum())
        torch.testing.assert_close(results["dv"], inputs["dout"].sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_poison_beyond_each_length(device: str) -> None:
    """NaN in K and V beyond each length, and beyond the packed total in q and dout, changes nothing."""
    torch.use_deterministic_algorithms(device == "cuda")  # where atomics add in any order
    nan = float("nan")
    for options in (("seqlens_k",), ("seqlens_k", "causal"), ("seqlens_k", "window", "dropout")):
        case = case_of(*options)
        inputs = make_inputs(case, torch.float32, device)
        clean = run_triton(case, inputs)
        for row, length in enumerate(case.lengths):
            inputs["k"][row, length:] = nan
            inputs["v"][row, length:] = nan
        poisoned = run_triton(case, inputs)
        assert all(torch.equal(clean[key], poisoned[key]) for key in clean), options
    case = case_of("packed", "causal")
    inputs = make_inputs(case, torch.float32, device)
    q, dout = (pack(inputs[key], case.lengths_q) for key in ("q", "dout"))
    k, v = (pack(inputs[key], case.lengths) for key in ("k", "v"))
    rest = (cumulative(case.lengths_q, device), cumulative(case.lengths, device), 33, 48, 0.125, None, 0, 0.0, None)
    tail = torch.full((9, 2, 64), nan, device=device)
    results = []
    for end in (tail[:0], tail):
        long_q, long_k, long_v = (torch.cat([x, end]) for x in (q, k, v))
        out, lse = kernels.varlen_attention_fwd(long_q, long_k, long_v, *rest)
        # The op's own out is 0 in the tail; NaN there must not be read either.
        grads = kernels.varlen_attention_bwd(torch.cat([dout, end]), long_q, long_k, long_v, out, lse, *rest)
        results.append([out[:50], *(x[:n] for x, n in zip(grads, (50, 85, 85), strict=True))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("deterministic_form", [False, True])
def test_poison_beyond_the_bound(deterministic_form: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in keys from block J on doesn't affect rows before J; NaN in rows before J doesn't affect dk and dv from J
    on.
    """
    use_tiles(monkeypatch, (32, 32))
    case = Case(batch=1, heads=1, kv_heads=1, head_dim=16, seqlen_q=96, seqlen_k=96, window=(None, 0))
    inputs = make_inputs(case, torch.float32, device)
    torch.use_deterministic_algorithms(deterministic_form)
    clean = run_triton(case, inputs)
    for edge in (32, 64):
        poisoned = dict(inputs) | {key: inputs[key].clone() for key in ("k", "v")}
        poisoned["k"][:, edge:] = poisoned["v"][:, edge:] = float("nan")
        results = run_triton(case, poisoned)
        assert torch.equal(results["out"][:, :edge], clean["out"][:, :edge])
        assert torch.equal(results["lse"][..., :edge], clean["lse"][..., :edge])
        assert results["out"][:, edge:].isnan().all()
        torch.testing.assert_close(results["dq"][:, :edge], clean["dq"][:, :edge], rtol=1e-5, atol=1e-6)
        poisoned = dict(inputs) | {key: inputs[key].clone() for key in ("q", "dout")}
        poisoned["q"][:, :edge] = poisoned["dout"][:, :edge] = float("nan")
        results = run_triton(case, poisoned)
        for key in ("dk", "dv"):
            assert torch.equal(results[key][:, edge:], clean[key][:, edge:])
            assert results[key][:, :edge].isnan().all()


def count_work(window: tuple[int | None, int | None], n: int, tile: tuple[int, int], device: str) -> tuple[int, int]:
    """Returns the block products of the forward and the backward kernel, for one head of n x n."""
    q = torch.zeros(1, n, 1, 16, device=device)
    problem = forward_problem(q, q, window)
    counters = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    config = Config(*tile, 4, 1)
    lengths_and_seed = (None, None, None)
    forward = kernels.plan_forward(q, q, q, None, problem, config=config)
    results = forward(q, q, q, None, *lengths_and_seed, counters[0])
    inputs = (q, q, q, q, *results, None)
    backward = backward_kernels.plan_backward(*inputs, problem, False, config=config, dq_config=config)
    backward(*inputs, *lengths_and_seed, counters[1])
    return int(counters[0]), int(counters[1])


@pytest.mark.parametrize("n, tile", [(1024, (128, 64)), pytest.param(4096, (128, 64), marks=pytest.mark.slow),
                                     pytest.param(4096, (64, 128), marks=pytest.mark.slow)])  # fmt: skip
def test_causal_work_is_half(n: int, tile: tuple[int, int], device: str) -> None:
    full = count_work((None, None), n, tile, device)
    causal = count_work((None, 0), n, tile, device)
    assert full == (n // tile[0] * (n // tile[1]),) * 2
    for part, whole in zip(causal, full, strict=True):
        assert 0.5 < part / whole <= 0.5 + max(tile) / (2 * n) + 0.001


def test_window_work_is_linear(device: str) -> None:
    """A window of r keys costs O(r n): at most the blocks that r plus the rows of a tile span, for any n."""
    tile, reach = (64, 32), 96
    for n in (512, 1024):
        work = count_work((reach, 0), n, tile, device)
        blocks = n // tile[0] * ((reach + 1 + tile[0]) / tile[1] + 1)
        assert all(n // tile[0] < part <= blocks for part in work)


# Windows wider and narrower than a tile, whose edges fall into a tile, onto its border and one beside it.
WINDOWS = [(None, 0), (40, 0), (61, 0), (64, -10), (33, 31), (31, 34), (32, None), (-5, 40), (None, -33)]


@pytest.mark.parametrize(
    "window, tile",
    [*((window, (32, 32)) for window in [(None, None), *WINDOWS]), ((70, 0), (64, 16)), ((31, 1), (16, 64))],
    ids=str,
)
def test_visibility_of_keys(window, tile, device, monkeypatch) -> None:
    """With equal scores and K = V = identity, out is P and dq is dS, element by element, in all three kernels."""
    use_tiles(monkeypatch, tile)
    seqlen_q, seqlen_k = 97, 128
    # The last key that exists: at a tile's end, before and behind it.
    lengths = (96, 97) if window == (None, None) else (100,)
    case = Case(len(lengths), 1, 1, seqlen_k, seqlen_q, seqlen_k, window, lengths)
    seen = visible(case, device)[:, 0]
    q = torch.zeros(len(lengths), seqlen_q, 1, seqlen_k, device=device)
    eye = torch.eye(seqlen_k, device=device)[None, :, None].expand(len(lengths), -1, -1, -1)
    rest = (None, torch.tensor(lengths, dtype=torch.int32, device=device), 1.0, *window, 0.0, None)
    out, lse = kernels.attention_fwd(q, eye, eye, *rest)
    counts = seen.sum(-1, keepdim=True)
    torch.testing.assert_close(out[:, :, 0], seen / counts.clamp(min=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[:, 0], counts[..., 0].log(), rtol=1e-6, atol=1e-6)
    # dP is dout; where a row sees one key alone, P (dP - delta) is 0.
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(device)
    for deterministic_form in (False, True):
        torch.use_deterministic_algorithms(deterministic_form)
        dq, _, dv, _ = kernels.attention_bwd(dout, q, eye, eye, out, lse, *rest, False)
        assert torch.equal(dq[:, :, 0] != 0, seen & (counts > 1)), deterministic_form
        torch.testing.assert_close(dv[:, :, 0], out[:, :, 0].mT @ dout[:, :, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(HAS_GPU, reason="counts the interpreter's atomics")
def test_the_deterministic_form_has_no_atomics(device: str, calls_of: CallsOf) -> None:
    """This includes dq, and the gradient of a bias however it is shared: all sums have a fixed order."""
    from triton.runtime.interpreter import InterpreterBuilder

    added = calls_of(InterpreterBuilder, "create_atomic_rmw")
    for options in ((), ("bias",), ("additive_keys",)):
        case = case_of(*options)
        assert case is not None
        case = replace(case, heads=1, kv_heads=1, head_dim=16)
        inputs = make_inputs(case, torch.float16, device)
        for deterministic_form in (False, True):
            added.clear()
            torch.use_deterministic_algorithms(deterministic_form)
            run_triton(case, inputs)
            assert bool(added) != deterministic_form, options


def test_shared_heads_sum_in_fp32(device: str) -> None:
    """The parts 1025/3 and -1024/3 add up to 1/3. Rounded to fp16 before the sum, they would give 1/2."""
    q, k = torch.zeros(1, 1, 2, 16, device=device), torch.zeros(1, 3, 1, 16, device=device)
    q, k = q.half(), k.half()
    dout = torch.tensor([1025.0, -1024.0], device=device)[None, None, :, None].expand(1, 1, 2, 16).half()
    rest = (None, None, 1.0, None, None, 0.0, None)
    out, lse = kernels.attention_fwd(q, k, k, *rest)
    _, _, dv, _ = kernels.attention_bwd(dout, q, k, k, out, lse, *rest, False)
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 3), rtol=1e-3, atol=0)


@pytest.mark.skipif(HAS_GPU, reason="a file stands for the memory")
@pytest.mark.parametrize("row", [16, 2**24])
def test_strides_beyond_32_bits(row: int, tmp_path: Path, device: str) -> None:
    """Two batches are 2**31 elements apart, in a sparse file; rows may be too far apart for a tile."""
    buffer = torch.from_file(str(tmp_path / "holes"), shared=True, size=2**32 + 8 * row + 2**18, dtype=torch.float16)
    near = [torch.randn(2, 5, 1, 16, dtype=torch.float16) for _ in range(4)]
    far = []
    for i, x in enumerate(near):
        # From the buffer's middle on: an offset that wraps around is still within it, and wrong.
        view = buffer.as_strided(x.shape, (2**31, row, 16, 1), 2**31 + i * 2**16)
        view[:, :, :, :] = x
        far.append(view)
    rest = (None, None, 0.25, None, 0, 0.0, None)
    results = []
    for q, k, v, dout in (near, far):
        out, lse = kernels.attention_fwd(q, k, v, *rest)
        results.append((out, lse, *kernels.attention_bwd(dout, q, k, v, out, lse, *rest, False)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_packed_rows_that_no_program_computes_are_zeros(device: str) -> None:
    """Two blocks of 32 rows for the announced 40, so the last 6 of 70 have none; and rows after the last sequence."""
    q, k, v, dout = (torch.randn(rows, 2, 16, device=device) for rows in (170, 200, 200, 170))
    lengths = torch.tensor([0, 70, 70, 90], dtype=torch.int32, device=device)
    options = (lengths, lengths, 40, 40, 0.25, None, None, 0.0, None)
    tile = Config(32, 32, 4, 1)
    problem = describe(q, k, "packed", *options)
    out, lse = kernels.plan_forward(q, k, v, None, problem, config=tile)(q, k, v, None, lengths, lengths, None)
    plan = backward_kernels.plan_backward(dout, q, k, v, out, lse, None, problem, False, config=tile)
    dq, dk, dv, _ = plan(dout, q, k, v, out, lse, None, lengths, lengths, None)
    for x in (out, lse.T.exp(), dq, dk, dv):
        is_computed = torch.arange(len(x), device=device) < 64
        is_computed[70:90] = True
        assert torch.equal(x.flatten(1).ne(0).any(1), is_computed)
