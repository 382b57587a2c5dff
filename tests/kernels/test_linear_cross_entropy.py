"""Tests the Triton linear_cross_entropy: tiles, padded rows, chunks of a buffer, an assertion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.measure.timing import peak_bytes  # noqa: E402
from fastformer.kernels import linear_cross_entropy as kernels  # noqa: E402
from fastformer.ops import linear_cross_entropy  # noqa: E402
from tests.conftest import HAS_GPU  # noqa: E402
from tests.ops.test_linear_cross_entropy import compare, make_inputs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")

ALL_OPTIONS = {"label_smoothing": 0.1, "smooth_others": True, "z_loss": 0.01}


@pytest.mark.parametrize("rows", [64, 65, 150])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks(dtype: torch.dtype, reduction: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "chunk_rows", lambda *_: 64)
    compare(make_inputs((rows, 16), 40, device, dtype), reduction=reduction, **ALL_OPTIONS)


def test_chunks_sum_in_fp32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of a half dtype err no more than one, because sums over chunks are rounded once."""
    inputs = make_inputs((256, 8), 12, device, torch.bfloat16)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "weight", "bias")}

    def gradients(step: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(kernels, "chunk_rows", lambda *_: step)
        return torch.autograd.grad(linear_cross_entropy(**inputs, reduction="sum"), list(leaves.values()))

    for single, many in zip(gradients(256), gradients(16), strict=True):
        torch.testing.assert_close(single, many, rtol=2**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dweight_is_added_up_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS adds to the fp32 sum in place, without rounding to 16 bits."""
    monkeypatch.setattr(kernels, "chunk_rows", lambda *_: 128)
    x, weight, target, _ = make_inputs((300, 64), 520, "cuda", dtype, bias=False).values()
    chunks = kernels._Chunks(x, weight, None, target, -100, 0.0, False, 0.0, 0.0, True)
    gradients = kernels._ChunkGradients(chunks, (False, True, False))
    expected = torch.zeros(520, 64, dtype=torch.float64, device="cuda")
    places = set()
    for chunk, logits in chunks:
        gradients.add(chunk, logits)
        assert gradients.dweight is not None and gradients.dweight.dtype == torch.float32
        places.add(gradients.dweight.data_ptr())
        expected += logits.double().T @ chunk.of(x).double()
    assert len(places) == 1
    assert (gradients.dweight - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.skipif(HAS_GPU, reason="cuBLAS's workspace is larger than these tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peak_memory(reduction: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is one chunk of logits and the gradients, for any number of rows."""
    monkeypatch.setattr(kernels, "SMALLEST_CHUNK", 64)
    monkeypatch.setattr(kernels, "LARGEST_CHUNK", 64)
    rows, vocab_size, dim = 512, 256, 2
    inputs = make_inputs((rows, dim), vocab_size, device, dtype, bias=False)
    x = inputs.pop("x").requires_grad_()
    inputs["weight"].requires_grad_()

    def step() -> None:
        linear_cross_entropy(x, **inputs, label_smoothing=0.1, reduction=reduction).sum().backward()

    chunk = 64 * vocab_size * x.element_size()
    # The CPU has no product of half dtypes with an fp32 result, and the interpreter lets go of its arguments late.
    copies = (2 * chunk if x.dtype == torch.bfloat16 else 0) + (chunk if reduction == "none" else 0)
    vectors = 4 * 8 * rows + 2 * 4 * dim * (rows + 2 * vocab_size)
    peak = peak_bytes(step, device)
    assert chunk <= peak <= chunk + copies + vectors
    assert peak < rows * vocab_size * x.element_size() / 2
