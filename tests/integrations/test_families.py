"""Accelerated models of every family give the results of the original models."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fastformer
from fastformer.integrations.conversion import from_huggingface, to_huggingface
from fastformer.integrations.known import CACHE
from tests.covering import by_turns, covering
from tests.integrations.families import (
    CAUSAL,
    DROPOUTS,
    FAMILIES,
    FUSED,
    HEADS,
    HOLES,
    IDS,
    LEFT,
    PACKED,
    RIGHT,
    SEQ2SEQ,
    TARGETS,
    Wrapped,
    assert_all_same,
    before_and_after,
    exactly,
    gradients,
    layers_of,
    make,
    ran,
    run,
)
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PACKING = tuple(family for family in FAMILIES if family != "t5")  # whose attention has a bias: see test_t5.py
MASKS = {"no mask": None, "right": RIGHT, "left": LEFT, "holes": HOLES}
# Linear layers, and the other modules, that are swapped.
SWAPPED = {"bert": (14, 11), "gpt2": (1, None), "llama": (15, None), "bart": (33, 8), "marian": (33, 8)}


def is_packed(family: str, mask: str) -> bool:
    """Returns whether a stack is packed. BERT's stays padded if a first token is padding, which a pooler might read."""
    return mask != "no mask" and family in PACKING and (family, mask) != ("bert", "left")


@pytest.mark.parametrize(
    ("family", "mask", "mode", "use_cache"), covering(FAMILIES, list(MASKS), ["train", "eval"], [False, True])
)
def test_outputs_are_the_same(family, mask, mode, use_cache):
    if use_cache and family == "bert":
        pytest.skip("an encoder keeps no cache")
    model, given = getattr(make(family), mode)(), MASKS[mask]
    options = {} if family == "bert" else {"use_cache": use_cache}
    real = torch.ones(4, 9, 1) if given is None or family in SEQ2SEQ else given[..., None].double()
    real = real[:, : TARGETS.shape[1]] if family in SEQ2SEQ else real

    def step() -> list[Tensor]:
        out = run(model, given, **options)
        assert family not in CAUSAL or (out.get(CACHE) is not None) == use_cache
        return [out.loss, out.logits * real, *gradients(model, out.loss)]

    expected, found = before_and_after(model, step)
    assert_all_same(found, expected, "loss, logits or gradient")
    report, names = fastformer.report(model), ran(step)
    assert not report.left and report.swapped
    if family in SWAPPED:
        linears, others = SWAPPED[family]
        assert Counter(report.swapped.values())["Linear"] == linears
        assert others is None or len(report.swapped) == linears + others
    assert "add_layer_norm_fwd" in names and (FUSED in names) == (family != "llama")
    assert (PACKED in names) == is_packed(family, mask)
    assert "attention_fwd" in names or is_packed(family, mask)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SEQ2SEQ])
def test_a_stack_returns_zeros_at_padding(family):
    """It does so if you ask for it; the output of a stack inside a larger model may be read there if you call it
    directly.
    """
    model, given = make(family), {"input_ids": IDS, "attention_mask": RIGHT.long()}
    fastformer.accelerate(model)
    assert model.base_model(**given).last_hidden_state[~RIGHT].any()
    fastformer.accelerate(model.base_model, padding="skip")
    hidden = model.base_model(**given).last_hidden_state
    assert not hidden[~RIGHT].any() and hidden[RIGHT].all()


@pytest.mark.parametrize(("family", "num_beams", "mask"), covering([*CAUSAL, *SEQ2SEQ], [1, 3], ["right", "left"]))
def test_generated_tokens_are_the_same(family, num_beams, mask):
    model = make(family).eval()
    options = {"attention_mask": MASKS[mask].long(), "max_new_tokens": 12, "num_beams": num_beams, "do_sample": False}
    implementation = model.config._attn_implementation
    with exactly(family):
        expected = model.generate(IDS, **options)
    fastformer.accelerate(model)
    names = ran(lambda: model.generate(IDS, **options))
    # A decoder alone has to keep what stands at padding on the right: it goes on behind it.
    assert (PACKED in names) == (family in PACKING and (family in SEQ2SEQ or mask == "left"))
    assert torch.equal(model.generate(IDS, **options), expected)
    assert fastformer.restore(model)
    assert model.config._attn_implementation == implementation and not ran(lambda: run(model, RIGHT))
    assert not any("fastformer" in type(module).__module__ for module in model.modules())


