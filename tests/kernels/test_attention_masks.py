"""Tests added masks in the kernels: values that swallow fp32 scores, other dtypes and strides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels import attention as kernels  # noqa: E402
from fastformer.kernels._attention_configs import Config  # noqa: E402
from tests.conftest import HAS_GPU  # noqa: E402
from tests.kernels.attention_cases import case_of, check, make_inputs, run_triton  # noqa: E402

LOWEST, NOTHING = torch.finfo(torch.float32).min, float("-inf")
# What is added to the scores of a row's first half, and of its second.
PAIRS = [
    (-1e4, -1e4), (-1e4, -1e4 + 0.5), (-1e6 + 1, -1e6), (-1.3e6, -1.3e6), (-1e9, 0.0), (0.0, -1e9), (-1e9, -1e9),
    (-1e9, -2e9), (-3.3e9, -3.3e9), (-1e10, -1e10), (-7.7e12, -7.7e12), (-1e30, LOWEST), (LOWEST, -1e30),
    (LOWEST, LOWEST), (LOWEST, 3.0), (NOTHING, LOWEST), (LOWEST, NOTHING), (NOTHING, NOTHING), (NOTHING, 2.5),
    (-1.6e8, -1.4e8), (-1.4e8, -1.6e8), (1.4e8, 1.6e8), (1.6e8, 1.4e8), (1e9, -1e9), (5e9, 5e9), (1e30, 3e38),
]  # fmt: skip


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a multiplication and an addition round once, as on a GPU; the interpreter rounds the product, too."""
    if HAS_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        with np.errstate(over="ignore", invalid="ignore"):
            exact = x.data.astype(np.float64) * y.data + z.data
            return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)


def run_on_zeros(mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the kernel's out and lse with all scores 0, in tiles of 32 x 32."""
    zeros = torch.zeros(1, mask.shape[2], 1, 16, dtype=torch.float16, device=mask.device)
    keys = torch.zeros_like(values)
    problem = kernels.describe_dense(zeros, keys, None, 0.25, None, None, 0.0, None)
    forward = kernels.plan_forward(zeros, keys, values, mask, problem, config=Config(32, 32, 4, 1))
    return forward(zeros, keys, values, mask, None, None, None)


@pytest.mark.parametrize("seqlen_k", [128, 120])
def test_weights_under_any_number(seqlen_k: int, fused: None, device: str) -> None:
    """With four blocks of keys, sums are rescaled between blocks; the last block may be short."""
    mask = torch.tensor(PAIRS, device=device).repeat_interleave(seqlen_k // 2, 1)[None, None]
    values = torch.randn(1, seqlen_k, 1, 16, device=device).half()
    out, lse = run_on_zeros(mask, values)
    weights = torch.softmax(mask[0, 0].double(), -1).nan_to_num(0.0)  # a row that sees nothing is 0
    torch.testing.assert_close(out[0, :, 0].double(), weights @ values[0, :, 0].double(), rtol=2e-3, atol=1e-3)
    exact = torch.logsumexp(mask[0, 0].double(), -1)
    torch.testing.assert_close(lse[0, 0].double(), exact, rtol=2**-23, atol=2**-20)


def test_lse_is_rounded_only_once(fused: None, device: str) -> None:
    """Weights are in units of a rounded peak; lse compensates the effect of that rounding on their sum."""
    far = -1e6 * (1 + torch.rand(256, device=device))
    values = torch.zeros(1, 64, 1, 16, dtype=torch.float16, device=device)
    _, lse = run_on_zeros(far[None, None, :, None].expand(1, 1, 256, 64).contiguous(), values)
    exact = far.double() + torch.tensor(64.0, device=device, dtype=torch.float64).log()
    ulp = torch.where(exact.abs() < 2**20, 2**-4, 2**-3)
    assert ((lse[0, 0].double() - exact).abs() <= 0.51 * ulp).all()


@pytest.mark.parametrize("option", ["additive", "additive_keys"])
def test_bfloat16_masks(option: str, device: str) -> None:
    """Their bits are the upper half of a float32."""
    case = case_of(option)
    assert case is not None
    inputs = make_inputs(case, torch.float16, device)
    assert inputs["mask"] is not None
    narrow = inputs["mask"].bfloat16()
    wide = run_triton(case, inputs | {"mask": narrow.float()})
    results = run_triton(case, inputs | {"mask": narrow})
    for name in ("out", "lse"):
        assert torch.equal(results[name], wide[name]), name


@pytest.mark.parametrize("option", ["bool", "bool_keys", "additive", "additive_keys"])
def test_strided_masks(option: str, device: str) -> None:
    """The mask is every second column of a wider one, over several blocks of keys."""
    case = case_of(option)
    assert case is not None
    case = replace(case, heads=1, kv_heads=1, head_dim=16, seqlen_k=120)
    inputs = make_inputs(case, torch.float16, device)
    mask = inputs["mask"]
    assert mask is not None
    wide = torch.stack([mask, torch.zeros_like(mask)], -1).flatten(-2)[..., ::2]
    assert not wide.is_contiguous() and torch.equal(wide, mask)
    check(case, torch.float16, device, inputs | {"mask": wide})


@pytest.mark.parametrize("option", ["bool_keys", "additive_keys"])
def test_lengths_that_a_mask_implies(option: str, device: str) -> None:
    """In addition to the mask, they change no result, even for a row without keys; NaN after them is not read."""
    case = case_of(option)
    assert case is not None
    case = replace(case, batch=3, heads=1, kv_heads=1, head_dim=16, seqlen_k=100)
    inputs = make_inputs(case, torch.float16, device)
    lengths = torch.tensor([70, 0, 100], device=device)
    hidden = torch.arange(100, device=device) >= lengths[:, None]
    hidden[0, 20:60] = hidden[2, :40] = True
    hidden = hidden[:, None, None]
    mask = inputs["mask"]
    assert mask is not None
    inputs["mask"] = ~hidden if mask.dtype == torch.bool else mask.nan_to_num(neginf=0.5).masked_fill(hidden, NOTHING)
    masked = run_triton(case, inputs)
    bounded = replace(case, lengths=tuple(lengths.tolist()))
    behind = (torch.arange(100, device=device) >= lengths[:, None])[..., None, None]
    poisoned = {name: inputs[name].masked_fill(behind, float("nan")) for name in ("k", "v")}
    results = run_triton(bounded, inputs | poisoned)
    for name, expected in masked.items():
        torch.testing.assert_close(results[name], expected, rtol=1e-3, atol=1e-5, msg=name)
