"""A plan serves the calls of its own geometry and no others, and says what a call decided anew would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels import _plans, _tuning, add_layer_norm, attention  # noqa: E402
from fastformer.ops import _extension, _library, record_backends, use_backend  # noqa: E402

LAUNCHERS = {
    "attention_fwd": attention.attention_fwd,
    "attention_bwd": attention.attention_bwd,
    "varlen_attention_fwd": attention.varlen_attention_fwd,
    "varlen_attention_bwd": attention.varlen_attention_bwd,
    "add_layer_norm_fwd": add_layer_norm.add_layer_norm_fwd,
    "add_layer_norm_bwd": add_layer_norm.add_layer_norm_bwd,
}
Args = tuple[Any, ...]


@pytest.fixture(autouse=True)
def planned(device: str) -> Iterator[list[str]]:
    """The ops whose plans were made; every op runs on Triton."""
    made: list[str] = []
    patch = pytest.MonkeyPatch()
    for module in (attention, add_layer_norm):
        for name in LAUNCHERS:
            if plan_of := getattr(module, f"plan_{name}", None):
                patch.setattr(module, f"plan_{name}", counted(name, plan_of, made))
    _plans.forget()
    with use_backend("triton"):
        yield made
    patch.undo()
    _plans.forget()


def counted(name: str, plan_of: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    def plan(*args: Any) -> Any:
        made.append(name)
        return plan_of(*args)

    return plan


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def heads(device: str, rows: int = 20, heads: int = 2, dim: int = 16, *, apart: bool = True) -> Tensor:
    """(1, rows, heads, dim), as it comes out of one projection for three."""
    return (
        random(1, rows, 3, heads, dim, device=device)[:, :, 1] if apart else random(1, rows, heads, dim, device=device)
    )


def seed(device: str) -> Tensor:
    return torch.randint(0, 2**40, (2,), device=device)


def unaligned(x: Tensor) -> Tensor:
    """A copy with the same strides, whose address is no multiple of 16."""
    copy = x.new_empty(x.untyped_storage().nbytes() // x.element_size() + 1).as_strided(x.shape, x.stride(), 1)
    return copy.copy_(x)


def attention_calls(device: str) -> Iterator[Args]:
    """Calls that differ in one thing each."""
    new = lambda **options: [heads(device, **options) for _ in range(3)]  # noqa: E731
    yield *new(), None, None, 0.25, None, 0, 0.0, None
    yield *new(apart=False), None, None, 0.25, None, 0, 0.0, None
    yield (
        *(x.transpose(1, 2) for x in (heads(device, rows=2, heads=20) for _ in range(3))),
        None,
        None,
        0.25,
        None,
        0,
        0.0,
        None,
    )
    yield *new(), None, None, 0.5, None, 0, 0.0, None
    yield *new(), None, None, 0.25, None, None, 0.0, None
    yield *new(), None, None, 0.25, 3, 0, 0.0, None
    yield *new(), None, None, 0.25, None, 0, 0.5, seed(device)
    yield *new(), None, None, 0.25, None, 0, 0.25, seed(device)
    yield *new(), None, torch.tensor([17], dtype=torch.int32, device=device), 0.25, None, 0, 0.0, None
    yield *new(), torch.rand(1, 1, 20, 20, device=device) > 0.3, None, 0.25, None, 0, 0.0, None
    yield *new(), torch.rand(1, 1, 1, 20, device=device) > 0.3, None, 0.25, None, 0, 0.0, None
    yield *new(), random(1, 2, 20, 20, device=device), None, 0.25, None, 0, 0.0, None
    yield *(x.half() for x in new()), None, None, 0.25, None, 0, 0.0, None
    yield *map(unaligned, new(apart=False)), None, None, 0.25, None, 0, 0.0, None
    yield *new(rows=21), None, None, 0.25, None, 0, 0.0, None
    yield heads(device), heads(device, heads=1), heads(device, heads=1), None, None, 0.25, None, 0, 0.0, None
    strided = [random(1, 20, 2, 32, device=device)[..., ::2] for _ in range(3)]
    yield *strided, None, None, 0.25, None, 0, 0.0, None  # copied first


def backward_calls(device: str) -> Iterator[Args]:
    for q, k, v, mask, *rest in attention_calls(device):
        out, lse = attention.attention_fwd(q, k, v, mask, *rest)
        for wanted in {False, mask is not None and mask.is_floating_point()}:
            yield torch.randn_like(out), q, k, v, out, lse, mask, *rest, wanted


def varlen_calls(device: str) -> Iterator[Args]:
    def cumulative(*ends: int) -> Tensor:
        return torch.tensor([0, *ends], dtype=torch.int32, device=device)

    for ends, longest in (((7, 20), 13), ((20,), 20), ((10, 20), 13)):
        for dropout in ((0.0, None), (0.5, seed(device))):
            q, k, v = (heads(device)[0] for _ in range(3))
            yield q, k, v, cumulative(*ends), cumulative(*ends), longest, longest, 0.25, None, 0, *dropout


def varlen_backward_calls(device: str) -> Iterator[Args]:
    for q, k, v, *rest in varlen_calls(device):
        out, lse = attention.varlen_attention_fwd(q, k, v, *rest)
        yield torch.randn_like(out), q, k, v, out, lse, *rest


def norm_calls(device: str) -> Iterator[Args]:
    x = lambda: random(3, 5, 24, device=device)  # noqa: E731
    vector = lambda: random(24, device=device)  # noqa: E731
    for residual in (None, x()):
        for weight, bias in ((None, None), (vector(), vector()), (vector(), None)):
            for dropout in ((0.0, None), (0.5, seed(device))):
                yield x(), residual, weight, bias, 1e-5, *dropout, False
    yield x(), x(), vector(), vector(), 1e-2, 0.0, None, False
    yield x(), x(), vector(), None, 1e-5, 0.0, None, True
    yield x().half(), x(), vector(), vector(), 1e-5, 0.0, None, False
    yield x().transpose(0, 1), x().transpose(0, 1), vector(), vector(), 1e-5, 0.0, None, False
    yield unaligned(x()), x(), vector(), vector(), 1e-5, 0.0, None, False
    yield random(15, 24, device=device), random(15, 24, device=device), vector(), vector(), 1e-5, 0.0, None, False
    yield random(0, 24, device=device), random(0, 24, device=device), vector(), vector(), 1e-5, 0.0, None, False


def norm_backward_calls(device: str) -> Iterator[Args]:
    for x, residual, weight, bias, _, p, drawn, rms in norm_calls(device):
        _, stream, mean, rstd = add_layer_norm.add_layer_norm_fwd(x, residual, weight, bias, 1e-5, p, drawn, rms)
        stream = stream if residual is not None or p else x
        for dresidual in (None, torch.randn_like(stream)):
            yield torch.randn_like(x), dresidual, stream, weight, mean, rstd, p, drawn, rms, bias is not None, x.dtype


CALLS: dict[str, Callable[[str], Iterator[Args]]] = {
    "attention_fwd": attention_calls,
    "attention_bwd": backward_calls,
    "varlen_attention_fwd": varlen_calls,
    "varlen_attention_bwd": varlen_backward_calls,
    "add_layer_norm_fwd": norm_calls,
    "add_layer_norm_bwd": norm_backward_calls,
}


def other(args: Args) -> Args:
    """A call of the same geometry with other numbers in it."""

    def changed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.dtype == torch.int32:
            return x.clone()
        copy = unaligned(x) if x.data_ptr() % 16 else torch.empty_like(x)
        if copy.stride() != x.stride():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            copy = x.new_empty(size).as_strided(x.shape, x.stride())
        return copy.copy_(~x if x.dtype == torch.bool else x + 1 if x.dtype == torch.int64 else x * 0.5)

    return tuple(map(changed, args))


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_gives_what_a_decision_gives(name: str, device: str, planned: list[str]) -> None:
    """One call of each geometry makes its plan; the next, with other numbers, is held to a launcher that decides."""
    calls = list(CALLS[name](device))
    planned.clear()
    run = _library.OPS[name].run
    for args in calls:
        run("triton", args)
    made = planned.count(name)
    assert made > len(calls) // 2
    calls = list(map(other, calls))
    found = [run("triton", args) for args in calls]
    assert planned.count(name) == made
    for index, (args, mine) in enumerate(zip(calls, found, strict=True)):
        for one, another in zip(mine, LAUNCHERS[name](*args), strict=True):
            assert one.dtype == another.dtype and one.stride() == another.stride(), index
            assert torch.equal(one.nan_to_num(), another.nan_to_num()), index


def test_plans_hold_no_tensors(device: str) -> None:
    """Not those that they were made with: a step's activations would stay for good."""
    for name, calls in CALLS.items():
        module = add_layer_norm if name.startswith("add") else attention
        for args in calls(device):
            mine = other(args)
            left = [weakref.ref(x) for x in mine if isinstance(x, Tensor)]
            plan = getattr(module, f"plan_{name}")(*mine)
            del mine
            assert not any(reference() is not None for reference in left), name
            del plan


