"""Tests `accelerate` and `restore` on models made of torch.nn's modules."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

import fastformer
from fastformer.functional import scaled_dot_product_attention
from fastformer.ops import record_backends
from tests.covering import covering
from tests.nn.comparing import assert_same, padding_mask, randomised
from tests.nn.test_surgery import Half

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors is in prototype")

N, L, S, E, H, FF = 3, 5, 4, 12, 3, 16
ARGS: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
PADDING = padding_mask([5, 3, 2], L)


class Classifier(nn.Module):
    """A model as users write them."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, E, dtype=torch.float64)
        layer = nn.TransformerEncoderLayer(E, H, FF, norm_first=norm_first, **ARGS)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E, dtype=torch.float64), enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(E, 4, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.encoder(self.embedding(ids), src_key_padding_mask=padding)
        pooled, _ = self.pool(x[:, :1], x, x, key_padding_mask=padding)
        return self.head(pooled[:, 0])


IDS = torch.randint(1, 20, (N, L), generator=torch.Generator().manual_seed(0)).masked_fill(PADDING, 0)


def grads(model: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), [p for p in model.parameters()], allow_unused=True))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_model_computes_the_same_on_our_ops(norm_first):
    model = randomised(Classifier(norm_first))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    modules = list(model.modules())
    expected = model(IDS)
    expected_grads = grads(model, expected)
    report = fastformer.report(fastformer.accelerate(model))
    assert report.swapped == {
        "encoder": "TransformerEncoder",
        "encoder.layers.0": "TransformerEncoderLayer",
        "encoder.layers.0.self_attn": "MultiheadAttention",
        "encoder.layers.1": "TransformerEncoderLayer",
        "encoder.layers.1.self_attn": "MultiheadAttention",
        "pool": "MultiheadAttention",
    }
    assert not report.left
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)), "the very same parameters"
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True)), "the very same modules"
    assert keys == list(model.state_dict())
    assert isinstance(model.encoder, nn.TransformerEncoder) and isinstance(model.pool, nn.MultiheadAttention)
    for padding, attention in (("auto", "attention_fwd"), ("skip", "varlen_attention_fwd")):
        fastformer.accelerate(model, padding=padding)
        with record_backends() as ran:
            out = model(IDS)
        assert {attention, "attention_fwd", "feed_forward_fwd", "add_layer_norm_fwd"} <= {n for n, _ in ran}
        assert_same(out, expected, "output")
        for a, b in zip(grads(model, out), expected_grads, strict=True):
            assert (a is None and b is None) or (a - b).abs().max() <= 1e-10 * b.abs().max().clamp(min=1e-3)
    assert fastformer.report(fastformer.accelerate(model)) == report, "a second time there is nothing to do"


def test_restore_leaves_no_trace():
    model = randomised(Classifier())
    before = {name: (type(m), sorted(m.__dict__)) for name, m in model.named_modules()}
    x = model(IDS)
    report = fastformer.report(fastformer.accelerate(model))
    model(IDS)  # modules keep what they found out in a call
    assert sorted(fastformer.restore(model)) == sorted(report.swapped)
    assert before == {name: (type(m), sorted(m.__dict__)) for name, m in model.named_modules()}
    with record_backends() as ran:
        assert torch.equal(model(IDS), x)
    assert not ran
    assert fastformer.restore(model) == []


def test_the_model_itself_and_both_stacks():
    for norm_first in (False, True):
        model = randomised(nn.Transformer(E, H, 2, 2, FF, norm_first=norm_first, **ARGS))
        src, tgt = torch.randn(N, S, E, dtype=torch.float64), torch.randn(N, L, E, dtype=torch.float64)
        options = {"tgt_mask": CAUSAL, "tgt_key_padding_mask": PADDING, "tgt_is_causal": True}
        expected = model(src, tgt, **options)
        report = fastformer.report(fastformer.accelerate(model))
        assert report.swapped[""] == "Transformer" and len(report.swapped) == 1 + 2 + 2 + 2 + 2 + 4
        real = ~PADDING[..., None]
        assert_same(model(src, tgt, **options) * real, expected * real, "output")


