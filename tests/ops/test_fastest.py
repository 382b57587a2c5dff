"""Tests the choice of attention kernels on a GPU, and their arguments. The CPU's flash attention stands in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import fastest_attention
from fastformer.ops import _fastest, attention
from fastformer.ops._dispatch import record_backends, use_backend
from fastformer.ops._fastest import FastestEntry, Kernel
from tests.checks import assert_accurate

ATEN = torch.ops.aten
FORWARD: Any = ATEN._scaled_dot_product_flash_attention_for_cpu
BACKWARD: Any = ATEN._scaled_dot_product_flash_attention_for_cpu_backward


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = FORWARD(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse[..., None]  # as cuDNN has it


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float):
    return BACKWARD(dout, q, k, v, out, lse, 0.0, is_causal, scale=scale)


@pytest.fixture
def any_order() -> Iterator[None]:
    """Allows sums in any order, which tests forbid in general."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(was)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, any_order: None) -> str:
    """Puts a CPU kernel of PyTorch in place of those for GPUs."""
    monkeypatch.setitem(_fastest.KERNELS, "stand-in", Kernel(lambda: None, _forward, _backward))
    monkeypatch.setattr(_fastest, "DEVICES", {"cpu"})
    return "stand-in"


def inputs(seqlen: int = 48, heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, seqlen, heads, 64).to(dtype).requires_grad_() for _ in range(3)]


def backends(**options: Any) -> set[tuple[str, str]]:
    with record_backends() as ran:
        q, k, v = inputs()
        attention(q, k, v, **options).sum().backward()
    return ran


