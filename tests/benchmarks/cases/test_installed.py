"""Kernels of other packages are offered if they are installed, and each runs the case that it is offered for."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from benchmarks.measure.suites import benchmarks


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(members)
    for parent in (name.rpartition(".")[0], name):
        if parent:
            monkeypatch.setitem(sys.modules, parent, made)


def agrees(name: str, provider: str, shape: dict) -> None:
    benchmark = benchmarks()[name]
    torch.manual_seed(0)
    x = benchmark.make_inputs(shape, "cpu")
    found, expected = benchmark.providers[provider](x, shape), benchmark.providers["eager"](x, shape)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa(q, k, v, is_causal):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)

    class LowerTriangularMask:
        pass

    def memory_efficient(q, k, v, attn_bias=None, p=0.0):
        return sdpa(q, k, v, isinstance(attn_bias, LowerTriangularMask))

    def flash(q, k, v, dropout_p=0.0, causal=False):
        return sdpa(q, k, v, causal)

    module(monkeypatch, "flash_attn", flash_attn_func=flash)
    members = {"memory_efficient_attention": memory_efficient, "LowerTriangularMask": LowerTriangularMask}
    module(monkeypatch, "xformers.ops", **members)
    shape = {"batch": 2, "seqlen": 5, "heads": 2, "head_dim": 8, "causal": causal, "dropout_p": 0.0}
    for provider in ("flash-attn", "xformers"):
        agrees("attention", provider, shape)


def test_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm:
        @staticmethod
        def apply(x, weight, bias, eps):
            return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    class Loss:
        def __init__(self, label_smoothing: float) -> None:
            self.label_smoothing = label_smoothing

        def __call__(self, weight, x, target):
            return F.cross_entropy(x @ weight.t(), target, label_smoothing=self.label_smoothing)

    module(monkeypatch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=Norm)
    agrees("add_layer_norm", "liger", {"rows": 4, "dim": 8, "dropout_p": 0.0})
    module(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=Loss)
    agrees("linear_cross_entropy", "liger", {"rows": 20, "dim": 8, "vocab_size": 12})


def test_a_missing_package_is_a_row_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "xformers", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, absent in {
        "attention": {"flash-attn", "xformers"},
        "add_layer_norm": {"liger"},
        "linear_cross_entropy": {"liger"},
    }.items():
        benchmark = benchmarks()[name]
        missing = benchmark.missing("cuda")
        assert {other for other in missing if "pip install" in missing[other]} >= absent
        assert not absent & benchmark.offered("cpu").keys()
        assert benchmark.ours == "fastformer" and benchmark.baseline == "eager"
