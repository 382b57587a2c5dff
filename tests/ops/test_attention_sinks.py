"""Compares attention with sinks, dense and packed, with a softmax over one more key, on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.nn import MultiheadAttention
from fastformer.nn.errors import InputError
from fastformer.ops import attention, varlen_attention
from tests.checks import assert_accurate, keep_mask, keep_scale, small_draws
from tests.conftest import on_backend
from tests.covering import on_backends
from tests.ops.attention_cases import Case
from tests.ops.test_attention import BACKENDS, lacks


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_backend(request, "attention")


CASES = [
    Case("causal", is_causal=True),
    Case("window-gqa", num_heads=4, is_causal=True, window_size=(6, None)),
    Case("cap-scale", num_heads=4, softcap=1.5, softmax_scale=0.7, logits=2.0),
    Case("mask-of-nothing", mask="bool", seqlens_k=(33, 0)),
    Case("dropout", num_heads=4, num_kv_heads=1, is_causal=True, dropout_p=0.25),
]
SEED = torch.tensor([1234567890123, 77])
BOUNDS = torch.tensor([0, 33, 33, 50], dtype=torch.int32)  # of packed sequences, one of which is empty


def plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, case: Case, visible: Tensor | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Computes one batch with the sinks as a last column of scores; first: the place of its first row, for dropout."""
    batch, length, heads, size = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT * (case.softmax_scale or size**-0.5)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(k.shape[2])
    seen = torch.ones_like(distance, dtype=torch.bool) if visible is None else visible
    if case.is_causal:
        seen = seen & (distance >= 0)
    if (left := case.window_size[0]) is not None:
        seen = seen & (distance <= left)
    whole = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks.view(-1, 1, 1).expand(batch, -1, length, 1)], -1)
    weights = whole.softmax(-1)[..., :-1]
    if case.dropout_p:
        keep = keep_mask(SEED, case.dropout_p, length, k.shape[2], (first + batch) * heads)[first * heads :]
        weights = weights * keep.view_as(weights).to(weights.dtype) * keep_scale(case.dropout_p)
    return (weights @ v).transpose(1, 2), whole.detach().logsumexp(-1)


