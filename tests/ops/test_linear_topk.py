"""Compares linear_topk with F.linear, log_softmax and topk on the whole matrix of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure.timing import peak_bytes
from fastformer.ops import linear_topk, use_backend
from fastformer.ops.linear_topk import best_of_logits
from tests.checks import assert_accurate, is_interpreted, small_draws
from tests.conftest import HAS_GPU
from tests.covering import each
from tests.no_sync import NoSync

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
OP = torch.ops.fastformer.linear_topk.default
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
log_probs = pytest.mark.parametrize("log_probs", [True, False], ids=["log_probs", "logits"])
# Around the places where kernels cut a vocabulary.
PLACES = [0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 299]


def make_inputs(
    shape: tuple[int, ...], vocab_size: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(shape, device=device), torch.randn(vocab_size, shape[-1], device=device)
    return x.to(dtype), (2 * weight * shape[-1] ** -0.5).to(dtype)


def is_supported(backend: str, dtype: torch.dtype, k: int = 1) -> bool:
    if backend == "cpp":
        return dtype != torch.float16
    # The interpreter multiplies bf16 wrongly.
    return backend != "triton" or (k <= 64 and dtype in (torch.float32, torch.float16, *[torch.bfloat16] * HAS_GPU))


def skip_unless_supported(backend: str, dtype: torch.dtype, k: int = 1) -> None:
    if not is_supported(backend, dtype, k):
        pytest.skip("the reference runs: see test_every_op.py")


def scores(x: Tensor, weight: Tensor, log_probs: bool) -> Tensor:
    """Returns the scores from which the k best are chosen, in plain PyTorch: fp32 (fp64 for fp64)."""
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1) if log_probs else logits


def compare(*draws: tuple[Tensor, Tensor], k: int, log_probs: bool, clear_at_least: float = 0.5) -> None:
    """Checks values by the rule, each as the value of its index; indices must match if the fp64 values differ enough.

    The largest error of a handful of numbers is a matter of luck, so the worst of several draws counts.
    """
    results = []
    for x, weight in draws:
        values, indices = linear_topk(x, weight, k, log_probs=log_probs)
        assert indices.dtype == torch.int64 and indices.shape == values.shape == (*x.shape[:-1], k)
        assert (values[..., 1:] <= values[..., :-1]).all(), "expected values that never rise"
        assert (indices.sort(-1).values.diff(dim=-1) > 0).all(), "expected each index once"
        plain, exact = scores(x, weight, log_probs), scores(x.double(), weight.double(), log_probs)
        results.append((values, indices, plain, exact))
    values, indices, plain, exact = (torch.stack(parts) for parts in zip(*results, strict=True))
    best = exact.sort(-1, descending=True)
    if values.dtype == torch.float64:
        # Plain PyTorch is the exact result here, and the rule would ask for its very bits.
        torch.testing.assert_close(values, best.values[..., :k], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values, exact.gather(-1, indices), rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(values, plain.topk(k, -1).values, best.values[..., :k], "values")
        assert_accurate(values, plain.gather(-1, indices), exact.gather(-1, indices), "values at the indices")
    # Sums of fp32, whatever the inputs are: a bf16 logit would be another one.
    apart = best.values.diff(dim=-1).abs() > 1e-5 * exact.abs().max()
    edge = torch.ones_like(best.indices[..., :1], dtype=torch.bool)
    clear = (torch.cat((edge, apart), -1) & torch.cat((apart, edge), -1))[..., :k]
    assert torch.equal(indices[clear], best.indices[..., :k][clear])
    assert clear.double().mean() >= clear_at_least, "too few places are clear for the test to mean anything"


@log_probs
@dtypes
@each(
    "shape, vocab_size, k",
    [
        ((1, 16), 33, 1),
        ((3, 24), 50, 8),
        ((5, 1), 7, 7),
        ((4, 40), 1000, 12),
        ((2, 3, 20), 100, 5),
        ((12,), 9, 2),
        ((9, 17), 1, 1),
        ((17, 64), 257, 257),
        ((40, 530), 300, 4),
        ((300, 8), 520, 3),
        ((6, 12), 2500, 4),
        ((70, 100), 2200, 64),
    ],
)
def test_accuracy(shape, vocab_size, k, dtype, log_probs, backend, device) -> None:
    skip_unless_supported(backend, dtype, k)
    draws = [make_inputs(shape, vocab_size, device, dtype) for _ in range(small_draws() if shape[0] * k < 100 else 1)]
    compare(*draws, k=k, log_probs=log_probs)


@log_probs
@each("rows", [3, 16])
@each("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_classes_that_are_not_contiguous(dtype, rows, log_probs, backend, device) -> None:
    skip_unless_supported(backend, dtype)
    x, weight = make_inputs((rows, 16), 70, device, dtype)
    wide, spread = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, 3, 40), (140, 3, 32)))
    for strided in (wide[:, 1, 3:19], x.T.contiguous().T, x[:1].expand(rows, 16), wide[:, 0, ::2][:, :16]):
        compare((strided, weight), k=4, log_probs=log_probs)
    for strided in (
        spread[:70, 1, 5:21],
        spread[::2, 0, 1:17],
        spread[:70, 0, ::2],
        weight.T.contiguous().T,
        torch.randn(70, 17, device=device).to(dtype)[:, 1:],  # bf16 at no multiple of four bytes
        torch.randn(16, 71, device=device).to(dtype).T[:70],
    ):
        compare((x, strided), k=4, log_probs=log_probs)


@log_probs
@pytest.mark.parametrize("rows", [1, 40])
def test_equal_values(rows: int, log_probs: bool, backend: str, device: str) -> None:
    """Small integers make exact logits, many of them equal; among equals, the lower index comes first."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randint(-2, 3, (rows, 6), device=device).to(dtype)
        x[0] = 0  # all are equal
        weight = torch.randint(-1, 2, (600, 6), device=device).to(dtype)
        for k in filter(functools.partial(is_supported, backend, dtype), (1, 2, 9, 600)):
            values, indices = linear_topk(x, weight, k, log_probs=log_probs)
            logits = x.double() @ weight.double().T
            best = logits.sort(stable=True, dim=-1, descending=True)
            assert torch.equal(logits.gather(-1, indices), best.values[:, :k])
            expected = scores(x.double(), weight.double(), log_probs).gather(-1, indices)
            torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(indices, best.indices[:, :k])


