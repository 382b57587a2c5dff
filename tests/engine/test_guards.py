"""Guards and plans hold as long as nothing has changed, whatever the classes look like."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
import fastformer.nn as fnn
from fastformer.engine.frozen import Guards, Plans
from fastformer.ops import _extension, record_backends, use_backend
from tests.checks import assert_accurate
from tests.covering import each
from tests.nn.comparing import randomised


class Tagged(nn.Parameter):
    pass


def set_(name: str, value: Any) -> Callable[..., None]:
    return lambda model, monkeypatch: monkeypatch.setattr(model.get_submodule("0"), name, value)


# What is done to a model -> by how little of its first module is watched it is noticed.
CHANGES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "another class": (lambda model, patch: patch.setattr(model.get_submodule("0"), "__class__", nn.Bilinear), "class"),
    "another module": (lambda model, patch: patch.setitem(model._modules, "0", nn.Linear(2, 2)), "class"),
    "a hook": (lambda model, patch: model.get_submodule("0").register_forward_hook(lambda *_: None), "part"),
    "other hooks": (set_("_forward_hooks", {}), "part"),
    "a forward of its own": (set_("forward", print), "part"),
    "a number": (set_("in_features", 7), "whole"),
    "a flag": (set_("training", False), "whole"),
    "a tensor of another class": (
        lambda model, patch: patch.setitem(model.get_submodule("0")._parameters, "weight", Tagged(torch.ones(2, 2))),
        "whole",
    ),
    "no bias": (lambda model, patch: patch.setitem(model.get_submodule("0")._parameters, "bias", None), "whole"),
}  # fmt: skip
WATCHED = ("class", "part", "whole")


@pytest.mark.parametrize("language", ["C++", "Python"])
@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("name", CHANGES)
def test_guards_hold_until_something_changes(name, watched, language, monkeypatch):
    if language == "Python":
        monkeypatch.setattr(_extension, "host_function", lambda name: None)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inside = {"class": {"strangers": model.children()}, "part": {"modules": model.children()}}
    options: Any = inside.get(watched, {"wholly": model.children()})
    guards = Guards(model, **options)
    assert guards.hold(model) and guards.hold(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert guards.hold(model), "other parameters of the same class change nothing"
    change, least = CHANGES[name]
    change(model, monkeypatch)
    assert guards.hold(model) == (WATCHED.index(watched) < WATCHED.index(least))
    if name != "a hook":
        monkeypatch.undo()
        assert guards.hold(model)


def test_plans_are_made_once_and_by_each_copy():
    count = itertools.count(1)
    plans: Plans[int] = Plans("_test_plan", lambda module: next(count))
    model = nn.Sequential(nn.Linear(2, 2))
    assert [plans.of(model), plans.of(model)] == [1, 1]
    model.eval()
    assert plans.of(model) == 2
    assert plans.of(model.train()) == 1, "of a mode that comes back it is still there"
    model[0].register_forward_hook(print)
    assert plans.of(model) == 3
    assert plans.of(copy.deepcopy(model)) == 4 and plans.of(pickle.loads(pickle.dumps(nn.Sequential()))) == 5


def encoder(num_layers: int = 3, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = fnn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dtype=torch.float64, **options)
    stack = randomised(fnn.TransformerEncoder(layer, num_layers, fnn.AddLayerNorm(12, dtype=torch.float64))).eval()
    return stack, torch.randn(2, 5, 12, dtype=torch.float64)


class Sharper(fnn.MultiheadAttention):
    """Overrides a method of the attention that forward calls."""

    def _project(self, *args: Any) -> Any:
        q, k, v = super()._project(*args)
        return 4 * q, k, v


def test_overridden_parts_of_an_attention_count_in_evaluation():
    stack, x = encoder()
    with torch.no_grad():
        before = stack(x)
    stack.layers[1].self_attn.__class__ = Sharper
    expected = stack(x)
    assert not torch.allclose(expected, before)
    with torch.no_grad():
        torch.testing.assert_close(stack(x), expected)


def test_layers_are_freed_with_their_stack():
    stack, x = encoder()
    gc.collect()
    gc.disable()
    try:
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                stack(x)
        layer = weakref.ref(stack.layers[0])
        del stack
        assert layer() is None, "it waits for the garbage collector"
    finally:
        gc.enable()


KINDS: list[dict[str, Any]] = [
    {}, {"norm_first": True}, {"norm": "rms", "activation": "swiglu", "bias": False}, {"num_kv_heads": 1},
    {"norm_first": True, "window_size": (2, 1), "activation": "gelu"},
]  # fmt: skip


CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "band": {"mask": torch.ones(5, 5, dtype=torch.bool).triu(2)},
    "padding": {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])},
    "hidden keys": {"src_key_padding_mask": torch.tensor([[False] * 5, [True, False, False, True, False]])},
    "hidden keys in a band": {
        "mask": torch.ones(5, 5, dtype=torch.bool).triu(2),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False, True, False, True, False]]),
    },
}


@each("options, mask", itertools.product(KINDS, CALLS))
def test_one_call_in_evaluation_equals_the_ops(options, mask):
    (stack, x), given = encoder(**options), CALLS[mask]
    stack.padding = "skip" if mask == "padding" else "compute"  # type: ignore[assignment]
    with torch.no_grad(), record_backends() as ran:
        found = stack(x, **given)
    with torch.inference_mode():
        assert torch.equal(stack(x, **given), found)
    with torch.no_grad(), use_backend("reference"):
        expected = stack(x, **given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with_graph = stack(x, **given)
    torch.testing.assert_close(with_graph, expected, rtol=1e-10, atol=1e-10)
    name = "varlen_attention_fwd" if mask == "padding" else "attention_fwd"
    assert {(name, "cpp"), ("add_layer_norm_fwd", "cpp"), ("feed_forward_fwd", "cpp")} <= ran


def test_a_stack_in_evaluation_compiles_to_one_graph():
    stack, x = encoder(num_layers=1)
    with torch.no_grad():
        expected = stack(x)
        torch.testing.assert_close(torch.compile(stack, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_one_call_in_evaluation_is_accurate(options, dtype, monkeypatch):
    exact, x = encoder(**options)
    stack, x = copy.deepcopy(exact).to(dtype), x.to(dtype)
    # Else the engine takes what it knows: see test_packed_stack.py.
    stack.packs_weights = False  # type: ignore[assignment]
    exact.load_state_dict(stack.state_dict())  # the rounded weights
    results: list[Tensor | None] = []
    function = _extension.function

    def noted(name: str) -> Any:
        found: Any = function(name)

        def call(*args: Any) -> Any:
            results.append(found(*args))
            return results[-1]

        return call if name == "encoder_stack" else found

    for masks in (CALLS["no mask"], CALLS["causal"], CALLS["padding"]):
        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(_extension, "function", noted)
            ours = stack(x, **masks)
        assert results.pop() is not None and not results, "one call for all layers"
        with torch.no_grad(), use_backend("reference"):
            assert_accurate(ours, stack(x, **masks), exact(x.double(), **masks))


def test_a_forward_of_the_librarys_own_class_that_was_replaced_is_called(monkeypatch):
    stack, x = encoder()
    for kind in (fnn.TransformerEncoderLayer, fnn.MultiheadAttention):
        with torch.no_grad():
            before = stack(x)
            calls: list[Any] = []
            own = kind.forward

            def counted(*args: Any, own: Any = own, calls: list[Any] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                return own(*args, **kwargs)

            with monkeypatch.context() as patched:
                patched.setattr(kind, "forward", counted)
                fastformer.accelerate(stack)
                after = stack(x)
            assert len(calls) == 3
            fastformer.accelerate(stack)
            torch.testing.assert_close(after, before)


def test_a_change_of_parameters_takes_effect_in_evaluation():
    stack, x = encoder()
    with torch.no_grad():
        before = stack(x)
        stack.layers[1].linear1.weight.data.mul_(2)
        second = stack(x)
        stack.layers[1].linear1.weight = nn.Parameter(stack.layers[1].linear1.weight / 2)
        assert not torch.allclose(second, before)
        torch.testing.assert_close(stack(x), before)
        assert stack.float()(x.float()).dtype == torch.float32
        with pytest.raises(ValueError):
            stack(x[..., :11].float())
