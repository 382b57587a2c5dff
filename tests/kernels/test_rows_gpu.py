"""Tests the other kernels on a GPU: half dtypes in tl.dot, the shipped tiles, many programs at once.

The tests of each op run on a GPU too, in the small sizes that the interpreter bears (see tests/conftest.py); here are
sizes that take many tiles, several rounds of programs and several chunks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import _feed_forward_configs  # noqa: E402
from fastformer.kernels import feed_forward as feed_forward_kernels  # noqa: E402
from fastformer.kernels._launch import dropout_arguments  # noqa: E402
from fastformer.ops import (  # noqa: E402
    add_layer_norm,
    draw_seed,  # noqa: E402
    embedding,
    feed_forward,
    linear_topk,
    rotary_tables,
    use_backend,
)
from tests.checks import (  # noqa: E402
    assert_accurate,
    assert_op_accurate,
    keep_mask,  # noqa: E402
)
from tests.kernels.repeats import assert_repeats  # noqa: E402
from tests.ops import test_add_layer_norm as norm_cases  # noqa: E402
from tests.ops import test_embedding as embedding_cases  # noqa: E402
from tests.ops import test_feed_forward as feed_forward_cases  # noqa: E402
from tests.ops import test_linear_cross_entropy as loss_cases  # noqa: E402
from tests.ops import test_rotary as rotary_cases  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _triton():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with use_backend("triton"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("rows, dim", [(3001, 512), (2500, 1000), (701, 4096), (301, 8192), (150, 16384)])
def test_add_layer_norm(rows: int, dim: int, rms_norm: bool, dtype: torch.dtype, device: str) -> None:
    seed = draw_seed(device)
    inputs = norm_cases.make_inputs((rows, dim), device, dtype, bias=not rms_norm)
    keep = keep_mask(seed, 0.1, rows, dim)[0]
    options = {"rms_norm": rms_norm, "dropout_p": 0.1}
    assert_op_accurate(
        partial(add_layer_norm, **options, dropout_seed=seed), partial(norm_cases.plain, **options, keep=keep), inputs
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("activation", feed_forward_cases.ACTIVATIONS)
@pytest.mark.parametrize("rows, dim, hidden_dim", [(2500, 512, 1000), (300, 1024, 2048)])
def test_feed_forward(
    rows: int, dim: int, hidden_dim: int, activation: str, fused: bool, dtype: torch.dtype, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(feed_forward_kernels, "fuses", lambda *_: fused)
    inputs = feed_forward_cases.make_inputs((rows, dim), hidden_dim, activation, device, dtype)
    for name in ("weight1", "weight2"):
        inputs[name] /= inputs[name].shape[1] ** 0.5
    seed = draw_seed(device)
    keep = keep_mask(seed, 0.1, rows, hidden_dim)[0]
    options = {"activation": activation, "dropout_p": 0.1}
    assert_op_accurate(
        partial(feed_forward, **options, dropout_seed=seed),
        partial(feed_forward_cases.plain, **options, keep=keep),
        inputs,
    )


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_feed_forward_repeats_to_the_bit(
    activation: str, persistent: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both products with what is fused to them, in many tiles: 100 runs beside a busy stream."""
    monkeypatch.setattr(feed_forward_kernels, "fuses", lambda *_: True)
    monkeypatch.setattr(_feed_forward_configs, "PERSISTENT", persistent)
    inputs = feed_forward_cases.make_inputs((4096, 512), 2048, activation, device, torch.bfloat16)
    x, weight1, bias1, weight2 = (inputs[name] for name in ("x", "weight1", "bias1", "weight2"))
    dout, dropout = torch.randn_like(x), dropout_arguments(0.1, draw_seed(device))

    def call() -> list[torch.Tensor]:  # without the products that are cuBLAS's
        hidden, saved = feed_forward_kernels._activated(x, weight1, bias1, activation, dropout, True)
        return [hidden, *feed_forward_kernels._activated_backward(dout, weight2, saved, activation, dropout, True)]

    assert_repeats(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab_size", [1000, 32000, 50257])
def test_linear_cross_entropy(vocab_size: int, reduction: str, dtype: torch.dtype, device: str) -> None:
    """Several chunks of rows, whose shares of dweight add up in fp32."""
    inputs = loss_cases.make_inputs((5000, 64), vocab_size, device, dtype)
    inputs["weight"].div_(8)
    loss_cases.compare(inputs, reduction=reduction, label_smoothing=0.1, z_loss=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("vocab_size", [20, 20000])
def test_embedding(vocab_size: int, atomics: bool, dtype: torch.dtype, device: str) -> None:
    """Runs of equal ids over many chunks, and hardly any."""
    seed = draw_seed(device)
    inputs = embedding_cases.make_inputs((64, 19), vocab_size, 512, device, dtype, table=dtype)
    options = {"scale": 512**0.5, "padding_idx": 0, "dropout_p": 0.1}
    keep = keep_mask(seed, 0.1, 64 * 19, 512)[0].view(64, 19, 512)
    assert_op_accurate(
        partial(embedding, **options, dropout_seed=seed, atomics=atomics),
        partial(embedding_cases.plain, **options, keep=keep),
        inputs,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (100, 64), (128, 128)])
def test_rotary(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(3, 700, 8, head_dim, device=device).to(dtype)
    rotary_cases.compare(x, rotary_tables(700, rotary_dim, device=device), interleaved=interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, vocab_size", [(5, 50257), (3000, 32000)])
def test_linear_topk(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """It has no kernel: what a call on a GPU gets, in several chunks of rows, with products of fp32 results."""
    x = torch.randn(rows, 256, device=device).to(dtype)
    weight = (torch.randn(vocab_size, 256, device=device) / 8).to(dtype)
    with use_backend(None):
        values, indices = linear_topk(x, weight, 8)
    exact = torch.log_softmax(x.double() @ weight.double().T, -1)
    plain = torch.log_softmax(x.float() @ weight.float().T, -1)
    assert values.dtype == torch.float32 and (values.diff(dim=-1) <= 0).all()
    assert_accurate(values, plain.gather(1, indices), exact.gather(1, indices), "values")
    # The eighth that it found is no worse than the true eighth, but for what fp32 leaves open.
    assert_accurate(values, plain.topk(8).values, exact.topk(8).values, "the best values")
