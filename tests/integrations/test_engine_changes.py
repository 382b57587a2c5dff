"""Encoders on the C++ engine whose model, inputs or modes change between two calls: what the plain model would give."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.generation import repack
from fastformer.integrations import accelerate, report, restore
from tests.integrations import conversions
from tests.integrations import test_engine_encode as encode
from tests.integrations import test_engine_sources as sources
from tests.integrations.encoders import BASE, ONLY_EAGER, Case
from tests.integrations.test_engine_encode import inputs
from tests.integrations.test_engine_sources import whole

MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [0] * 2 + [1] * 7])


def pair(kind: str = "bert", options: dict[str, Any] | None = None, **asked: Any) -> tuple[Any, Any]:
    """Returns a model, unchanged and accelerated, after one call of each."""
    attention = "eager" if kind in ONLY_EAGER else "sdpa"
    plain = Case(kind, BASE, options or {}).make(torch.float32, attn_implementation=attention)
    ours = accelerate(copy.deepcopy(plain), **asked)
    with torch.no_grad():
        ours(**inputs())
    return plain, ours


@torch.no_grad()
def alike(plain: Any, ours: Any, call: Callable[[Any], Tensor] = lambda model: model(**inputs())[0]) -> None:
    """Checks that both return the same values or raise an error."""
    try:
        expected = call(plain)
    except Exception:
        with pytest.raises((RuntimeError, ValueError, IndexError, TypeError, AttributeError)):
            call(ours)
        return
    found = call(ours)
    assert found.dtype == expected.dtype and found.device == expected.device
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def twice(function: Any) -> Any:
    @functools.wraps(function)  # whose signature transformers reads
    def own(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return own


METHODS = [
    ("roberta", "RobertaLayer", "feed_forward_chunk"),
    ("electra", "ElectraLayer", "feed_forward_chunk"),
    ("distilbert", "FFN", "ff_chunk"),
    ("mpnet", "MPNetEncoder", "compute_position_bias"),
    ("mpnet", "MPNetEncoder", "relative_position_bucket"),
    ("roberta", "RobertaEmbeddings", "create_position_ids_from_input_ids"),
]


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [case if case[0] in ("roberta", "mpnet") else pytest.param(*case, marks=pytest.mark.slow) for case in METHODS],
)
def test_a_method_that_is_replaced_in_a_class_inside_is_called(
    kind: str, owner: str, name: str, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    source = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    method = vars(getattr(source, owner))[name]
    models = pair(kind)
    is_static, count = isinstance(method, staticmethod), calls[0]
    assert count == 1
    own = twice(method.__func__ if is_static else method)
    if name in ("create_position_ids_from_input_ids", "relative_position_bucket"):
        own = lambda *args, **kwargs: torch.full_like(args[0], 3)  # noqa: E731
    with monkeypatch.context() as patched, torch.no_grad():
        before = models[0](**inputs())[0]
        patched.setattr(getattr(source, owner), name, staticmethod(own) if is_static else own)
        assert not torch.allclose(models[0](**inputs())[0], before)
        torch.testing.assert_close(models[1](**inputs())[0], before, rtol=1e-4, atol=1e-5)  # examined when handed over
        count = calls[0]
        alike(models[0], accelerate(models[1]))
        alike(models[0], accelerate(copy.deepcopy(models[0])))
    assert calls[0] == count
    repack(models[1])  # examines the class again, like accelerate
    alike(*models)
    assert calls[0] == count + 1


def test_the_bias_of_a_t5_that_is_replaced_is_computed(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    plain = conversions.CASES["T5 1.1"].make(torch.float32)
    ours = accelerate(copy.deepcopy(plain))
    call = lambda model: model(**whole(inputs())).encoder_last_hidden_state  # noqa: E731
    alike(plain, ours, call)
    assert calls == [1]
    monkeypatch.setattr(T5Attention, "compute_bias", twice(T5Attention.compute_bias))
    alike(plain, accelerate(ours), call)
    assert calls == [1]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_another_pad_id_in_the_config_does_not_move_positions(kind: str, calls: list[int]) -> None:
    """A user may write a tokenizer's id into a config; the modules use the id with which they were made."""
    plain, ours = pair(kind)
    batch = inputs() | {"attention_mask": MASK}
    for model in (plain, ours):
        model.config.pad_token_id = 4
    alike(plain, ours)
    alike(plain, ours, lambda model: model(**batch)[0][MASK.bool()])
    if kind == "roberta":
        for model in (plain, ours):
            model.config.pad_token_id, model.embeddings.padding_idx = 1, 7
        alike(plain, ours)


