"""Tests accelerated T5."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
)
from transformers.models.t5.modeling_t5 import T5Attention

import fastformer
from fastformer.integrations import t5 as t5_module
from fastformer.integrations.known import CACHE
from tests.conftest import CallsOf
from tests.covering import by_turns, covering
from tests.integrations.families import IDS, PACKED, RIGHT, TARGETS, Wrapped, before_and_after, exactly, make, ran, run
from tests.nn.comparing import assert_same

ENDS = torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
BEGINS = ENDS.flip(1)


def outputs(model: Any, mask: Tensor | None, **options: Any) -> list[Tensor]:
    out = run(model, mask, **options)
    grads = torch.autograd.grad(out.loss, [*model.parameters()], allow_unused=True)
    more = [*(out.encoder_hidden_states or ()), *(out.decoder_hidden_states or ())]
    more += [*(out.encoder_attentions or ()), *(out.cross_attentions or ())]
    return [out.loss, out.logits, *more, *[g for g in grads if g is not None]]


def compare(mask: Tensor | None, model: Any, **options: Any) -> set[str]:
    theirs, ours = before_and_after(model, lambda: outputs(model, mask, **options))
    assert len(ours) == len(theirs)
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine, other, f"output or gradient {i}", 1e-9)
    return ran(lambda: run(model, mask, **options))


# Slow: each dtype with the other activation, the same rounding at the same places.
@pytest.mark.parametrize(("dtype", "kind"), by_turns([torch.bfloat16, torch.float16], ["gated-gelu", "relu"]))
def test_half_precision_errs_no_more_than_before(dtype, kind):
    """The second weight of the FFN may stay in fp32, as transformers loads it.

    Which of the two models rounds better depends on the weights, so the test compares geometric means over several.
    """
    ratios = []
    for seed in range(8):
        model = make("t5", feed_forward_proj=kind, seed=seed).eval()
        with torch.no_grad(), exactly("t5"):
            exact = run(model, RIGHT).logits
        model = model.to(dtype)
        for layer in model.modules():
            if hasattr(layer, "wo"):
                layer.wo.float()
        ours = copy.deepcopy(model)
        assert fastformer.report(fastformer.accelerate(ours)).swapped
        with torch.no_grad():
            plain, after = run(model, RIGHT).logits, run(ours, RIGHT).logits
        assert after.dtype == plain.dtype
        ratios.append((after - exact).norm() / (plain - exact).norm())
    assert torch.stack(ratios).log().mean().exp() <= 1.1


def rows_computed(calls_of: CallsOf, call: Any, of: slice = slice(2)) -> set[int]:
    """Returns the number of tokens that the FFNs of the encoder's layers got."""
    calls = calls_of(t5_module, "fused_feed_forward")
    call()
    return {each.args[0].shape[:-1].numel() for each in calls[of]}


HOLES = RIGHT & (torch.arange(9) != 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("mask", [RIGHT, RIGHT.flip(1), HOLES], ids=["right", "left", "holes"])
def test_the_encoder_leaves_padding_out(mask, mode, calls_of):
    model = getattr(make("t5"), mode)()
    compare(mask, model)
    assert rows_computed(calls_of, lambda: run(model, mask)) == {int(mask.sum())}
    assert rows_computed(calls_of, lambda: run(model, None)) == {mask.numel()}
    assert model.encoder(IDS, attention_mask=mask.long()).last_hidden_state[~mask].any()  # by itself it may be read
    fastformer.accelerate(model.encoder, padding="skip")
    hidden = model.encoder(IDS, attention_mask=mask.long()).last_hidden_state
    assert not hidden[~mask].any() and hidden[mask].abs().min() > 0


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no mask", "right"])
def test_the_first_block_decides_on_the_bias(mask):
    """If it has no bias, neither do the other blocks."""
    model = make("t5").eval()
    model.encoder.block = torch.nn.ModuleList(reversed(model.encoder.block))
    compare(mask, model)


def test_a_row_without_tokens_is_kept(calls_of):
    """A decoder takes the mean of the values in such a row."""
    model, mask = make("t5"), RIGHT & (torch.arange(4) != 2)[:, None]
    with exactly("t5"), sdpa_kernel(SDPBackend.MATH):  # whose gradients are right under a mask that hides all
        theirs = outputs(model, mask)
    fastformer.accelerate(model)
    for i, (mine, other) in enumerate(zip(outputs(model, mask), theirs, strict=True)):
        assert_same(mine, other, f"output or gradient {i}", 1e-9)
    assert rows_computed(calls_of, lambda: run(model, mask)) == {mask.numel()}


@pytest.mark.parametrize("kind", [T5EncoderModel, T5ForTokenClassification])
def test_an_encoder_alone(kind, calls_of):
    torch.manual_seed(5)
    model = kind(make("t5").config).double().eval()
    given: dict[str, Any] = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    counted = {"labels": IDS % 2} if kind is T5ForTokenClassification else {}
    with exactly("t5"):
        expected = model(**given)[0]
        loss = model(**given, **counted)[0]
    fastformer.accelerate(model)
    assert rows_computed(calls_of, lambda: model(**given)) == {int(RIGHT.sum())}
    assert_same(model(**given)[0] * RIGHT[..., None], expected * RIGHT[..., None], "at tokens", 1e-9)
    if counted:  # also at padding
        assert_same(model(**given, **counted)[0], loss, "loss", 1e-6)
        assert rows_computed(calls_of, lambda: model(**given, **counted)) == {RIGHT.numel()}


@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, pytest.param(T5EncoderModel, marks=pytest.mark.slow)])
def test_compiles_as_one_graph_with_a_mask(kind, mode):
    """The plain model does so, too: no code reads the values of the mask."""
    if kind is T5ForConditionalGeneration and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 compiles no plain T5 in one graph: transformers copies its config in forward")
    torch._dynamo.reset()
    layers = 2 if kind is T5EncoderModel else 1  # one of each kind: the second reads the bias of the first
    model = getattr(kind(make("t5", num_layers=layers).config).double(), mode)()
    given = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    given |= {"decoder_input_ids": IDS} if kind is T5ForConditionalGeneration else {}
    with exactly("t5"):
        expected = model(**given)[0]
    fastformer.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = torch.ones_like(RIGHT) if kind is T5ForConditionalGeneration else RIGHT
    assert_same(compiled(**given)[0] * real[..., None], expected * real[..., None], "output", 1e-6)


