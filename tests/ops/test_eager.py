"""The two ways into an op, through PyTorch's dispatcher and past it: when each is taken, and that they are one op."""

from __future__ import annotations

import contextlib
import logging
import sys
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
from fastformer.ops import _eager, _extension, _library, record_backends, use_backend
from fastformer.ops._autograd import forbid_double_backward, register_autograd
from fastformer.ops._library import define_op

WAYS = ("past", "through")
ways: list[str] = []


def _which_way() -> None:
    """Whether PyTorch's dispatcher called the op that this is part of: it stands between `call` and here."""
    through = False
    frame = sys._getframe(2)
    while frame.f_code.co_name != "call" and frame.f_back is not None:
        through = through or frame.f_code.co_filename.endswith("torch/_ops.py")
        frame = frame.f_back
    ways.append("through" if through else "past")


def _way_reference(x: Tensor, y: Tensor | None, factor: float, count: int, flag: bool) -> Tensor:
    _which_way()
    return x * (factor * count) if y is None else x * (factor * count) + y


def _way_backward_reference(dout: Tensor, factor: float, count: int) -> Tensor:
    _which_way()
    return dout * (factor * count)


_toy = define_op(
    "way_fwd(Tensor x, Tensor? y, float factor, int count, bool flag) -> Tensor",
    _way_reference,
    stem="toy",
    fake=lambda x, *rest: x.new_empty(x.shape),
    reference_only=dict.fromkeys(("cpp", "triton"), "it is a toy"),
)
_toy_backward = define_op(
    "way_bwd(Tensor dout, float factor, int count) -> Tensor",
    _way_backward_reference,
    stem="toy",
    fake=lambda dout, *rest: dout.new_empty(dout.shape),
    reference_only=dict.fromkeys(("cpp", "triton"), "it is a toy"),
)


def _way_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.factor, ctx.count, _ = inputs
    ctx.save_for_backward(inputs[0])


register_autograd(
    "way_fwd",
    lambda ctx, dout: (
        _toy_backward(dout, ctx.factor, ctx.count),
        dout if ctx.needs_input_grad[1] else None,
        None,
        None,
        None,
    ),  # fmt: skip
    setup_context=_way_setup,
)
forbid_double_backward("way_bwd")
_without_gradient = define_op(
    "way_alone(Tensor x) -> Tensor",
    lambda x: _way_reference(x, None, 1.0, 1, True),
    stem="toy",
    fake=lambda x: x.new_empty(x.shape),
    reference_only=dict.fromkeys(("cpp", "triton"), "it is a toy"),
)
# Other tests take the entries for the package's own.
for _name in ("way_fwd", "way_bwd", "way_alone"):
    del _library.OPS[_name]


def toy(x: Tensor, y: Tensor | None = None, factor: Any = 2.0, count: Any = 3, flag: Any = True) -> Tensor:
    return _toy(x, y, factor, count, flag)


@pytest.fixture(autouse=True)
def _no_ways() -> None:
    ways.clear()


class Subclass(Tensor):
    """PyTorch's default: what comes of it is one again."""


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


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
def test_plain_calls_go_past(context: Callable[[], Any]) -> None:
    x, parameter = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
    calls = [(x, None), (x.t(), x[1:2]), (parameter, None), (x, parameter), (x.expand(2, 4, 4), None), (x[:0], None)]
    with context():
        for first, second in calls:
            assert torch.equal(toy(first, second), first * 6 + (0 if second is None else second))
        assert toy(x, parameter).requires_grad is torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16), context():
        toy(parameter)
    assert set(ways) == {"past"}


def test_gradients_past() -> None:
    x, y = torch.randn(3).requires_grad_(), torch.nn.Parameter(torch.randn(3))
    toy(x, y).backward(torch.ones(3))
    assert torch.equal(x.grad, torch.full((3,), 6.0)) and torch.equal(y.grad, torch.ones(3))
    torch.autograd.grad(toy(x), x, torch.ones(3), create_graph=True)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        toy(x, y)
    assert [id(t) for t in packed] == [id(x)]
    out = checkpoint(lambda x: toy(x, y), x, use_reentrant=False)
    out.sum().backward()
    assert set(ways) == {"past"}