@pytest.mark.parametrize("shape", [(40,), (3, 40), (5, 2, 40)], ids=str)
def test_the_best_of_logits_are_the_same_for_each_k(shape: tuple[int, ...], device: str) -> None:
    """16-bit logits are often equal, at the edge of the k best and elsewhere; some rows have NaN, or only NaN."""
    logits = torch.randint(0, 4, shape, device=device).bfloat16()
    logits[..., 5:30] -= 4
    logits[..., ::7] = -torch.inf
    if len(shape) > 1:
        logits[0, ..., 3] = torch.nan
        logits[1] = -torch.inf
    every = logits.float().sort(stable=True, dim=-1, descending=True)
    for k in (1, 2, 3, 17, 39, 40):
        values, indices = best_of_logits(logits, k, log_probs=False)
        broken = logits.isnan().any(-1)
        assert values[broken].isnan().all() and (indices[broken] == torch.arange(k, device=device)).all()
        assert torch.equal(indices[~broken], every.indices[~broken][..., :k])
        assert torch.equal(values[~broken], every.values[~broken][..., :k])


@pytest.mark.parametrize("rows", [1, 20])
def test_one_class_far_above_or_below_the_rest(rows: int, backend: str, device: str) -> None:
    """In any position, it is found first or not at all, and counts once in the sum of the exponentials."""
    x = torch.rand(rows, 8, device=device)
    for place in PLACES[::3] if is_interpreted() else PLACES:
        for logit in (1000.0, -1000.0):
            weight = torch.rand(300, 8, device=device)
            weight[place] = logit
            compare((x, weight), k=3, log_probs=True, clear_at_least=0.0)
            assert bool((linear_topk(x, weight, 1).indices == place).all()) == (logit > 0)


@pytest.mark.parametrize("rows", [2, 20])
def test_impossible_classes(rows: int, backend: str, device: str) -> None:
    """-inf is a logit: it is chosen last, adds nothing to the sum, and gives no NaN if a whole tile has it."""
    x, weight = torch.rand(rows, 8, device=device) + 0.1, torch.randn(700, 8, device=device)
    weight[:300] = weight[350:690] = -torch.inf
    possible = torch.cat((weight[300:350], weight[690:]))
    expected = linear_topk(x, possible, 60)
    values, indices = linear_topk(x, weight, 64)
    torch.testing.assert_close(values[:, :60], expected.values)
    assert torch.equal(
        torch.where(indices[:, :60] < 350, indices[:, :60] - 300, indices[:, :60] - 640), expected.indices
    )
    assert torch.equal(values[:, 60:], torch.full_like(values[:, 60:], -torch.inf))
    assert indices[:, 60:].tolist() == [[0, 1, 2, 3]] * rows
    nothing = torch.full_like(weight, -torch.inf)
    assert linear_topk(x, nothing, 3).values.isnan().all()  # as log_softmax has it
    assert linear_topk(x, nothing, 3, log_probs=False).values.isneginf().all()


