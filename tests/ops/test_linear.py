"""Compares linear with F.linear, and tests its C++ kernels at every size and layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.ops import linear, record_backends, use_backend
from tests.checks import assert_accurate, assert_op_accurate
from tests.conftest import skip_without
from tests.covering import each


@pytest.fixture(autouse=True)
def _needs_the_extension(request: pytest.FixtureRequest) -> None:
    if "backend" not in request.fixturenames:
        skip_without("cpp", "linear")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.fastformer_cpp.linear(x, weight, bias)
    return out


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each(
    "rows, features, out",
    # Few rows aren't packed for; up to 768 are tall tiles of equal heights; products longer than 192 (bf16: 512) are
    # sums of sums; rows of 1,024 (bf16: 2,048) are copied.
    [
        (1, 1, 1), (3, 70, 33), (4, 513, 130), (7, 33, 65), (9, 191, 20), (15, 512, 16), (20, 193, 40), (40, 1030, 48),
        (65, 64, 130), (66, 385, 33), (256, 40, 70), (257, 40, 300), (300, 600, 31), (513, 40, 300), (769, 40, 300),
        (16, 1024, 33), (17, 1024, 40), (40, 2048, 70), (530, 1024, 65),
    ],
)  # fmt: skip
@each("is_transposed", [False, True])
def test_the_op_equals_the_product(rows: int, features: int, out: int, is_transposed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, features).to(dtype), torch.randn(out).to(dtype)
    weight = (torch.randn(features, out).t() if is_transposed else torch.randn(out, features)).to(dtype)
    assert weight.is_contiguous() != is_transposed or 1 in weight.shape
    for b in (bias, None):
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        product = _product(x, weight, b)
        assert product.shape == (rows, out) and product.is_contiguous() and product.dtype == dtype
        # MKL's kernel for few rows is more exact than the one that computes the same rows among others.
        plain = F.linear(x.repeat(100 // rows + 1, 1), weight, b)[:rows]
        _assert_accurate(product, plain, exact)


def _assert_accurate(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Checks a product by the rule; in fp64, where plain PyTorch is the exact result, up to the last digits."""
    if actual.dtype is torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(actual, plain, exact)


def test_a_map_to_no_features_has_gradients(backend: str) -> None:
    x, weight, bias = (torch.ones(shape, requires_grad=True) for shape in ((2, 5, 3), (0, 3), (0,)))
    linear(x, weight, bias).sum().backward()
    for tensor in (x, weight, bias):
        assert tensor.grad is not None and torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("features", [192, 700, 1025])
