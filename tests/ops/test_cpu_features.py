"""The C++ ops on CPUs with fewer instructions, or with AMX: each in a process, since a CPU's features are read once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import skip_without

# Prints a digest of the results in bf16, after comparing them with plain PyTorch; also with oneDNN switched off, and
# with rows that overlap, neither of which brgemm takes.
PRODUCTS = """
import hashlib
import torch
from fastformer.ops import attention, feed_forward, linear, linear_cross_entropy, linear_topk, use_backend
from fastformer.ops._attention_reference import AttentionOptions
from tests.checks import assert_accurate

torch.manual_seed(0)
digest = hashlib.sha256()

def compare(op, *inputs):
    inputs = [each.bfloat16() for each in inputs]
    results = []
    for backend, dtype in (("cpp", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        with use_backend(backend):
            out = op(*leaves)
            dout = torch.ones_like(out).cumsum(-1) / out.shape[-1]
            results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    for found, plain, exact in zip(*results):
        assert_accurate(found, plain, exact)
        digest.update(found.float().numpy().tobytes())

def compare_all():
    q = torch.randn(2, 70, 4, 64)
    for keys in (81, 300):
        k, v = torch.randn(2, 2, keys, 2, 64)
        compare(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v)
    one, many = torch.randn(1, 1, 2, 64), torch.randn(1, 90, 2, 64)
    compare(lambda one, k: attention(one.expand_as(k), k, k), one, many)
    compare(lambda q, one: attention(q, one.expand_as(q), one.expand_as(q)), many, one)
    for rows in (3, 90, 900):
        for features in (130, 1030):  # brgemm doesn't split long sums
            compare(linear, *map(torch.randn, ((rows, features), (66, features), (66,))))
        compare(
            lambda x, w1, b1, w2, b2: feed_forward(x, w1, b1, w2, b2, activation="swiglu"),
            *map(torch.randn, ((rows, 64), (192, 64), (192,), (64, 96), (64,))),
        )
    target = torch.randint(500, (90,))
    compare(
        lambda x, weight: linear_cross_entropy(x, weight, target, reduction="sum")[None],
        *map(torch.randn, ((90, 48), (500, 48))),
    )

compare_all()
with torch.backends.mkldnn.flags(enabled=False):
    compare_all()
print(digest.hexdigest())
"""


def _digest(settings: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", PRODUCTS]
    process = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()[-1]


@pytest.mark.slow
def test_products_of_bf16_on_other_cpus() -> None:
    skip_without("cpp", "attention")
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512 on this CPU: AVX2 has one path")
    digests = {
        name: _digest(settings)
        for name, settings in {
            "its own": {},
            "without dot products": {"FASTFORMER_CPU_FEATURES": ""},
            "brgemm": {"FASTFORMER_BRGEMM": "1"},
        }.items()
    }
    features = torch.cpu._is_avx512_bf16_supported()
    # Each path rounds differently, so equal bits would mean that a setting has no effect.
    assert len(set(digests.values())) == (3 if features else 1) or torch.cpu._is_amx_tile_supported()
