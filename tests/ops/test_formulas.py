"""Tests every op beyond its kernels: functorch, forward mode, double backward, tensor subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fastformer import ops
from fastformer.ops import _dispatch, record_backends, use_backend
from tests.ops.calls import BY_NAME, OF_ONE_DTYPE, cast, ints
from tests.ops.calls import CALLS as EVERY_CALL

N = 3
TARGET = torch.tensor([1, -100, 3])
# Added to scores, it hides everything from query 1 and one key from query 0.
DEAD_ROW = torch.tensor([[0.1, 0.2, -torch.inf], [-torch.inf] * 3, [0.5, 0.0, -0.7]], dtype=torch.float64)
Inputs = tuple[Tensor, ...]
Call = Callable[..., Tensor | tuple[Tensor, ...]]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _heads() -> Inputs:
    return randn(2, 3, 4, 2), randn(2, 4, 2, 2), randn(2, 4, 2, 2)


def _weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": True}
    lse = ops.attention(q, k, k, return_lse=True, **options)[1]
    return ops.attention_weights(q, k, lse, **options)


def case_of(name: str, **changes: Any) -> tuple[Call, Inputs]:
    """Returns a call of the table of all ops with some arguments changed, and its differentiable inputs in fp64."""
    call = BY_NAME[name]
    tensors = {key: tensor for key, tensor in cast(call.tensors(N), torch.float64).items() if key not in changes}
    inputs = {key: x for key, x in tensors.items() if x.is_floating_point() and key not in OF_ONE_DTYPE}

    def run(*values: Tensor) -> Tensor | tuple[Tensor, ...]:
        arguments = {**tensors, **call.options(N), **changes, **dict(zip(inputs, values, strict=True))}
        # So small a product would be F.linear's.
        with use_backend("reference") if call.op == "linear" else contextlib.nullcontext():
            outputs: Tensor | tuple[Tensor, ...] = getattr(ops, call.op)(**arguments)
        return outputs

    return run, tuple(inputs.values())


# name -> (call, its differentiable inputs). All of them are differentiated, whatever gives one.
CASES: dict[str, tuple[Call, Inputs]] = {
    **{call.name: case_of(call.name) for call in EVERY_CALL if call.learns and call.op != "attention_weights"},
    "attention, lengths": case_of("attention", seqlens_k=ints(0, 3), window_size=(1, 1), is_causal=False),
    "attention, a row that sees nothing": case_of("attention", attn_mask=DEAD_ROW, is_causal=False),
    "attention_weights": (_weights, (*_heads()[:2], randn(2, 1, 3, 4))),
    "feed_forward, gelu": case_of("feed_forward, relu", activation="gelu", dropout_p=0.0),
    "feed_forward, no biases": case_of(
        "feed_forward, relu", activation="gelu_tanh", dropout_p=0.0, bias1=None, bias2=None
    ),
    "add_layer_norm, alone": case_of("add_layer_norm", residual=None, dropout_p=0.0),
    "embedding, in order": case_of("embedding", positions=None, padding_idx=None),
    "linear, no bias": case_of("linear", bias=None),
    "linear_cross_entropy, ignored": case_of("linear_cross_entropy, none", target=TARGET, softcap=2.0),
    "linear_cross_entropy, others": case_of("linear_cross_entropy", target=TARGET, smooth_others=True),
}
MEANS = ("linear_cross_entropy", "linear_cross_entropy, softcap", "linear_cross_entropy, others")
CALLS = [pytest.param(*case, id=name) for name, case in CASES.items()]


def leaves(inputs: Inputs) -> Any:
    return tuple(x.clone().requires_grad_() for x in inputs)


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def close(actual: Any, expected: Any) -> None:
    for a, b in zip(as_tuple(actual), as_tuple(expected), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), (a - b).abs().max()


@pytest.mark.parametrize(("call", "inputs"), CALLS)
def test_the_formula_equals_the_op(call: Call, inputs: Inputs) -> None:
    """Compares values, gradients and tangents under functorch with the kernels' forward and backward passes."""
    args = leaves(inputs)
    outputs = as_tuple(call(*args))
    dys = tuple(torch.randn_like(y) for y in outputs)
    through_formula = torch.autograd.grad(outputs, args, dys, create_graph=True)
    gradients = torch.autograd.grad(outputs, args, dys)
    close(through_formula, gradients)

    primals, pull, *_ = vjp(lambda *x: as_tuple(call(*x)), *inputs)
    close(primals, outputs)
    close(pull(dys), gradients)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    primals, pushed, *_ = jvp(lambda *x: as_tuple(call(*x)), inputs, tangents)
    close(primals, outputs)
    # <dy, J t> = <J^T dy, t>
    along = sum((dy * t).sum() for dy, t in zip(dys, pushed, strict=True))
    close(along, sum((dx * t).sum() for dx, t in zip(gradients, tangents, strict=True)))
    assert float(along.abs()) > 1e-6
    with forward_ad.dual_level():
        duals = as_tuple(call(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True))))
        close(tuple(forward_ad.unpack_dual(y).tangent for y in duals), pushed)