GAPS = ENDS & (torch.arange(6) != 1)
DECODER = slice(2, 4)


def run_decoder(model: Any, real: Tensor | None, **options: Any) -> Any:
    """Runs the model; labels count where `real` marks tokens of the decoder."""
    given = {"attention_mask": RIGHT.long(), "labels": TARGETS} | options
    if real is not None:
        given["decoder_attention_mask"] = real.long()
        given["labels"] = given["labels"].masked_fill(~real, -100)
    return model(IDS, **given)


def decoded(model: Any, real: Tensor, **options: Any) -> list[Tensor]:
    """Returns the loss, the logits, keys and values at tokens, and gradients."""
    out = run_decoder(model, real, **options)
    found = [out.loss, out.logits[real]]
    if out.get(CACHE) is not None:
        cache = out[CACHE]
        for layers, kept in ((cache.self_attention_cache.layers, real), (cache.cross_attention_cache.layers, RIGHT)):
            found += [each.transpose(1, 2)[kept] for layer in layers for each in (layer.keys, layer.values)]
        assert cache.is_updated == {0: True, 1: True} and cache.get_seq_length() == 6
    grads = torch.autograd.grad(out.loss, [*model.parameters()], allow_unused=True)
    return [*found, *[g for g in grads if g is not None]]


@pytest.mark.parametrize("real, mode, use_cache", covering([ENDS, BEGINS, GAPS], ["train", "eval"], [True, False]))
def test_the_decoder_leaves_padding_out(real, mode, use_cache, calls_of):
    model = getattr(make("t5", use_cache=use_cache), mode)()
    theirs, ours = before_and_after(model, lambda: decoded(model, real))
    assert len(ours) == len(theirs) > 20 + 8 * use_cache
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine, other, f"output or gradient {i}", 1e-9)
    names = ran(lambda: run_decoder(model, real))
    assert {"attention_fwd", PACKED} <= names
    assert rows_computed(calls_of, lambda: run_decoder(model, real), DECODER) == {int(real.sum())}
    assert rows_computed(calls_of, lambda: run_decoder(model, None), DECODER) == {real.numel()}
    assert not run_decoder(model, real).logits[~real].any()


def test_a_cache_of_a_packed_decoder_goes_on():
    model = make("t5").eval()
    more = torch.randint(5, 60, (4, 2), generator=torch.Generator().manual_seed(2))
    mask = torch.cat([GAPS, torch.ones(4, 2, dtype=torch.bool)], 1).long()

    def both_steps() -> Tensor:
        out = run_decoder(model, GAPS)
        options = {CACHE: out[CACHE], "encoder_outputs": (out.encoder_last_hidden_state,)}
        step = model(attention_mask=RIGHT.long(), decoder_input_ids=more, decoder_attention_mask=mask, **options)
        logits: Tensor = step.logits
        return logits

    with torch.no_grad():
        expected, found = before_and_after(model, both_steps)
    assert_same(found, expected, "logits", 1e-9)