def _vmap(x: Tensor) -> None:
    torch.func.vmap(toy)(x)


def _grad(x: Tensor) -> None:
    torch.func.grad(lambda x: toy(x).sum())(x)


def _functionalized(x: Tensor) -> None:
    torch.func.functionalize(toy)(x)


def _leaked(x: Tensor) -> None:
    """A wrapper that outlived its transform."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    torch.func.grad(keep)(x)
    toy(kept[0])


def _forward_mode(x: Tensor) -> None:
    with forward_ad.dual_level():
        toy(forward_ad.make_dual(x, x))


def _jit_trace(x: Tensor) -> None:
    graph = torch.jit.trace(toy, (x,), check_trace=False).graph
    assert "fastformer::way_fwd" in str(graph)


def _make_fx(x: Tensor) -> None:
    graph = make_fx(lambda x: toy(x))(x).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["fastformer.way_fwd.default"]


def _fake(x: Tensor) -> None:
    with FakeTensorMode() as mode:
        assert type(toy(mode.from_tensor(x))) is not Tensor


def _fake_outside(x: Tensor) -> None:
    assert type(toy(FakeTensorMode().from_tensor(x))) is not Tensor


def _dispatch_mode(x: Tensor) -> None:
    with Seen() as mode:
        toy(x)
    assert "fastformer.way_fwd.default" in mode.names


def _function_mode(x: Tensor) -> None:
    with SeenFunctions() as mode:
        toy(x)
    assert any("way_fwd" in name for name in mode.names)


def _flop_counter(x: Tensor) -> None:
    way = torch.ops.fastformer.way_fwd
    with FlopCounterMode(display=False, custom_mapping={way: lambda *args, **options: 7}) as counter:
        toy(x)
    assert counter.get_total_flops() == 7


def _profiler(x: Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        toy(x)
    assert "fastformer::way_fwd" in {event.name for event in profile.events()}


def _compiled(x: Tensor) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(toy, backend=backend, fullgraph=True)(x)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets == ["fastformer.way_fwd.default"]


def _exported(x: Tensor) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return toy(x)

    for strict in (True, False):
        program = torch.export.export(Module(), (x,), strict=strict)
        assert "fastformer.way_fwd" in str(program.graph), strict


def _below_autograd(x: Tensor) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        assert not toy(x.requires_grad_()).requires_grad


def _subclass(x: Tensor) -> None:
    for out in (toy(x.as_subclass(Subclass)), toy(x, x.as_subclass(Subclass))):
        assert type(out) is Subclass


def _negative_bit(x: Tensor) -> None:
    assert torch.equal(toy(torch._neg_view(x)), -6 * x)


def _sparse(x: Tensor) -> None:
    toy(x.to_sparse())


def _meta(x: Tensor) -> None:
    assert toy(x.to("meta")).device.type == "meta"


def _inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        toy(x), toy(torch.randn(4))


def _inference_tensor(x: Tensor) -> None:
    with torch.inference_mode():
        x = torch.randn(4)
    toy(x)


def _without_autograd(x: Tensor) -> None:
    _without_gradient(x)


def _integer_for_a_number(x: Tensor) -> None:
    assert toy(x, factor=2).dtype == x.dtype


def _numpy_scalars(x: Tensor) -> None:
    np = pytest.importorskip("numpy")
    assert torch.equal(toy(x, factor=np.float64(2.0)), x * 6)


THROUGH = [
    _vmap, _grad, _functionalized, _leaked, _forward_mode, _jit_trace, _make_fx, _fake, _fake_outside, _dispatch_mode,
    _function_mode, _flop_counter, _profiler, _compiled, _exported, _below_autograd, _subclass, _negative_bit, _sparse,
    _meta, _inference_mode, _inference_tensor, _without_autograd, _integer_for_a_number, _numpy_scalars,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", THROUGH, ids=lambda call: call.__name__)
def test_whatever_surrounds_a_call_goes_through(call: Callable[[Tensor], None]) -> None:
    # Functorch can not differentiate an op, and says so.
    with pytest.raises(RuntimeError) if call is _grad else contextlib.nullcontext():
        call(torch.randn(4, 4))
    assert "past" not in ways
    ways.clear()
    toy(torch.randn(2))
    assert ways == ["past"], "the next call is a plain one again"


def test_wrong_types_meet_the_schema() -> None:
    x = torch.randn(2)
    for wrong in ({"count": 1.5}, {"factor": "2"}, {"flag": "no"}, {"y": 3}):
        with pytest.raises((RuntimeError, TypeError)):
            toy(x, **wrong)
            raise AssertionError(wrong)
    few: Callable[..., Tensor] = _toy
    with pytest.raises((RuntimeError, TypeError)):
        few(x)
    assert not ways


def test_the_keys_of_plain_tensors() -> None:
    assert _eager._PLAIN[torch._C._dispatch_keys(torch.empty(2)).raw_repr()] == "cpu"
    assert sorted(_eager._PLAIN.values()) == ["cpu", "cuda"]


def test_the_extension_knows_plain_tensors_as_python_does() -> None:
    function = _extension.host_function("device_of")
    if function is None:
        pytest.skip("the C++ extension is not built")
    x, leaf = torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)
    other: Tensor = x.as_subclass(type("Other", (Tensor,), {}))
    with torch.inference_mode():
        inferred = torch.randn(2, 2)
    with FakeTensorMode():
        fake = torch.randn(2, 2)
    tensors = [
        x, leaf, leaf * 2, torch.nn.Parameter(x), torch.nn.Buffer(x), x.t(), torch.randn(0), other, inferred, fake,
        x.to("meta"), x.to_sparse(), torch.randn(2, dtype=torch.complex64).conj(), torch._efficientzerotensor(2), None,
        "a", 3,
    ]  # fmt: skip
    calls: list[tuple[Any, ...]] = [(first, second, 1.0, 1, True) for first in tensors for second in tensors]
    calls += [(x, None, wrong, 1, True) for wrong in (1, "1.0", None, leaf)] + [(x,), (), (x, x, 1.0, 1, True, leaf)]
    answers: set[tuple[str | None, bool]] = set()
    schema = torch.ops.fastformer.way_fwd.default._schema
    for _ in range(2):  # the kinds are met for the first time, and again
        places = [_eager.Places(schema) for _ in range(2)]
        for args in calls:
            expected = _eager.device_of(args, places[0])
            assert function(args, places[1]) == expected, args
            answers.add(expected)
        assert places[0] == places[1]
    assert answers == {("cpu", False), ("cpu", True), (None, False)}
    for level in (torch.func.vmap, torch.func.grad):
        seen: list[tuple[str | None, bool]] = []

        def ask(x: Tensor, seen: list[Any] = seen, function: Callable[..., Any] = function) -> Tensor:
            seen.append(function((x, None, 1.0, 1, True), _eager.Places(schema)))
            return x.sum()

        level(ask)(x)
        assert seen == [(None, False)]


@pytest.mark.gpu
def test_plain_tensors_of_a_gpu_go_past() -> None:
    x = torch.randn(4, device="cuda")
    toy(x), toy(x.requires_grad_()), toy(torch.nn.Parameter(x))
    assert ways == ["past"] * 3
    with pytest.raises(RuntimeError, match="device"):
        toy(x, torch.randn(4))


@pytest.fixture(params=["reference", "cpp"])
def _backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpp" and _extension.load() is None:
        pytest.skip("the C++ extension is not built")
    yield request.param


def _attention(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return ops.attention(*(tensors[name] for name in "qkv"), is_causal=True, return_lse=True)


def _add_layer_norm(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return ops.add_layer_norm(*(tensors[name] for name in ("x", "residual", "weight", "bias")))


def _tensors(call: Callable[..., Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if call is _attention:
        return {name: torch.randn(2, 5, 4, 8) for name in "qkv"}
    return {name: torch.randn(3, 8) for name in ("x", "residual")} | {n: torch.randn(8) for n in ("weight", "bias")}


def observe(call: Callable[..., Any], backend: str, wanted: tuple[str, ...], context: Any) -> dict[str, Any]:
    """All that a caller can see of an op's forward and backward pass."""
    tensors = _tensors(call)
    for name in wanted:
        tensors[name].requires_grad_()
    packed: list[tuple[Any, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor.shape, tensor.dtype, tensor.requires_grad))
        return tensor

    with record_backends() as ran:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with use_backend(backend), context(), hooks:
            outputs = call(tensors)
        seen: dict[str, Any] = {
            "outputs": [out.detach() for out in outputs],
            "requires_grad": [out.requires_grad for out in outputs],
            "strides": [(out.stride(), out.is_inference(), out.is_leaf) for out in outputs],
            "saved": packed,
        }
        if outputs[0].requires_grad:
            grad = torch.randn_like(outputs[0]).mT.contiguous().mT  # not contiguous
            inputs = [tensors[name] for name in wanted]
            for times in ("first", "again"):
                seen[times] = torch.autograd.grad(outputs[0], inputs, grad, retain_graph=True)
            doubled = torch.autograd.grad(outputs[0], inputs, grad.clone().requires_grad_(), create_graph=True)
            # None for a norm's weight alone, whose gradient doesn't depend on it: as PyTorch's own has it.
            seen["double backward"] = torch.autograd.grad(doubled[0].sum(), inputs, allow_unused=True)
            with use_backend(backend):
                outputs = call(tensors)
            with torch.no_grad():
                tensors["weight" if "weight" in wanted else wanted[0]].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outputs[0].backward(grad)
    seen["ran"] = ran
    return seen


