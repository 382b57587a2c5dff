"""Tests the rules for every op: refusals, memory layouts, torch.compile, autocast, and empty inputs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer import ops
from fastformer.ops import use_backend
from tests.conftest import HAS_GPU, skip_without
from tests.covering import each
from tests.ops.calls import BY_NAME, CALLS, DTYPES, OpCall, all_calls, cast, draw, forced, ints, results

__all__ = ["forced"]
N = 5


def test_the_table_has_every_op() -> None:
    """Adding an op requires adding a call of it."""
    helpers = {"draw_seed", "record_backends", "rotary_tables", "sinusoidal_positions", "use_backend"}
    public = {name for name, value in vars(ops).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert public - helpers == {call.op for call in CALLS}


def wrong_kinds(call: OpCall, name: str, tensor: Tensor) -> dict[str, object]:
    """Returns values that are not tensors, or tensors of a wrong kind of numbers."""
    parameter = inspect.signature(getattr(ops, call.op)).parameters[name]
    kinds: dict[str, object] = {
        "a list": tensor.tolist(),
        "an array": tensor.float().numpy(),
        "complex": tensor.to(torch.complex64),
        "another kind": tensor.long() if tensor.is_floating_point() else tensor.float(),
    }
    if "None" not in str(parameter.annotation):
        kinds["nothing"] = None
    return kinds


@each("call, name", [(call, name) for call in CALLS for name in call.tensors(N)])
def test_a_wrong_kind_of_tensor_is_refused_by_name(call: OpCall, name: str) -> None:
    call(N)
    for kind, value in wrong_kinds(call, name, call.tensors(N)[name]).items():
        with pytest.raises((ValueError, TypeError)) as caught:
            call(N, **{name: value})
        message = str(caught.value)
        assert name in message.replace(",", " ").split(), (kind, message)


LONG = torch.zeros(2, dtype=torch.int64)
# Op -> (what is changed in a right call, the argument that the error names).
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "attention": [
        ({"q": draw(2, N, 16)}, "q"),
        ({"k": draw(2, N, 3, 16), "v": draw(2, N, 3, 16)}, "num_kv_heads"),
        ({"v": draw(2, N + 1, 2, 16)}, "v"),
        ({"k": draw(2, N, 2, 9), "v": draw(2, N, 2, 9)}, "head_dim"),
        ({"q": draw(2, N, 4, 16).double()}, "q"),
        ({"k": draw(3, N, 2, 16), "v": draw(3, N, 2, 16)}, "batch"),
        ({"attn_mask": torch.zeros(N, N, dtype=torch.long)}, "attn_mask"),
        ({"attn_mask": torch.zeros(N, N + 1)}, "attn_mask"),
        ({"seqlens_k": LONG}, "seqlens_k"),
        ({"window_size": (1.5, None)}, "window_size"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1])}, "dropout_seed"),
    ],
    "varlen_attention": [
        ({"cu_seqlens_q": torch.tensor([0, 2, N])}, "cu_seqlens_q"),
        ({"cu_seqlens_k": ints(0, N)}, "sequences"),
        ({"k": draw(N, 3, 16)}, "k"),
        ({"dropout_p": 1.5}, "dropout_p"),
    ],
    "attention_weights": [({"lse": draw(2, 1, N)}, "lse")],
    "decode_attention": [
        ({"cache_seqlens": torch.zeros(N)}, "cache_seqlens"),
        ({"v": None}, "v"),
        ({"cache_batch_idx": ints(0, 1, 2, 3, 4)}, "cache_batch_idx"),
        ({"k": draw(N, 1, 3, 16)}, "k"),
        ({"k": draw(N, 1, 4, 16).double()}, "k"),
        ({"q": draw(3, 1, 4, 16), "k": None, "v": None}, "queries"),
        ({"cos": draw(9, 8)}, "sin"),
        ({"cos": draw(9, 9), "sin": draw(9, 9)}, "cos"),
        ({"cos": draw(9, 8), "sin": draw(8, 8)}, "sin"),
        ({"cos": draw(9, 8), "sin": draw(9, 8), "k": None, "v": None}, "k"),
        ({"cos": draw(9, 8), "sin": draw(9, 8), "q": draw(N, 2, 4, 16)}, "k"),
        ({"cos": draw(0, 8), "sin": draw(0, 8)}, "positions"),
        ({"window_left": 2.0}, "window_left"),
        ({"slot_table": torch.zeros(N, 5).long()}, "slot_table"),
        ({"slot_table": ints(*range(25))}, "slot_table"),
        ({"slot_table": ints(*range(30)).view(6, 5)}, "cache_seqlens"),
        ({"slot_table": ints(*range(25)).view(N, 5).to("meta")}, "device"),
        ({"cache_seqlens": ints(0, 0, 0, 0, 0).to("meta")}, "device"),
        ({"slot_table": ints(*range(25)).view(N, 5), "k_cache": draw(N, 6, 4, 16)[:, :5]}, "k_cache"),
        ({"slot_table": ints(*range(25)).view(N, 5), "v_cache": draw(N, 6, 4, 16)[:, :5]}, "v_cache"),
    ],
    "feed_forward": [
        ({"activation": "tanh"}, "activation"),
        ({"weight1": draw(12, 15)}, "weight1"),
        ({"weight1": draw(13, 16)}, "weight1"),
        ({"weight2": draw(8, 12)}, "weight2"),
        ({"weight2": draw(8, 6).bfloat16()}, "weight2"),
        ({"bias1": draw(6)}, "bias1"),
        ({"bias2": draw(6)}, "bias2"),
        ({"dropout_p": -0.1}, "dropout_p"),
    ],
    "add_layer_norm": [
        ({"x": draw(N, 0)}, "x"),
        ({"residual": draw(1, 16)}, "residual"),
        ({"weight": draw(15)}, "weight"),
        ({"bias": draw(1, 16)}, "bias"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"dropout_seed": torch.ones(3, dtype=torch.int64)}, "dropout_seed"),
    ],
    "embedding": [
        ({"weight": draw(16)}, "weight"),
        ({"position_table": draw(5, 15)}, "position_table"),
        ({"position_table": draw(2, 16), "positions": None}, "position_table"),
        ({"position_table": None}, "position_table"),
        ({"positions": torch.arange(N)}, "positions"),
        ({"padding_idx": 7}, "padding_idx"),
        ({"dropout_p": 2}, "dropout_p"),
    ],
    "rotary": [
        ({"x": draw(N, 16)}, "x"),
        ({"x": draw(2, N, 3, 7)}, "cos"),
        ({"sin": draw(8, 4)}, "sin"),
        ({"x": draw(10, 3, 16), "positions": None}, "positions"),
        ({"positions": torch.arange(3)}, "positions"),
    ],
    "linear": [
        ({"x": draw(16)[0]}, "x"),
        ({"weight": draw(11, 15)}, "weight"),
        ({"weight": draw(1, 11, 16)}, "weight"),
        ({"weight": draw(11, 16).bfloat16()}, "weight"),
        ({"bias": draw(8)}, "bias"),
        ({"bias": draw(11).double()}, "bias"),
    ],
    "linear_cross_entropy": [
        ({"reduction": "average"}, "reduction"),
        ({"label_smoothing": 1.1}, "label_smoothing"),
        ({"weight": draw(11, 15)}, "weight"),
        ({"weight": draw(11, 16).bfloat16()}, "weight"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target"),
        ({"bias": draw(8)}, "bias"),
        ({"weight": draw(1, 16), "bias": None, "smooth_others": True}, "classes"),
    ],
    "linear_topk": [
        ({"weight": draw(11, 15)}, "weight"),
        ({"weight": draw(0, 16)}, "weight"),
        ({"weight": draw(11, 16).bfloat16()}, "weight"),
        *(({"k": k}, "k") for k in (0, -1, 12, 2.0, True, None)),
    ],
}


@each("op", WRONG)
def test_a_wrong_argument_is_refused_by_name(op: str) -> None:
    for change, name in WRONG[op]:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            BY_NAME[op](N, **change)


@pytest.mark.parametrize("wrong", [(ops.sinusoidal_positions, 4, 8, "paper"), (ops.sinusoidal_positions, 4, 0),
                                   (ops.rotary_tables, 4, 7), (ops.rotary_tables, -1, 8)], ids=range(4))  # fmt: skip
def test_impossible_tables(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        wrong[0](*wrong[1:])


@each("name, tensor, size, bad", [
    ("embedding", "ids", 7, 7), ("embedding", "ids", 7, -1), ("embedding", "positions", 5, 5),
    ("rotary", "positions", 9, 9), ("rotary", "positions", 9, -1), ("linear_cross_entropy", "target", 11, 11),
    ("linear_cross_entropy", "target", 11, -1), ("linear_cross_entropy, none", "target", 11, 11),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "cpp"])  # a GPU asserts on the device
def test_an_index_outside_its_table(name: str, tensor: str, size: int, bad: int, backend: str) -> None:
    call = BY_NAME[name]
    skip_without(backend, call.stem)
    values = call.tensors(N)[tensor].clone()
    values.view(-1)[3] = bad
    with use_backend(backend), pytest.raises(IndexError, match=rf"\b{size}\b.*{bad}"):
        call(N, **{tensor: values})


@all_calls
def test_calls_that_cpp_supports(call: OpCall) -> None:
    """Other tests skip calls that a backend refuses; this one defines which it may refuse."""
    skip_without("cpp", call.stem)
    with use_backend("cpp"):
        for dtype in DTYPES.values():
            results(call, N, cast(call.tensors(N), dtype))
        with pytest.raises(NotImplementedError, match="float16"):
            call(N, **cast(call.tensors(N), torch.float16))
        if call.op == "attention":
            with pytest.raises(NotImplementedError, match=r"\bsoftmax_scale\b"):
                call(N, softmax_scale=-1.0)


@all_calls
def test_calls_that_triton_refuses(call: OpCall) -> None:
    """These are fp64, heads wider than a tile, and rows wider than a program can hold."""
    skip_without("triton", call.stem)
    changes: list[dict[str, Any]] = [cast(call.tensors(N), torch.float64)]
    if call.op == "add_layer_norm":
        changes = [changes[0] | {"weight": None, "bias": None}, {"x": draw(1, 16385), "residual": None}]
        changes[1] |= {"weight": None, "bias": None}
    elif call.stem == "attention":
        wide = {name: draw(*call.tensors(N)[name].shape[:-1], 264) for name in "qkv"}
        changes += [wide, {"softmax_scale": -1.0}]
    elif call.op == "decode_attention":
        changes += [
            {name: draw(N, 5 if "cache" in name else 1, 4, 264) for name in call.tensors(N) if name[0] in "qkv"}
        ]
    with use_backend("triton"):
        for change in changes:
            with pytest.raises(NotImplementedError, match="float64|16384|264|softmax_scale"):
                call(N, **change)


def same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, name
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name)
        )


def views(tensor: Tensor) -> list[Tensor]:
    """Returns the same numbers in non-contiguous tensors."""
    wide = torch.stack((tensor, torch.full_like(tensor, 3)), -1)
    variants = [wide[..., 0]]
    return variants if tensor.dim() < 2 else [*variants, tensor.transpose(0, -1).contiguous().transpose(0, -1)]


@all_calls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_inputs_may_have_any_strides(call: OpCall, dtype: torch.dtype, forced: str) -> None:
    """Inputs, including integers, are columns of wider tensors or transposed.

    A cache has to be contiguous in head_dim.
    """
    if forced == "triton" and dtype == torch.bfloat16 and not HAS_GPU:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    tensors = cast(call.tensors(N), dtype)
    expected = results(call, N, tensors)
    lying = {name: views(tensor) for name, tensor in tensors.items() if not name.endswith("_cache")}
    # One by one, or, where a call takes long, all at once, by turns.
    changes: list[dict[str, Tensor]] = [{name: view} for name, variants in lying.items() for view in variants]
    if forced == "triton":
        changes = [{name: variants[i % 2 - 1] for i, (name, variants) in enumerate(lying.items())}]
    for change in changes:
        assert all(torch.equal(view, tensors[name]) for name, view in change.items())
        values = results(call, N, tensors | change)
        same(values, expected, 2e-5 if dtype == torch.float32 else 0.05)
        # That of attention lies as the queries do.
        assert call.stem == "attention" or values["output 0"].is_contiguous()


@all_calls
def test_backends_agree_in_fp64(call: OpCall) -> None:
    """They agree up to the last digits; `test_formulas.py` compares one with the formula and its derivatives."""
    skip_without("cpp", call.stem)
    tensors = cast(call.tensors(N), torch.float64)
    with use_backend("cpp"):
        ours = results(call, N, tensors)
    with use_backend("reference"):
        same(ours, results(call, N, tensors), 1e-10)


@all_calls
@pytest.mark.parametrize("backend", ["reference", None])
def test_a_backward_pass_under_autocast_equals_one_without(call: OpCall, backend: str | None) -> None:
    """The tensors that forward kept are fp32, and products of them stay fp32, wherever backward() is called."""
    if call.op == "linear" and backend is None:
        pytest.skip("this may be F.linear, with a backward pass of its own")
    with use_backend(backend):
        under = results(call, N, call.tensors(N), around_backward=partial(torch.autocast, "cpu", torch.bfloat16))
        same(under, results(call, N, call.tensors(N)))


@all_calls
def test_only_what_learns_has_a_gradient(call: OpCall, forced: str) -> None:
    tensors = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in call.tensors(N).items()}
    leaves = {n: x.clone() if n.endswith("_cache") else x for n, x in tensors.items()}
    assert any(output.requires_grad for output in call(N, **leaves)) == call.learns


@all_calls
def test_integers_may_be_of_either_size(call: OpCall, forced: str) -> None:
    tensors = call.tensors(N)
    names = {"ids", "positions", "target"} & tensors.keys()
    expected = results(call, N, tensors) if names else {}
    for name in names:
        same(results(call, N, tensors | {name: tensors[name].int()}), expected)


@all_calls
def test_empty_inputs_give_empty_outputs(call: OpCall, forced: str) -> None:
    for name, value in results(call, 0, call.tensors(0)).items():
        assert not value.numel() or not value.any(), name


class Recorded(TorchDispatchMode):
    """Records calls of fastformer's ops below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "fastformer":
            assert not kwargs
            self.calls.append((function, torch.utils._pytree.tree_map_only(Tensor, lambda x: x.clone(), args)))
        return function(*args, **(kwargs or {}))


