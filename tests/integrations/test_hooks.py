"""Hooks on accelerated models see and change the same tensors as before, and the report names them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

import fastformer
from fastformer.ops import record_backends
from tests.covering import by_turns
from tests.integrations import families as small
from tests.integrations import test_acceleration as torch_nn
from tests.integrations.families import FUSED, IDS, PACKED, RIGHT, TARGETS, exactly
from tests.nn.comparing import randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:Using non-full backward hooks")

# Some of each family: a stack, a layer, what is fused with its neighbours, what runs by itself, what stands outside.
PLACES = {
    "torch.nn": ("encoder", "encoder.layers.0", "encoder.layers.1.self_attn", "encoder.layers.0.linear1",
                 "encoder.layers.1.dropout2", "encoder.layers.0.norm1", "pool", "head"),
    "bert": ("bert.encoder", "bert.encoder.layer.0", "bert.encoder.layer.0.attention.self",
             "bert.encoder.layer.1.attention.output.LayerNorm", "bert.encoder.layer.0.output.dropout",
             "bert.encoder.layer.1.intermediate.dense", "cls.predictions.decoder"),
    "gpt2": ("", "transformer", "transformer.h.0", "transformer.h.1.attn", "transformer.h.0.mlp.c_fc",
             "transformer.h.1.ln_2", "transformer.wte", "lm_head"),
    "llama": ("", "model", "model.layers.0", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp",
              "model.layers.1.post_attention_layernorm", "model.norm", "lm_head"),
    "marian": ("model.encoder", "model.encoder.layers.0", "model.encoder.layers.1.self_attn",
               "model.encoder.layers.0.fc1", "model.decoder.layers.0.self_attn", "model.decoder.layers.1",
               "model.decoder.layers.0.encoder_attn", "model.decoder.layers.1.final_layer_norm", "lm_head"),
}  # fmt: skip
CASES = [(family, place) for family, places in PLACES.items() for place in places]
# Where a hook sees what a stack gives, which is zeros at padding.
OUTSIDE = (
    *("", "encoder", "model.encoder", "bert.encoder", "transformer", "model"),
    *("head", "pool", "cls.predictions.decoder", "lm_head", *(p for p in PLACES["marian"] if "decoder" in p)),
)


def doubling(seen: list, kind: type[nn.Module] = nn.Module) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that stores its inputs, and doubles the outputs of modules of a kind."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        seen.append(out)
        if not isinstance(module, kind):
            return None
        if isinstance(out, tuple):
            return (2 * out[0], *out[1:])
        return 2 * out if isinstance(out, Tensor) else None

    return hook


# By kind what the report says of it, the method that registers it, and the method's options.
KINDS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "forward": ("a forward hook", "register_forward_hook", {}),
    "forward with kwargs": ("a forward hook", "register_forward_hook", {"with_kwargs": True}),
    "forward, always": ("a forward hook", "register_forward_hook", {"always_call": True}),
    "forward that changes": ("a forward hook", "register_forward_hook", {}),
    "pre": ("a forward pre-hook", "register_forward_pre_hook", {}),
    "pre with kwargs": ("a forward pre-hook", "register_forward_pre_hook", {"with_kwargs": True}),
    "backward": ("a backward hook", "register_full_backward_hook", {}),
    "backward pre": ("a backward pre-hook", "register_full_backward_pre_hook", {}),
}


def hooked(kind: str, module: nn.Module | None, seen: list) -> RemovableHandle:
    """Registers a hook that keeps what it sees, on all modules if none is given."""
    _, method, options = KINDS[kind]
    hook: Any = lambda _, *args: seen.append(args)  # noqa: E731
    if kind == "forward that changes":
        hook = doubling(seen, nn.Linear if module is None else nn.Module)
    if module is None:
        method = method.replace("_", "_module_", 1)
    handle: RemovableHandle = getattr(module or torch_module, method)(hook, **options)
    return handle


GLOBAL = ("forward", "forward that changes", "pre", "backward", "backward pre")


def make(family: str) -> Any:
    torch.manual_seed(3)
    return (randomised(torch_nn.Classifier()) if family == "torch.nn" else small.make(family)).train()


def run(family: str, model: Any) -> Tensor:
    if family == "torch.nn":
        return model(torch_nn.IDS)
    if family == "marian":
        return model(input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=TARGETS).logits
    return model(IDS, attention_mask=RIGHT.long()).logits * RIGHT[..., None]


class Step:
    """The output of a model, the inputs of its hooks, the gradients, and fastformer's ops that ran."""

    def __init__(self, family: str, model: Any, hook: Callable[[list], Any], *, is_plain: bool) -> None:
        saw: list[Any] = []
        handle = hook(saw)
        try:
            with exactly(family) if is_plain else contextlib.nullcontext(), record_backends() as ran:
                out = run(family, model)
                torch.manual_seed(1)
                out.backward(torch.randn_like(out))
        finally:
            handle.remove()
        self.ran = {name for name, _ in ran}
        self.values = [out, *(p.grad for p in model.parameters() if p.grad is not None)]
        tensors = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in saw)
        self.seen = [[each.detach().clone() for each in own if each.is_floating_point()] for own in tensors]

    def assert_same(self, other: Step, *, with_padding: bool) -> None:
        close = {"rtol": 1e-7, "atol": 1e-9}
        for ours, theirs in zip(self.values, other.values, strict=True):
            torch.testing.assert_close(ours, theirs, **close)
        assert len(self.seen) == len(other.seen)
        for mine, others in zip(self.seen, other.seen, strict=True):
            for ours, theirs in zip(mine, others, strict=True):
                if not with_padding and theirs.dim() == 3:
                    real = ~torch_nn.PADDING if theirs.shape[0] == 3 else RIGHT
                    if theirs.shape[:2] == real.shape:
                        ours, theirs = ours * real[..., None], theirs * real[..., None]
                torch.testing.assert_close(ours, theirs, **close)


