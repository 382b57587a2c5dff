"""A plan serves later calls of the same geometry only, and keeps no tensor alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels import _plans  # noqa: E402
from fastformer.ops import (  # noqa: E402
    add_layer_norm,
    attention,
    decode_attention,
    record_backends,
    use_backend,
    varlen_attention,
)
from tests.conftest import leave_out_extension  # noqa: E402

Call = tuple[Callable[..., Any], dict[str, Any]]
HEADS = (1, 6, 2, 16)


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    _plans.forget()
    yield
    _plans.forget()


def unaligned(x: Tensor) -> Tensor:
    """Returns a copy with the same strides, whose address is not a multiple of 16."""
    copy = x.new_empty(x.untyped_storage().nbytes() // x.element_size() + 1).as_strided(x.shape, x.stride(), 1)
    return copy.copy_(x)


def attention_calls(device: str) -> Iterator[Call]:
    """Returns calls that differ in one thing each."""

    def call(make: Callable[[], Tensor] | None = None, **options: Any) -> Call:
        make = make or (lambda: torch.randn(HEADS, device=device))
        return attention, {"q": make(), "k": make(), "v": make(), "is_causal": True} | options

    drawn = partial(torch.randn, device=device)
    seed = torch.tensor([2**40, 9], device=device)
    yield call()
    yield call(lambda: drawn(1, 6, 3, 2, 16)[:, :, 1])  # out of one projection for three
    yield call(lambda: drawn(1, 2, 6, 16).transpose(1, 2))
    yield call(lambda: drawn(1, 6, 2, 32)[..., ::2])  # copied first
    yield call(lambda: unaligned(drawn(*HEADS)))
    yield call(lambda: drawn(1, 7, 2, 16))
    yield call(lambda: drawn(*HEADS).half())
    yield call(k=drawn(1, 6, 1, 16), v=drawn(1, 6, 1, 16))
    for options in (
        {"softmax_scale": 0.5},
        {"is_causal": False},
        {"window_size": (1, 0)},
        {"dropout_p": 0.5, "dropout_seed": seed},
        {"dropout_p": 0.25, "dropout_seed": seed},
        {"seqlens_k": torch.tensor([3], dtype=torch.int32, device=device)},
        {"attn_mask": drawn(1, 1, 6, 6) > -0.5},
        {"attn_mask": drawn(1, 1, 1, 6) > -0.5},
        {"attn_mask": drawn(1, 2, 6, 6)},
    ):
        yield call(**options)


def varlen_calls(device: str) -> Iterator[Call]:
    for ends, longest in (((0, 2, 6), 4), ((0, 6), 6), ((0, 3, 6), 4)):
        for dropout in ({}, {"dropout_p": 0.5, "dropout_seed": torch.tensor([2**40, 9], device=device)}):
            q, k, v = (torch.randn(6, 2, 16, device=device) for _ in range(3))
            cu = torch.tensor(ends, dtype=torch.int32, device=device)
            lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            yield varlen_attention, {"q": q, "k": k, "v": v, **lengths, **dropout}


def norm_calls(device: str) -> Iterator[Call]:
    drawn = partial(torch.randn, device=device)
    seed = torch.tensor([2**40, 9], device=device)
    whole = {"x": drawn(3, 5, 24), "residual": drawn(3, 5, 24), "weight": drawn(24), "bias": drawn(24)}
    for change in (
        {},
        {"residual": None},
        {"weight": None, "bias": None},
        {"bias": None},
        {"bias": None, "rms_norm": True},
        {"eps": 1e-2},
        {"dropout_p": 0.5, "dropout_seed": seed},
        {"residual": None, "dropout_p": 0.25, "dropout_seed": seed},
        {"x": drawn(3, 5, 24).half()},
        {"x": drawn(5, 3, 24).transpose(0, 1), "residual": drawn(5, 3, 24).transpose(0, 1)},
        {"x": unaligned(drawn(3, 5, 24))},
        {"x": drawn(15, 24), "residual": drawn(15, 24)},
        {"x": drawn(0, 24), "residual": drawn(0, 24)},
    ):
        yield add_layer_norm, whole | change


def decode_step(**arguments: Any) -> tuple[Tensor, ...]:
    """Returns what the op computes, and what it leaves in the caches."""
    out = decode_attention(**arguments)
    return out, arguments["k_cache"].clone(), arguments["v_cache"].clone()


def decode_calls(device: str) -> Iterator[Call]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def whole(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    step = {"q": drawn(2, 1, 4, 16), "k": drawn(2, 1, 2, 16), "v": drawn(2, 1, 2, 16)}
    caches = {"k_cache": drawn(2, 40, 2, 16), "v_cache": drawn(2, 40, 2, 16), "cache_seqlens": whole(3, 38)}
    tables = {"cos": drawn(40, 4), "sin": drawn(40, 4)}
    for change in (
        {},
        {"k": None, "v": None},
        {"k": None, "v": None, "cache_batch_idx": whole(1, 1)},
        {"k": unaligned(step["k"])},
        {"v_cache": drawn(2, 2, 40, 16).transpose(1, 2)},
        {"q": drawn(2, 1, 4, 32)[..., ::2]},
        {"window_left": 5},
        {"softmax_scale": 0.5},
        {"softcap": 2.0},
        {"slot_table": torch.arange(80, dtype=torch.int32, device=device).flip(0).view(2, 40)},
        {name: drawn(2, 90, 2, 16) for name in ("k_cache", "v_cache")},
        tables,
        tables | {"interleaved": True},
        {name: table[:, ::2] for name, table in tables.items()},
        {name: drawn(2, 3, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        | {"cache_seqlens": whole(0, 9)},
        {name: drawn(0, *x.shape[1:]) for name, x in (step | caches).items()} | {"cache_seqlens": whole()},
    ):
        yield decode_step, step | caches | change


CALLS = {
    "attention": attention_calls,
    "varlen_attention": varlen_calls,
    "add_layer_norm": norm_calls,
    "decode_attention": decode_calls,
}


def with_other_numbers(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns a call of the same geometry with other numbers."""

    def changed(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype == torch.int32:
            return x
        copy = unaligned(x) if x.data_ptr() % 16 else x.clone(memory_format=torch.preserve_format)
        if copy.stride() != x.stride():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            copy = x.new_empty(size).as_strided(x.shape, x.stride())
        return copy.copy_(~x if x.dtype == torch.bool else x + 1 if x.dtype == torch.int64 else x * 0.5)

    return {name: changed(value) for name, value in tensors.items()}


def run(call: Call, backend: str) -> list[Tensor]:
    """Returns the outputs and all gradients. A decode step has none."""
    function, arguments = call
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if function is not decode_step and isinstance(value, Tensor) and value.is_floating_point()
    }
    with use_backend(backend), record_backends() as ran:
        outputs = function(**arguments | leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ones = [torch.ones_like(y) for y in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), ones) if leaves else ()
    assert {name for _, name in ran} == {backend}
    return [*(output.detach() for output in outputs), *gradients]


