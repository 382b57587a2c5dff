"""Compares embedding with F.embedding, a product, a sum and dropout's formula; tests sinusoidal tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops import embedding, sinusoidal_positions
from tests.checks import assert_equals_plain, assert_op_accurate, keep_mask, keep_scale
from tests.covering import covering, each
from tests.no_sync import no_waiting

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(
    ids: Tensor,
    weight: Tensor,
    position_table: Tensor | None,
    positions: Tensor | None,
    *,
    scale: float = 1.0,
    padding_idx: int | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    out = F.embedding(ids, weight) * scale
    if padding_idx is not None:
        out = out.masked_fill((ids == padding_idx % len(weight))[..., None], 0.0)
    if position_table is not None:
        rows = position_table[: ids.shape[-1]] if positions is None else F.embedding(positions, position_table)
        out = (out + rows).to(weight.dtype)
    return out if keep is None else out * keep * keep_scale(dropout_p)


def make_inputs(
    shape: tuple[int, ...],
    num_embeddings: int,
    dim: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    table: torch.dtype | None = None,
    positions: bool = False,
) -> dict[str, Tensor | None]:
    """Makes inputs. `table`: the dtype of a position table of 19 rows; None = no table."""
    return {
        "ids": torch.randint(num_embeddings, shape, device=device),
        "weight": torch.randn(num_embeddings, dim, device=device).to(dtype),
        "position_table": torch.randn(19, dim, device=device).to(table) if table else None,
        "positions": torch.randint(19, shape, device=device) if positions else None,
    }


def compare(inputs: dict[str, Tensor | None], op: Callable[..., Tensor] = embedding, **options: Any) -> None:
    ids, weight = inputs["ids"], inputs["weight"]
    assert ids is not None and weight is not None
    assert_equals_plain(op, plain, inputs, (*ids.shape, weight.shape[1]), **options)


@pytest.mark.parametrize("of_table", [False, True])
def test_expanded_rows_are_read_in_place(of_table: bool, backend: str, device: str) -> None:
    """A copy of an expanded weight or table would take 64 MiB; no kernel needs its full size."""
    ids = torch.tensor([[7, 3, 2**17]], device=device)
    row, rows = torch.randn(1, 64, device=device), torch.randn(9, 64, device=device)
    expanded = row.expand(2**18, 64)
    ids, arguments, expected = {
        False: (ids, {}, row.expand(1, 3, 64)),
        True: (ids % 9, {"position_table": expanded, "positions": ids}, rows[ids % 9] + row),
    }[of_table]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = embedding(ids, rows if of_table else expanded, **arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    if backend == "cpp":
        assert sum(max(event.self_cpu_memory_usage, 0) for event in profiled.key_averages()) < 2**20


@pytest.mark.parametrize(
    "dtype, positions, scale, padding_idx",
    covering(DTYPES, ["none", "in order", "given"], [(1.0, None), (5.0, 0), (0.3, -2)]),
)
def test_accuracy(dtype, positions, scale, padding_idx, backend, device) -> None:
    table = None if positions == "none" else dtype
    inputs = make_inputs((3, 17), 11, 24, device, dtype, table=table, positions=positions == "given")
    compare(inputs, scale=scale, padding_idx=padding_idx)


@each("shape, num_embeddings, dim", [((1, 1), 1, 1), ((5,), 7, 17), ((2, 3, 4), 30, 33), ((2, 9), 1000, 1000)])
@each("positions", [False, True])
def test_shapes(shape, num_embeddings, dim, positions, backend, device) -> None:
    inputs = make_inputs(shape, num_embeddings, dim, device, table=torch.float32, positions=positions)
    compare(inputs, scale=2.0, strided_dy=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_many_times(dtype: torch.dtype, backend: str, device: str) -> None:
    compare(make_inputs((4, 300), 2, 16, device, dtype), scale=3.0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_no_occurrence_of_an_id_is_lost(dropout_p: float, backend: str, device: str) -> None:
    """Sums are in groups of tokens: ids fill some groups exactly, with one token less, or one more.

    All numbers are exact.
    """
    if backend == "triton" and dropout_p:
        pytest.skip("its groups are the same ones with dropout")
    sizes = [0, 1, 15, 16, 17, 18, 33] if backend == "triton" else [*range(20), *range(30, 35), *range(46, 51), 64, 65]
    counts = torch.tensor(sizes, device=device)
    ids = torch.arange(len(counts), device=device).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), device=device)]
    dout = torch.randint(1, 64, (len(ids), 21), device=device).float()
    seed = torch.tensor([2**61 + 12345, 77], device=device)
    keep = keep_mask(seed, dropout_p, len(ids), 21)[0] if dropout_p else torch.ones_like(dout)
    expected = torch.zeros(len(counts), 21, device=device).index_add_(0, ids, dout * keep)
    weight, table = (torch.zeros(len(counts), 21, device=device, requires_grad=True) for _ in range(2))
    options = {"dropout_p": dropout_p, "dropout_seed": seed} if dropout_p else {}
    out = embedding(ids, weight, position_table=table, positions=ids, scale=2.0, **options)
    out.backward(dout * (1 - dropout_p))  # which the scale of dropout takes back
    assert torch.equal(weight.grad, 2 * expected)
    assert torch.equal(table.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_a_frequent_token(dtype: torch.dtype, backend: str, device: str) -> None:
    """A sum of ones stops growing at 256 in bf16 and at 2048 in fp16; the sums over tokens are fp32."""
    # 2048 and then 256 ones, so that a few tokens do what thousands would.
    ids = torch.zeros(257, dtype=torch.int64, device=device)
    weight, table = (torch.zeros(1, 8, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    try:
        out = embedding(ids, weight, position_table=table, positions=ids)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    dout = torch.ones_like(out)
    dout[0] = 2048
    out.backward(dout)
    assert torch.equal(weight.grad, torch.full_like(weight, 2304))
    assert torch.equal(table.grad, torch.full_like(table, 2304))


def test_fixed_table_in_another_dtype(backend: str, device: str) -> None:
    inputs = make_inputs((2, 9), 11, 24, device, torch.bfloat16)
    table = sinusoidal_positions(9, 24, device=device)
    del inputs["position_table"]
    assert_op_accurate(partial(embedding, position_table=table), partial(plain, position_table=table), inputs)


def test_padding_gives_zeros_and_gets_no_gradient(backend: str, device: str) -> None:
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    table = torch.randn(3, 8, device=device)
    ids = torch.tensor([[4, 2, 2]], device=device)
    assert torch.equal(embedding(ids, weight, padding_idx=2)[0, 1:], torch.zeros(2, 8, device=device))
    out = embedding(ids, weight, position_table=table, padding_idx=2)
    assert torch.equal(out[0, 1:], table[1:])  # the position is added all the same
    out.backward(torch.randn_like(out))
    assert torch.equal(weight.grad[2], torch.zeros(8, device=device))
    assert weight.grad[4].abs().min() > 0


@pytest.mark.parametrize("dtype, dropout_p, positions", covering(DTYPES, [0.1, 1.0], [False, True]))
def test_dropout_equals_the_formula(dtype, dropout_p, positions, backend, device) -> None:
    inputs = make_inputs((3, 7), 11, 29, device, dtype, table=dtype, positions=positions)
    compare(inputs, scale=3.0, padding_idx=0, dropout_p=dropout_p)


@pytest.mark.gpu
def test_no_host_sync() -> None:
    inputs = make_inputs((3, 17), 11, 24, "cuda", table=torch.float32, positions=True)
    weight = inputs.pop("weight").requires_grad_()
    call = partial(embedding, weight=weight, **inputs, padding_idx=0, dropout_p=0.1)
    call().sum().backward()  # compiled by now
    with no_waiting():
        call().sum().backward()


@each("dim", [1, 2, 3, 8, 9])
def test_sinusoidal_positions_of_the_paper(dim: int) -> None:
    table = sinusoidal_positions(50, dim, dtype=torch.float64)
    for position in (0, 1, 7, 49):
        for column in range(dim):
            angle = position / 10000 ** (2 * (column // 2) / dim)
            expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert table[position, column] == pytest.approx(expected, abs=1e-14)
    halves = sinusoidal_positions(50, dim, "halves", dtype=torch.float64)
    assert torch.equal(halves, torch.cat((table[:, 0::2], table[:, 1::2]), 1))


@each("dim", [1, 2, 3, 8, 9])
def test_sinusoidal_positions_of_tensor2tensor(dim: int) -> None:
    table = sinusoidal_positions(50, dim, "concatenated", dtype=torch.float64)
    half = dim // 2
    for position in (0, 1, 7, 49):
        for column in range(half):
            angle = position / 10000 ** (column / max(half - 1, 1))
            assert table[position, column] == pytest.approx(math.sin(angle), abs=1e-14)
            assert table[position, half + column] == pytest.approx(math.cos(angle), abs=1e-14)
        if dim % 2:
            assert table[position, -1] == 0.0


@pytest.mark.parametrize("kind", ["interleaved", "halves", "concatenated"])
def test_sinusoidal_positions_may_begin_later(kind: str) -> None:
    table = sinusoidal_positions(50, 6, kind)
    assert torch.equal(sinusoidal_positions(48, 6, kind, first=2), table[2:])
    for first in (-1, 0.5):
        with pytest.raises(ValueError, match=r"\bfirst\b"):
            sinusoidal_positions(50, 6, kind, first=first)


@pytest.mark.parametrize("kind, column, angle", [("interleaved", 2, 1e5 / 1e4 ** (2 / 6)), ("concatenated", 1, 1e3)])
def test_sinusoidal_positions_are_rounded_last(kind: str, column: int, angle: float, device: str) -> None:
    """An angle of thousands of radians is off by 1e-4 in fp32, so it is fp64, and only the result is rounded."""
    table = sinusoidal_positions(100_001, 6, kind, device=device)
    assert table.dtype == torch.float32 and table.device.type == device
    assert float(table[100_000, column]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_an_element_at_the_threshold_is_kept(backend: str, device: str) -> None:
    # The published words of Philox4x32-7 for counter and key 0, each four decisions, the lowest byte first.
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    decisions = [byte for word in words for byte in word.to_bytes(4, "little")]
    columns = [column for pair in range(0, 64, 8) for column in (pair, pair + 1)]
    ids, weight, seed = (torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 64), torch.zeros(2, dtype=torch.int64))
    ids, weight, seed = ids.to(device), weight.to(device), seed.to(device)
    for limit in sorted({edge for decision in decisions for edge in (decision, decision + 1)}):
        out = embedding(ids, weight, dropout_p=limit / 256, dropout_seed=seed)
        assert (out[0, 0, columns] != 0).tolist() == [decision >= limit for decision in decisions]