@pytest.mark.parametrize(
    "side, what",
    [
        *itertools.product(["encoder", "decoder"], ["hidden states", "a hook", "checkpointing", "another attention"]),
        *itertools.product(["decoder"], ["labels at padding", "a cache", "no tokens"]),
    ],
)
def test_a_stack_stays_padded_if_a_call_reads_padding(side, what, calls_of):
    model, mask = make("t5").train(), RIGHT
    options: dict[str, Any] = {}
    layers = model.get_submodule(side).block[1].layer
    attention = layers[0].SelfAttention if side == "encoder" else layers[1].EncDecAttention
    if what == "labels at padding":
        options["labels"] = TARGETS
    elif what == "a cache":
        options[CACHE] = run_decoder(model, None)[CACHE]
    elif what == "hidden states":
        options["output_hidden_states"] = True
    elif what == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what == "another attention":
        attention.__class__ = type("Other", (T5Attention,), {})
    elif what == "no tokens":  # to attend to
        mask = RIGHT & (torch.arange(4) != 2)[:, None]
    fastformer.accelerate(model)
    if what == "a hook":
        attention.q.register_forward_hook(lambda *args: None)
    real = torch.cat([torch.ones(4, 6), ENDS], 1).long() if what == "a cache" else ENDS.long()

    def call() -> Any:
        given = {"attention_mask": mask.long(), "labels": TARGETS.masked_fill(~ENDS, -100)} | options
        return model(IDS, decoder_attention_mask=real, **given)

    of, whole = (slice(2), RIGHT) if side == "encoder" else (DECODER, ENDS)
    assert rows_computed(calls_of, call, of) == {whole.numel()}


@pytest.mark.parametrize("which", [0, 1], ids=["self", "memory"])
def test_dropout_works_in_a_packed_decoder(which):
    """Only the attention, whose rows are packed, has dropout."""
    model = make("t5", dropout_rate=0.4).train()
    model.encoder.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for block in model.decoder.block:
        for part, name in ((0, "SelfAttention"), (1, "EncDecAttention")):
            getattr(block.layer[part], name).dropout = 0.4 * (part == which)
    fastformer.accelerate(model)
    first, second = (run_decoder(model, ENDS).logits for _ in range(2))
    assert not torch.equal(first, second) and first.isfinite().all() and not first[~ENDS].any()
    model.eval()
    assert torch.equal(*(run_decoder(model, ENDS).logits for _ in range(2)))


@pytest.mark.parametrize(
    "what", ["no memory", "a wrapped block", "a bias for the memory", "two sides", "is_causal", "is_causal=None"]
)
def test_surgery_on_the_decoder(what):
    """If blocks are changed, the stack stays padded."""

    def changed() -> Any:
        model = make("t5", use_cache=False)
        for i, block in enumerate(model.decoder.block):
            if what == "no memory":
                del block.layer[1]
            elif what == "two sides":
                block.layer[0].SelfAttention.is_causal = False
            elif what == "a wrapped block" and i == 1:
                model.decoder.block[i] = Wrapped(block)
                model.encoder.block[i] = Wrapped(model.encoder.block[i])
            elif what == "a bias for the memory" and i == 0:
                attention = block.layer[1].EncDecAttention
                attention.has_relative_attention_bias = True
                attention.relative_attention_bias = torch.nn.Embedding(8, 3).double()
                torch.nn.init.normal_(attention.relative_attention_bias.weight, std=2)
        return model

    options = {"is_causal": True if what == "is_causal" else None} if what.startswith("is_causal") else {}
    for given in ({}, {"attention_mask": None}, {"decoder_attention_mask": ENDS.long()}):
        results = []
        for fused in (None, False, True):
            model = changed().train()
            if fused is not None:
                fastformer.accelerate(model, fused_loss=fused)
            labels = TARGETS.masked_fill(~ENDS, -100)
            with exactly("t5", accelerated=fused is not None):
                if what == "no memory":
                    out = model.decoder(TARGETS, attention_mask=given.get("decoder_attention_mask", ENDS.long()))
                    loss = out.last_hidden_state[ENDS].square().mean()
                else:
                    loss = model(IDS, **{"attention_mask": RIGHT.long(), "labels": labels} | given, **options).loss
            grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
            results.append([loss, *grads])
        for ours in results[1:]:
            for i, (mine, other) in enumerate(zip(ours, results[0], strict=True)):
                assert (mine is None) == (other is None)
                if mine is not None:
                    assert_same(mine, other, f"loss or gradient {i}", 1e-9)


@pytest.mark.parametrize("kind", [T5ForSequenceClassification, T5ForQuestionAnswering, T5Model])
def test_other_heads_of_the_decoder(kind, calls_of):
    """If a module reads a decoder's outputs at padding, the decoder isn't packed."""
    torch.manual_seed(5)
    model = kind(make("t5", eos_token_id=1).config).double().eval()
    ids = IDS.clone()
    ids[:, -1] = 1
    # The first of these heads makes the decoder's inputs of the encoder's.
    shape = RIGHT.shape if kind is T5ForSequenceClassification else ENDS.shape
    real = RIGHT if kind is T5ForSequenceClassification else ENDS
    given: dict[str, Any] = {"attention_mask": RIGHT.long(), "decoder_attention_mask": real.long()}
    if kind is not T5ForSequenceClassification:
        given["decoder_input_ids"] = TARGETS
    expected, found = before_and_after(model, lambda: model(ids, **given))
    rows = int(real.sum()) if kind is T5Model else shape.numel()
    assert rows_computed(calls_of, lambda: model(ids, **given), DECODER) == {rows}
    for ours, theirs in zip(found.to_tuple()[: 1 if kind is T5Model else 2], expected.to_tuple(), strict=False):
        if kind is T5Model:
            ours, theirs = ours[real], theirs[real]
        if isinstance(ours, Tensor):
            assert_same(ours, theirs, "an output", 1e-9)
