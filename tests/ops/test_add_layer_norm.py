"""add_layer_norm against F.dropout's formula, an addition and F.layer_norm (or RMSNorm written out)."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops import add_layer_norm, use_backend
from fastformer.ops._dropout import draw_seed, keep_mask, keep_scale
from tests.checks import assert_op_accurate
from tests.conftest import missing_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OP = torch.ops.fastformer


def plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float = 1e-5,
    rms_norm: bool = False,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    s = x if keep is None else x * keep * keep_scale(dropout_p)
    if residual is not None:
        s = (s + residual).to(residual.dtype)
    weight, bias = (None if p is None else p.to(s.dtype) for p in (weight, bias))
    if rms_norm:
        y = F.rms_norm(s, s.shape[-1:], weight, eps)
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return y.to(x.dtype), s


def make_inputs(
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    residual: bool = True,
    weight: bool = True,
    bias: bool = True,
    stream: torch.dtype | None = None,
    parameters: torch.dtype | None = None,
) -> dict[str, Tensor | None]:
    random = partial(torch.randn, device=device)
    return {
        "x": (2 * random(*shape) + 0.5).to(dtype),
        "residual": random(*shape).to(stream or dtype) if residual else None,
        "weight": (1 + random(shape[-1])).to(parameters or dtype) if weight else None,
        "bias": random(shape[-1]).to(parameters or dtype) if bias else None,
    }


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize(
    "parts", [("residual", "weight", "bias"), ("residual", "weight"), ("weight", "bias"), ("residual", "bias"), ()]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype, parts: tuple[str, ...], rms_norm: bool, backend: str, device: str) -> None:
    chosen = {part: part in parts for part in ("residual", "weight", "bias")}
    inputs = make_inputs((3, 7, 96), device, dtype, **chosen)
    options = {"rms_norm": rms_norm, "eps": 1e-6}
    assert_op_accurate(partial(add_layer_norm, **options), partial(plain, **options), inputs)


@pytest.mark.parametrize("shape", [(1, 64), (40, 1), (5, 17), (3, 1000), (17,), (2, 3, 2, 33), (131, 24)])
@pytest.mark.parametrize("rms_norm", [False, True])
def test_shapes(shape: tuple[int, ...], rms_norm: bool, backend: str, device: str) -> None:
    inputs = make_inputs(shape, device)
    assert_op_accurate(
        partial(add_layer_norm, rms_norm=rms_norm), partial(plain, rms_norm=rms_norm), inputs, strided_dy=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("dim", [512, 1024, 4096, 5000, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(dim: int, dtype: torch.dtype, backend: str, device: str) -> None:
    assert_op_accurate(add_layer_norm, plain, make_inputs((19, dim), device, dtype))


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize(
    "stream, parameters", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, None)]
)
def test_mixed_dtypes(
    stream: torch.dtype, parameters: torch.dtype | None, rms_norm: bool, backend: str, device: str
) -> None:
    """bf16 sub-layers beside an fp32 residual stream or fp32 parameters: y in x's dtype, the stream in its own."""
    inputs = make_inputs((4, 5, 40), device, torch.bfloat16, stream=stream, parameters=parameters)
    assert_op_accurate(partial(add_layer_norm, rms_norm=rms_norm), partial(plain, rms_norm=rms_norm), inputs)