def test_restore_after_further_surgery():
    """A derived class has to be removed first; hooks and new parts stay."""
    model = randomised(Classifier())
    plain = copy.deepcopy(model)
    fastformer.accelerate(model)
    calls: list[str] = []
    for each in (model, plain):
        parametrize.register_parametrization(each.pool, "in_proj_weight", Half())
        each.encoder.layers[1].linear1 = nn.Linear(E, FF, dtype=torch.float64).requires_grad_(False)
        torch.nn.init.constant_(each.encoder.layers[1].linear1.weight, 0.1)
        torch.nn.init.zeros_(each.encoder.layers[1].linear1.bias)
        each.encoder.layers[0].register_forward_hook(lambda *args: calls.append("layer"))
    assert_same(model(IDS), plain(IDS), "while swapped")
    with pytest.raises(ValueError, match=r"\bParametrizedMultiheadAttention\b"):
        fastformer.restore(model)
    for each in (model, plain):
        parametrize.remove_parametrizations(each.pool, "in_proj_weight")
    fastformer.restore(model)
    with record_backends() as ran:
        assert torch.equal(model(IDS), plain(IDS))
    assert not ran and len(calls) == 4


@pytest.mark.parametrize("name", ["self_attn.forward", "forward", "_sa_block", "_ff_block"])
def test_restore_leaves_no_method_that_calls_fastformer(name):
    """A wrapper around a fastformer method would call it on a module that is no longer fastformer's."""
    model = randomised(Classifier())
    x = model(IDS)
    report = fastformer.report(fastformer.accelerate(model))
    classes = [type(module) for module in model.modules()]
    place, _, method = f"encoder.layers.1.{name}".rpartition(".")
    module = model.get_submodule(place)
    before = getattr(module, method)
    setattr(module, method, lambda *args, **options: before(*args, **options))
    assert_same(model(IDS), x, "output")
    with pytest.raises(ValueError, match=rf"\b{method}\b.*\b{place}\b"):
        fastformer.restore(model)
    assert classes == [type(module) for module in model.modules()], "nothing is restored"
    setattr(module, method, before)  # as those do who take theirs away again
    assert sorted(fastformer.restore(model)) == sorted(report.swapped)
    assert method not in vars(module) and torch.equal(model(IDS), x)


def test_restore_leaves_a_method_that_was_there_before():
    model = randomised(nn.TransformerEncoderLayer(E, H, FF, **ARGS))
    before = model._ff_block
    model._ff_block = own = lambda x: 2 * before(x)  # noqa: E731
    x = torch.randn(N, L, E, dtype=torch.float64)
    expected = model(x)
    fastformer.accelerate(model)
    assert_same(model(x), expected, "output")
    assert fastformer.restore(model) and model._ff_block is own and torch.equal(model(x), expected)


def test_restore_leaves_a_method_of_the_originals():
    """Tools that look for the forward beneath wrappers set such methods."""
    model = randomised(nn.TransformerEncoderLayer(E, H, FF, **ARGS))
    x = torch.randn(N, L, E, dtype=torch.float64)
    expected = model(x)
    fastformer.accelerate(model)
    model.forward = MethodType(nn.TransformerEncoderLayer.forward, model)
    assert fastformer.restore(model)
    assert_same(model(x), expected, "output")


@pytest.mark.parametrize("name", ["window_size", "_fastformer_swapped"])
def test_attributes_of_the_user_stay(name):
    model = nn.MultiheadAttention(E, H, batch_first=True)
    setattr(model, name, (0, 0))
    report = fastformer.report(fastformer.accelerate(model))
    assert not report.swapped and report.left == {"": f"it has an attribute {name} already"}
    assert fastformer.restore(model) == [] and getattr(model, name) == (0, 0)


