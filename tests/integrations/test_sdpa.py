"""Tests `scaled_dot_product_attention` under PyTorch's name, and `activate`."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
import fastformer.functional as FF
from fastformer import functional as sdpa
from fastformer.ops import record_backends
from tests.conftest import Call, CallsOf
from tests.covering import each
from tests.nn.comparing import assert_same

B, H, L, S, D = 2, 4, 5, 7, 8
BOOL = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(0)) < 0.7
BOOL[..., 0] = True
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": BOOL},
    "two dimensions": {"attn_mask": BOOL[0, 0]},
    "additive": {"attn_mask": torch.randn(1, H, S, S, dtype=torch.float64)},
    "per key": {"attn_mask": BOOL[:, :, :1]},
    "grouped": {"enable_gqa": True},
}


def inputs(*, grouped: bool = False, dtype: torch.dtype = torch.float64, seqlens: tuple[int, int] = (L, S)) -> Any:
    torch.manual_seed(0)
    heads = 2 if grouped else H
    shapes = [(B, H, seqlens[0], D), (B, heads, seqlens[1], D), (B, heads, seqlens[1], D)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def options_of(name: str, seqlens: tuple[int, int] = (L, S)) -> dict[str, Any]:
    options = dict(CASES[name])
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"][..., : seqlens[0], : seqlens[1]]
    return options


def ours_ran(call: Any) -> bool:
    with record_backends() as ran:
        call()
    return bool(ran)


@each("name, seqlens", itertools.product(CASES, [(L, S), (S, L), (L, L)]))
def test_equals_pytorch(name, seqlens):
    options = options_of(name, seqlens)
    data = inputs(grouped=name == "grouped", seqlens=seqlens)
    results = []
    for function in (FF.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with record_backends() as ran:
            out = function(*data, **options)
        assert bool(ran) == (function is FF.scaled_dot_product_attention)
        results.append([out, *torch.autograd.grad(out, data, torch.ones_like(out).cumsum(-1))])
    for part, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_same(ours, theirs, part)


ORDERS = list(itertools.permutations(range(4)))


def lying(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns x with its dimensions in this order in memory, from the outermost to the innermost."""
    return x.detach().permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def of_every_fourth(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns the same tensor as a part of a larger one, with gaps between the rows of the innermost dimension."""
    rows = torch.stack((x.detach().permute(order),) * 4, 3).contiguous()[:, :, :, 1]
    return rows.permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize("name", CASES)
def test_an_output_has_pytorchs_strides(name):
    """They are in query's order for any order of the other inputs."""
    q, *others = (each.detach() for each in inputs(grouped=name == "grouped"))
    options = options_of(name)
    k, v = others
    for order, is_dense, learns in itertools.product(ORDERS, (True, False), (True, False)):
        query = lying(q, order) if is_dense else of_every_fourth(q, order)
        for key in (k, lying(k, (0, 2, 1, 3))):
            query.requires_grad_(learns)
            theirs = F.scaled_dot_product_attention(query, key, v, **options)
            ours = FF.scaled_dot_product_attention(query, key, v, **options)
            assert ours.stride() == theirs.stride(), (order, is_dense)
            assert_same(ours, theirs, "out")


class Copies(TorchDispatchMode):
    """Counts operations that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += any(word in str(function) for word in ("clone", "copy", "contiguous"))
        return function(*args, **(kwargs or {}))


@each("order, name, dropout_p", itertools.product([(0, 1, 2, 3), (0, 2, 1, 3)], CASES, [0.0, 0.3]))
def test_an_output_is_copied_only_for_heads_apart_that_share_keys_or_masks(order, name, dropout_p):
    options = options_of(name)
    query, k, v = (lying(each, order) for each in inputs(grouped=name == "grouped"))
    options["dropout_p"] = dropout_p
    with Copies() as counted:
        out = FF.scaled_dot_product_attention(query, k, v, **options)
    is_copied = order == (0, 1, 2, 3) and name in ("bool", "additive", "per key", "grouped")
    assert counted.copies == is_copied
    assert out.stride() == query.stride()


def test_dropout_does_not_depend_on_strides():
    data = inputs(seqlens=(32, 32))
    outs = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        torch.manual_seed(3)
        q, k, v = (lying(each, order) for each in data)
        outs.append(FF.scaled_dot_product_attention(q, k, v, dropout_p=0.4))
    for out in outs[1:]:
        assert_same(out, outs[0], "out")
    q, k, v = data
    dropped = FF.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
    assert 0.9 < dropped.mean() < 1.1 and dropped.std() > 0.02


@pytest.mark.parametrize("seqlens", [(L, S), (S, L), (L, L)], ids=str)
def test_biases_are_masks(seqlens):
    q, k, v = inputs(seqlens=seqlens)
    for make in (causal_upper_left, causal_lower_right):
        bias: Any = make(*seqlens)
        materialised = torch.ones(seqlens).tril(0 if make is causal_upper_left else seqlens[1] - seqlens[0]).bool()
        expected = _zero_where_nothing(F.scaled_dot_product_attention(q, k, v, materialised), materialised)
        assert ours_ran(lambda bias=bias: FF.scaled_dot_product_attention(q, k, v, bias))
        assert_same(FF.scaled_dot_product_attention(q, k, v, bias), expected, str(make))
    assert FF.causal_lower_right() == FF.Window(None, 0)
    for left, right in ((2, 1), (None, 0), (0, None), (3, -1)):
        offset = torch.arange(seqlens[1])[None] - torch.arange(seqlens[0])[:, None] - (seqlens[1] - seqlens[0])
        seen = (offset >= -(99 if left is None else left)) & (offset <= (99 if right is None else right))
        expected = _zero_where_nothing(F.scaled_dot_product_attention(q, k, v, seen), seen)
        assert_same(FF.scaled_dot_product_attention(q, k, v, FF.Window(left, right)), expected, f"{left}, {right}")
        # What our kernels can't take gives the same through a mask.
        wide = torch.cat((v, v), -1)[..., : D + 3]
        expected = _zero_where_nothing(F.scaled_dot_product_attention(q, k, wide, attn_mask=seen), seen)
        assert not ours_ran(lambda wide=wide: FF.scaled_dot_product_attention(q, k, wide, attn_mask=FF.Window(1, 1)))
        out = FF.scaled_dot_product_attention(q, k, wide, attn_mask=FF.Window(left, right))
        assert_same(out, expected, "a wider value")


def _zero_where_nothing(out: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen.any(-1, keepdim=True), out, 0.0)


def band(seqlens: tuple[int, int], left: int | None, right: int | None) -> Tensor:
    """Returns a mask (seqlen_q, seqlen_k), True from `left` before to `right` after the diagonal from the top left
    corner.
    """
    distance = torch.arange(seqlens[1]) - torch.arange(seqlens[0])[:, None]
    return (distance <= (seqlens[1] if right is None else right)) & (distance >= (-(10**6) if left is None else -left))


def additive(mask: Tensor, lowest: float = -torch.inf, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)


@pytest.fixture
def calls(calls_of: CallsOf, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Records the calls of fastformer's attention, and lets it read short masks, too."""
    monkeypatch.setattr(sdpa, "_WORTH_READING", 0)
    return calls_of(sdpa, "attention")


LOWEST = torch.finfo(torch.float64).min
# (seqlens, left, right) from the top left -> the window from the bottom right.
BANDS = [
    ((7, 7), None, 0, (None, 0)),
    ((5, 7), None, 0, (None, -2)),
    ((5, 7), None, 2, (None, 0)),
    ((7, 5), None, 1, (None, 3)),
    ((7, 7), 2, 0, (2, 0)),
    ((7, 7), 2, None, (2, None)),
    ((6, 9), 1, 4, (4, 1)),
    ((7, 7), None, None, (None, None)),
]


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest", "four dimensions", "expanded"])
@pytest.mark.parametrize(("seqlens", "left", "right", "window"), BANDS)
def test_masks_that_are_windows_skip_work(seqlens, left, right, window, kind, calls):
    q, k, v = inputs(seqlens=seqlens)
    mask = band(seqlens, left, right)
    given = {
        "bool": mask, "-inf": additive(mask), "lowest": additive(mask, LOWEST), "four dimensions": mask[None, None],
        "expanded": additive(mask).expand(B, H, *seqlens),
    }[kind]  # fmt: skip
    results = []
    for function in (FF.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(q, k, v, given)
        results.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out).cumsum(-1))])
    (call,) = calls
    assert call.options["attn_mask"] is None and call.options["window_size"] == window
    for part, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_same(ours, theirs, part)