# The others go the same ways.
QUICK = ("forward that changes", "pre", "backward")
# One function finds the hooks of all kinds, so each place has one of them in turn.
IN_TURNS = [
    pytest.param(family, place, kind, marks=() if kind == QUICK[turn % 3] else pytest.mark.slow)
    for turn, (family, place) in enumerate(CASES)
    for kind in KINDS
]


@pytest.mark.parametrize("family, place, kind", IN_TURNS)
def test_a_hook_sees_and_changes_the_same_tensors(family, place, kind):
    said = KINDS[kind][0]
    plain, model = make(family), make(family)
    kept = hooked(kind, model.get_submodule(place), [])
    report = fastformer.report(fastformer.accelerate(model))
    inside = any(place == name or place.startswith(f"{name}.") or not name for name in report.swapped)
    assert report.hooked == ({place: said} if inside else {})
    line = f"hooked, and called as before: {place or 'the model'}: {said}"
    assert (line in str(report)) == inside
    kept.remove()
    ours = Step(family, model, partial(hooked, kind, model.get_submodule(place)), is_plain=False)
    theirs = Step(family, plain, partial(hooked, kind, plain.get_submodule(place)), is_plain=True)
    # Where a module gives no tensor, PyTorch calls no hook of its gradients.
    assert theirs.seen or (kind.startswith("backward") and place in OUTSIDE)
    ours.assert_same(theirs, with_padding=place not in OUTSIDE)
    if place not in OUTSIDE:
        assert PACKED not in ours.ran


@pytest.mark.parametrize("family", PLACES)
def test_fusion_continues_after_a_hook_is_removed(family):
    model = make(family)
    handles = [model.get_submodule(place).register_forward_hook(lambda *args: None) for place in PLACES[family]]
    padding = "skip" if family == "torch.nn" else "auto"  # torch.nn itself computes padding in training
    fastformer.accelerate(model, padding=padding)
    hooked = Step(family, model, lambda seen: handles[0], is_plain=False)
    for handle in handles:
        handle.remove()
    freed = Step(family, model, lambda seen: handles[0], is_plain=False)
    fresh = make(family)
    fastformer.accelerate(fresh, padding=padding)
    assert freed.ran == Step(family, fresh, lambda seen: handles[0], is_plain=False).ran
    assert PACKED in freed.ran and PACKED not in hooked.ran


@pytest.mark.parametrize("family, kind", by_turns([*PLACES], GLOBAL))
def test_a_hook_on_all_modules(family, kind):
    plain, model = make(family), make(family)
    handle = hooked(kind, None, [])
    try:
        report = fastformer.report(fastformer.accelerate(model))
    finally:
        handle.remove()
    assert report.hooked.keys() == report.swapped.keys()
    assert set(report.hooked.values()) == {"a hook on all modules"}
    assert "hooked, and called as before: " in str(report) and "more: a hook on all modules" in str(report)
    ours = Step(family, model, partial(hooked, kind, None), is_plain=False)
    assert ours.seen and not ours.ran & {PACKED, FUSED}
    if family != "torch.nn":  # which calls no out_proj, as ours does: see DIFFERENCES.md
        ours.assert_same(Step(family, plain, partial(hooked, kind, None), is_plain=True), with_padding=True)
    assert not fastformer.report(fastformer.accelerate(model)).hooked


def test_each_module_is_named_with_all_of_its_hooks_by_every_call():
    model = make("torch.nn")
    layer = model.encoder.layers[0]
    for module in (model.encoder.layers[1].linear2, model.encoder.layers[0].linear2, model.encoder.layers[1].norm1):
        module.register_forward_hook(lambda *args: None)
    model.encoder.layers[0].linear1.register_forward_hook(print)  # has no module of its own
    layer.linear1.register_forward_pre_hook(lambda *args: None)
    layer.linear1.register_full_backward_hook(lambda *args: None)
    model.head.register_forward_hook(lambda *args: None)
    report = fastformer.report(fastformer.accelerate(model))
    assert report.hooked == {
        "encoder.layers.0.linear1": "a forward pre-hook, a forward hook, a backward hook",
        "encoder.layers.0.linear2": "a forward hook",
        "encoder.layers.1.linear2": "a forward hook",
        "encoder.layers.1.norm1": "a forward hook",
    }
    model.pool.register_forward_pre_hook(lambda *args: None)
    again = fastformer.report(fastformer.accelerate(model))
    assert again.swapped == report.swapped and again.hooked == report.hooked | {"pool": "a forward pre-hook"}
    fastformer.restore(model)
    assert "hooked" not in str(fastformer.report(fastformer.accelerate(make("torch.nn"))))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "marian"])
def test_transformers_recording_is_not_a_users_hook(family):
    model = make(family)
    options = {"decoder_input_ids": TARGETS} if family == "marian" else {}
    model(input_ids=IDS, output_hidden_states=True, **options)
    assert any(module._forward_hooks for module in model.modules())
    report = fastformer.report(fastformer.accelerate(model))
    assert not report.hooked and "hooked" not in str(report)
    with record_backends() as ran:
        run(family, model)
    assert PACKED in {name for name, _ in ran}
