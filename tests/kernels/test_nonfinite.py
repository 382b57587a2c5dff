"""NaN and infinity in, NaN and infinity out: where eager PyTorch has them in a result, the kernels have them too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.ops import (  # noqa: E402
    add_layer_norm,
    embedding,
    feed_forward,
    linear_cross_entropy,
    rotary,
    rotary_tables,
    use_backend,
)
from tests.kernels.attention_cases import Case, make_inputs, plain, run_triton  # noqa: E402
from tests.ops import test_add_layer_norm as norm_cases  # noqa: E402
from tests.ops import test_embedding as embedding_cases  # noqa: E402
from tests.ops import test_feed_forward as feed_forward_cases  # noqa: E402
from tests.ops import test_linear_cross_entropy as loss_cases  # noqa: E402
from tests.ops import test_rotary as rotary_cases  # noqa: E402

VALUES = [float("nan"), float("inf"), float("-inf")]
Inputs = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def _triton():
    with use_backend("triton"):
        yield


def run(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Inputs) -> dict[str, Tensor]:
    """The outputs and the gradients of every floating-point input, for output gradients of 1, 2, 3, ..."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in inputs.items()
        if value is not None and value.is_floating_point()
    }
    outputs = function(**inputs | leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [torch.arange(1.0, y.numel() + 1, device=y.device, dtype=y.dtype).view(y.shape) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), dys)
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | {
        f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)
    }


def assert_same(ours: dict[str, Tensor], eager: dict[str, Tensor], poison: float) -> None:
    """NaN where eager has NaN, infinite where it is infinite, about its number elsewhere.

    What becomes of an infinity on its way back (inf - inf, 0 * inf) depends on the order of a formula's terms, among
    PyTorch's own kernels too: there no non-finite number may be lost, whichever it is.
    """
    assert poison < 0 or any(not value.isfinite().all() for value in eager.values())
    for name, value in ours.items():
        expected = eager[name].to(value.dtype)
        if abs(poison) == float("inf") and name != "out" and not name.startswith("output"):
            assert not (value.isfinite() & ~expected.isfinite()).any(), name
        else:
            torch.testing.assert_close(
                value, expected, rtol=1e-3, atol=1e-3, equal_nan=True, msg=partial("{}: {}".format, name)
            )


def compare(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Inputs,
    names: tuple[str, ...],
) -> None:
    for name in names:
        for value in VALUES[:2]:
            poisoned = inputs[name].clone()
            poisoned[(1,) * poisoned.dim()] = value
            changed = inputs | {name: poisoned}
            wide = {key: x.double() if x is not None and x.is_floating_point() else x for key, x in changed.items()}
            # In fp64, since PyTorch's vectorised fp32 gelu(inf) is NaN.
            assert_same(run(ours, changed), run(plain, wide), value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("seqlen_k", [27, 40])
def test_attention(seqlen_k: int, name: str, device: str) -> None:
    """One key block and several; a q row spoils its own row alone, a key or a value all of its head's."""
    case = Case(batch=1, kv_heads=1, head_dim=16, seqlen_q=33, seqlen_k=seqlen_k)
    inputs = make_inputs(case, torch.float32, device)
    for value in VALUES:
        poisoned = inputs[name].clone()
        poisoned[0, 5, 0, 3] = value
        changed = inputs | {name: poisoned}
        assert_same(run_triton(case, changed), plain(case, changed, torch.float64), value)


@pytest.mark.parametrize("rms_norm", [False, True])
def test_add_layer_norm(rms_norm: bool, device: str) -> None:
    inputs = norm_cases.make_inputs((5, 24), device)
    names = ("x", "residual", "weight", *(() if rms_norm else ("bias",)))
    inputs = inputs if not rms_norm else inputs | {"bias": None}
    compare(partial(add_layer_norm, rms_norm=rms_norm), partial(norm_cases.plain, rms_norm=rms_norm), inputs, names)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("activation", feed_forward_cases.ACTIVATIONS)
def test_feed_forward(activation: str, fused: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastformer.kernels import feed_forward as kernels

    monkeypatch.setattr(kernels, "fuses", lambda *_: fused)
    inputs = feed_forward_cases.make_inputs((5, 24), 40, activation, device)
    inputs["x"] = inputs["x"].abs()  # infinity times both signs in a column of dweight1 would hide all else
    compare(
        partial(feed_forward, activation=activation),
        partial(feed_forward_cases.plain, activation=activation),
        inputs,
        ("x", "weight1", "bias1", "weight2", "bias2"),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy(reduction: str, device: str) -> None:
    inputs = loss_cases.make_inputs((6, 8), 40, device)
    inputs["target"].fill_(3)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    ours, eager = (partial(f, **options) for f in (linear_cross_entropy, loss_cases.plain))
    compare(ours, eager, inputs, ("x", "weight", "bias"))


def test_embedding(device: str) -> None:
    inputs = embedding_cases.make_inputs((2, 7), 5, 12, device, table=torch.float32)
    inputs["ids"][0, 0] = 1
    compare(embedding, embedding_cases.plain, inputs, ("weight", "position_table"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, device: str) -> None:
    cos, sin = rotary_tables(9, 8, device=device)
    compare(
        lambda x: rotary(x, cos, sin, interleaved=interleaved),
        lambda x: rotary_cases.plain(x, cos, sin, interleaved=interleaved),
        {"x": torch.randn(2, 9, 3, 12, device=device)},
        ("x",),
    )