def changed(mask: Tensor, at: tuple[int, int], value: Any) -> Tensor:
    mask = mask.clone()
    mask[at] = value
    return mask


CAUSAL = band((S, S), None, 0)


@pytest.mark.parametrize(
    "mask",
    [
        changed(CAUSAL, (3, 4), True),
        changed(CAUSAL, (3, 1), False),
        changed(band((S, S), 2, 0), (4, 3), False),
        changed(additive(CAUSAL), (3, 1), -1.0),
        changed(additive(CAUSAL), (3, 1), 0.5),
        changed(additive(CAUSAL), (0, 6), -1e9),
        changed(additive(CAUSAL), (0, 6), torch.finfo(torch.float32).min),
        additive(CAUSAL) - 1,
        additive(CAUSAL).requires_grad_(),
        torch.stack([CAUSAL, CAUSAL])[:, None],
        band((S, S), 2, -1),  # a query that sees no key
        band((S, S), -1, None),
        CAUSAL[:, :1],
    ],
)
def test_masks_that_are_not_padding_stay_masks(mask, calls):
    q, k, v = inputs(seqlens=(S, S))
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    out = FF.scaled_dot_product_attention(q, k, v, mask)
    (call,) = calls
    assert call.options["attn_mask"] is mask and call.options["window_size"] == (None, None)
    empty = (mask == False) if mask.dtype == torch.bool else mask == -torch.inf  # noqa: E712
    assert_same(out, expected.masked_fill(empty.expand(*empty.shape[:-1], S).all(-1)[..., None], 0), "out")


