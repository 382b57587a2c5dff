"""Products use fastformer's kernel, or `F.linear` under anything but plain autograd, with equal results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer import doctor
from fastformer.nn.linear import LINEARS, linear
from fastformer.ops import _extension
from tests.checks import assert_accurate, saved_for_backward
from tests.conftest import skip_without
from tests.ops.test_outputs import Stop
from tests.products import notice_products

linear_op = importlib.import_module("fastformer.ops.linear")


class Products(list[int]):
    """Records the rows of each product by kernel, and separately those of the kernel for weight gradients."""

    def __init__(self) -> None:
        self.of_gradients: list[int] = []


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """Records products on any CPU that has the kernel, including bf16; see `Products`."""
    skip_without("cpp", "linear")
    rows = Products()

    def note(x: Tensor, weight: Tensor, is_gradient: bool) -> None:
        for each in (rows, rows.of_gradients) if is_gradient else (rows,):
            each.append(x.numel() // x.shape[-1])

    notice_products(monkeypatch, note)
    monkeypatch.setattr(linear_op, "MIN_PRODUCT", 0)
    monkeypatch.setattr(linear_op, "MIN_PRODUCT_BF16", 0)
    return rows


def inputs(*shape: int, out: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(len(shape))
    return torch.randn(*shape), torch.randn(out, shape[-1]), torch.randn(out)


def test_modes_and_subclasses_see_f_linear(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(20, 24)
    leaf = weight.clone().requires_grad_()
    for args in [
        (x, leaf, bias),
        (x.clone().requires_grad_(), weight, bias),
        (x, weight, bias.clone().requires_grad_()),
    ]:
        assert linear(*args).requires_grad
    for dtype in (torch.float16, torch.float64):
        assert linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).dtype == dtype
    linear(x[:3], weight, bias)
    linear(x, torch.randn(40, 30)[:, :24], bias)
    linear(x, torch.randn(30, 40)[:24].t()[::2], bias[::2])
    linear(x[:0], weight, bias)
    kind = type("Other", (Tensor,), {})
    assert type(linear(x.as_subclass(kind), weight, bias)) is kind
    with BaseTorchFunctionMode():
        linear(x, weight, bias)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 20 * 24 * 40
    with torch.autocast("cpu", torch.float16):
        assert linear(x, weight, bias).dtype == torch.float16
    torch.func.vmap(lambda row: linear(row, weight, bias))(x[None])
    torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (x,))
    assert linear(x.to("meta"), weight.to("meta"), bias.to("meta")).device.type == "meta"
    for wrong in [(x, weight[:, :3], bias), (x, weight, bias[:3]), (x, weight[None], bias)]:
        with pytest.raises(RuntimeError):
            linear(*wrong)
    torch.compile(linear, fullgraph=True, backend="eager")(x, weight, bias)
    assert not products
    linear(x, torch.randn(24, 40).t(), bias)
    assert products.pop() == 20
    with torch.no_grad():
        linear(x, leaf, bias)
    with torch.inference_mode():
        linear(x, leaf, bias)
        linear(torch.randn(30, 24), weight + 1, bias)
    linear(x, nn.Parameter(weight, requires_grad=False), bias)
    with torch.profiler.profile() as profile:
        linear(x, weight, bias)
    assert any("fastformer_cpp::linear" in event.name for event in profile.events())
    assert products == [20, 20, 30, 20, 20]
    products.clear()
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x)
    assert linear(x, weight, bias) is x and not products


def test_bf16_uses_fastformers_kernel_if_onednn_has_none(products: Products) -> None:
    x, weight, bias = (t.bfloat16() for t in inputs(3, 50, 24))
    found = linear(x, weight, bias)
    assert products == [150]
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert_accurate(found, F.linear(x, weight, bias), exact)
    products.clear()
    linear(x[0, :1], weight, bias)
    assert not products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_to_bf16_is_that_of_the_usual_function(dtype: torch.dtype, products: Products) -> None:
    found = []
    for function in (linear, F.linear):
        x, weight, bias = (t.to(dtype).requires_grad_() for t in inputs(3, 50, 24))
        with torch.autocast("cpu", torch.bfloat16):
            out = function(x, weight, bias)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, weight, bias))))
        assert len(products) == 3
    for ours, plain in zip(*found, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))
    products.clear()
    # Where a hook or a mode has a say, or autocast wants another dtype, nothing is cast by us, nor for a few rows.
    x, weight, bias = inputs(3, 50, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x[0, :15], weight, bias).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16), BaseTorchFunctionMode():
        assert linear(x, weight, bias).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    assert not products


@pytest.mark.parametrize("cpu", ["fast", "slow", "unknown"])
@pytest.mark.parametrize("has_bf16", [True, False], ids=["bf16", "none"])
def test_bf16_uses_onednn_where_it_is_faster(
    has_bf16: bool, cpu: str, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs products of bf16, and a CPU that is fast at them unless the rows are few."""
    probe = {"fast": lambda: True, "slow": lambda: False}.get(cpu)
    monkeypatch.setattr(_extension, "host_function", lambda name: probe if name == "has_fast_bf16" else None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    for rows in (20, 15, 2):
        linear(*(t.bfloat16() for t in inputs(rows, 24)))
    assert products == ([20, 15, 2] if not has_bf16 else [20] if cpu == "slow" else [])


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_doctor_says_which_dtype_is_not_pytorchs(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"is_intel_cpu": lambda: True, "has_fast_bf16": lambda: is_fast}
    monkeypatch.setattr(_extension, "host_function", functions.get)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    (op,) = (op for op in doctor.forward_ops() if op.stem == "linear")
    backend, why = doctor.choice(op, "cpu")
    assert backend == "torch" and ("bf16" in why) != is_fast


def test_an_extension_without_the_kernel_is_not_an_error(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been built before the kernel existed, or be missing."""
    x, weight, bias = inputs(20, 24)
    monkeypatch.setattr(_extension, "function", lambda name: None)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    monkeypatch.setattr(_extension, "instruction_set", lambda: None)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    assert not products


@pytest.mark.parametrize("maker", ["intel", "another", "unknown"])
@pytest.mark.parametrize("has_mkl", [True, False], ids=["mkl", "none"])
def test_intel_cpus_keep_mkl(maker: str, has_mkl: bool, products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"intel": lambda: True, "another": lambda: False}.get(maker)
    monkeypatch.setattr(_extension, "host_function", lambda name: probe if name == "is_intel_cpu" else None)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    x, weight, bias = inputs(20, 24)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    assert bool(products) == (maker != "intel" or not has_mkl)


def test_the_maker_of_this_cpu() -> None:
    is_intel = _extension.host_function("is_intel_cpu")
    if is_intel is None or not Path("/proc/cpuinfo").exists():
        pytest.skip("needs the C++ extension and Linux")
    assert is_intel() == ("GenuineIntel" in Path("/proc/cpuinfo").read_text())


@pytest.fixture
def learns_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_op, "MIN_PRODUCT_TRAINING", 0)


def plainly_contiguous() -> tuple[Tensor, Tensor, Tensor]:
    return inputs(5, 20, 24)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "contiguous": plainly_contiguous,
    "transposed weight": lambda: (torch.randn(40, 24), torch.randn(24, 33).t(), torch.randn(33)),
    "strided input": lambda: (torch.randn(24, 50).t(), torch.randn(17, 24), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["dense", "expanded", "strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_product(
    layout: str, how: str, dtype: torch.dtype, learns_small: None, products: Products
) -> None:
    given, found = LAYOUTS[layout](), []
    for function, own in ((linear, dtype), (F.linear, dtype), (F.linear, torch.float64)):
        # As they lie: what is a view of another layout stays one.
        tensors = [None if t is None else t.to(dtype).to(own).detach().requires_grad_() for t in given]
        out = function(*tensors)
        torch.manual_seed(3)
        dout = torch.randn(*out.shape, 2)[..., 1] if how == "strided" else torch.randn(out.shape)
        if how == "expanded":
            dout = torch.randn(out.shape[-1]).expand(out.shape)
        dout = dout.to(dtype).to(own)
        found.append((out, *torch.autograd.grad(out, [t for t in tensors if t is not None], dout)))
        if function is linear:
            assert len(products) == 3 and len(products.of_gradients) == 1
            assert found[0][2].stride() == tensors[1].stride(), "a gradient lies as its weight"
            products.clear()
    for ours, plain, exact in zip(*found, strict=True):
        assert_accurate(ours, plain, exact)
    assert not products


def test_only_trainable_inputs_get_gradients_and_are_saved(learns_small: None, products: list[int]) -> None:
    x, weight, bias = plainly_contiguous()
    for which in range(1, 8):
        tensors = [t.clone().requires_grad_(bool(which >> i & 1)) for i, t in enumerate((x, weight, bias))]
        with saved_for_backward() as saved:
            out = linear(*tensors)
        assert {t.data_ptr() for t in saved} == {
            t.data_ptr() for t, other in ((x_, w_) for x_, w_ in [tensors[:2], tensors[1::-1]]) if other.requires_grad
        }
        products.clear()
        out.sum().backward()
        for t, plain in zip(tensors, (x, weight, bias), strict=True):
            assert (t.grad is not None) == t.requires_grad
            assert t.grad is None or t.grad.shape == plain.shape
        assert len(products) == sum(t.requires_grad for t in tensors[:2])


def test_a_backward_pass_that_is_watched_gives_the_same(learns_small: None, products: list[int]) -> None:
    x, weight, bias = plainly_contiguous()
    weight.requires_grad_()
    step = linear(x, weight, bias)
    assert products

    def vjp(dout: Tensor) -> Tensor:
        return torch.autograd.grad(step, weight, dout, retain_graph=True)[0]

    # Gradients of many losses at once, and by functorch through a graph from outside.
    douts = torch.randn(3, *step.shape)
    each = torch.stack([vjp(dout) for dout in douts])
    (batched,) = torch.autograd.grad(step, weight, douts, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(batched, each)
    torch.testing.assert_close(torch.func.vmap(vjp)(douts), each)
    torch.testing.assert_close(vjp(douts[0].as_subclass(type("Other", (Tensor,), {}))).as_subclass(Tensor), each[0])
    with FlopCounterMode(display=False) as counter:
        vjp(douts[0])
    assert counter.get_total_flops() == 2 * 100 * 24 * 40
    products.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vjp(douts[0]), each[0])
    assert products == [40]
    products.clear()
    torch.func.grad(lambda w: linear(x, w, bias).sum())(weight.detach())
    torch.compile(lambda: linear(x, weight, bias).sum(), fullgraph=True, backend="eager")().backward()
    assert not products


def test_small_products_use_f_linear(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = linear_op.MIN_PRODUCT_TRAINING // (64 * 64)
    weight = torch.randn(64, 64, requires_grad=True)
    monkeypatch.setattr(linear_op, "MIN_PRODUCT", 20 * 64 * 64)
    linear(torch.randn(19, 64), weight.detach())
    assert not products
    linear(torch.randn(20, 64), weight.detach())
    assert products.pop() == 20
    linear(torch.randn(rows - 1, 64), weight)
    assert not products
    linear(torch.randn(rows, 64), weight)
    assert products == [rows]


def test_outputs_may_be_changed_in_place(learns_small: None, products: list[int]) -> None:
    x, weight, bias = (t.requires_grad_() for t in plainly_contiguous())
    for shape in ((-1, 24), (10, 10, 24)):
        products.clear()
        out = linear(x.view(shape), weight, bias)
        assert products == [100]
        expected = out.detach() / 2
        out /= 2
        out[0] = 0
        assert torch.equal(out[1:], expected[1:])
        found = torch.autograd.grad(out.sum(), (x, weight, bias))
        plain = F.linear(x.view(shape), weight, bias) / 2
        for ours, theirs in zip(found, torch.autograd.grad(plain[1:].sum(), (x, weight, bias)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        other = torch.zeros(out.shape, requires_grad=True)
        Stop.apply(linear(x.view(shape), weight, bias), other).sum().backward()
        assert other.grad is not None and x.grad is weight.grad is bias.grad is None


def test_a_compiled_backward_pass_follows(learns_small: None) -> None:
    x, weight, bias = (t.requires_grad_() for t in plainly_contiguous())
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        linear(x, weight, bias).square().sum().backward()
    plain = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))
    for t, expected in zip((x, weight, bias), plain, strict=True):
        torch.testing.assert_close(t.grad, expected, rtol=1e-4, atol=1e-3)


def test_gradients_have_gradients(learns_small: None) -> None:
    for function in (linear, F.linear):
        x, weight, bias = (t.requires_grad_() for t in plainly_contiguous())
        dx, dweight, dbias = torch.autograd.grad(
            function(x, weight, bias).square().sum(), (x, weight, bias), create_graph=True
        )
        seconds = torch.autograd.grad(dx.square().sum() + dweight.sum() + dbias.square().sum(), (x, weight, bias))
        if function is linear:
            found = seconds
    for ours, plain in zip(found, seconds, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)


def test_a_changed_weight_is_noticed_and_a_checkpoint_computes_again(learns_small: None, products: list[int]) -> None:
    x, weight, bias = (t.requires_grad_() for t in plainly_contiguous())
    out = linear(x, weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError):
        out.sum().backward()
    products.clear()
    checkpoint(linear, x, weight, bias, use_reentrant=False).sum().backward()
    assert len(products) == 4  # forward, again, and two gradients
    expected = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    for t, plain in zip((x, weight, bias), expected, strict=True):
        torch.testing.assert_close(t.grad, plain, rtol=1e-4, atol=1e-4)


def test_a_linear_layer_runs_a_replaced_forward_of_torch(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 24)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    with torch.no_grad():
        for kind in LINEARS:
            assert kind(24, 40)(x) is x
    assert not products


def test_attention_uses_it_for_inference(products: list[int]) -> None:
    attention = fastformer.nn.MultiheadAttention(32, 4, batch_first=True)
    x, memory = torch.randn(2, 10, 32), torch.randn(2, 9, 32)
    attention(x, x, x)
    assert not products  # its parameters require gradients
    with torch.no_grad():
        attention(x, x, x)
        assert products == [20, 20]
        attention(x, memory, memory)
        assert products[2:] == [20, 18, 20]