# An op's first call is compiled with the default backend, and its second one with the reference: a graph contains one
# call of an op for either, because the backend is chosen within the call. All other pairs are slow.
COMPILED = {
    call: backend
    for op in {call.op: None for call in CALLS}
    for call, backend in zip([call for call in CALLS if call.op == op], (None, "reference"), strict=False)
}


@all_calls
def test_opcheck(call: OpCall, forced: str) -> None:
    """Checks the schema, fake tensors, and autograd registration of the forward and the backward pass."""
    if forced == "triton" and call.stem.endswith("attention") and not HAS_GPU:
        pytest.skip("the interpreter takes long; what the launchers give is what the fakes say in tests/kernels")
    with Recorded() as recorded:
        results(call, N, call.tensors(N))
    assert recorded.calls
    checks = ["test_schema", "test_faketensor"]
    if forced == "reference" and call.learns:  # how an op is registered is no backend's affair
        checks += ["test_autograd_registration", *["test_aot_dispatch_dynamic"] * (call not in COMPILED)]
    for function, args in recorded.calls:
        if str(function).rpartition(".")[0].endswith("_fwd"):
            args = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: x.requires_grad_() if x.is_floating_point() and call.learns else x, args
            )
        torch.library.opcheck(function, args, test_utils=checks)