def test_a_mask_is_read_in_each_call_and_a_short_one_never(calls, monkeypatch):
    (q, k, v), mask = inputs(seqlens=(S, S)), CAUSAL.clone()
    FF.scaled_dot_product_attention(q, k, v, mask)
    mask.data[4, 1] = False
    assert_same(
        FF.scaled_dot_product_attention(q, k, v, mask),
        F.scaled_dot_product_attention(q, k, v, mask),
        "out",
    )
    assert [call.options["window_size"] for call in calls] == [(None, 0), (None, None)]
    monkeypatch.undo()
    assert sdpa._WORTH_READING > B * H * S * S * D


def test_blocks_on_the_diagonal():
    q, k, v = (each[:1] for each in inputs(seqlens=(6, 9)))
    blocks = FF.BlockDiagonal([2, 1, 3], [4, 2, 3], FF.Window(None, 0))
    out = FF.scaled_dot_product_attention(q, k, v, blocks)
    for (a, b), (c, d) in (((0, 2), (0, 4)), ((2, 3), (4, 6)), ((3, 6), (6, 9))):
        alone = FF.scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], FF.Window(None, 0))
        assert_same(out[:, :, a:b], alone, f"{a} to {b}")
    assert out.is_contiguous()
    turned, *others = (lying(each, (0, 2, 1, 3)) for each in (q, k, v))
    assert FF.scaled_dot_product_attention(turned, others[0], others[1], blocks).stride() == turned.stride()
    with pytest.raises(ValueError):
        FF.scaled_dot_product_attention(q, k, v, FF.BlockDiagonal([2, 1, 3]))
    with pytest.raises(ValueError, match=r"\bis_causal\b"):
        FF.scaled_dot_product_attention(q, k, v, blocks, is_causal=True)