@pytest.mark.parametrize(("name", "extension"), [*((name, True) for name in CALLS), ("add_layer_norm", False)])
def test_each_call_gets_its_own_plan(name: str, extension: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of each geometry uses the plan of the first one, with other geometries in between.

    The geometry of a call is read in C++, or in Python if there is no extension.
    """
    if not extension:
        leave_out_extension(monkeypatch)
    calls = list(CALLS[name](device))
    for call in calls:
        run(call, "triton")
    for index, (function, arguments) in enumerate(calls):
        fresh = function, with_other_numbers(arguments)
        for ours, plain in zip(run(fresh, "triton"), run(fresh, "reference"), strict=True):
            assert ours.dtype == plain.dtype, index
            tolerance = 1e-2 if ours.dtype == torch.float16 else 1e-4
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, index))


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_kept_alive(name: str, device: str) -> None:
    """A plan holds neither inputs nor outputs of the call that made it; otherwise activations would stay."""
    for function, arguments in list(CALLS[name](device))[::3]:
        fresh = with_other_numbers(arguments)
        tensors = {n: x.clone() if isinstance(x, Tensor) else x for n, x in fresh.items()}
        results = run((function, tensors), "triton")
        left = [weakref.ref(x) for x in (*tensors.values(), *results) if isinstance(x, Tensor)]
        del fresh, tensors, results
        assert not any(reference() is not None for reference in left)


def test_the_deterministic_form_is_chosen_in_each_call(device: str) -> None:
    """Both ways of summing are right, but on a GPU only the deterministic one repeats bit by bit."""
    call = next(iter(attention_calls(device)))
    usual = run(call, "triton")
    torch.use_deterministic_algorithms(True)
    first, second = run(call, "triton"), run(call, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(usual, first, strict=True):
        torch.testing.assert_close(a, b)


def test_the_number_of_kept_buffers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "LARGEST", 3)
    plans = _plans.new_plans()
    for key in range(7):
        _plans.remember(plans, key, print)
        assert key in plans and len(plans) <= 3
    plans.clear()