def test_memory_at_the_address_of_a_freed_parameter(calls: list[int]) -> None:
    plain, ours = pair()
    for number in range(4):
        for model in (plain, ours):
            model.encoder.layer[0].intermediate.dense.weight.data = torch.full((40, 24), float(number))
        if number != 2:  # one that no call has seen, in whose place the next one may be
            alike(plain, ours)
    for model in (plain, ours):
        table = model.embeddings.word_embeddings
        table.weight.data = table.weight.data.t().contiguous().t()
    alike(plain, ours)
    assert calls == [5]


def doubled(module: Any, args: Any, out: Any) -> Any:
    """A forward hook."""
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def of_layer(name: str, attribute: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute of a module of the first layer."""
    return lambda model: setattr(model.encoder.layer[0].get_submodule(name), attribute, value)


def patched_bound(model: Any) -> None:
    layer = model.encoder.layer[0]
    layer.forward = types.MethodType(lambda self, x, *args, **kwargs: x * 2, layer)


def swapped_layers(model: Any) -> None:
    layers = model.encoder.layer._modules
    layers["0"], layers["1"] = layers["1"], layers["0"]


@torch.no_grad()
def halved(model: Any) -> None:
    model.encoder.layer[0].intermediate.dense.weight.mul_(0.5)


def raised_unseen(model: Any) -> None:
    model.embeddings.LayerNorm.weight.data.numpy()[:] += 0.5


# What is done to a model -> whether the engine serves the call after it.
TWICE = type("Twice", (nn.LayerNorm,), {"forward": lambda self, x: x * 2})
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a hook": (lambda model: model.encoder.layer[1].output.register_forward_hook(doubled), 0),
    "a pre-hook": (lambda model: model.encoder.layer[0].register_forward_pre_hook(lambda _, a: (a[0] * 2, *a[1:])), 0),
    "a hook of the embedding": (lambda model: model.embeddings.word_embeddings.register_forward_hook(doubled), 0),
    "a hook of the model": (lambda model: model.register_forward_hook(lambda _, a, out: (out[0] * 2,)), 0),
    "a forward of the model": (
        lambda m: setattr(m, "forward", lambda *args, own=m.forward, **kwargs: (own(*args, **kwargs)[0] * 2,)), 0,
    ),
    "a forward of a layer": (patched_bound, 0),
    "another activation": (of_layer("intermediate", "intermediate_act_fn", nn.Tanh()), 0),
    "fewer layers": (lambda model: setattr(model.encoder, "layer", model.encoder.layer[:1]), 0),
    "layers in another order": (swapped_layers, 0),
    "a layer twice": (lambda model: model.encoder.layer._modules.update({"0": model.encoder.layer[1]}), 0),
    "another class": (of_layer("output.LayerNorm", "__class__", TWICE), 0),
    "another eps": (of_layer("output.LayerNorm", "eps", 0.5), 0),
    "a parametrization": (
        lambda model: nn.utils.parametrizations.weight_norm(model.encoder.layer[0].intermediate.dense), 0,
    ),
    "another weight": (lambda m: of_layer("intermediate.dense", "weight", nn.Parameter(torch.zeros(40, 24)))(m), 1),
    "a weight written in place": (halved, 1),
    "a weight written unseen": (raised_unseen, 1),
    "token types": (lambda model: model.embeddings.token_type_ids.fill_(1), 0),
    "a norm of rows": (lambda model: setattr(model.embeddings.word_embeddings, "max_norm", 0.1), 0),
    "more words": (lambda model: model.resize_token_embeddings(80), 1),
    "tied weights": (lambda m: of_layer("output.dense", "weight", m.encoder.layer[1].output.dense.weight)(m), 1),
    "no pooler": (lambda model: setattr(model, "pooler", None), 1),
    "a decoder's config": (lambda model: setattr(model.config, "is_decoder", True), 0),
    "another dtype": (lambda model: model.double(), 0),
}  # fmt: skip
CHANGES_NO_STATES = ("a parametrization", "more words", "no pooler", "a decoder's config")


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_after_accelerate_takes_effect(name: str, calls: list[int]) -> None:
    (plain, ours), (change, served) = pair(), CHANGES[name]
    before = plain(**inputs())[0]
    for model in (plain, ours):
        torch.manual_seed(0)
        change(model)
    alike(plain, ours)
    assert calls == [1 + served]
    assert name in CHANGES_NO_STATES or not torch.allclose(plain(**inputs())[0].float(), before)


@pytest.mark.parametrize(
    ("kind", "place"), [("bert", ""), ("xlm-roberta labels", "roberta"), ("Bart real", "model.encoder")]
)
def test_an_option_turns_it_off(kind: str, place: str, calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    plain: Any
    plain, ours = (sources.pair if kind in conversions.CASES else encode.pair)(kind, encode=False)
    own = [model.get_submodule(place) for model in (plain, ours)]

    def check(count: int) -> None:
        alike(*own)
        assert calls == [count]

    assert "asked" in report(ours).encode[place]
    check(0)
    accelerate(ours)
    assert "C++" in report(ours).encode[place] and [*report(ours).encode] == [place]
    check(1)
    for model in own:
        next(module for module in model.modules() if "Layer" in type(module).__name__).register_forward_hook(doubled)
    with caplog.at_level(logging.DEBUG, "fastformer"):
        check(1)
    assert "hook" in caplog.text and "hook" in report(ours).encode[place] and "hook" in str(report(ours))
    restore(ours)
    assert type(own[1]) is type(own[0]) and vars(own[1]).keys() == vars(own[0]).keys()
    check(1)


MASKS: dict[str, Any] = {
    "3-d": MASK[:, None].expand(3, 9, 9), "4-d": MASK[:, None, None].bool().expand(3, 1, 9, 9),
    "added": torch.where(MASK[:, None, None] == 1, 0.0, -1e9).expand(3, 1, 9, 9), "of one row": MASK[:1],
    "longer": torch.ones(3, 11), "1-d": torch.ones(9), "other numbers": -MASK, "of other rows": torch.ones(2, 9),
    "not contiguous": torch.ones(9, 3).t(), "learning": torch.ones(3, 9).requires_grad_(), "on meta": MASK.to("meta"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64])
def test_a_mask_may_have_any_dtype(dtype: torch.dtype, calls: list[int]) -> None:
    alike(*pair(), lambda model: model(**inputs(), attention_mask=MASK.to(dtype))[0][MASK.bool()])
    assert calls == [2]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_another_shape(name: str) -> None:
    alike(*pair(), lambda model: model(**inputs(), attention_mask=MASKS[name])[0])


IDS = inputs()["input_ids"]
INPUTS: dict[str, Any] = {
    "int32": IDS.int(), "uint8": IDS.to(torch.uint8), "floats": IDS.float(),
    "no columns": IDS[:, :0], "1-d": IDS[0], "3-d": IDS[None], "a list": IDS.tolist(),
    "nothing": None, "not contiguous": IDS.t().contiguous().t(), "expanded": IDS[:1].expand(3, 9),
    "beyond 32 bits": IDS + 2**40,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", INPUTS)
def test_ids_of_another_kind(name: str, kind: str) -> None:
    alike(*pair(kind), lambda model: model(input_ids=INPUTS[name])[0])


def test_a_model_that_moves_to_meta_and_back(calls: list[int]) -> None:
    plain, ours = pair()
    weights = copy.deepcopy(plain.state_dict())
    for model in (plain, ours):
        model.to("meta")
    alike(plain, ours)
    with torch.no_grad():
        assert ours(input_ids=IDS.to("meta"))[0].is_meta
    assert calls == [1]
    for model in (plain, ours):
        model.load_state_dict(weights, assign=True)
        model.embeddings.position_ids = torch.arange(48)[None]
        model.embeddings.token_type_ids = torch.zeros(1, 48, dtype=torch.long)
    alike(plain, ours)
    assert calls == [2]


def test_inference_mode(calls: list[int]) -> None:
    plain, ours = pair()
    with torch.inference_mode():
        alike(plain, ours, lambda model: model(input_ids=IDS.clone())[0])
        for model in (plain, ours):
            model.encoder.layer[0].intermediate.dense.weight.mul_(0.5)
        alike(plain, ours)
        for model in (plain, ours):
            model.encoder.layer[0].intermediate.dense.bias.data.add_(0.5)
        alike(plain, ours)
        assert calls == [4]
        models = pair()
    assert calls == [4]  # weights of inference mode change unnoticed
    alike(*models)


def test_gradients_are_computed_if_an_input_requires_them(calls: list[int]) -> None:
    plain, ours = pair()
    embedded = torch.randn(3, 9, 24)
    alike(plain, ours, lambda model: model(inputs_embeds=embedded.clone().requires_grad_())[0])
    found = []
    for model in (plain, ours.requires_grad_(False)):
        leaf = embedded.clone().requires_grad_()
        model(inputs_embeds=leaf)[0].square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert calls == [1]


def test_a_precision_ends_with_restore(calls: list[int]) -> None:
    plain, ours = pair("bert", precision="int8")
    with torch.no_grad():
        assert not torch.equal(ours(**inputs())[0], plain(**inputs())[0])
    restore(ours)
    with torch.no_grad():
        assert torch.equal(ours(**inputs())[0], plain(**inputs())[0]) and calls == [2]
    assert vars(ours).keys() == vars(plain).keys()
    alike(plain, accelerate(ours))  # in fp32 again
    assert calls == [3]


def test_a_shallow_copy_uses_its_own_hooks_and_settings(calls: list[int]) -> None:
    plain, ours = pair()
    twin = copy.copy(ours)
    alike(plain, twin)
    for other in (twin, copy.copy(copy.deepcopy(ours))):
        accelerate(other, encode=False)
    count = calls[0]
    alike(plain, twin)
    assert calls == [count]
    alike(plain, ours)
    assert calls == [count + 1]
    handle = twin.encoder.layer[1].register_forward_pre_hook(lambda _, a: (a[0] * 2, *a[1:]))  # of both
    other = plain.encoder.layer[1].register_forward_pre_hook(lambda _, a: (a[0] * 2, *a[1:]))
    alike(plain, accelerate(twin))
    alike(plain, ours)
    handle.remove(), other.remove()
    alike(plain, twin)


def test_threads_and_a_load_in_between() -> None:
    plain, ours = pair()
    states = [copy.deepcopy(plain.state_dict()) for _ in range(2)]
    for value in states[1].values():
        value.mul_(0.7)
    over, errors = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            with torch.no_grad():
                while not over.is_set():
                    assert ours(**inputs())[0].isfinite().all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20):
        ours.load_state_dict(states[number % 2])
    over.set()
    for thread in threads:
        thread.join()
    assert not errors
    plain.load_state_dict(states[1])
    alike(plain, ours)
