"""The backend of the tests of kernels, and guards around what kernels write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.ops import use_backend
from tests.conftest import HAS_GPU

GUARD = 64  # elements on both sides of an output


@pytest.fixture
def on_triton(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forces every op onto Triton, and skips a test for a device if there is none."""
    if request.node.get_closest_marker("gpu") is not None and not HAS_GPU:
        pytest.skip("no GPU")
    with use_backend("triton"):
        yield


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever `new_empty` gives lies between guards, where no kernel may write."""
    buffers: list[Tensor] = []
    usual = Tensor.new_empty

    def new_empty(self: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options:
            return usual(self, *size, dtype=dtype, **options)  # the interpreter's own
        size = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = torch.full((size.numel() + 2 * GUARD,), 7.0, dtype=dtype or self.dtype, device=self.device)
        buffers.append(buffer)
        return buffer[GUARD : GUARD + size.numel()].view(size)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    yield
    assert buffers
    for buffer in buffers:
        assert (buffer[:GUARD] == 7).all() and (buffer[-GUARD:] == 7).all()
