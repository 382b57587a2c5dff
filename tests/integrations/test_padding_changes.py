"""If a change of a model, or around it, might read padding, padding is computed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.loss import loss_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.bert import modeling_bert as bert
from transformers.models.llama import modeling_llama as llama

import fastformer
from tests.integrations.test_padding import IDS, LABELS, MASK, assert_equal, given_to, make, packs
from tests.integrations.test_padding_sweep import compared, mixed, pooled

ORDERS = ("before", "after")
SEQ2SEQ = ["BartForConditionalGeneration", "T5ForConditionalGeneration"]


def call(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(compared(model(IDS, attention_mask=MASK)))


def check(name: str, edit: Callable[[Any], None], order: str) -> Any:
    """Checks that an edit before or after `accelerate` has the same effect as on the plain model."""
    plain, ours = make(name), make(name)
    edit(plain)
    if order == "before":
        edit(ours)
    fastformer.accelerate(ours)
    if order == "after":
        assert packs(lambda: ours(IDS, attention_mask=MASK))
        edit(ours)
    for mine, other in zip(call(ours), call(plain), strict=True):
        assert_equal(mine, other)
    return ours


def stand_a_function_in(name: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        part = getattr(model, name)
        delattr(model, name)
        object.__setattr__(model, name, lambda *args, **kwargs: read(part(*args, **kwargs)))

    def read(out: Any) -> Any:
        if isinstance(out, Tensor):
            return mixed(out)
        out.last_hidden_state = mixed(out.last_hidden_state)
        return out

    return edit


def pool_by_a_function(model: Any) -> None:
    del model.pooler
    model.pooler = lambda hidden: hidden.mean(1)


def pool_where_there_was_no_pooler(model: Any) -> None:
    del model.pooler
    model.pooler = None
    call(model)
    model.pooler = lambda hidden: hidden.mean(1)


def hook_in_another_dictionary(model: Any) -> None:
    """Replaces the dictionary of hooks, as some tools do to remove all hooks."""
    model.classifier._forward_hooks = OrderedDict()
    model.classifier.register_forward_hook(lambda module, args, out: mixed(out))


def children_in_another_dictionary(model: Any) -> None:
    model.__dict__["_modules"] = dict(model._modules) | {"classifier": nn.Sequential(model.classifier, nn.Softmax(1))}


def chunk_of_a_layer(model: Any) -> None:
    layer = model.encoder.layer[0]
    own = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda x: mixed(own(x))


EDITS: list[tuple[str, Callable[[Any], None]]] = [
    ("BertModel", pool_by_a_function),
    ("BertModel", pool_where_there_was_no_pooler),
    ("BertModel", chunk_of_a_layer),
    ("BertForTokenClassification", stand_a_function_in("classifier")),
    ("BertForTokenClassification", stand_a_function_in("bert")),
    ("LlamaForCausalLM", stand_a_function_in("lm_head")),
    ("BertForTokenClassification", hook_in_another_dictionary),
    ("GPT2ForTokenClassification", hook_in_another_dictionary),
    ("BertForTokenClassification", children_in_another_dictionary),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "edit"), EDITS)
def test_a_function_in_place_of_a_module_may_read_padding(name, edit, order):
    model = check(name, edit, order)
    assert not packs(lambda: model(IDS, attention_mask=MASK))


def test_a_function_of_libraries_reads_nothing():
    """Functions on a model may be an activation named by the config, or come from peft and accelerate."""
    model = make("BertModel")
    model.encoder.layer[0].intermediate.intermediate_act_fn = None
    del model.encoder.layer[0].intermediate.intermediate_act_fn
    model.encoder.layer[0].intermediate.intermediate_act_fn = F.relu
    fastformer.accelerate(model)
    assert packs(lambda: model(IDS, attention_mask=MASK))


def mix_heads(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    q, k = _rotary(q, k, *args, **kwargs)
    return q, mixed(k.transpose(1, 2)).transpose(1, 2) * k


def see_all(*args: Any, **kwargs: Any) -> Tensor:
    return MASK[:, None, None].bool().expand(2, 1, 9, 9)


_rotary, _chunk, _call = llama.apply_rotary_pos_emb, bert.BertLayer.feed_forward_chunk, nn.Module.__call__
_head = llama.LlamaForCausalLM.forward


def mix_the_classifier(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out = _call(self, *args, **kwargs)
    return mixed(out) if isinstance(self, nn.Linear) and self.out_features == 2 else out


PATCHES: list[tuple[str, Any, str, Any]] = [
    ("LlamaForCausalLM", llama, "create_causal_mask", see_all),
    ("LlamaForCausalLM", llama, "apply_rotary_pos_emb", mix_heads),
    ("LlamaForCausalLM", llama.LlamaForCausalLM, "forward", lambda self, *a, **k: pooled(_head(self, *a, **k))),
    ("BertModel", bert.BertLayer, "feed_forward_chunk", lambda self, x: mixed(_chunk(self, x))),
    ("BertForTokenClassification", nn.Module, "__call__", mix_the_classifier),
]


@pytest.mark.parametrize(("name", "where", "what", "instead"), PATCHES)
def test_a_replaced_function_of_transformers_may_read_padding(name, where, what, instead, monkeypatch):
    model = check(name, lambda _: monkeypatch.setattr(where, what, instead), order="before")
    assert not packs(lambda: model(IDS, attention_mask=MASK))
    monkeypatch.undo()
    fastformer.accelerate(model)
    assert packs(lambda: model(IDS, attention_mask=MASK))
    monkeypatch.setattr(where, what, instead)
    fastformer.accelerate(model)
    assert not packs(lambda: model(IDS, attention_mask=MASK))


def test_another_mask_under_the_name_of_sdpa(monkeypatch):
    model = make("LlamaForCausalLM")
    fastformer.accelerate(model)
    ours = AttentionMaskInterface()["sdpa"]
    AttentionMaskInterface.register("sdpa", lambda *args, **kwargs: sdpa_mask(*args, **kwargs))
    try:
        assert not packs(lambda: model(IDS, attention_mask=MASK))
    finally:
        AttentionMaskInterface.register("sdpa", ours)
    assert packs(lambda: model(IDS, attention_mask=MASK))


@pytest.mark.parametrize("change", ["eager", "chunks"])
def test_a_report_says_why_padding_is_computed(change):
    model = make("BertModel")
    fastformer.accelerate(model)
    assert not fastformer.report(model).padding["encoder"].startswith("padding is computed")
    if change == "eager":
        model.set_attn_implementation("eager")
    else:
        model.encoder.layer[1].chunk_size_feed_forward = 3
    assert not packs(lambda: model(IDS, attention_mask=MASK))
    assert fastformer.report(model).padding["encoder"].startswith("padding is computed")


class Squared(nn.CrossEntropyLoss):
    """A model whose loss reads all logits."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return super().forward(scores, target) + scores.square().mean()