@pytest.mark.parametrize("call", [_attention, _add_layer_norm], ids=["attention", "add_layer_norm"])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_both_ways_are_one_op(
    call: Callable[..., Any],
    wanted: tuple[int, ...],
    context: Any,
    _backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list(_tensors(call))
    if call is _add_layer_norm:
        names = ["x", "weight", "residual"] if wanted != (1,) else ["residual", "weight"]
    chosen = tuple(names[index] for index in wanted)
    seen = {}
    for way in WAYS:
        with monkeypatch.context() as patch:
            if way == "through":
                patch.setattr(_eager, "nothing_watches", lambda: False)
            torch.manual_seed(2)
            seen[way] = observe(call, _backend, chosen, context)
    past, through = seen["past"], seen["through"]
    assert past.keys() == through.keys()
    for what, expected in through.items():
        if what in ("outputs", "first", "again", "double backward"):
            for ours, theirs in zip(past[what], expected, strict=True):
                assert ours is theirs is None or torch.equal(ours, theirs), what
        else:
            assert past[what] == expected, what
    assert {backend for _, backend in past["ran"]} == {_backend}


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_speaks_alike(way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if way == "through":
        monkeypatch.setattr(_eager, "nothing_watches", lambda: False)
    monkeypatch.setattr(_library, "_told", set())
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    if _extension.load() is None:
        pytest.skip("the C++ extension is not built")
    monkeypatch.setenv("FASTFORMER_STRICT", "1")
    with pytest.raises(NotImplementedError, match="attention_fwd can't run on cpp: it needs a positive softmax_scale"):
        ops.attention(q, q, q, softmax_scale=-1.0)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    with caplog.at_level(logging.WARNING, "fastformer"):
        ops.attention(q, q, q, softmax_scale=-1.0).sum().backward()
    assert len(caplog.records) == 2 and "attention_fwd runs on" in caplog.records[0].message