def test_a_row_does_not_depend_on_other_rows(features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((300, features), (90, features), (90,)))
    whole = _product(x, weight, bias)
    for first, last in ((0, 1), (3, 7), (5, 11), (17, 40), (100, 260), (43, 300)):
        assert torch.equal(_product(x[first:last], weight, bias), whole[first:last]), (first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_vocabulary_is_processed_in_chunks_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(260, 64).to(dtype), torch.randn(66_000, 64).to(dtype)
    assert weight.numel() > 2**22
    product, some = _product(x, weight), weight[::97]
    assert product.isfinite().all()  # all columns are written, and some are compared
    assert_accurate(product[:, ::97], F.linear(x, some), F.linear(x.double(), some.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tensors_may_have_any_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24), torch.randn(40)
    for x in (
        torch.randn(2, 3, 5, 24),
        torch.randn(20, 2, 24)[:, 1],
        torch.randn(24, 30).t(),
        torch.randn(20, 48)[:, ::2],
        torch.randn(1, 20, 24).expand(3, 20, 24),
        torch.randn(3, 24, 20).transpose(1, 2),
        torch.randn(24),
        torch.randn(24).expand(30, 24),
        torch.randn(60).as_strided((30, 24), (1, 1)),
    ):
        for w, b in (
            (weight, bias),
            (torch.randn(40, 50)[:, 3:27], torch.randn(80)[::2]),
            (torch.randn(80, 48)[::2, ::2], torch.randn(1).expand(40)),
            (torch.randn(40, 1).expand(40, 24), None),
        ):
            # Layouts that a change of the dtype keeps.
            views = [None if t is None else _like(t, dtype) for t in (x, w, b)]
            exact = F.linear(*(None if t is None else t.double() for t in views)).to(dtype)
            bound = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(_product(*views), exact, rtol=bound, atol=bound)


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with the memory layout of t."""
    memory = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype)
    memory.untyped_storage().copy_(t.untyped_storage())
    return memory.to(dtype).as_strided(t.shape, t.stride(), t.storage_offset())


def test_parts_that_do_not_fit_are_refused() -> None:
    x, weight, bias = torch.randn(6, 5), torch.randn(7, 5), torch.randn(7)
    for args in (
        (x, weight.t(), bias),
        (x, weight, bias[:6]),
        (x, weight, bias[None]),
        (x, weight[None], bias),
        (x, weight.double(), bias),
        (x, weight, bias.double()),
        (x[0, 0], weight, bias),
    ):
        with pytest.raises(RuntimeError, match=r"\bin_features\b"):
            _product(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_empty_sums_give_the_bias_and_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    bias = torch.randn(7).to(dtype)
    assert _product(torch.empty(0, 5, dtype=dtype), torch.empty(7, 5, dtype=dtype), bias).shape == (0, 7)
    assert _product(torch.empty(4, 5, dtype=dtype), torch.empty(0, 5, dtype=dtype)).shape == (4, 0)
    empty = _product(torch.empty(4, 0, dtype=dtype), torch.empty(7, 0, dtype=dtype), bias)
    assert torch.equal(empty, bias.expand(4, 7))
    x, weight = torch.randn(30, 50).to(dtype), torch.randn(70, 50).to(dtype)
    x[4, 7] = torch.nan
    product = _product(x, weight)
    assert product[4].isnan().all() and product.isnan().sum() == 70
    weight[69, 49] = torch.inf
    assert _product(torch.ones(30, 50, dtype=dtype), weight)[:, 69].isinf().all()


def make_inputs(
    shape: tuple[int, ...], out_features: int, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> dict[str, Tensor | None]:
    return {
        "x": torch.randn(shape).to(dtype),
        "weight": torch.randn(out_features, shape[-1]).to(dtype),
        "bias": torch.randn(out_features).to(dtype) if bias else None,
    }


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape, out", [((1, 1), 1), ((7, 33), 65), ((3, 5, 24), 40), ((20,), 12), ((2, 3, 2, 40), 2), ((2, 0, 12), 20)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_the_op_and_its_gradients(shape, out, bias, dtype, backend) -> None:
    inputs = make_inputs(shape, out, dtype, bias=bias)
    with record_backends() as ran:
        assert_op_accurate(linear, F.linear, inputs, strided_dy=len(shape) > 1)
    assert ran == {("linear", backend), ("linear_weight_grad", backend)}


def test_layouts_and_their_gradients(backend: str) -> None:
    inputs = {"x": torch.randn(6, 5, 16).transpose(0, 1), "weight": torch.randn(16, 24).T, "bias": torch.randn(48)[::2]}
    assert linear(**inputs).is_contiguous()
    assert_op_accurate(linear, F.linear, inputs)
    weight = inputs["weight"].requires_grad_()
    (gradient,) = torch.autograd.grad(linear(**inputs).sum(), weight)
    assert gradient.stride() == weight.stride(), "a gradient lies as its weight"


def test_a_compiled_product_is_pytorchs() -> None:
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    with record_backends() as ran:
        assert_op_accurate(compiled, F.linear, make_inputs((3, 5, 24), 40))
    assert not ran


def test_a_product_is_recorded_if_pytorch_computes_it() -> None:
    inputs = make_inputs((5, 16), 24)
    for forced in (None, "triton"):  # there is no kernel for GPUs
        with use_backend(forced), record_backends() as ran:
            linear(**inputs)
        assert ran == {("linear", "torch")}


def test_no_double_backward_of_the_gradient_alone() -> None:
    dout = torch.randn(6, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.ops.fastformer.linear_weight_grad(dout, torch.randn(6, 5)).sum().backward()


def _weight_gradient(a: Tensor, b: Tensor) -> Tensor:
    """Returns a^T b by the C++ kernel, at every size and layout that autograd uses."""
    out: Tensor = torch.ops.fastformer_cpp.linear_weight_grad(a, b)
    return out


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each(
    "rows, m, n",
    # The wider one is cut into slices of 128 columns at most, which panels of 32 and groups of 14 rows make up.
    [
        (1, 1, 1),
        (5, 33, 7),
        (7, 3, 130),
        (40, 129, 128),
        (40, 128, 129),
        (90, 300, 31),
        (513, 70, 257),
        (1100, 40, 16),
        (41, 150, 140),
        (41, 140, 150),
    ],  # fmt: skip
)
def test_the_op_equals_the_weight_gradient(rows: int, m: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    a, b = torch.randn(rows, m).to(dtype), torch.randn(rows, n).to(dtype)
    exact = a.double().t() @ b.double()
    gradient = _weight_gradient(a, b)
    assert gradient.shape == (m, n) and gradient.is_contiguous()
    _assert_accurate(gradient, a.t() @ b, exact)


@pytest.mark.parametrize(("m", "n"), [(150, 40), (40, 150)])
def test_rows_of_a_weights_gradient_may_have_any_strides(m: int, n: int) -> None:
    torch.manual_seed(m)
    for a, b in [
        (torch.randn(50, m + 3)[:, 2:-1], torch.randn(50, n + 9)[:, :-9]),
        (torch.randn(m, 50).t(), torch.randn(50, 2 * n)[:, ::2]),
        (torch.randn(m).expand(50, m), torch.randn(1, n).expand(50, n)),
        (torch.randn(50, 1).expand(50, m), torch.randn(100, n)[::2]),
        (torch.randn(2, m)[1:], torch.randn(m + n)[m:].as_strided((1, n), (3, 1))),
    ]:
        torch.testing.assert_close(_weight_gradient(a, b), a.contiguous().t() @ b.contiguous(), rtol=1e-4, atol=1e-4)


def test_parts_of_a_weights_gradient_that_do_not_fit_are_refused() -> None:
    a = torch.randn(6, 5)
    for b in (torch.randn(7, 5), torch.randn(6, 5, 1), torch.randn(6), torch.randn(6, 5).double()):
        with pytest.raises(RuntimeError, match=r"\bout_features\b"):
            _weight_gradient(a, b)


def test_no_rows_give_a_gradient_of_zeros_and_nan_stays_in_its_column() -> None:
    assert torch.equal(_weight_gradient(torch.empty(0, 20), torch.empty(0, 150)), torch.zeros(20, 150))
    assert _weight_gradient(torch.empty(9, 0), torch.empty(9, 150)).shape == (0, 150)
    a, b = torch.randn(30, 50), torch.randn(30, 200)
    a[4, 7] = torch.nan
    gradient = _weight_gradient(a, b)
    assert gradient[7].isnan().all() and gradient.isnan().sum() == 200
    b[29, 199] = torch.inf
    assert _weight_gradient(torch.ones(30, 50), b)[:, 199].isinf().all()