class Mine(nn.TransformerEncoderLayer):
    """A user's subclass."""

    def forward(self, src: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(src, *args, **options)


def test_unswapped_modules_and_reasons():
    model = nn.Sequential(Mine(E, H, FF, **ARGS), nn.TransformerEncoderLayer(E, H, FF, **ARGS), nn.Linear(E, E))
    model.double()
    model[1].self_attn.forward = functools.partial(model[1].self_attn.forward)
    x = torch.randn(N, L, E, dtype=torch.float64)
    model.eval()
    expected = model(x)
    report = fastformer.report(fastformer.accelerate(model))
    assert report.left == {
        "0": "Mine is a subclass of TransformerEncoderLayer, and may compute something else",
        "1.self_attn": "it has its own forward",
    }
    assert report.swapped == {"0.self_attn": "MultiheadAttention", "1": "TransformerEncoderLayer"}
    assert_same(model(x), expected, "output")
    text = str(report)
    assert "1 MultiheadAttention" in text and "0: Mine is a subclass" in text and "1.self_attn: it has" in text
    assert str(fastformer.report(fastformer.accelerate(nn.Linear(2, 2)))) == "swapped: nothing"


STACKS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
PATCHES: list[tuple[Any, str]] = [
    *((kind, "forward") for kind in (nn.MultiheadAttention, *LAYERS, *STACKS)),
    *((kind, name) for kind in LAYERS for name in ("_sa_block", "_mha_block", "_ff_block") if hasattr(kind, name)),
    *((F, name) for name in ("scaled_dot_product_attention", "multi_head_attention_forward")),
]


def results_of(model: nn.Module) -> list[Tensor]:
    """Returns the output for real tokens, and the gradients."""
    generator = torch.Generator().manual_seed(0)
    src, tgt = (torch.randn(N, L, E, dtype=torch.float64, generator=generator) for _ in range(2))
    masks = {f"{of}_key_padding_mask": PADDING for of in ("src", "tgt", "memory")}
    out = model(src, tgt, tgt_mask=CAUSAL, tgt_is_causal=True, **masks) * ~PADDING[..., None]
    return [out, *grads(model, out)]


def doubled(function: Any, calls: list[Any]) -> Any:
    """Doubles what a function gives, and notes the shapes and dtypes that it gets."""

    @functools.wraps(function)
    def own(*args: Any, **options: Any) -> Any:
        given = [each for each in (*args, *options.values()) if type(each) is Tensor and not each.is_nested]
        calls.append([(each.shape, each.dtype) for each in given])
        out = function(*args, **options)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return own


@pytest.mark.parametrize(
    "owner, name, comes, norm_first",
    covering(PATCHES, ["before", "later"], [False, True]),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_replaced_functions_of_torch_are_called_as_without_acceleration(owner, name, comes, norm_first, monkeypatch):
    plain = randomised(nn.Transformer(E, H, 2, 2, FF, norm_first=norm_first, **ARGS))
    model, fresh = copy.deepcopy(plain), copy.deepcopy(plain)
    calls: list[Any] = []
    if comes == "later":
        assert not fastformer.report(fastformer.accelerate(model)).left
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, doubled(getattr(owner, name), calls))
        left = fastformer.report(fastformer.accelerate(model)).left
        assert set(left.values()) == {f"{owner.__name__}.{name} was replaced"}
        expected, before = results_of(plain), [*calls]
        calls.clear()
        for ours, other in zip(results_of(model), expected, strict=True):
            assert (ours - other).abs().max() <= 1e-10 * other.abs().max().clamp(min=1e-3)
        assert calls == before and before
    # It isn't there any more: all is fast.
    fastformer.accelerate(model)
    fastformer.accelerate(fresh)
    assert not torch.allclose(results_of(model)[0], expected[0])
    assert ran(model) == ran(fresh) > {"varlen_attention_fwd", "feed_forward_fwd"}


@pytest.mark.parametrize(("owner", "name"), PATCHES, ids=lambda each: getattr(each, "__name__", each))
def test_nested_tensors_reach_a_replaced_forward(owner, name, monkeypatch):
    layer = nn.TransformerEncoderLayer(12, 2, FF, **ARGS)
    plain = randomised(nn.TransformerEncoder(layer, 2)).eval()
    model = copy.deepcopy(plain)
    fastformer.accelerate(model)
    monkeypatch.setattr(owner, name, doubled(getattr(owner, name), []))
    nested = torch.nested.nested_tensor([torch.randn(n, 12, dtype=torch.float64) for n in (5, 3)])
    with torch.no_grad():
        ours, expected = (each(nested).to_padded_tensor(0.0) for each in (model, plain))
    assert_same(ours, expected, "output")


def ran(model: nn.Module) -> set[str]:
    with record_backends() as backends:
        results_of(model)
    return {name for name, _ in backends}


def test_fastformers_attention_is_not_taken_for_a_replacement(monkeypatch):
    model = randomised(nn.Transformer(E, H, 2, 2, FF, **ARGS))
    fastformer.accelerate(model)
    fast = ran(model)
    with fastformer.activate():
        assert ran(model) == fast
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    assert ran(model) == fast > {"varlen_attention_fwd"}


@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 7, "vdim": 5}, {"batch_first": False}],
    ids=str,
)
def test_attention_of_every_kind(options):
    model = randomised(nn.MultiheadAttention(E, H, **{"batch_first": True, **options}, dtype=torch.float64))
    sizes = (E, options.get("kdim", E), options.get("vdim", E))
    q, k, v = (torch.randn(N, S, size, dtype=torch.float64) for size in sizes)
    expected, expected_weights = model(q, k, v)
    assert fastformer.report(fastformer.accelerate(model)).swapped == {"": "MultiheadAttention"}
    out, weights = model(q, k, v)
    assert_same(out, expected, "output")
    assert_same(weights, expected_weights, "weights")


def test_wrong_arguments():
    functions: list[Any] = [fastformer.accelerate, fastformer.report, fastformer.restore]
    for function in functions:
        with pytest.raises(ValueError, match=r"\btorch\.nn\.Module\b"):
            function("model")