def assert_close(name: str, value: Tensor, ours: Tensor, exact: Tensor) -> None:
    """Checks results by the rule; lse has the precision of the inputs, because exponentials may be rounded to it."""
    if name == "lse":
        value, ours = value.bfloat16(), ours.bfloat16()
    assert_accurate(value, ours, exact)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorchs_kernels_equal_fastformers(is_causal: bool, stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks out, lse in its units and layout, and gradients, for an lse from either forward pass."""
    dout = torch.randn(2, 48, 2, 64).bfloat16()

    def results(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        out, lse = attention(q, k, v, is_causal=is_causal, softmax_scale=0.2, return_lse=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    ours = results(*inputs())
    exact = results(*(x.detach().double().requires_grad_() for x in inputs()))
    monkeypatch.setenv("FASTFORMER_ATTENTION_KERNELS", stand_in)
    with record_backends() as ran:
        by_torch = results(*inputs())
    assert ran == {("attention_fwd", stand_in), ("attention_bwd", stand_in)}
    assert by_torch["lse"].shape == (2, 2, 48) and by_torch["lse"].dtype == torch.float32
    for name, value in by_torch.items():
        assert value.is_contiguous(), name
        assert_close(name, value, ours[name], exact[name])


def test_only_calls_with_the_same_result_use_pytorchs_kernel(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends() == {("attention_fwd", "cpp"), ("attention_bwd", "cpp")} or not is_built()
    monkeypatch.setenv("FASTFORMER_ATTENTION_KERNELS", stand_in)
    there = {("attention_fwd", stand_in), ("attention_bwd", stand_in)}
    assert backends() == backends(is_causal=True) == there
    assert backends(is_causal=True) == there  # again, by what was remembered
    mask = torch.ones(48, 48, dtype=torch.bool).tril()
    lengths = torch.tensor([48, 20], dtype=torch.int32)
    for options in (
        {"attn_mask": mask}, {"seqlens_k": lengths}, {"dropout_p": 0.1}, {"softcap": 5.0}, {"window_size": (8, 0)},
        {"window_size": (None, 1)},
    ):  # fmt: skip
        assert not backends(**options) & there, options
    with use_backend("reference"):
        assert backends() == {("attention_fwd", "reference"), ("attention_bwd", "reference")}
    q, k, v = inputs()
    for wrong in (
        (q[:, :20], k, v), (q, k[:, :, :1], v[:, :, :1]), (q.float(), k.float(), v.float()),
        (q[..., :60], k[..., :60], v[..., :60]),
    ):  # fmt: skip
        with record_backends() as ran, torch.no_grad():
            attention(*wrong, is_causal=True)
        assert stand_in not in {backend for _, backend in ran}, [x.shape for x in wrong]
    torch.use_deterministic_algorithms(True)
    assert {op for op, backend in backends() if backend == stand_in} == {"attention_fwd"}


def is_built() -> bool:
    from fastformer.ops import _extension

    return _extension.module() is not None


def test_the_table_decides_by_device_head_dim_direction_and_length(stand_in, monkeypatch) -> None:
    lines = (
        FastestEntry(0, "fwd", 64, False, 32, stand_in), FastestEntry(0, "fwd", 64, False, 512, "ours"),
        FastestEntry(0, "bwd", 64, False, 64, stand_in), FastestEntry(0, "fwd", 128, True, 0, stand_in),
        FastestEntry(90, "fwd", 64, True, 0, stand_in),
    )  # fmt: skip
    monkeypatch.setattr(_fastest, "table", lambda: lines)
    monkeypatch.setattr(_fastest, "SEEN", 0)
    assert {op for op, backend in backends() if backend == stand_in} == {"attention_fwd"}
    assert not any(backend == stand_in for _, backend in backends(is_causal=True))
    assert [_fastest.fastest(0, "fwd", 64, False, n) for n in (31, 32, 511, 512)] == [
        "ours",
        stand_in,
        stand_in,
        "ours",
    ]
    assert any("64" in line and stand_in in line for line in _fastest.report(90))
    monkeypatch.setattr(_fastest, "table", lambda: ())  # another table is another decision
    assert not any(backend == stand_in for _, backend in backends())


def test_a_geometry_has_to_come_often(stand_in, monkeypatch) -> None:
    """For a new one, cuDNN takes longer than it saves. A deterministic run never changes its kernel on the way."""
    monkeypatch.setattr(_fastest, "table", lambda: (FastestEntry(0, "fwd", 64, False, 0, stand_in),))

    def ran(seqlen: int) -> str:
        with record_backends() as pairs, torch.no_grad():
            attention(*inputs(seqlen))
        ((_, backend),) = pairs
        return backend

    ours = ran(8)
    assert [ran(47) for _ in range(_fastest.SEEN + 2)] == [ours] * _fastest.SEEN + [stand_in] * 2
    assert {ran(seqlen) for seqlen in range(49, 49 + 2 * _fastest.SEEN)} == {ours}
    torch.use_deterministic_algorithms(True)
    assert {ran(20) for _ in range(_fastest.SEEN + 2)} == {ours}


def test_a_wrong_name_is_an_error(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTFORMER_ATTENTION_KERNELS", "cuddn")
    with pytest.raises(ValueError, match=r"\bcudnn\b"):
        backends()


@pytest.mark.parametrize("name", ["cudnn", "flash2"])
def test_pytorchs_ops_accept_the_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own shape functions check this on fake CUDA tensors; the values would need a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernel = _fastest.KERNELS[name]
    if (missing := kernel.why_missing()) is not None:
        pytest.skip(missing)
    with FakeTensorMode():
        q = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        out, lse = kernel.forward(q, q, q, True, 0.125)
        assert out.shape == q.shape and lse.numel() == 2 * 4 * 128 and lse.dtype == torch.float32
        lse = lse.reshape(2, 4, 128)
        gradients = kernel.backward(q, q, q, q, out, lse, True, 0.125)
        assert [x.shape for x in gradients] == [q.shape] * 3


@pytest.fixture
def _on_a_gpu(any_order: None) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    yield


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", list(_fastest.KERNELS))
def test_a_device_runs_fastformers_kernel(name, head_dim, is_causal, monkeypatch) -> None:
    """Checks out, the units of lse, and each backward pass after each forward pass."""
    if (missing := _fastest.KERNELS[name].why_missing()) is not None:
        pytest.skip(missing)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(2, 300, 4, head_dim, device="cuda", generator=generator).bfloat16() for _ in range(4))

    def results(forward: str, backward: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        monkeypatch.setenv("FASTFORMER_ATTENTION_KERNELS", forward)
        out, lse = attention(*leaves, is_causal=is_causal, return_lse=True)
        monkeypatch.setenv("FASTFORMER_ATTENTION_KERNELS", backward)
        gradients = torch.autograd.grad(out, leaves, dout.to(dtype))
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    ours = results("ours", "ours")
    with use_backend("reference"):
        exact = results("ours", "ours", torch.float64)
    for forward, backward in ((name, name), (name, "ours"), ("ours", name)):
        for key, value in results(forward, backward).items():
            assert_close(key, value, ours[key], exact[key])


def row(provider: str, mode: str, ms: float, seqlen: int, **shape: Any) -> dict[str, Any]:
    sizes = {"batch": 4, "heads": 16, "head_dim": 128, "causal": True, "dropout_p": 0.0, "seqlen": seqlen} | shape
    return {
        "op": "attention", "provider": provider, "mode": mode, "dtype": "bfloat16", "shape": sizes, "ms_p50": ms,
        "capability": [9, 0],
    }  # fmt: skip


def test_rows_fill_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for seqlen, ours, cudnn, flash in ((256, 1.0, 2.0, 2.0), (2048, 3.0, 2.0, 2.9), (8192, 9.0, 6.0, 8.7)):
        for provider, ms in (("fastformer", ours), ("sdpa cudnn", cudnn), ("sdpa flash", flash)):
            rows += [row(provider, "fwd", ms, seqlen), row(provider, "bwd", seqlen / 100, seqlen)]
    rows += [row("fastformer", "fwd", 5.0, 512, causal=False), row("sdpa cudnn", "fwd", 4.9, 512, causal=False)]
    rows += [row("sdpa cudnn", "fwd", 0.1, 64), row("fastformer", "fwd", 5.0, 64, dropout_p=0.1)]  # nothing to compare
    path, table = tmp_path / "rows.jsonl", tmp_path / "table.json"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    old = FastestEntry(80, "fwd", 64, True, 0, "flash2")
    table.write_text(json.dumps([old._asdict(), FastestEntry(90, "fwd", 64, True, 0, "flash2")._asdict()]))
    assert fastest_attention.main([str(path), "--out", str(table)]) == 0
    entries = [FastestEntry(**line) for line in json.loads(table.read_text())]
    assert entries == [old, FastestEntry(90, "fwd", 128, True, 2048, "cudnn")]  # the backward passes take equally long
    path.write_text("")
    with pytest.raises(SystemExit):
        fastest_attention.main([str(path), "--out", str(table)])
    assert all(entry.kernel in ("ours", *_fastest.KERNELS) for entry in _fastest.table())
