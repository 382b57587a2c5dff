"""Products for inference go to oneDNN, what anybody else has a say in goes to `F.linear`, and both are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer.nn import linear as linear_module
from fastformer.nn.fusing import LINEARS
from fastformer.nn.linear import linear, project
from tests.checks import assert_accurate

pytestmark = pytest.mark.skipif(not linear_module._IS_THERE, reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that went to oneDNN."""
    rows: list[int] = []
    real = linear_module._by_onednn

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return real(x, weight, bias)

    monkeypatch.setattr(linear_module, "_by_onednn", counted)
    return rows


def inputs(*shape: int, out: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(len(shape))
    return torch.randn(*shape), torch.randn(out, shape[-1]), torch.randn(out)


@pytest.mark.parametrize(
    "make",
    [
        lambda: inputs(16, 24),
        lambda: inputs(3, 50, 24),
        lambda: (*inputs(200, 7, out=1)[:2], None),
        lambda: (torch.randn(24, 30).t(), *inputs(1, 24)[1:]),
        lambda: (torch.randn(20, 2, 24)[:, 1], *inputs(1, 24)[1:]),
        lambda: (torch.randn(1, 20, 24).expand(3, 20, 24), *(t[8:32] for t in inputs(1, 24)[1:])),
    ],
)
def test_it_is_the_product(make: Callable[[], tuple[Tensor, Tensor, Tensor | None]], products: list[int]) -> None:
    x, weight, bias = make()
    found = linear(x, weight, bias)
    assert len(products) == 1 and found.shape == (*x.shape[:-1], len(weight)) and found.is_contiguous()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_accurate(found, F.linear(x, weight, bias), exact)
    x = x.clone()
    x[(0,) * (x.dim() - 1)] = torch.nan
    assert linear(x, weight, bias).isnan().sum() == len(weight)  # of one row, and all of that


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_who_has_a_say_meets_the_usual_function(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(20, 24)
    leaf = weight.clone().requires_grad_()
    for args in [
        (x, leaf, bias),
        (x.clone().requires_grad_(), weight, bias),
        (x, weight, bias.clone().requires_grad_()),
    ]:
        assert linear(*args).requires_grad
    for dtype in (torch.bfloat16, torch.float64):
        assert linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).dtype == dtype
    linear(x[:15], weight, bias)
    linear(x, torch.randn(24, 40).t(), bias)
    linear(x[:0], weight, bias)
    kind = type("Other", (Tensor,), {})
    assert type(linear(x.as_subclass(kind), weight, bias)) is kind
    with Mode():
        linear(x, weight, bias)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 20 * 24 * 40
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight, bias)
    torch.func.vmap(lambda row: linear(row, weight, bias))(x[None])
    torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (x,))
    assert linear(x.to("meta"), weight.to("meta"), bias.to("meta")).device.type == "meta"
    for wrong in [(x, weight[:, :3], bias), (x, weight, bias[:3]), (x, weight[None], bias)]:
        with pytest.raises(RuntimeError):
            linear(*wrong)
    torch.compile(linear, fullgraph=True, backend="eager")(x, weight, bias)
    assert not products
    with torch.no_grad():
        linear(x, leaf, bias)
    with torch.inference_mode():
        linear(x, leaf, bias)
        linear(torch.randn(30, 24), weight + 1, bias)
    linear(x, nn.Parameter(weight, requires_grad=False), bias)
    with torch.profiler.profile() as profile:
        linear(x, weight, bias)
    assert any("linear_pointwise" in event.name for event in profile.events())
    assert products == [20, 20, 30, 20, 20]
    products.clear()
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x)
    assert linear(x, weight, bias) is x and not products


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_module_is_called_where_it_does_more(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 24)
    with torch.no_grad():
        plain = nn.Linear(24, 40)
        torch.testing.assert_close(project(plain, x), plain(x))
        assert products.pop() == 20 and not products
        hooked, patched = nn.Linear(24, 40), nn.Linear(24, 40)
        hooked.register_forward_hook(lambda module, args, out: out + 1)
        patched.__dict__["forward"] = lambda x: x
        for module in (hooked, patched, Half(24, 40), nn.Identity()):
            assert torch.equal(project(module, x), module(x))
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
        for kind in LINEARS:
            assert project(kind(24, 40), x) is x
    assert not products


@pytest.fixture
def attention() -> Iterator[fastformer.nn.MultiheadAttention]:
    torch.manual_seed(0)
    yield fastformer.nn.MultiheadAttention(32, 4, batch_first=True)


def test_attention_uses_it_for_inference(attention: fastformer.nn.MultiheadAttention, products: list[int]) -> None:
    x, memory = torch.randn(2, 10, 32), torch.randn(2, 9, 32)
    attention(x, x, x)
    assert not products  # its parameters require gradients
    with torch.no_grad():
        attention(x, x, x)
        assert products == [20, 20]
        attention(x, memory, memory)
        assert products[2:] == [20, 18, 20]