def test_what_else_a_plan_depends_on(device: str, planned: list[str]) -> None:
    """PyTorch's deterministic mode, and measured tiles."""
    args = next(iter(backward_calls(device)))
    run = _library.OPS["attention_bwd"].run
    planned.clear()
    for change in (lambda: None, lambda: torch.use_deterministic_algorithms(True), _tuning.forget):
        change()
        try:
            for _ in range(2):
                run("triton", args)
        finally:
            torch.use_deterministic_algorithms(False)
    assert planned == 3 * ["attention_bwd"]


@pytest.mark.parametrize("where", ["python", "extension"])
def test_what_is_known_of_a_call(device: str, where: str) -> None:
    geometry = _plans.geometry if where == "python" else _extension.host_function("geometry")
    if geometry is None:
        pytest.skip("the C++ extension is not built")
    x, weight = torch.zeros(4, 8, device=device), torch.nn.Parameter(torch.zeros(8, device=device))
    rest = (0.5, [True, False], None, "gelu", torch.bfloat16, 7)
    same: list[Args] = [(x, weight, *rest), (x.clone(), weight.detach(), *rest)]
    assert geometry(same[0]) == geometry(same[1]) is not None
    others: list[Args] = [
        (x.half(), weight, *rest), (x[:2], weight, *rest), (torch.zeros(8, 4, device=device).t(), weight, *rest),
        (unaligned(x), weight, *rest), (x, None, *rest), (x.to("meta"), weight, *rest), (x, x, *rest),
        (x.view(4, 8, 1), weight, *rest), (x, weight),
    ]  # fmt: skip
    instead = {0: (0.25, 1.0, None), 1: ([True, True], [True], [], [True, False, None]), 2: (1, False, x),
               3: ("relu", "gelu ", ""), 4: (torch.float16, None), 5: (8, -7, 7 + 2**32, 2**62)}  # fmt: skip
    others += [(x, weight, *rest[:n], value, *rest[n + 1 :]) for n, values in instead.items() for value in values]
    keys = {geometry(args) for args in [*same, *others]}
    assert len(keys) == 1 + len(others) and None not in keys
    unknown: tuple[Any, ...] = (object(), x.as_subclass(type("Other", (Tensor,), {})), (1, 2), b"x", np.float64(1.0))
    assert {geometry((x, one)) for one in unknown} == {None}
    torch.use_deterministic_algorithms(True)
    try:
        keys.add(geometry(same[0]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(keys) == 2 + len(others)


def test_plans_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "LARGEST", 3)
    plans = _plans.new_plans()
    for key in range(7):
        _plans.remember(plans, key, print)
        assert key in plans and len(plans) <= 3
    _plans.remember(plans, None, print)
    assert len(plans) == 1
    _plans._all_plans.remove(plans)


def test_a_plan_is_for_its_backend_alone(device: str, planned: list[str]) -> None:
    """Whatever is forced or recorded around the call."""
    x = random(4, 8, device=device)
    args = (x, None, None, None, 1e-5, 0.0, None, False)
    run = _library.OPS["add_layer_norm_fwd"].run
    for name in ("triton", "reference", "triton"):
        with use_backend(name), record_backends() as ran:
            run("triton", args)
        assert ran == {("add_layer_norm_fwd", name)}
    assert planned == ["add_layer_norm_fwd"]