@pytest.mark.parametrize("call, backend", [
    pytest.param(call, backend, id=f"{backend}-{call}",
                 marks=() if call in COMPILED and COMPILED[call] == backend else pytest.mark.slow)
    for call in CALLS for backend in (None, "reference")
])  # fmt: skip
def test_compiled(call: OpCall, backend: str | None) -> None:
    """There is one graph for all sizes, which contains one call of the op for any backend."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
        return getattr(ops, call.op)(**tensors, **options)

    torch._dynamo.reset()
    for n in (N, 7):
        with use_backend(backend):
            expected = results(call, n, call.tensors(n))
        tensors = call.tensors(n)
        leaves = {name: x.clone().requires_grad_(f"d{name}" in expected) for name, x in tensors.items()}
        with use_backend(backend):
            outputs = compiled(leaves, call.options(n))
        outputs = tuple(outputs) if isinstance(outputs, tuple) else (outputs,)
        values = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        values |= {name: leaf for name, leaf in leaves.items() if name.endswith("_cache")}
        learned = [output for output in outputs if output.requires_grad]
        if learned:
            names = [name for name, leaf in leaves.items() if leaf.requires_grad]
            douts = [draw(*output.shape).to(output) for output in learned]
            gradients = torch.autograd.grad(learned, [leaves[name] for name in names], douts)
            values |= {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
        same(values, expected, 2e-5)


@all_calls
@pytest.mark.parametrize("backend", ["reference", None])
def test_autocast(call: OpCall, backend: str | None) -> None:
    """Products run in its dtype, and the rest in that of the inputs; scores and losses are always fp32."""
    tensors = call.tensors(N)
    caches = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.endswith("_cache")}
    tensors |= caches  # in the dtype that autocast says, as the models make them
    inside = cast(tensors, torch.bfloat16) if call.narrows else tensors
    inside |= {name: tensor for name, tensor in tensors.items() if name == "attn_mask"}
    with use_backend(backend):
        expected = results(call, N, inside)
        with torch.autocast("cpu", torch.bfloat16):
            values = results(call, N, tensors)
            (wide, *_) = call(N, **cast(call.tensors(N), torch.float64))
    assert wide.dtype == torch.float64 or call.op == "linear_topk"
    assert all(value.dtype == tensors[name[1:]].dtype for name, value in values.items() if name[0] == "d")
    same({n: v.to(expected[n].dtype) for n, v in values.items()}, expected)