def test_calls_that_pytorch_computes():
    q, k, v = inputs()
    half = [each.detach().half() for each in (q, k, v)]
    other = torch.randn(B, H, S, D + 3, dtype=torch.float64)
    for name, call in {
        "another head_dim of the values": lambda f: f(q, k, other),
        "half precision on a CPU": lambda f: f(*half),
        "three dimensions": lambda f: f(q[0], k[0], v[0]),
        "a broadcast batch": lambda f: f(q, k[:1], v[:1]),
    }.items():
        assert not ours_ran(lambda call=call: call(FF.scaled_dot_product_attention)), name
        assert torch.equal(call(FF.scaled_dot_product_attention), call(F.scaled_dot_product_attention)), name
    with pytest.raises(RuntimeError):
        FF.scaled_dot_product_attention(q, k, v, torch.ones(3, 3, dtype=torch.bool))
    single = [each.detach().float() for each in (q, k, v)]
    for mask in (torch.zeros(L, S, dtype=torch.float64), torch.zeros(L, S, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"\battn_mask\b"):
            FF.scaled_dot_product_attention(single[0], single[1], single[2], mask)
    with pytest.raises(IndexError):
        FF.scaled_dot_product_attention(single[0], single[1], single[2], torch.zeros(S))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:Lower right causal bias")
@pytest.mark.parametrize("seqlens", [(L, S), (S, L), (L, L)], ids=str)
@pytest.mark.parametrize("bias", [None, causal_upper_left, causal_lower_right])
def test_a_trace_of_causal_calls(bias, seqlens):
    """In a trace, sizes are tensors."""
    options = {"is_causal": True} if bias is None else {"attn_mask": bias(*seqlens)}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FF.scaled_dot_product_attention(q, k, v, **options)

    data = [each.detach() for each in inputs(seqlens=seqlens)]
    traced = torch.jit.trace(call, [torch.randn_like(each) for each in data], check_trace=False)
    assert_same(traced(*data), call(*data), "out")


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_tensors_are_pytorchs():
    rows = [torch.randn(H, length, D) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows)
    out = FF.scaled_dot_product_attention(nested, nested, nested)
    for mine, row in zip(out.unbind(), rows, strict=True):
        torch.testing.assert_close(mine, F.scaled_dot_product_attention(row, row, row))


class Layer(nn.Module):
    """A user's attention module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.fixture
def _deactivated():
    yield
    fastformer.deactivate()


@pytest.mark.usefixtures("_deactivated")
def test_activate_catches_every_call():
    q, k, v = inputs()
    learned = torch.randn(1, 1, L, S, dtype=torch.float64, requires_grad=True)
    expected = [F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, learned)]
    expected_grad = torch.autograd.grad(expected[1].sum(), [q, learned])
    calls = {
        "as an attribute": lambda: F.scaled_dot_product_attention(q, k, v),
        "imported before": lambda: imported_before(q, k, v),
        "through aten": lambda: torch.ops.aten.scaled_dot_product_attention(q, k, v),
        "in a module": lambda: Layer()(q, k, v),
    }
    assert not any(ours_ran(call) for call in calls.values())
    with fastformer.activate():
        for name, call in calls.items():
            assert ours_ran(call), name
            assert_same(call(), expected[0], name)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    assert ours_ran(call), f"{name}, {context.__name__}"
                    assert_same(call(), expected[0], name)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(ours_ran(calls["as an attribute"])))
        thread.start()
        thread.join()
        assert seen == [True]
        assert ours_ran(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
        out = F.scaled_dot_product_attention(q, k, v, learned)
        assert_same(out, expected[1], "a learned mask")
        for ours, theirs in zip(torch.autograd.grad(out.sum(), [q, learned]), expected_grad, strict=True):
            assert_same(ours, theirs, "its gradients")
        for name, call in calls.items():
            assert call().view(B * H, L, D).shape == (B * H, L, D), f"{name} lies as PyTorch's"
    assert not any(ours_ran(call) for call in calls.values())


@pytest.mark.usefixtures("_deactivated")
def test_activations_last_until_the_last_one_ends():
    """A library may activate inside of a caller's block, and in other threads."""
    q, k, v = inputs()

    def is_active() -> bool:
        return ours_ran(lambda: F.scaled_dot_product_attention(q, k, v))

    def library() -> None:
        with fastformer.activate():
            assert is_active()

    with fastformer.activate():
        library()
        thread = threading.Thread(target=library)
        thread.start()
        thread.join()
        assert is_active()
        outlasts = fastformer.activate()
    assert is_active()
    with outlasts:
        pass
    assert not is_active()
    fastformer.activate()
    with fastformer.activate():
        fastformer.deactivate()
        assert not is_active()
        fastformer.activate()
    assert is_active(), "a block ends only its own activation"
    fastformer.deactivate()
    fastformer.deactivate()
    assert not is_active()


def with_math(*data: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*data)


def jvp(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Computes a forward-mode derivative, which PyTorch has for its plain formula."""
    return torch.func.jvp(lambda q: with_math(q, k, v), (q,), (torch.ones_like(q),))[1]


@pytest.mark.usefixtures("_deactivated")
def test_activate_leaves_the_rest_to_pytorch():
    q, k, v = inputs()
    other = torch.randn(B, H, S, D + 3, dtype=torch.float64, requires_grad=True)
    calls = {
        "values of another head_dim": lambda: F.scaled_dot_product_attention(q, k, other),
        "both": lambda: F.scaled_dot_product_attention(q, k, v, BOOL[:, :, :L], is_causal=True),
        "half": lambda: F.scaled_dot_product_attention(*(each.detach().half() for each in (q, k, v))),
        "vmap": lambda: torch.vmap(F.scaled_dot_product_attention)(q, k, v),
        "gradients of gradients": lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q),
        "jvp": lambda: jvp(q, k, v),
        "sdpa_kernel": lambda: with_math(q, k, v),
    }
    try:
        calls["both"]()
    except RuntimeError:  # PyTorch 2.15 refuses a mask beside is_causal
        refused = calls.pop("both")
        with fastformer.activate(), pytest.raises(RuntimeError):
            refused()
    expected = {name: call() for name, call in calls.items()}
    with fastformer.activate():
        for name, call in calls.items():
            assert not ours_ran(call), name
            torch.testing.assert_close(call(), expected[name], msg=name)
        for name in ("values of another head_dim", "both"):
            if name in calls:
                (dq,) = torch.autograd.grad(calls[name]().sum(), q)
                assert dq.abs().sum() > 0
        compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), Layer()(q, k, v))


@pytest.mark.usefixtures("_deactivated")
@pytest.mark.parametrize("values", [S - 1, S + 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_of_two_lengths_are_refused(dtype, values):
    """PyTorch's CPU kernel reads past the keys if there are more values, and ignores keys if there are fewer."""
    q, k, _ = (each.detach() for each in inputs(dtype=dtype))
    v = torch.randn(B, H, values, D, dtype=dtype)
    mask = torch.ones(L, S, dtype=torch.bool)
    calls = {
        "plain": ((q, k, v), {}),
        "masked": ((q, k, v, mask), {}),
        "causal": ((q, k, v), {"is_causal": True}),
        "grouped": ((q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
        "three dimensions": ((q[0], k[0], v[0]), {}),
        "learned": ((q.requires_grad_(), k, v), {"dropout_p": 0.1}),
    }
    for tensors, options in calls.values():
        with pytest.raises(ValueError, match=r"\bvalue\b"):
            FF.scaled_dot_product_attention(*tensors, **options)
        with fastformer.activate(), pytest.raises(ValueError, match=r"\bvalue\b"):
            F.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.usefixtures("_deactivated")
def test_activate_under_autocast_computes_in_its_dtype():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v)
        with fastformer.activate():
            assert ours_ran(lambda: F.scaled_dot_product_attention(q, k, v))
            out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
