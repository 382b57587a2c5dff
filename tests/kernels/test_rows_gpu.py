"""Tests the other kernels on a GPU: half dtypes in tl.dot, the shipped tiles, many programs at once.

The tests of each op run on a GPU too, in the small sizes that the interpreter bears (see tests/conftest.py); here are
sizes that take many tiles, several rounds of programs and several chunks.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fastformer import ops  # noqa: E402
from fastformer.kernels import feed_forward as feed_forward_kernels  # noqa: E402
from fastformer.kernels._launch import dropout_arguments  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.kernels.repeats import assert_repeats  # noqa: E402
from tests.ops import test_add_layer_norm as norm_cases  # noqa: E402
from tests.ops import test_embedding as embedding_cases  # noqa: E402
from tests.ops import test_feed_forward as feed_forward_cases  # noqa: E402
from tests.ops import test_linear_cross_entropy as loss_cases  # noqa: E402
from tests.ops import test_rotary as rotary_cases  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_triton")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("rows, dim", [(3001, 512), (2500, 1000), (701, 4096), (301, 8192)])
def test_add_layer_norm(rows: int, dim: int, rms_norm: bool, dtype: torch.dtype, device: str) -> None:
    if dim * dtype.itemsize > 16384:
        pytest.skip("PyTorch differentiates rows so wide")
    inputs = norm_cases.make_inputs((rows, dim), device, dtype, bias=not rms_norm)
    norm_cases.compare(inputs, rms_norm=rms_norm, dropout_p=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fused, activation", [(True, "relu"), *((False, activation) for activation in feed_forward_cases.ACTIVATIONS)]
)
@pytest.mark.parametrize("rows, dim, hidden_dim", [(2500, 512, 1000), (300, 1024, 2048)])
def test_feed_forward(rows, dim, hidden_dim, activation, fused, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(feed_forward_kernels, "fuses", lambda x, *_: fused and x.element_size() == 2)
    inputs = feed_forward_cases.make_inputs((rows, dim), hidden_dim, activation, device, dtype)
    for name in ("weight1", "weight2"):
        inputs[name] /= inputs[name].shape[1] ** 0.5
    feed_forward_cases.compare(inputs, activation=activation, dropout_p=0.1)


def test_feed_forward_repeats_to_the_bit(device, monkeypatch) -> None:
    """Both fused products have many tiles: 100 runs beside a busy stream."""
    monkeypatch.setattr(feed_forward_kernels, "fuses", lambda *_: True)
    inputs = feed_forward_cases.make_inputs((4096, 512), 2048, "relu", device, torch.bfloat16)
    x, weight1, bias1, weight2 = (inputs[name] for name in ("x", "weight1", "bias1", "weight2"))
    dout, dropout = torch.randn_like(x), dropout_arguments(0.1, ops.draw_seed(device))

    def call() -> list[torch.Tensor]:  # without the products that are cuBLAS's
        hidden, saved = feed_forward_kernels._activated(x, weight1, bias1, "relu", dropout, True)
        return [hidden, *feed_forward_kernels._activated_backward(dout, weight2, saved, "relu", dropout, True)]

    assert_repeats(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab_size", [1000, 32000, 50257])
def test_linear_cross_entropy(vocab_size: int, reduction: str, dtype: torch.dtype, device: str) -> None:
    """There are several chunks of rows, whose parts of dweight are summed in fp32."""
    inputs = loss_cases.make_inputs((5000, 64), vocab_size, device, dtype)
    inputs["weight"].div_(8)
    loss_cases.compare(inputs, reduction=reduction, label_smoothing=0.1, z_loss=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("vocab_size", [20, 20000])
def test_embedding(vocab_size: int, atomics: bool, dtype: torch.dtype, device: str) -> None:
    """There are runs of equal ids over many chunks, or hardly any."""
    inputs = embedding_cases.make_inputs((64, 19), vocab_size, 512, device, dtype, table=dtype)
    embedding = partial(ops.embedding, atomics=atomics)
    embedding_cases.compare(inputs, embedding, scale=512**0.5, padding_idx=0, dropout_p=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (100, 64), (128, 128)])
def test_rotary(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(3, 700, 8, head_dim, device=device).to(dtype)
    rotary_cases.compare(x, ops.rotary_tables(700, rotary_dim, device=device), interleaved=interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, vocab_size", [(5, 50257), (3000, 32000)])
def test_linear_topk(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Many rows are computed in chunks."""
    x = torch.randn(rows, 256, device=device).to(dtype)
    weight = (torch.randn(vocab_size, 256, device=device) / 8).to(dtype)
    values, indices = ops.linear_topk(x, weight, 8)
    exact = torch.log_softmax(x.double() @ weight.double().T, -1)
    plain = torch.log_softmax(x.float() @ weight.float().T, -1)
    assert values.dtype == torch.float32 and (values.diff(dim=-1) <= 0).all()
    assert_accurate(values, plain.gather(1, indices), exact.gather(1, indices), "values")
    # The eighth that it found is no worse than the true eighth, but for what fp32 leaves open.
    assert_accurate(values, plain.topk(8).values, exact.topk(8).values, "the best values")


# Calls with an index that their tables don't have, and what the device says.
OUTSIDE = {
    "embedding, id": ("embedding(ids(0, BAD), draw(12, 8), position_table=draw(3, 8))", 12, "is outside the"),
    "embedding, position": (
        "embedding(ids(0, 1), draw(12, 8), position_table=draw(3, 8), positions=ids(BAD, 0))", 3, "is outside the",
    ),
    "rotary": (
        "rotary(draw(2, 3, 8), *ops.rotary_tables(9, 8, device='cuda'), positions=ids(0, BAD))", 9,
        "a position is outside the tables",
    ),
    "linear_cross_entropy": (
        "linear_cross_entropy(draw(4, 8).requires_grad_(), draw(12, 8), ids(1, 2, BAD, 3))", 12,
        "a target is outside the vocabulary",
    ),
}  # fmt: skip
SCRIPT = """
import torch
from fastformer import ops

def ids(*values):
    return torch.tensor(values, device="cuda")

def draw(*shape):
    return torch.randn(shape, device="cuda")

print(ops.CALL)
"""


@pytest.mark.parametrize("is_negative", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_outside_its_table(name: str, is_negative: bool) -> None:
    """The device asserts, which ends the CUDA context: in a process of its own."""
    call, size, says = OUTSIDE[name]
    script = SCRIPT.replace("CALL", call.replace("BAD", "-1" if is_negative else str(size)))
    proc = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert proc.returncode != 0
    assert says in proc.stdout + proc.stderr