@pytest.mark.parametrize(("call", "inputs"), CALLS)
def test_double_backward(call: Call, inputs: Inputs) -> None:
    if call in [CASES[name][0] for name in MEANS]:
        pytest.skip("it says no: test_a_mean_loss_refuses_double_backward")
    assert gradgradcheck(call, leaves(inputs), fast_mode=True)


@pytest.mark.parametrize("name", ["attention, mask", "attention, dropout", "add_layer_norm", "feed_forward, gelu"])
def test_every_derivative_numerically(name: str) -> None:
    """Compares element by element, including forward mode, and forward over reverse."""
    call, inputs = CASES[name]
    inputs = tuple(x[..., :2] if x.dim() == 4 else x for x in inputs)
    assert gradcheck(call, leaves(inputs), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, leaves(inputs), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["attention, mask", "add_layer_norm", "embedding", "linear_cross_entropy, none"])
def test_only_some_inputs_are_differentiated_twice(name: str) -> None:
    call, inputs = CASES[name]
    for i in range(len(inputs)):

        def of_one(x: Tensor, i: int = i) -> Any:
            return call(*inputs[:i], x, *inputs[i + 1 :])

        assert gradgradcheck(of_one, leaves(inputs[i : i + 1]), fast_mode=True)


def test_one_tensor_in_several_places() -> None:
    x = randn(1, 3, 2, 2)
    assert gradgradcheck(lambda x: ops.attention(x, x, x), leaves((x,)), fast_mode=True)
    assert gradgradcheck(lambda x: ops.add_layer_norm(x, x), leaves((randn(3, 4),)), fast_mode=True)


def test_a_third_derivative() -> None:
    x = randn(1, 2, 1, 2)

    def loss(x: Tensor, attend: Callable[..., Tensor] = ops.attention) -> Tensor:
        (first,) = torch.autograd.grad(attend(x, x, x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), x)[0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * 2**-0.5).softmax(-1), v)

    close(loss(leaves((x,))[0]), loss(leaves((x,))[0], plain))


@pytest.mark.parametrize(("call", "inputs"), CALLS)
@pytest.mark.filterwarnings("error:.*performance drop")  # a loop over the batch
def test_batched(call: Call, inputs: Inputs) -> None:
    """Compares vmap and vmap(grad), over each input alone and over all, with one call per sample."""

    def loss(*x: Tensor) -> Tensor:
        parts = [(y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in as_tuple(call(*x))]
        return torch.stack(parts).sum()

    copies = tuple(torch.stack((x, torch.randn_like(x))) for x in inputs)
    for which in (*range(len(inputs)), None):
        batch = tuple(c if which in (None, i) else x for i, (c, x) in enumerate(zip(copies, inputs, strict=True)))
        dims = tuple(0 if which in (None, i) else None for i in range(len(inputs)))
        samples = [tuple(x if d is None else x[j] for x, d in zip(batch, dims, strict=True)) for j in range(2)]
        close(vmap(loss, dims)(*batch), torch.stack([loss(*x) for x in samples]))
    everything = tuple(range(len(inputs)))
    expected = [torch.autograd.grad(loss(*args), args) for args in (leaves(x) for x in samples)]
    close(vmap(grad(loss, everything))(*copies), tuple(map(torch.stack, zip(*expected, strict=True))))


def test_jacobians() -> None:
    call, (q, k, v) = CASES["attention"]
    forward, reverse = jacfwd(call)(q, k, v), jacrev(call)(q, k, v)
    close(forward, reverse)
    assert reverse.shape == (*q.shape, *q.shape) and float(reverse.abs().max()) > 1e-3
    x = randn(2, 4)
    close(
        hessian(lambda x: ops.add_layer_norm(x)[0].pow(3).sum())(x),
        hessian(lambda x: torch.nn.functional.layer_norm(x, (4,)).pow(3).sum())(x),
    )
    # A Jacobian of plain autograd's, whose backward pass is batched.
    rows = torch.autograd.functional.jacobian(lambda q: call(q, k, v), q, vectorize=True)
    close(rows, reverse)


def test_tangents_of_gradients_of_an_earlier_graph() -> None:
    """The graph was made before forward mode began."""
    x = randn(3, 4).requires_grad_()
    y = ops.add_layer_norm(x)[0]
    dy, tangent = randn(3, 4), randn(3, 4)
    (expected,) = torch.autograd.grad(y, x, tangent, retain_graph=True)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent))
        close(forward_ad.unpack_dual(dx).tangent, expected)


