"""The C++ code reuses large buffers, however many it has freed before."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator

import pytest
import torch

from fastformer import ops
from fastformer.generation.engines.cpp import pack
from fastformer.models import GPT
from fastformer.ops import _extension

PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = 41, 42


def faults() -> int:
    """Returns the number of page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def small_pages() -> Iterator[None]:
    """Makes memory use 4 KB pages, so that fresh memory shows as thousands of page faults."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or (was := prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0)) < 0:
        pytest.skip("only Linux can switch huge pages off for a process")
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    yield
    prctl(PR_SET_THP_DISABLE, was, 0, 0, 0)


@pytest.mark.usefixtures("small_pages")
def test_many_small_buffers_leave_room_for_a_large_one() -> None:
    """40 concurrent sessions fill the pool with their small buffers when they end."""
    if _extension.load() is None:
        pytest.skip("the C++ extension is not built")
    model = GPT.from_preset("tiny", vocab_size=50, d_model=32, num_heads=2, num_layers=1, max_len=32)
    packed = pack(model, "fp32")
    sessions = [_extension.module().Session(packed, 64) for _ in range(40)]
    for session in sessions:
        session.admit([[]], [[1, 2, 3]], 1)
    del sessions, session
    check_that_large_buffers_are_kept()


@pytest.mark.usefixtures("small_pages")
def test_a_buffer_is_reused_after_any_number_of_frees() -> None:
    """Each call has a buffer of 8 MiB for its logits; 40 of these are far more than the pool keeps."""
    check_that_large_buffers_are_kept()


def check_that_large_buffers_are_kept() -> None:
    if _extension.load() is None:
        pytest.skip("the C++ extension is not built")
    before = faults()
    torch.empty(2**21 + 1, device="cpu").fill_(1.0)
    if faults() - before < 1000:
        pytest.skip("here fresh memory has no faults by which it could be told")
    x, weight = torch.randn(512, 8, requires_grad=True), torch.randn(4096, 8)
    target = torch.zeros(512, dtype=torch.int64)
    for _ in range(30):
        ops.linear_cross_entropy(x, weight, target)
    before = faults()
    for _ in range(10):
        ops.linear_cross_entropy(x, weight, target)
    assert faults() - before < 2000, "each call had fresh pages, 2048 of them"
