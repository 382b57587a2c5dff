"""Tests the dispatcher: the choice of a backend, refusals, and autocast in the reference."""

from __future__ import annotations

import inspect
import logging
import threading

import pytest
import torch
from torch import Tensor

from fastformer import ops
from fastformer.ops import _autograd, _backends, _dispatch, _extension, record_backends, use_backend
from fastformer.ops._library import define_op


def toy_reference(x: Tensor) -> Tensor:
    return x @ x


toy = define_op(
    "toy(Tensor x) -> Tensor",
    toy_reference,
    stem="toy",
    fake=lambda x: torch.empty_like(x),
    cpp_unsupported=lambda name, x: "only squares of two" if x.shape[0] != 2 else None,
)
# Has no kernel and wants none.
plain_toy = define_op(
    "plain_toy(Tensor x) -> Tensor",
    toy_reference,
    stem="toy",
    fake=lambda x: torch.empty_like(x),
    reference_only=dict.fromkeys(("cpp", "triton"), "it is a toy"),
)
# An op with a gradient, whose backward is an op too.
doubled = define_op("doubled_fwd(Tensor x) -> Tensor", lambda x: 2 * x, stem="toy", fake=lambda x: x.new_empty(x.shape))
doubled_bwd = define_op(
    "doubled_bwd(Tensor dy) -> Tensor", lambda dy: 2 * dy, stem="toy", fake=lambda dy: dy.new_empty(dy.shape)
)
_autograd.register_autograd(
    "doubled_fwd", lambda ctx, dy: doubled_bwd(dy), setup_context=lambda ctx, inputs, output: None
)
# Named arguments in an order that no position gives away.
named = define_op(
    "named(Tensor x, float first, Tensor? y, float softmax_scale, int? left) -> Tensor",
    lambda x, first, y, softmax_scale, left: x.clone(),
    stem="toy",
    fake=lambda x, *options: x.new_empty(x.shape),
    cpp_unsupported=lambda name, *, softmax_scale, left, **_: f"{name} {softmax_scale} {left}",
)
# They work on without their entries, which other tests take for the package's own.
TOYS = {name: _dispatch.OPS.pop(name) for name, op in list(_dispatch.OPS.items()) if op.stem == "toy"}


def test_a_new_argument_is_not_withheld_from_pytorchs_function() -> None:
    for name, op in _dispatch.OPS.items():
        if op.torch_unsupported is not None:
            with pytest.raises(TypeError, match="new_option"):
                inspect.signature(op.torch_unsupported).bind(name, **dict.fromkeys(op.arguments), new_option=None)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables strict mode, also if the whole run is not strict."""
    monkeypatch.setenv("FASTFORMER_STRICT", "1")


@pytest.fixture
def cpp_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns C++ functions that return zeros, which distinguishes them from the reference."""
    names = ("toy", "named", "doubled_fwd", "doubled_bwd")
    monkeypatch.setattr(_extension, "function", lambda name: torch.zeros_like if name in names else None)
    monkeypatch.setattr(_backends, "_told", set())


def test_a_missing_kernel_is_logged_once_and_strict_forbids_it(monkeypatch, caplog) -> None:
    x = torch.randn(2, 2)
    monkeypatch.setattr(_backends, "_told", set())
    monkeypatch.setattr(_extension, "load", lambda: "avx2")
    with pytest.raises(NotImplementedError, match=r"fastformer::toy can't run on cpp: .*lacks this op"):
        toy(x)
    monkeypatch.setattr(_extension, "load", lambda: None)
    with pytest.raises(NotImplementedError, match=r"can't run on cpp: the C\+\+ extension is not built.*doctor"):
        toy(x)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert torch.equal(toy(x), x @ x)
        assert not caplog.records  # the loader speaks for all ops
        monkeypatch.setattr(_extension, "load", lambda: "avx2")
        for _ in range(2):
            assert torch.equal(toy(x), x @ x)
    (message,) = (record.message for record in caplog.records)
    assert message.startswith("toy runs on the reference, not on cpp: the C++ extension lacks this op")


def test_an_op_without_kernel_by_design_is_not_a_fallback(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 2)
    assert torch.equal(plain_toy(x), x @ x) and not caplog.records
    with use_backend("cpp"), pytest.raises(NotImplementedError, match="can't run on cpp"):
        plain_toy(x)