def test_a_mean_loss_refuses_double_backward() -> None:
    """It saves gradients instead of inputs. First derivatives are right nevertheless under create_graph."""
    call, inputs = CASES["linear_cross_entropy"]
    args = leaves(inputs)
    first = torch.autograd.grad(call(*args), args, create_graph=True)
    close(first, torch.autograd.grad(call(*args), args))
    for gradient in first:
        for arg in args:  # although autograd only runs what lies between the two
            with pytest.raises(NotImplementedError, match=r"\breduction\b"):
                torch.autograd.grad(gradient.sum(), arg, retain_graph=True, allow_unused=True)
        with pytest.raises(NotImplementedError, match=r"\breduction\b"):
            gradient.sum().backward()


def _topk(x: Tensor) -> Tensor:
    return ops.linear_topk(x, torch.ones(6, 4), 2).values


def _decode(q: Tensor) -> Tensor:
    cache, seqlens = torch.ones(2, 3, 1, 4), torch.tensor([1, 2], dtype=torch.int32)
    return ops.decode_attention(q[:, None, None], cache, cache, seqlens)


@pytest.mark.parametrize("call", [_topk, _decode])
def test_ops_for_inference_refuse_gradients(call: Callable[[Tensor], Tensor]) -> None:
    """They don't return zeros. A call inside a transform that differentiates by other inputs is computed."""
    x = torch.randn(2, 4)

    def loss(x: Tensor) -> Tensor:
        return call(x).sum()

    transforms: tuple[Callable[[], Any], ...] = (
        lambda: grad(loss)(x),
        lambda: jvp(loss, (x,), (x,)),
        lambda: vmap(grad(loss))(x[None]),
        lambda: grad(lambda x: vmap(loss)(x).sum())(x[None]),
    )
    for transform in transforms:
        with pytest.raises(NotImplementedError):
            transform()
    expected = loss(x)
    assert torch.equal(grad(lambda other: other * loss(x))(torch.ones(())), expected)
    assert torch.equal(vmap(lambda other: other * loss(x))(torch.ones(2))[1], expected)


class RecordingTensor(Tensor):
    """Records the questions that it gets, and knows none of fastformer's ops."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(function))
        assert "fastformer" not in str(function)
        return super().__torch_function__(function, types, args, kwargs)


class WrappedTensor(Tensor):
    """Stores its numbers in another tensor, and dispatches PyTorch's operations to that."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> WrappedTensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.held = inner.detach()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert function.namespace == "aten", function
        inner = torch.utils._pytree.tree_map_only(WrappedTensor, lambda x: x.held, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, WrappedTensor, function(*inner[0], **inner[1]))


@pytest.mark.parametrize("kind", [RecordingTensor, WrappedTensor])
def test_a_subclass_sees_only_pytorchs_operations(kind: type[Tensor]) -> None:
    for name in ("attention", "add_layer_norm", "feed_forward, gelu"):
        call, inputs = CASES[name]
        wrap: Any = {RecordingTensor: lambda x: x.as_subclass(RecordingTensor), WrappedTensor: WrappedTensor}[kind]
        if name == "add_layer_norm":
            call = ops.add_layer_norm
        expected, outputs = as_tuple(call(*inputs)), as_tuple(call(*map(wrap, inputs)))
        assert all(type(y) is kind for y in outputs)
        close(tuple(y.held if isinstance(y, WrappedTensor) else y.as_subclass(Tensor) for y in outputs), expected)
    assert kind is WrappedTensor or any("matmul" in function for function in RecordingTensor.calls)


