"""A plain call of an op bypasses PyTorch's dispatcher; modes, profilers and tracers still see every call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastformer import ops
from fastformer.ops import record_backends, use_backend
from fastformer.ops._dispatch import forced_backend
from tests.checks import saved_for_backward
from tests.conftest import leave_out_extension, missing_backend, skip_without
from tests.covering import each

NAME = "add_layer_norm_fwd"


@pytest.fixture(params=["with the extension", "without"], autouse=True)
def _extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests the check for plain tensors in C++ and, as without the extension, in Python."""
    if request.param == "with the extension":
        yield
        return
    leave_out_extension(monkeypatch)
    with use_backend(None if missing_backend("triton", "add_layer_norm") else "triton"):
        yield


def norm(x: Tensor, residual: Tensor | None = None, eps: Any = 1e-5) -> Tensor:
    return ops.add_layer_norm(x, residual, eps=eps)[0]


def expected(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class TensorSubclass(Tensor):
    """A subclass with PyTorch's default behaviour: results of operations are instances as well."""


def test_plain_tensors_of_all_kinds() -> None:
    x, parameter = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
    for context in (contextlib.nullcontext, torch.no_grad):
        with context():
            for tensor in (x, x.t(), x[1:2], parameter, x.expand(2, 4, 4), x[:0], torch.nn.Buffer(x)):
                out = norm(tensor)
                torch.testing.assert_close(out, expected(tensor))
                assert type(out) is Tensor and out.requires_grad is (tensor.requires_grad and torch.is_grad_enabled())


def test_gradients_hooks_of_what_is_saved_and_checkpointing() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    dout = torch.randn(3, 4)
    (gradient,) = torch.autograd.grad(expected(x), x, dout)
    with saved_for_backward() as packed:
        out = norm(x)
    assert any(tensor is x for tensor in packed)
    recomputed = checkpoint(norm, x, use_reentrant=False)
    for output in (out, recomputed):
        torch.testing.assert_close(torch.autograd.grad(output, x, dout)[0], gradient)


def _vmap(x: Tensor) -> Tensor:
    return torch.func.vmap(norm)(x)


def _grad(x: Tensor) -> None:
    ours, reference = (torch.func.grad(lambda x, f=f: (f(x) * x).sum())(x) for f in (norm, expected))
    torch.testing.assert_close(ours, reference)


def _leaked(x: Tensor) -> None:
    """Returns a wrapper that outlived its transform."""
    leaked: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        leaked.append(x)
        return x.sum()

    torch.func.grad(keep)(x)
    with contextlib.suppress(RuntimeError):  # as PyTorch's own functions may have it
        norm(leaked[0])


def _forward_mode(x: Tensor) -> None:
    tangents = []
    for function in (norm, expected):
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(function(forward_ad.make_dual(x, x + 1))).tangent)
    torch.testing.assert_close(*tangents)


def _jit_trace(x: Tensor) -> None:
    assert f"fastformer::{NAME}" in str(torch.jit.trace(norm, (x,), check_trace=False).graph)


def _make_fx(x: Tensor) -> None:
    assert NAME in str(make_fx(lambda x: norm(x))(x).graph)


def _fake(x: Tensor) -> None:
    with FakeTensorMode() as mode:
        assert type(norm(mode.from_tensor(x))) is not Tensor
    assert type(norm(FakeTensorMode().from_tensor(x))) is not Tensor


def _dispatch_mode(x: Tensor) -> None:
    with Seen() as mode:
        norm(x)
    assert f"fastformer.{NAME}.default" in mode.names


def _function_mode(x: Tensor) -> None:
    with SeenFunctions() as mode:
        norm(x)
    assert any(NAME in name for name in mode.names)


def _flop_counter(x: Tensor) -> None:
    mapping = {torch.ops.fastformer.add_layer_norm_fwd: lambda *args, **options: 7}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        norm(x)
    assert counter.get_total_flops() == 7