@pytest.mark.parametrize(("family", "side", "use_cache"), covering(SEQ2SEQ, ["right", "left"], [True, False]))
def test_generates_the_same_after_padded_prompts(family, side, use_cache):
    """`generate` reads the logits of the last position, even if that is padding."""
    model = make(family).eval()
    real = torch.arange(4) < torch.tensor([[4], [2], [1], [3]])
    real = real if side == "right" else real.flip(1)
    given = {"attention_mask": RIGHT.long(), "decoder_attention_mask": real.long(), "use_cache": use_cache}
    given |= {"decoder_input_ids": TARGETS[:, :4], "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(*before_and_after(model, lambda: model.generate(IDS, **given)))


@pytest.mark.parametrize("family", CAUSAL)
def test_generates_the_same_from_the_logits_at_padding(family):
    model = make(family).eval()
    options = {"attention_mask": RIGHT.long(), "max_new_tokens": 5, "do_sample": False, "logits_to_keep": 0}
    assert torch.equal(*before_and_after(model, lambda: model.generate(IDS, **options)))


READERS = {
    "bert": ["BertForQuestionAnswering"],
    "gpt2": ["GPT2DoubleHeadsModel", "GPT2ForQuestionAnswering"],
    "llama": ["LlamaForQuestionAnswering"],
    "bart": ["BartForSequenceClassification", "BartForQuestionAnswering", "BartForCausalLM"],
    "marian": ["MarianForCausalLM"],
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in READERS.items() for name in names])
def test_heads_that_read_padding_see_it(family, name):
    model = make(family, getattr(transformers, name), use_cache=False).eval()
    ids = IDS.clone()
    ids[:, -1] = 2  # the end token, which a classifier reads
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": RIGHT.long()}
    if family in SEQ2SEQ and "Causal" not in name:
        given |= {"attention_mask": torch.ones(4, 9).long(), "decoder_attention_mask": RIGHT.long()}
    with torch.no_grad():
        expected, found = before_and_after(model, lambda: model(**given)[0])
    assert_same(found, expected, name, 1e-9)


ASKED: dict[str, dict[str, Any]] = {
    "hidden states": {"output_hidden_states": True},
    "weights": {"output_attentions": True},
    "a tuple": {"return_dict": False},
    "the last logits": {"logits_to_keep": 2, "labels": None},
}
MORE = ["hidden states", "weights", "checkpointing", "a tuple", "the last logits", "a forward of its own"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", MORE)
def test_a_request_for_more_is_answered(what, family):
    """If a call asks for internals, the batch isn't packed, and the results are as before.

    For hooks, see test_hooks.py.
    """
    if what in MORE[4:] and family not in CAUSAL:
        pytest.skip("of decoders alone")
    model = make(family, **({"attn_implementation": "eager"} if what == "weights" else {}))
    model.train(what == "checkpointing")
    options = ASKED.get(what, {})
    if what == "checkpointing":
        model.gradient_checkpointing_enable()
    elif what == "a forward of its own":
        layers_of(model)[0][1].mlp.forward = lambda x: 3 * x
    is_whole = what == "a tuple"
    results = []
    for accelerated in (False, True):
        if accelerated:
            report = fastformer.report(fastformer.accelerate(model))
            was_touched = what == "a forward of its own" and family == "gpt2"
            assert bool(report.left) == was_touched
            names = ran(lambda: run(model, RIGHT, **options))
            assert (PACKED in names) == (is_whole and family in PACKING)
        with exactly(family, accelerated=accelerated):
            out = run(model, RIGHT, **options)
            if is_whole:
                results.append([out[0], out[1] if family in SEQ2SEQ else out[1] * RIGHT[..., None]])
                continue
            loss = out.logits.square().sum() if out.loss is None else out.loss
            kinds = [f"{of}{kind}" for of in ("", "encoder_", "decoder_") for kind in ("hidden_states", "attentions")]
            more = [each for name in (*kinds, "cross_attentions") for each in getattr(out, name, None) or ()]
            assert what not in MORE[:2] or len(more) >= 2
            results.append([out.logits, *more, *gradients(model, loss)])
    assert_all_same(results[1], results[0], what)


@pytest.mark.parametrize("family", PACKING)
def test_packs_again_when_nothing_is_recorded(family):
    model = make(family).eval()
    fastformer.accelerate(model)
    run(model, RIGHT, output_hidden_states=True)
    assert PACKED in ran(lambda: run(model, RIGHT))
    assert PACKED not in ran(lambda: run(model, RIGHT, output_hidden_states=True))


@pytest.mark.parametrize("how", ["told", "configured"])
@pytest.mark.parametrize("family", [*CAUSAL, "bart", "marian"])
def test_a_tuple_equals_its_dict(family, how):
    model = make(family).eval()
    fastformer.accelerate(model, padding="skip")
    stack = model.base_model if family in CAUSAL else model.base_model.encoder
    given, told = {"input_ids": IDS, "attention_mask": RIGHT.long()}, {"return_dict": False} if how == "told" else {}
    with torch.no_grad():
        expected, logits = stack(**given).to_tuple(), run(model, RIGHT).logits
        if told:
            assert torch.equal(run(model, RIGHT, **told)[1], logits)
        # transformers' own heads go with no stack whose config says so.
        model.config.return_dict = how == "told"
        found = stack(**given, **told)
    assert type(found) is tuple and len(found) == len(expected)
    assert torch.equal(found[0], expected[0]) and not found[0][~RIGHT].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_works_in_training(family):
    for options in ({name: 0.4} for name in DROPOUTS[family]):
        model = make(family, **options).train()
        fastformer.accelerate(model)
        assert not torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits), options
        model.eval()
        assert torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits)


