"""`scaled_dot_product_attention` by PyTorch's name, and `activate`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before

import fastformer
import fastformer.functional as FF
from fastformer.ops._library import record_backends
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


def ours_ran(call: Any) -> bool:
    with record_backends() as ran:
        call()
    return bool(ran)


@pytest.mark.parametrize("seqlens", [(L, S), (S, L), (L, L)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch(name, seqlens):
    options = dict(CASES[name])
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"][..., : seqlens[0], : seqlens[1]]
    data = inputs(grouped=name == "grouped", seqlens=seqlens)
    results = []
    for function in (FF.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with record_backends() as ran:
            out = function(*data, **options)
        assert bool(ran) == (function is FF.scaled_dot_product_attention)
        results.append([out, *torch.autograd.grad(out, data, torch.ones_like(out).cumsum(-1))])
    for part, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_same(ours, theirs, part)


def test_dropout_drops():
    q, k, v = inputs(seqlens=(64, 64))
    out = FF.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25)
    assert 0.9 < out.mean() < 1.1 and out.std() > 0.02


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


def test_blocks_on_the_diagonal():
    q, k, v = (each[:1] for each in inputs(seqlens=(6, 9)))
    blocks = FF.BlockDiagonal([2, 1, 3], [4, 2, 3], FF.Window(None, 0))
    out = FF.scaled_dot_product_attention(q, k, v, blocks)
    for (a, b), (c, d) in (((0, 2), (0, 4)), ((2, 3), (4, 6)), ((3, 6), (6, 9))):
        alone = FF.scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], FF.Window(None, 0))
        assert_same(out[:, :, a:b], alone, f"{a} to {b}")
    with pytest.raises(ValueError, match="6 queries and 6 keys"):
        FF.scaled_dot_product_attention(q, k, v, FF.BlockDiagonal([2, 1, 3]))
    with pytest.raises(ValueError, match="BlockDiagonal or is_causal, got both"):
        FF.scaled_dot_product_attention(q, k, v, blocks, is_causal=True)


def test_what_is_left_to_pytorch():
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
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            FF.scaled_dot_product_attention(single[0], single[1], single[2], mask)
    with pytest.raises(IndexError):
        FF.scaled_dot_product_attention(single[0], single[1], single[2], torch.zeros(S))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_tensors_are_pytorchs():
    rows = [torch.randn(H, length, D) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows)
    out = FF.scaled_dot_product_attention(nested, nested, nested)
    for mine, row in zip(out.unbind(), rows, strict=True):
        torch.testing.assert_close(mine, F.scaled_dot_product_attention(row, row, row))


class Layer(nn.Module):
    """A user's attention."""

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
        with pytest.raises(RuntimeError, match="active already"):
            fastformer.activate()
    assert not any(ours_ran(call) for call in calls.values())
    fastformer.activate()
    assert ours_ran(calls["in a module"])
    fastformer.deactivate()
    fastformer.deactivate()
    assert not ours_ran(calls["in a module"])


def with_math(*data: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*data)


def jvp(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Forward mode, which PyTorch has for its plain formula."""
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
    expected = {name: call() for name, call in calls.items()}
    with fastformer.activate():
        for name, call in calls.items():
            assert not ours_ran(call), name
            torch.testing.assert_close(call(), expected[name], msg=name)
        (dq,) = torch.autograd.grad(calls["values of another head_dim"]().sum(), q)
        assert dq.abs().sum() > 0
        (dq,) = torch.autograd.grad(calls["both"]().sum(), q)
        assert dq.abs().sum() > 0
        compiled = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), Layer()(q, k, v))


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


@pytest.mark.usefixtures("_deactivated")
def test_torch_nns_modules_run_on_ours_when_active():
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = layer(x)
    with fastformer.activate():
        assert ours_ran(lambda: layer(x))
        assert_same(layer(x), expected, "output")