@log_probs
@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("rows", [3, 20])
def test_nan_and_inf_are_never_silent(rows, dtype, log_probs, backend, device) -> None:
    """A NaN or +inf among a row's logits, in any position, makes this row NaN and doesn't affect the others."""
    skip_unless_supported(backend, dtype)
    x, weight = make_inputs((rows, 9), 300, device, dtype)  # odd: bf16 goes in pairs
    x = x.abs() + 0.1
    x[1] = -x[1]  # turns the sign of an infinity
    for k in (1, 7):
        clean = linear_topk(x, weight, k, log_probs=log_probs)
        for place in PLACES[::4] if is_interpreted() else PLACES:
            for bad in (torch.nan, torch.inf):
                broken = weight.clone()
                broken[place, 0] = bad
                values, indices = linear_topk(x, broken, k, log_probs=log_probs)
                hit = torch.arange(rows, device=device) != (1 if bad == torch.inf else -1)
                assert values[hit].isnan().all(), f"{bad} at {place}"
                assert (indices[hit] == torch.arange(k, device=device)).all(), "indices that no lookup refuses"
                assert values[~hit].isfinite().all(), f"{bad} at {place}"
        for row in range(0, rows, 2):
            broken = x.clone()
            broken[row, 0] = torch.nan  # right behind the row before
            values, indices = linear_topk(broken, weight, k, log_probs=log_probs)
            others = torch.arange(rows, device=device) != row
            assert values[row].isnan().all()
            assert torch.equal(values[others], clean.values[others]) and torch.equal(
                indices[others], clean.indices[others]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_other_rows_do_not_change_bits(dtype: torch.dtype, backend: str, device: str) -> None:
    """A request decodes to the same tokens with any other requests in the batch."""
    if backend != "cpp":
        pytest.skip("of the C++ code; PyTorch's products depend on the number of rows")
    x, weight = make_inputs((140, 600), 300, device, dtype)
    whole = linear_topk(x, weight, 6)
    for first, last in ((0, 1), (7, 9), (11, 15), (20, 37), (139, 140), (3, 139)):
        for part, all_ in zip(linear_topk(x[first:last], weight, 6), whole, strict=True):
            assert torch.equal(part, all_[first:last]), f"rows {first} to {last}"


@pytest.mark.parametrize("k", [1, 6])
def test_the_best_logits_are_chosen_without_a_sync(k: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, -torch.inf, -2.0], [0.0] * 8, [5.0, torch.nan] * 4])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with NoSync():
            top = best_of_logits(logits.to(dtype), k, log_probs=False, may_read=False)
        by_reading = best_of_logits(logits.to(dtype), k, log_probs=False, may_read=True)
        assert torch.equal(top.indices, by_reading.indices)
        assert torch.equal(top.values.nan_to_num(9.0), by_reading.values.nan_to_num(9.0))
        assert top.indices[0].tolist() == [1, 2, 5, 0, 3, 4][:k]  # zeros of both signs are equal
        assert top.indices[1].tolist() == list(range(k)) and top.values[2].isnan().all()


def test_the_whole_logits_are_never_in_memory(backend: str, device: str) -> None:
    rows, vocab_size = 512 if is_interpreted() else 8192, 600
    x, weight = make_inputs((rows, 4), vocab_size, device)
    assert peak_bytes(lambda: linear_topk(x, weight, 2), device) < rows * vocab_size * 4 / 2
    compare((x, weight), k=2, log_probs=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_narrow_weight_is_never_widened_as_a_whole(dtype: torch.dtype, device: str) -> None:
    """Otherwise, each decode step would write and read twice the weight's bytes."""
    x, weight = make_inputs((2, 64), 20_000, device, dtype)
    with use_backend("reference"):
        assert peak_bytes(lambda: linear_topk(x, weight, 2), device) < weight.numel() * 4 / 4


@dtypes
@log_probs
def test_capped_logits(log_probs: bool, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_supported(backend, dtype)
    x, weight = make_inputs((3, 7, 24), 300, device, dtype)
    values, indices = linear_topk(x, weight, 5, log_probs=log_probs, softcap=1.5)
    logits = 1.5 * torch.tanh(F.linear(x.double(), weight.double()) / 1.5)
    exact = logits.log_softmax(-1) if log_probs else logits
    torch.testing.assert_close(values.double(), exact.topk(5).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exact.gather(-1, indices), exact.topk(5).values, rtol=1e-5, atol=1e-5)


def test_equal_capped_logits_are_ordered_by_index(backend: str, device: str) -> None:
    """With a cap of 1, logits of 20 and more, including infinity, are equal, and break no row."""
    x, weight = torch.ones(2, 1, device=device), torch.full((300, 1), 20.0, device=device)
    weight[5], weight[7], weight[200] = 30.0, -1.0, torch.inf
    values, indices = linear_topk(x, weight, 8, log_probs=False, softcap=1.0)
    assert torch.equal(values, torch.ones_like(values))
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5, 6, 8]] * 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_call_like_the_one_before_is_checked(context: Callable[[], Any], backend: str, device: str) -> None:
    x, weight = make_inputs((2, 8), 9, device)
    with context():
        first = linear_topk(x, weight, 1)
        assert all(torch.equal(*pair) for pair in zip(linear_topk(x, weight, 1), first, strict=True))
        for k, log_probs in ((True, True), (1, 1)):  # equal to 1 and True
            with pytest.raises(ValueError, match="expected (k|log_probs)"):
                linear_topk(x, weight, k, log_probs=log_probs)
    weight.requires_grad_()
    assert not linear_topk(x, weight, 1).values.requires_grad
