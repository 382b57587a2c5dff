"""Tests the Triton feed_forward: both forms of a product, tiles and their edges, partial sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.measure.timing import peak_bytes  # noqa: E402
from fastformer.kernels import feed_forward as kernels  # noqa: E402
from fastformer.ops import feed_forward  # noqa: E402
from tests.conftest import HAS_GPU  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.ops.test_feed_forward import ACTIVATIONS, compare, make_inputs, plain  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")

SEED = (2**61 + 12345, 2**33 + 77)
# Only relu is fused. A test that asks for a path gets it whatever a device has measured.
PATHS = ("fused", "relu"), *(("cublas", activation) for activation in ACTIVATIONS)


@pytest.fixture(params=["fused", "cublas"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fuses", lambda *_: request.param == "fused")


def on(*activations: str) -> pytest.MarkDecorator:
    """Runs a test with each path of the activations."""
    chosen = [pair for pair in PATHS if pair[1] in activations]
    return pytest.mark.parametrize("path, activation", chosen, indirect=["path"])


def test_wide_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are as wide as on a GPU; the last part of an epilogue is incomplete."""
    monkeypatch.setattr(kernels, "fuses", lambda *_: True)
    wide = kernels.tile_of(torch.zeros(40, 32), 40) | {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 32}
    monkeypatch.setattr(kernels, "tile_of", lambda *_: wide)
    compare(make_inputs((40, 32), 203, "relu", device, out_dim=64), activation="relu", dropout_p=0.2)


def test_which_products_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a device has shown to be faster: relu in half dtypes on sm_90."""
    monkeypatch.setattr(kernels, "architecture", lambda _: 90)
    half = torch.zeros(1, dtype=torch.bfloat16)
    assert kernels.fuses(half, 512, 8192, "relu") and kernels.fuses(half, 1024, 256, "relu")
    refused = [(half, 512, 8192, "gelu"), (half.float(), 512, 8192, "relu"), (half, 2048, 8192, "relu"),
               (half, 520, 8192, "relu"), (half, 512, 255, "relu")]  # fmt: skip
    assert not any(kernels.fuses(*call) for call in refused)
    monkeypatch.setattr(kernels, "architecture", lambda _: 80)
    assert not kernels.fuses(half, 512, 8192, "relu")


@pytest.mark.parametrize("dtype, dropout_p", covering([torch.float32, torch.float16, torch.bfloat16], [0.0, 0.2, 1.0]))
@on(*ACTIVATIONS)
def test_paths(dtype: torch.dtype, activation: str, dropout_p: float, path: None, device: str) -> None:
    """Rows and columns end within a tile."""
    if dtype == torch.bfloat16 and kernels.fuses(torch.empty(0), 0, 0, activation) and not HAS_GPU:
        pytest.skip("tl.dot of bf16 is wrong in Triton's interpreter")
    compare(make_inputs((5, 9, 48), 72, activation, device, dtype), activation=activation, dropout_p=dropout_p)


@on("relu", "swiglu")
def test_many_blocks_of_rows(activation: str, path: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more row blocks than run concurrently, and programs of the elementwise kernel process several."""
    monkeypatch.setattr(kernels, "ELEMENTWISE_PROGRAMS", 4)
    compare(make_inputs((290, 32), 32, activation, device), activation=activation, dropout_p=0.1)


@on("relu", "swiglu")
def test_gradients_with_other_strides(activation: str, path: None, device: str) -> None:
    """Gradients are columns, every second column, or a single number for all, as from `sum`."""
    leaves = {name: value.requires_grad_() for name, value in make_inputs((40, 16), 72, activation, device).items()}
    for dout in (torch.randn(16, 40, device=device).T, torch.randn(40, 32, device=device)[:, ::2],
                 torch.ones((), device=device).expand(40, 16)):  # fmt: skip
        actual, expected = (
            torch.autograd.grad(feed_forward(**leaves, activation=activation), [*leaves.values()], dy)
            for dy in (dout, dout.contiguous())
        )
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias1", [True, False])
@pytest.mark.parametrize("bias2", [True, False])
def test_a_missing_bias_costs_no_sum(bias1: bool, bias2: bool, path: None, device: str) -> None:
    """Its gradient is empty, as the op's schema tells a compiler."""
    inputs = make_inputs((40, 16), 72, "relu", device)
    leaves = dict(inputs) | {name: None for name, present in (("bias1", bias1), ("bias2", bias2)) if not present}
    x, weight1, b1, weight2, b2 = leaves.values()
    biases = (b1, b2)
    _, saved = kernels.feed_forward_fwd(x, weight1, biases[0], weight2, biases[1], "relu", 0.0, None, True)
    dout = torch.randn(40, 16, device=device)
    rest = (biases[0], weight2, saved, "relu", 0.0, None, bias2)
    grads = dict(zip(leaves, kernels.feed_forward_bwd(dout, x, weight1, *rest), strict=True))
    doubles = {name: tensor.double().requires_grad_() for name, tensor in leaves.items() if tensor is not None}
    out = plain(**dict.fromkeys(leaves) | doubles, activation="relu")
    for name, expected in zip(doubles, torch.autograd.grad(out, [*doubles.values()], dout.double()), strict=True):
        torch.testing.assert_close(grads.pop(name).double(), expected, rtol=1e-4, atol=1e-4)
    assert all(tensor.shape == (0,) for tensor in grads.values())


@pytest.mark.skipif(HAS_GPU, reason="cuBLAS's workspace is larger than these tensors")
@on("relu", "gelu", "swiglu")
def test_peak_memory(activation: str, path: None, device: str) -> None:
    """Counts the concurrent tensors of rows * hidden: there is no additional activation or mask."""
    forward, backward = {"relu": (1, 2), "gelu": (2, 3), "swiglu": (3, 6)}[activation]
    rows, dim, hidden_dim = 256, 8, 256
    inputs = make_inputs((rows, dim), hidden_dim, activation, device)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    seed = torch.tensor(SEED, device=device)
    tensor = 4 * rows * hidden_dim
    small = tensor // 3  # gradients of weights and biases, partial sums, what has the width dim
    outs: list[Tensor] = []

    def run() -> None:
        outs.append(feed_forward(**leaves, activation=activation, dropout_p=0.1, dropout_seed=seed))

    # In inference the pre-activation is no tensor of its own, but for the product of a gate.
    with torch.no_grad():
        alone = 3 if activation == "swiglu" else 1
        assert alone * tensor <= peak_bytes(run, device) <= alone * tensor + small
    outs.clear()
    assert forward * tensor <= peak_bytes(run, device) <= forward * tensor + small
    # While backward runs, what forward has saved is still there.
    saved = 2 if activation == "swiglu" else 1
    peak = saved * tensor + peak_bytes(lambda: outs[-1].sum().backward(), device)
    assert peak <= backward * tensor + small