def decompositions() -> dict[Any, Any]:
    table = torch._decomp.get_decompositions([getattr(torch.ops.fastformer, name).default for name in _dispatch.OPS])
    assert table
    return table


def names_of(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if "fastformer" in str(node.target)}


@pytest.mark.parametrize(("call", "inputs"), CALLS)
def test_a_graph_can_be_decomposed(call: Call, inputs: Inputs) -> None:
    apart = make_fx(call, decomposition_table=decompositions())(*inputs)
    assert not names_of(apart.graph)
    others = tuple(torch.randn_like(x) for x in inputs)
    close(apart(*others), call(*others))


@pytest.mark.parametrize("name", ["attention, mask", "add_layer_norm", "linear_cross_entropy, none"])
def test_a_graph_is_not_decomposed_by_itself(name: str) -> None:
    call, inputs = CASES[name]
    assert names_of(make_fx(call)(*inputs).graph)


def test_an_exported_program_is_decomposed_only_on_request() -> None:
    class Attending(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return ops.attention(q, k, k, is_causal=True)

    q, k, _ = _heads()
    others = randn(3, 5, 4, 2), randn(3, 6, 2, 2)
    sizes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim(name)} for name in ("seqlen_q", "seqlen_k")]
    program = torch.export.export(Attending(), (q, k), dynamic_shapes=tuple(sizes))
    whole = program.run_decompositions()
    assert names_of(whole.graph) == {"fastformer.attention_fwd.default"}
    apart = program.run_decompositions(torch.export.default_decompositions() | decompositions())
    assert not names_of(apart.graph)
    for exported in (whole, apart):
        close(exported.module()(*others), Attending()(*others))


def test_symbolic_shapes_come_from_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's assumptions about strides are those of the kernels, and not those of the formula."""
    for op in decompositions():
        monkeypatch.setitem(torch._decomp.decomposition_table, op, lambda *args: pytest.fail("the formula was asked"))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert isinstance(q.shape[0], torch.SymInt)
        return ops.attention(q, k, v)

    assert names_of(make_fx(call, tracing_mode="symbolic")(*_heads()).graph) == {"fastformer.attention_fwd.default"}


def test_ordinary_calls_never_run_the_formula() -> None:
    """A backward pass without create_graph runs the kernel, and forward mode leaves no trace after its end."""
    call, inputs = CASES["attention"]
    with forward_ad.dual_level():
        pass
    vmap(call)(*(x[None] for x in inputs))
    args = leaves(inputs)
    with use_backend("reference"), record_backends() as ran:
        call(*args).sum().backward()
    assert ran == {("attention_fwd", "reference"), ("attention_bwd", "reference")}
    with record_backends() as ran, torch.inference_mode():
        call(*inputs)
    assert {name for name, _ in ran} == {"attention_fwd"}


def test_the_dispatchers_entry_uses_the_formula_too() -> None:
    """Compiled code calls torch.ops.fastformer directly."""
    q, k, v = (randn(1, 3, 2, 4) for _ in range(3))
    options = (None, None, 0.5, None, None, 0.0, None)

    def through(q: Tensor) -> Tensor:
        return torch.ops.fastformer.attention_fwd(q, k, v, *options)[0]

    def plain(q: Tensor) -> Tensor:
        return ops.attention(q, k, v, softmax_scale=0.5)

    tangent = torch.randn_like(q)
    close(jvp(through, (q,), (tangent,)), jvp(plain, (q,), (tangent,)))
    losses = (lambda q: through(q).square().sum(), lambda q: plain(q).square().sum())
    close(*(grad(loss)(q) for loss in losses))


def test_inductor_keeps_an_op_if_it_is_strict_about_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor raises in continuous integration, which it knows by this variable, when it sees a decomposition that it
    # does not use.
    monkeypatch.setenv("CI", "true")
    from torch._inductor import lowering

    op = torch.ops.fastformer.rotary_fwd.default
    lowering.lowerings.pop(op, None)
    lowering.FALLBACK_ALLOW_LIST.discard(op.name())
    x = torch.randn(1, 3, 2, 4)
    cos, sin = torch.randn(2, 3, 2)

    def call(x: Tensor) -> Tensor:
        return ops.rotary(x, cos, sin)  # alone: nothing is left for a C++ compiler

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.testing.assert_close(torch.compile(call, fullgraph=True)(x), call(x))
