"""The ops' own tensors make views, copies and conversions like PyTorch's, and leak no memory."""

from __future__ import annotations

import contextlib
import ctypes
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops import _extension

pytestmark = pytest.mark.skipif(_extension.load() is None, reason="the C++ extension is not built")
CPP = torch.ops.fastformer_cpp


@pytest.mark.parametrize(
    "shape", [(5,), (1, 5), (3, 1, 5), (2, 3, 4, 5), (2, 1, 3, 1, 2, 1, 5), (0, 3, 5), (2, 0, 3, 5)]
)
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(4, 5), torch.randn(4)
    out = CPP.linear(x, weight, bias)
    assert out.shape == (*shape[:-1], 4) and out.is_contiguous()
    torch.testing.assert_close(out, F.linear(x, weight, bias))


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize("step", [1, 2])
def test_strides_of_any_order(order: tuple[int, ...], step: int) -> None:
    x, weight = torch.randn(2 * step, 3 * step, 4 * step)[::step, ::step, ::step].permute(order), torch.randn(6, 9)
    expected = F.linear(x.contiguous(), weight[:, : x.shape[-1]].contiguous())
    torch.testing.assert_close(CPP.linear(x, weight[:, : x.shape[-1]], None), expected)
    bias = torch.randn(6)
    product = CPP.linear(x.expand(5, *x.shape), weight[:, : x.shape[-1]], bias)
    torch.testing.assert_close(product, (expected + bias).expand(5, *expected.shape))


@pytest.mark.parametrize("bias", [None, torch.arange(8.0)[::2]])
def test_without_features_only_the_bias_remains(bias: Tensor | None) -> None:
    expected = torch.zeros(2, 3, 4) if bias is None else bias.expand(2, 3, 4)
    assert torch.equal(CPP.linear(torch.empty(2, 3, 0), torch.empty(4, 0), bias), expected)


@pytest.mark.parametrize("dims", range(1, 8))
def test_a_result_may_have_a_dimension_more_than_its_input(dims: int) -> None:
    ids = torch.arange(6).view(*[1] * (dims - 1), 6)
    weight = torch.randn(6, 3)
    assert torch.equal(CPP.embedding_fwd(ids, weight, None, None, 1.0, -1, 0.0, None, False), weight[ids])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_indices_of_any_width_and_stride(dtype: torch.dtype) -> None:
    ids, weight = torch.tensor([[3, 9, 1], [0, 9, 2]], dtype=dtype)[:, ::2], torch.randn(4, 3)
    assert torch.equal(CPP.embedding_fwd(ids, weight, None, None, 1.0, -1, 0.0, None, False), weight[ids.long()])


def test_an_index_out_of_range_and_a_dtype_without_code() -> None:
    with pytest.raises(IndexError, match=r"got 7"):
        CPP.embedding_fwd(torch.tensor([7]), torch.randn(4, 3), None, None, 1.0, -1, 0.0, None, False)
    with pytest.raises(RuntimeError, match=r"Half"):
        CPP.embedding_fwd(torch.tensor([1]), torch.randn(4, 3).half(), None, None, 1.0, -1, 0.0, None, False)


def test_a_transposed_weight_has_a_transposed_gradient() -> None:
    x, dout = torch.randn(3, 8), torch.randn(3, 8)
    weights = torch.randn(6, 8), torch.randn(8, 6)
    _, saved = CPP.feed_forward_fwd(x, weights[0], None, weights[1], None, "gelu", 0.0, None, True)
    turned = [weight.t().contiguous().t() for weight in weights]
    due, grads = (
        CPP.feed_forward_bwd(dout, x, w1, None, w2, saved, "gelu", 0.0, None, False) for w1, w2 in (weights, turned)
    )
    for place, weight in ((1, turned[0]), (3, turned[1])):
        assert grads[place].stride() == weight.stride() and not grads[place]._is_view()
        torch.testing.assert_close(grads[place], due[place])


class Mallinfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "blocks", *"abcde", "used", "free", "top")]  # noqa: RUF012


def test_calls_leave_no_memory_behind() -> None:
    """The calls have tensors, optional tensors, a string and a list as arguments, and one raises an error."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        pytest.skip("the C library does not say how much memory it has given")
    info.restype = Mallinfo
    x, weight1, weight2, bias = torch.randn(2, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    ids = torch.tensor([9])
    stack: tuple[Any, ...] = (x, [], [], 2, 2, "relu", False, False, None, [True, True], None, None, 0)

    def call() -> None:
        CPP.feed_forward_fwd(x, weight1, bias, weight2, None, "gelu_tanh", 0.0, None, False)
        CPP.encoder_stack(*stack, None, None)
        with contextlib.suppress(IndexError):
            CPP.embedding_fwd(ids, weight1, None, None, 1.0, -1, 0.0, None, False)

    def grown() -> int:
        """Returns the number of bytes by which the memory in use grows in 100 calls."""
        before = info().used
        for _ in range(100):
            call()
        return int(info().used) - before

    grown()
    # Not each: Python, too, keeps memory and gives it back.
    assert sorted(grown() for _ in range(7))[3] < 800, "most calls leave 8 bytes behind, or more"