@pytest.mark.parametrize("family, order", by_turns([*FAMILIES], ["wrapped first", "accelerated first"]))
def test_a_wrapped_layer_is_called(family, order):
    """The stack stays padded, because the wrapper may mix tokens."""
    model = make(family).eval()
    with exactly(family):
        expected = run(model, RIGHT).logits
    if order == "accelerated first":
        fastformer.accelerate(model)
    for layers in layers_of(model):
        layers[1] = Wrapped(layers[1])
    fastformer.accelerate(model)
    assert_same(run(model, RIGHT).logits, expected, "logits", 1e-9)
    assert PACKED not in ran(lambda: run(model, RIGHT))


@pytest.mark.parametrize("family", PACKING)
def test_copies_and_pickles_and_keeps_its_signature(family):
    model = make(family).eval()
    signature = inspect.signature(model.forward)
    fastformer.accelerate(model)
    assert inspect.signature(model.forward) == signature
    expected = run(model, RIGHT).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert PACKED in ran(partial(run, other, RIGHT))
        assert torch.equal(run(other, RIGHT).logits, expected)
        assert fastformer.restore(other) and not ran(partial(run, other, RIGHT))
    assert type(model).__name__ == HEADS[family]
    assert PACKED in ran(partial(run, model, RIGHT)), "a copy has modules of its own"


class Adapter(nn.Module):
    """A wrapper around a linear layer, as adapters add it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def adapt(model: nn.Module, names: tuple[str, ...]) -> None:
    torch.manual_seed(5)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names:
                sizes = (child.nx, child.nf) if hasattr(child, "nf") else (child.in_features, child.out_features)
                setattr(parent, name, Adapter(child, *sizes).double())


ADAPTED = {
    "attention": ("c_attn", "q_proj", "v_proj", "query", "value", "q", "v"),
    "feed-forward": ("c_fc", "c_proj", "up_proj", "down_proj", "fc1", "fc2", "dense", "wi"),
}


@pytest.mark.parametrize("family, layers, first", covering([*FAMILIES], [*ADAPTED], ["adapters", "accelerate"]))
def test_adapters_take_effect(family, layers, first):
    """It is unknown what they read, so they get the whole batch."""
    results = []
    for accelerated in (False, True):
        model = make(family)
        if accelerated and first == "accelerate":
            fastformer.accelerate(model)
        adapt(model, ADAPTED[layers])
        if accelerated and first == "adapters":
            fastformer.accelerate(model)
        with exactly(family, accelerated=accelerated):
            out = run(model, RIGHT)
            names = ran(partial(run, model, RIGHT))
            assert PACKED not in names and ("fc1" not in layers or FUSED not in names)
        adapted = [p for name, p in model.named_parameters() if ".down.weight" in name or ".up.weight" in name]
        results.append([out.loss, *torch.autograd.grad(out.loss, adapted)])
        assert len(adapted) >= 4
    assert_all_same(results[1], results[0], "adapters")


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.15.1", "5.16.0", "5.23.0.dev0"])
def test_versions_of_transformers_with_other_layers_are_refused(version: str, monkeypatch) -> None:
    """Its models are neither accelerated nor converted then, but modules of torch.nn are accelerated."""
    theirs, ours = make("llama"), from_huggingface(make("llama"))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    is_known = version.startswith(("5.16", "5.23"))
    for call in (lambda: fastformer.accelerate(theirs), lambda: from_huggingface(theirs), lambda: to_huggingface(ours)):
        with contextlib.nullcontext() if is_known else pytest.raises(ImportError, match=version.replace(".", r"\.")):
            call()
    layer = fastformer.accelerate(nn.TransformerEncoderLayer(8, 2, 16))
    assert fastformer.report(layer).swapped
    assert bool(fastformer.report(theirs).swapped) if is_known else type(theirs) is transformers.LlamaForCausalLM