_fixed, _entropy = loss_utils.fixed_cross_entropy, F.cross_entropy
LOSSES: list[tuple[str, Any, str, Any]] = [
    ("BertForMaskedLM", bert, "CrossEntropyLoss", Squared),
    ("LlamaForCausalLM", loss_utils, "fixed_cross_entropy", lambda x, *a, **k: _fixed(x, *a, **k) + x.square().mean()),
    ("GPT2LMHeadModel", F, "cross_entropy", lambda x, *a, **k: _entropy(x, *a, **k) + x.square().mean()),
    ("BartForConditionalGeneration", F, "cross_entropy", lambda x, *a, **k: _entropy(x, *a, **k) + x.square().mean()),
]


@pytest.mark.parametrize(("name", "where", "what", "instead"), LOSSES)
def test_a_replaced_loss_may_read_padding(name, where, what, instead, monkeypatch):
    plain, ours = make(name), make(name)
    fastformer.accelerate(ours)
    monkeypatch.setattr(where, what, instead)
    with torch.no_grad():
        assert_equal(ours(**given_to(ours, LABELS)).loss, plain(**given_to(plain, LABELS)).loss)


class Reading(LogitsProcessor):  # type: ignore[misc]
    """A model that reads the encoder's output at padding."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.read = self.model.get_encoder()(IDS, attention_mask=MASK).last_hidden_state
        return scores


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_generate_skips_padding_and_the_functions_it_calls_do_not(name):
    plain, ours = make(name), make(name)
    fastformer.accelerate(ours)
    read, tokens = [], []

    def generate(model: Any, processor: Reading) -> None:
        given = {"attention_mask": MASK, "max_new_tokens": 2, "do_sample": False}
        tokens.append(model.generate(IDS, **given, logits_processor=LogitsProcessorList([processor])))
        read.append(processor.read)

    for model in (plain, ours):
        processor = Reading(model)
        assert packs(lambda: generate(model, processor)) == (model is ours)  # noqa: B023
    assert_equal(read[1], read[0])
    assert torch.equal(tokens[1], tokens[0])


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_hidden_states_that_the_config_asks_for_later(name):
    plain, ours = make(name), make(name)
    fastformer.accelerate(ours)
    call(ours)
    plain.config.output_hidden_states = ours.config.output_hidden_states = True
    with torch.no_grad():
        theirs = plain(IDS, attention_mask=MASK).hidden_states
        mine = ours(IDS, attention_mask=MASK).hidden_states
    assert len(mine) == len(theirs) > 1
    for each, other in zip(mine, theirs, strict=True):
        assert_equal(each, other)


def test_threads_have_calls_of_their_own():
    """One thread reads padding, because its labels are there, and another doesn't."""
    plain, model = make("LlamaForCausalLM"), make("LlamaForCausalLM")
    fastformer.accelerate(model)

    @torch.no_grad()
    def run(labels: Tensor) -> float:
        expected = plain(**given_to(plain, labels)).loss
        return max(float(abs(model(**given_to(model, labels)).loss - expected)) for _ in range(12))

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(run, (IDS, LABELS))) < 1e-6


def keep_the_model(model: Any) -> None:
    own = model.bert.forward
    model.bert.forward = lambda *args, **kwargs: (model, own(*args, **kwargs))[1]


def refer_to_the_model(model: Any) -> None:
    vars(model.bert)["around"] = model


def called(edit: Callable[[Any], None] | None) -> list[weakref.ref[nn.Module]]:
    model = make("BertForMaskedLM")
    fastformer.accelerate(model)
    if edit is not None:
        edit(model)
    call(model)
    return [weakref.ref(model), weakref.ref(model.bert.encoder)]


def test_a_model_is_freed_at_once():
    gc.disable()
    try:
        assert [part() for part in called(None)] == [None, None]
    finally:
        gc.enable()


def test_a_model_that_refers_to_itself_is_freed():
    parts = [*called(keep_the_model), *called(refer_to_the_model)]
    gc.collect()
    assert [part() for part in parts] == [None] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_decides_for_itself(copied):
    model = make("BertForTokenClassification")
    fastformer.accelerate(model)
    call(model)
    other = copied(model)
    assert packs(lambda: other(IDS, attention_mask=MASK))
    other.__dict__["_modules"] = dict(other._modules)
    other.classifier = nn.Sequential(other.classifier, nn.Softmax(1))
    assert not packs(lambda: other(IDS, attention_mask=MASK))
    assert packs(lambda: model(IDS, attention_mask=MASK))