def test_no_rows(backend: str, device: str) -> None:
    inputs = make_inputs((2, 0, 12), device)
    assert_op_accurate(add_layer_norm, plain, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_contiguous(dtype: torch.dtype, backend: str, device: str) -> None:
    inputs = make_inputs((6, 5, 24), device, dtype)
    inputs["x"] = inputs["x"].transpose(0, 1)
    inputs["residual"] = torch.randn(5, 6, 48, device=device).to(dtype)[..., ::2]
    inputs["weight"] = torch.randn(48, device=device).to(dtype)[::2]
    y, residual_out = add_layer_norm(**inputs)
    assert y.is_contiguous() and residual_out.is_contiguous()
    assert add_layer_norm(inputs["x"])[0].is_contiguous()
    assert_op_accurate(add_layer_norm, plain, inputs)


@pytest.mark.parametrize("rms_norm", [False, True])
def test_far_from_zero(rms_norm: bool, backend: str, device: str) -> None:
    """E[s^2] - E[s]^2 in fp32 would lose everything here; the variance takes two steps."""
    inputs = make_inputs((4, 256), device)
    inputs["x"] = torch.randn(4, 256, device=device) + 3000
    assert_op_accurate(partial(add_layer_norm, rms_norm=rms_norm), partial(plain, rms_norm=rms_norm), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("dim", [19, 256])
def test_statistics_are_of_the_rounded_stream(dim: int, dropout_p: float, backend: str, device: str) -> None:
    """Each sum is 0.9 above a number of bf16, which it is rounded to: a mean of the sums would be 0.9 off as well."""
    x = torch.full((5, dim), 0.9 * (1 - dropout_p), dtype=torch.bfloat16, device=device)
    even = (256 + 2 * torch.randint(2, x.shape, device=device)).bfloat16()  # neighbours in bf16
    seed = draw_seed(device) if dropout_p else None
    y, residual_out, mean, rstd = OP.add_layer_norm_fwd(x, even, None, None, 1e-5, dropout_p, seed, False)
    kept = residual_out.double()
    assert torch.equal(residual_out, even)
    torch.testing.assert_close(mean.double(), kept.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (kept.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(y, F.layer_norm(kept, (dim,)).bfloat16(), rtol=0.01, atol=0)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_one_output_used(used: int, dropout_p: float, backend: str, device: str) -> None:
    """Post-norm reads y alone: the other output's gradient is absent, not random memory."""
    seed = draw_seed(device)
    keep = keep_mask(seed, dropout_p, 12, 40)[0].view(3, 4, 40)
    inputs = make_inputs((3, 4, 40), device)
    # So that an unused parameter has a gradient in plain PyTorch as well.
    weightless = inputs if used == 0 else {**inputs, "weight": None, "bias": None}
    assert_op_accurate(
        lambda **a: add_layer_norm(**a, dropout_p=dropout_p, dropout_seed=seed)[used],
        lambda **a: plain(**a, keep=keep, dropout_p=dropout_p)[used],
        weightless,
    )


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_is_the_formula(dtype: torch.dtype, dropout_p: float, backend: str, device: str) -> None:
    seed = torch.tensor([2**61 + 12345, 2**33 + 77], device=device)
    inputs = make_inputs((5, 9, 27), device, dtype)
    keep = keep_mask(seed, dropout_p, 45, 27)[0].view(5, 9, 27)
    assert_op_accurate(
        partial(add_layer_norm, dropout_p=dropout_p, dropout_seed=seed),
        partial(plain, keep=keep, dropout_p=dropout_p),
        inputs,
    )
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        return  # Triton's interpreter truncates to bfloat16 where a GPU rounds to the nearest
    # Without a residual the sum is the dropped x itself, to the last bit.
    x = inputs["x"]
    _, dropped = add_layer_norm(x, dropout_p=dropout_p, dropout_seed=seed)
    accumulated = x.double() if dtype == torch.float64 else x.float()
    assert torch.equal(dropped, torch.where(keep, accumulated * keep_scale(dropout_p), 0.0).to(dtype))


def test_dropout_seed_is_drawn_from_the_default_generator(device: str) -> None:
    x = torch.randn(8, 64, device=device)
    torch.manual_seed(3)
    first, second = (add_layer_norm(x, x, dropout_p=0.5)[0] for _ in range(2))
    torch.manual_seed(3)
    again = add_layer_norm(x, x, dropout_p=0.5)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_without_residual_and_dropout_the_stream_is_x(backend: str, device: str) -> None:
    x = torch.randn(3, 8, device=device)
    assert add_layer_norm(x)[1] is x


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gradcheck(with_residual: bool, dropout_p: float, rms_norm: bool, backend: str) -> None:
    if backend == "triton":
        pytest.skip("gradcheck is for the backends that compute in fp64: reference and C++")
    seed = draw_seed("cpu")
    tensors = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    tensors += [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def op(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return add_layer_norm(
            x,
            residual if with_residual else None,
            weight,
            bias if with_residual else None,
            dropout_p=dropout_p,
            dropout_seed=seed,
            rms_norm=rms_norm,
        )

    if with_residual:
        assert torch.autograd.gradcheck(op, tensors)
    else:
        assert torch.autograd.gradcheck(lambda x, weight: op(x, x, weight, weight), (tensors[0], tensors[2]))


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("with_residual", [False, True])
def test_opcheck(with_residual: bool, dropout_p: float, rms_norm: bool, backend: str, device: str) -> None:
    inputs = make_inputs((2, 3, 16), device, residual=with_residual)
    x, residual, weight, bias = (t if t is None else t.requires_grad_() for t in inputs.values())
    seed = draw_seed(device) if dropout_p else None
    args = (x, residual, weight, bias, 1e-5, dropout_p, seed, rms_norm)
    torch.library.opcheck(OP.add_layer_norm_fwd.default, args)

    y, residual_out, mean, rstd = (t.detach() for t in OP.add_layer_norm_fwd(*args))
    s = residual_out if residual_out.numel() else x.detach()
    dy, ds = torch.randn_like(y), torch.randn_like(y)
    backward = (dy, ds, s, weight.detach(), mean, rstd, dropout_p, seed, rms_norm, True, torch.float32)
    torch.library.opcheck(OP.add_layer_norm_bwd.default, backward)


def test_compile(backend: str, device: str) -> None:
    compiled = torch.compile(add_layer_norm, fullgraph=True, dynamic=True)
    for shape in ((3, 5, 32), (2, 9, 48)):
        inputs = make_inputs(shape, device)
        assert_op_accurate(partial(compiled, rms_norm=False), plain, inputs)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(stream: torch.dtype, device: str) -> None:
    inputs = make_inputs((3, 16), device, torch.bfloat16, stream=stream, parameters=torch.float32)
    expected = add_layer_norm(**inputs)
    with torch.autocast(device, torch.float16):
        y, residual_out = add_layer_norm(**inputs)
    assert (y.dtype, residual_out.dtype) == (torch.bfloat16, stream)
    assert torch.equal(y, expected[0]) and torch.equal(residual_out, expected[1])


def test_what_cpp_takes() -> None:
    """The tests above skip what a backend refuses; this one says what it may refuse."""
    reason = missing_backend("cpp", "add_layer_norm")
    if reason is not None:
        pytest.skip(reason)
    x = torch.randn(3, 8)
    taken = [(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    with use_backend("cpp"):
        for dtype, stream in taken:
            leaf = x.to(dtype).requires_grad_()
            y, residual_out = add_layer_norm(leaf, x.to(stream))
            (y.double() * residual_out.double()).sum().backward()
        with pytest.raises(NotImplementedError, match="not torch.float16"):
            add_layer_norm(x.half())


def test_wrong_calls() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"expected a floating-point x \(\.\.\., dim\).*torch.int64"):
        add_layer_norm(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"dim >= 1, got torch.float32 of shape \(2, 0\)"):
        add_layer_norm(torch.ones(2, 0))
    with pytest.raises(ValueError, match=r"residual of x's shape \(2, 8\), got torch.float32 of shape \(1, 8\)"):
        add_layer_norm(x, x[:1])
    with pytest.raises(ValueError, match=r"floating-point weight of shape \(8,\), got .*\(7,\)"):
        add_layer_norm(x, x, torch.ones(7))
    with pytest.raises(ValueError, match=r"floating-point bias of shape \(8,\), got .*\(1, 8\)"):
        add_layer_norm(x, x, torch.ones(8), torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"dropout_p in \[0, 1\], got 1.5"):
        add_layer_norm(x, dropout_p=1.5)
    with pytest.raises(ValueError, match=r"dropout_seed int64 of shape \(2,\), got torch.float32 of shape \(2,\)"):
        add_layer_norm(x, dropout_p=0.5, dropout_seed=torch.ones(2))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_that_needs_no_gradient_costs_none(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fastformer.ops.add_layer_norm"]  # in the package, a function has the name
    asked: list[bool] = []
    op = module._bwd

    def spy(*args: object) -> object:
        asked.append(bool(args[9]))
        return op(*args)

    monkeypatch.setattr(module, "_bwd", spy)
    x, weight, bias = torch.randn(3, 8), torch.randn(8).requires_grad_(), torch.randn(8).requires_grad_(not frozen)
    add_layer_norm(x, x, weight, bias)[0].sum().backward()
    assert asked == [not frozen] and (bias.grad is None) == frozen and weight.grad is not None
