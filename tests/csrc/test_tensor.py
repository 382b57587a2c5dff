"""The ops' own tensors make views, copies and conversions like PyTorch's, and leak no memory."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from fastformer.ops import _extension

pytestmark = pytest.mark.skipif(_extension.load() is None, reason="the C++ extension is not built")
CPP = torch.ops.fastformer_cpp


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