def drawn(case: Case, packed: bool, seed: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    rows = (50,) if packed else (case.batch, case.seqlen_q)
    shapes = {"q": (*rows, case.num_heads, case.head_dim), **dict.fromkeys("kv", (*rows, 2, case.head_dim))}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    if case.num_kv_heads == 1:
        tensors |= {name: tensors[name][..., :1, :].contiguous() for name in "kv"}
    tensors["q"] *= case.logits
    return {**tensors, "sinks": torch.randn(case.num_heads, dtype=torch.float64) * 2}


def results(function: Any, tensors: dict[str, Tensor], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    leaves = {name: tensor.to(device, dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    out, lse = function(**leaves)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(device, dtype)
    gradients = torch.autograd.grad(out, [*leaves.values()], dout)
    return {"out": out, "lse": lse, **{f"d{name}": each for name, each in zip(leaves, gradients, strict=True)}}


def assert_same(ours: Any, exact: Any, case: Case, packed: bool, dtype: torch.dtype, device: str) -> None:
    # The gradients of sinks are few numbers: the worst of one draw is luck.
    draws = [drawn(case, packed, seed) for seed in range(4, 4 + small_draws())]
    found, due, same = (
        [results(*call) for call in calls]
        for calls in (
            [(ours, each, dtype, device) for each in draws],
            [(exact, each, torch.float64) for each in draws],
            [(exact, each, dtype) for each in draws],
        )
    )
    for name in found[0]:
        mine, right, other = (torch.stack([each[name].cpu() for each in all_draws]) for all_draws in (found, due, same))
        if dtype == torch.float64:
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
        elif name == "lse":  # ours is fp32 for bf16, too
            torch.testing.assert_close(mine.double(), right, rtol=1e-2, atol=1e-2)
        else:
            assert_accurate(mine, other, right, name)


@on_backends("case", CASES, BACKENDS, ["fp64", "fp32", "bf16"], lacks)
def test_a_batch(case, dtype, backend, device) -> None:
    visible, mask, lengths = None, None, None
    if case.mask is not None:
        mask = torch.rand(1, 1, 33, 33, generator=torch.Generator().manual_seed(2)) > 0.3
        lengths = torch.tensor(case.seqlens_k, dtype=torch.int32)
        visible = mask & (torch.arange(33) < lengths[:, None, None, None])
        mask, lengths = mask.to(device), lengths.to(device)
    options = case.options() | {"dropout_p": case.dropout_p, "dropout_seed": SEED.to(device), "return_lse": True}
    assert_same(
        lambda **tensors: attention(**tensors, attn_mask=mask, seqlens_k=lengths, **options),
        lambda **tensors: plain(**tensors, case=case, visible=visible),
        case, False, dtype, device,
    )  # fmt: skip


@on_backends("case", [each for each in CASES if each.mask is None], BACKENDS, ["fp64", "fp32", "bf16"], lacks)
def test_packed_sequences(case, dtype, backend, device) -> None:
    def each(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        ends = BOUNDS.tolist()
        parts = [
            plain(q[None, a:b], k[None, a:b], v[None, a:b], sinks, case, first=i)
            for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))
        ]
        outs, lses = zip(*parts, strict=True)
        return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], 1)

    bounds = BOUNDS.to(device)
    options = case.options() | {"dropout_p": case.dropout_p, "dropout_seed": SEED.to(device), "return_lse": True}
    assert_same(
        lambda q, k, v, sinks: varlen_attention(q, k, v, bounds, bounds, 33, 33, sinks=sinks, **options),
        each, case, True, dtype, device,
    )  # fmt: skip


@pytest.mark.parametrize("value", [-1e4, 1e4, -torch.inf])
def test_a_sink_may_take_nothing_or_everything(value: float) -> None:
    q, k, v, _ = drawn(CASES[0], False).values()
    q.requires_grad_()
    out = attention(q, k, v, sinks=torch.full((2,), value, dtype=torch.float64))
    due = attention(q, k, v) if value < 0 else torch.zeros_like(q)
    torch.testing.assert_close(out, due)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
    lengths = torch.tensor([33, 0], dtype=torch.int32)  # the second batch sees nothing but the sinks
    out = attention(q, k, v, seqlens_k=lengths, sinks=torch.full((2,), value, dtype=torch.float64))
    assert torch.equal(out[1], torch.zeros_like(q[1]))
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("is_packed", [False, True])
def test_derivatives_have_any_order_and_direction(is_packed: bool) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    shape = (3,) if is_packed else (1, 3)
    tensors = [torch.randn(*shape, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    tensors.append(torch.randn(4, dtype=torch.float64, requires_grad=True))

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        if is_packed:
            return varlen_attention(q, k, v, bounds, bounds, 2, 2, is_causal=True, sinks=sinks)
        return attention(q, k, v, is_causal=True, sinks=sinks)

    def summed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:  # whose result's gradient needs none
        return ours(q, k, v, sinks).sum()

    assert torch.autograd.gradcheck(ours, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(summed, tensors, torch.ones((), dtype=torch.float64))
    q, k, v, sinks = tensors
    every = torch.func.grad(summed, argnums=(0, 1, 2, 3))(q, k, v, sinks)
    for found, due in zip(every, torch.autograd.grad(summed(q, k, v, sinks), tensors), strict=True):
        torch.testing.assert_close(found, due)
    rows = torch.stack([sinks, sinks + 1])
    each = torch.func.vmap(ours, (None, None, None, 0))(q, k, v, rows)
    torch.testing.assert_close(each, torch.stack([ours(q, k, v, row) for row in rows]))


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), [0.0, 0.0]])
def test_sinks_of_another_kind_are_refused(sinks: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="sinks"):
        attention(q, q, q, sinks=sinks)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="sinks"):
        varlen_attention(q[0], q[0], q[0], bounds, bounds, 4, 4, sinks=sinks)


def test_a_mask_has_no_gradient_along_with_sinks() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="mask"):
        attention(q, q, q, attn_mask=torch.zeros(4, 4, requires_grad=True), sinks=torch.zeros(2))


def test_a_module_has_sinks_to_learn() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2, sinks=True).double()
    assert module.state_dict()["sinks"].shape == (4,) and not module.is_standard
    with torch.no_grad():
        module.sinks.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    out, _ = module(x, x, x, need_weights=False, is_causal=True)
    q, k, v = (part.view(2, 9, -1, 8) for part in torch.nn.functional.linear(x, module.in_proj_weight,
               module.in_proj_bias).split([32, 16, 16], -1))  # fmt: skip
    case = dataclasses.replace(CASES[0], num_heads=4)
    due = module.out_proj(plain(q, k, v, module.sinks, case)[0].flatten(2))
    torch.testing.assert_close(out, due)
    out.sum().backward()
    assert module.sinks.grad is not None and module.sinks.grad.abs().min() > 0
    with pytest.raises(InputError, match="need_weights"):
        module(x, x, x)