def _profiler(x: Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm(x)
    assert f"fastformer::{NAME}" in {event.name for event in profile.events()}


def _compiled(x: Tensor) -> Tensor:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    out = torch.compile(norm, backend=backend, fullgraph=True)(x)
    assert NAME in str(graphs[0].graph)
    return out


def _exported(x: Tensor) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return norm(x)

    for strict in (True, False):
        assert NAME in str(torch.export.export(Module(), (x,), strict=strict).graph), strict


def _below_autograd(x: Tensor) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        assert not norm(x.requires_grad_()).requires_grad


def _subclass(x: Tensor) -> None:
    for out in (norm(x.as_subclass(TensorSubclass)), norm(x, x.as_subclass(TensorSubclass))):
        assert type(out) is TensorSubclass


def _negative_bit(x: Tensor) -> None:
    torch.testing.assert_close(norm(torch._neg_view(x)), expected(-x))


def _meta(x: Tensor) -> None:
    assert norm(x.to("meta")).device.type == "meta"


def _inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        for tensor in (x, torch.randn(4, 4)):
            out = norm(tensor)
            torch.testing.assert_close(out, expected(tensor))
            assert out.is_inference()
        created = torch.randn(4, 4)
    assert not norm(created).requires_grad


def _numbers_of_other_types(x: Tensor) -> None:
    numpy = pytest.importorskip("numpy")
    for eps in (1, numpy.float64(1.0)):
        torch.testing.assert_close(norm(x, eps=eps), torch.nn.functional.layer_norm(x, (4,), eps=1.0))


SURROUNDINGS: list[Callable[[Tensor], Tensor | None]] = [
    _vmap, _grad, _leaked, _forward_mode, _jit_trace, _make_fx, _fake, _dispatch_mode, _function_mode, _flop_counter,
    _profiler, _compiled, _exported, _below_autograd, _subclass, _negative_bit, _meta, _inference_mode,
    _numbers_of_other_types,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", SURROUNDINGS, ids=lambda call: call.__name__)
def test_modes_around_a_call_see_it(call: Callable[[Tensor], Tensor | None]) -> None:
    x = torch.randn(4, 4)
    norm(x)  # what a plain call leaves behind serves no other
    out = call(x.clone())
    if out is not None:
        torch.testing.assert_close(out, expected(x))
    torch.testing.assert_close(norm(x), expected(x))


def test_wrong_types_meet_the_schema() -> None:
    x = torch.randn(2, 4)
    for wrong in ({"eps": "2"}, {"eps": None}, {"rms_norm": "no"}, {"residual": 3}, {"weight": [1.0] * 4}):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            ops.add_layer_norm(x, **wrong)


def observe(backend: str, names: tuple[str, ...], context: Any, mode: Any) -> dict[str, Any]:
    """Returns everything that a caller can see of an op's forward and backward pass."""
    torch.manual_seed(1)
    tensors = {name: torch.randn(3, 8) for name in ("x", "residual")} | {n: torch.randn(8) for n in ("weight", "bias")}
    inputs = [tensors[name].requires_grad_() for name in names]
    with record_backends() as ran, use_backend(backend), context(), saved_for_backward() as packed, mode():
        outputs = ops.add_layer_norm(**tensors)
    saved = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in packed]
    seen: dict[str, Any] = {"values": [out.detach() for out in outputs], "saved": saved, "ran": ran}
    seen["kinds"] = [(out.requires_grad, out.stride(), out.is_inference(), out.is_leaf) for out in outputs]
    if outputs[0].requires_grad:
        grad = torch.randn(8, 3).mT  # not contiguous
        first, again = (torch.autograd.grad(outputs[0], inputs, grad, retain_graph=True) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        seen["values"] += first
    return seen


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@each("names", [("x", "weight", "residual"), ("residual", "weight"), ()])
@each("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_both_ways_are_one_op(names: tuple[str, ...], context: Any, backend: str) -> None:
    """An inactive mode makes the call go through the dispatcher."""
    skip_without(backend, "add_layer_norm")
    past, through = (observe(backend, names, context, mode) for mode in (contextlib.nullcontext, Seen))
    assert all(torch.equal(a, b) for a, b in zip(past.pop("values"), through.pop("values"), strict=True))
    assert past == through and {name for _, name in past["ran"]} == {backend}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Seen])
def test_a_tensor_that_backward_needs_may_not_be_changed(mode: Any) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with mode():
        out = ops.add_layer_norm(x, None, weight)[0]
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "name",
    ["attention", "varlen_attention", "feed_forward", "wide_feed_forward", "linear_cross_entropy", "linear_topk"],
)
def test_autocast_casts_calls_that_were_checked_without_it(name: str) -> None:
    if forced_backend.get() is not None and ("attention" in name or "topk" in name):
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly, or there is no kernel")
    q, weight, ends = torch.randn(2, 5, 2, 8), torch.randn(16, 16), torch.tensor([0, 5, 10], dtype=torch.int32)
    rows = q.view(10, 2, 8)
    calls: dict[str, Callable[[], Tensor]] = {
        "attention": lambda: ops.attention(q, q, q),
        "varlen_attention": lambda: ops.varlen_attention(rows, rows, rows, ends, ends, 5, 5),
        "feed_forward": lambda: ops.feed_forward(rows.view(10, 16), weight, None, weight, None),
        "wide_feed_forward": lambda: ops.feed_forward(q.view(2, 5, 16), weight, None, weight, None),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(rows.view(10, 16), weight, torch.arange(10)),
        "linear_topk": lambda: ops.linear_topk(rows.view(10, 16), weight, 3).values,
    }
    plain = [calls[name]() for _ in range(2)][1]
    with torch.autocast("cpu", torch.bfloat16):
        cast = calls[name]()
    assert cast.dtype == (torch.float32 if "linear_" in name else torch.bfloat16)
    assert not torch.equal(cast.float(), plain) and torch.equal(calls[name](), plain)


def test_values_that_are_read_are_checked_in_every_call() -> None:
    q, ends = torch.randn(2, 5, 2, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
    rows, lengths = q.view(10, 2, 8), torch.tensor([5, 3], dtype=torch.int32)
    for _ in range(2):
        ops.attention(q, q, q, seqlens_k=lengths)
        ops.varlen_attention(rows, rows, rows, ends, ends, 5, 5)
    with pytest.raises(ValueError, match=r"\bseqlens_k\b"):
        ops.attention(q, q, q, seqlens_k=lengths + 1)
    with pytest.raises(ValueError, match=r"\bcu_seqlens_q\b"):
        ops.varlen_attention(rows, rows, rows, ends + 1, ends, 5, 5)