def test_ops_without_kernels_by_design() -> None:
    """An op without a kernel has to be listed here; every other op has a kernel on each backend."""
    ops = _dispatch.OPS
    assert {name: tuple(op.reference_only) for name, op in ops.items() if op.reference_only} == {
        "attention_weights_fwd": ("triton", "cpp"),
        "attention_weights_bwd": ("triton", "cpp"),
        "linear": ("triton",),
        "linear_weight_grad": ("triton",),
        "quantized_linear": ("cpp",),
        "quantized_topk": ("cpp",),
    }
    for backend in ("cpp", "triton"):
        for name, op in ops.items():
            missing = op.missing_kernel(backend)
            if missing is None or "not built" in missing or "not installed" in missing:
                continue
            assert backend in op.reference_only, f"{name} on {backend}: {missing}"


def test_backends_are_recorded(cpp_toy: None) -> None:
    x = torch.randn(2, 2)
    with record_backends() as outer:
        toy(x)
        with use_backend("reference"), record_backends() as inner:
            toy(x)
            plain_toy(x)
    toy(x)
    assert inner == {("toy", "reference"), ("plain_toy", "reference")}
    assert outer == inner | {("toy", "cpp")}


@pytest.mark.parametrize("forced", [None, "reference", "cpp"])
def test_backward_runs_on_the_backend_of_forward(cpp_toy: None, forced: str | None) -> None:
    """This includes other threads, such as the one of autograd on a GPU, and calls after the block."""
    x = torch.randn(2, 2, requires_grad=True)
    with use_backend(forced):
        y = doubled(x)
    gradients: list[Tensor] = []

    def differentiate() -> None:
        gradients.extend(torch.autograd.grad(y, x, torch.ones(2, 2)))

    with record_backends() as ran:
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
    # The C++ function gives zeros and is what an unforced call gets.
    assert gradients[0].eq(2.0 if forced == "reference" else 0.0).all()
    assert ran == {("doubled_bwd", forced or "cpp")}


def test_a_kernel_gets_arguments_by_the_schemas_names(cpp_toy: None) -> None:
    with pytest.raises(NotImplementedError, match="can't run on cpp: named 0.5 7"):
        named(torch.zeros(1), 2.0, None, 0.5, 7)
    assert TOYS["named"].arguments == ("x", "first", "y", "softmax_scale", "left")


def test_cpp_on_a_cpu_and_the_override(cpp_toy: None) -> None:
    x = torch.randn(2, 2)
    assert torch.equal(toy(x), torch.zeros(2, 2))
    with use_backend("reference"):
        assert torch.equal(toy(x), x @ x)
        with use_backend(None):
            assert torch.equal(toy(x), torch.zeros(2, 2))
        assert torch.equal(toy(x), x @ x)
    assert torch.equal(toy(x), torch.zeros(2, 2))


def test_a_refusal_is_logged_once_and_strict_forbids_it(cpp_toy, monkeypatch, caplog) -> None:
    x = torch.randn(3, 3)
    with pytest.raises(NotImplementedError, match="fastformer::toy can't run on cpp: only squares of two"):
        toy(x)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    with caplog.at_level(logging.WARNING, "fastformer"):
        for _ in range(2):
            assert torch.equal(toy(x), x @ x)
    assert [record.message for record in caplog.records] == [
        "toy runs on the reference, not on cpp: only squares of two"
    ]
    with use_backend("cpp"), pytest.raises(NotImplementedError, match="only squares of two"):
        toy(x)


def test_a_shared_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A model in fp16 on a CPU logs the reason for its first op; for the others, it is in the debug log."""
    if _extension.load() is None:
        pytest.skip("the C++ extension is not built: the loader speaks for all ops")
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    monkeypatch.setattr(_backends, "_told", set())
    x = torch.randn(2, 4, 2, 8, dtype=torch.float16)
    rows = x.flatten(0, 2)
    with caplog.at_level(logging.DEBUG, "fastformer"):
        for _ in range(2):
            ops.attention(x, x, x)
            ops.add_layer_norm(rows)
            ops.feed_forward(rows, rows, None, rows.T, None)
            ops.embedding(torch.tensor([1]), rows)
            ops.linear_topk(rows, rows, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] + ["DEBUG"] * 4
    names = ("attention_fwd", "add_layer_norm_fwd", "feed_forward_fwd", "embedding_fwd", "linear_topk")
    for record, name in zip(caplog.records, names, strict=True):
        assert record.message.startswith(name) and "float16" in record.message


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend in .*'reference'.*got 'cuda'"), use_backend("cuda"):
        pass


def test_autocast_stays_out_of_an_op(cpp_toy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any backend. A backward pass under autocast gets fp32 tensors that were not cast."""
    x = torch.randn(2, 2)
    monkeypatch.setattr(_extension, "function", lambda name: lambda x: x @ x)
    for backend in ("reference", "cpp"):
        with torch.autocast("cpu", torch.bfloat16), use_backend(backend):
            assert toy(x).dtype == torch.float32, backend
            assert (x @ x).dtype == torch.bfloat16, "autocast is on again behind the op"
