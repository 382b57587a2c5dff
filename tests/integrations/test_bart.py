"""transformers' BART and Marian, accelerated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

import fastformer
from fastformer.integrations.known import RETURNS_TUPLES
from fastformer.ops import record_backends
from tests.nn.comparing import assert_same

IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])
TARGETS = torch.randint(5, 60, (4, 6), generator=torch.Generator().manual_seed(1))
# Of the decoder, whole where the encoder's row isn't.
BEHIND = torch.arange(6) < torch.tensor([[2], [6], [1], [4]])
families = pytest.mark.parametrize("family", ["bart", "marian"])


def make(family: str, **options: Any) -> Any:
    torch.manual_seed(4)
    sizes = {
        "vocab_size": 60, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
        "dropout": 0.0, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 1,
        "forced_eos_token_id": 2, "activation_function": "gelu", "scale_embedding": family == "marian",
    }  # fmt: skip
    config, model = (BartConfig, BartForConditionalGeneration) if family == "bart" else (MarianConfig, MarianMTModel)
    made = model(config(**sizes | options)).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "embed_positions" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.5 if parameter.dim() == 1 else 0))
    return made


def run(model: Any, mask: Tensor | None, **options: Any) -> Any:
    return model(IDS, attention_mask=None if mask is None else mask.long(), labels=TARGETS, **options)


def ran(call: Any) -> set[str]:
    with record_backends() as backends:
        call()
    return {name for name, _ in backends}


@families
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["no mask", "right", "left"])
def test_computes_the_same(mask, mode, family):
    model = make(family)
    getattr(model, mode)()
    results = []
    for accelerated in (False, True):
        if accelerated:
            report = fastformer.report(fastformer.accelerate(model))
            kinds = Counter(report.swapped.values())
            linears = 2 * 6 + 2 * 10 + 1
            assert kinds["Linear"] == linears and len(report.swapped) - linears == 8
            assert not report.left and report.attention == [""]
            names = ran(lambda: run(model, mask))
            assert {"add_layer_norm_fwd", "feed_forward_fwd", "attention_fwd"} <= names
            assert ("varlen_attention_fwd" in names) == (mask is not None)
        out = run(model, mask)
        grads = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        results.append([out.loss, out.logits, *grads])
    for ours, theirs in zip(results[1], results[0], strict=True):
        if theirs is None or theirs.abs().max() < 1e-12:  # a bias of keys has no gradient, but for rounding
            assert ours is None or ours.abs().max() < 1e-12
        else:
            assert_same(ours, theirs, "output or gradient", 1e-9)


def run_both(model: Any, mask: Tensor | None, own: Tensor, **options: Any) -> Any:
    """With a mask for the decoder, too, and no labels at what it leaves out."""
    options = {"labels": TARGETS.masked_fill(~own, -100), "decoder_input_ids": TARGETS.flip(1)} | options
    encoder_mask = None if mask is None else mask.long()
    return model(IDS, attention_mask=encoder_mask, decoder_attention_mask=own.long(), **options)


@families
@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize(
    "own", [BEHIND, BEHIND.flip(1), BEHIND & (torch.arange(6) != 1)], ids=["right", "left", "holes"]
)
@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["no mask", "right", "left"])
def test_a_decoder_leaves_padding_out(mask, own, fused_loss, family):
    model = make(family).train()
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model, fused_loss=fused_loss)
            # Nothing else is packed where the encoder has no mask, nor is anything attended to with padding.
            names = ran(lambda: run_both(model, mask, own))
            assert "varlen_attention_fwd" in names and ("attention_fwd" in names) == (mask is None)
        out = run_both(model, mask, own)
        grads = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        logits = [] if fused_loss else [out.logits * own[..., None]]
        results.append([out.loss, *(g for g in grads if g is not None and g.abs().max() > 1e-12), *logits])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs, "output or gradient", 1e-9)
    given = {"decoder_input_ids": TARGETS, "decoder_attention_mask": own.long(), "use_cache": False}
    assert model.model(input_ids=IDS, **given).last_hidden_state[~own].any()  # called by itself it may be read
    fastformer.accelerate(model.model, padding="skip")
    hidden = model.model(input_ids=IDS, **given).last_hidden_state
    assert not hidden[~own].any() and hidden[own].all()


@families
@pytest.mark.parametrize("what", ["labels", "cache", "hook", "hidden states"])
def test_a_decoder_stays_padded_where_somebody_looks(what, family):
    model = make(family).eval()
    options: dict[str, Any] = {}
    if what == "labels":
        options["labels"] = TARGETS
    elif what == "cache":
        options |= {"labels": None, "use_cache": True}
    elif what == "hidden states":
        options["output_hidden_states"] = True
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
            if what == "hook":
                model.model.decoder.layers[0].fc1.register_forward_hook(lambda *args: None)
            assert ("varlen_attention_fwd" in ran(lambda: run_both(model, None, BEHIND))) == (what != "hook")
            assert "varlen_attention_fwd" not in ran(lambda: run_both(model, None, BEHIND, **options))
        results.append(run_both(model, None, BEHIND, **options))
    assert_same(results[1].logits, results[0].logits, what, 1e-9)
    assert bool(results[1].past_key_values) == bool(results[0].past_key_values)


@families
def test_a_row_without_memory_is_what_it_was(family):
    """Before transformers 5 it attends to all keys that are ignored, since then to none."""
    decoder = make(family).model.decoder.eval()
    memory, mask = torch.randn(4, 9, 24, dtype=torch.float64), RIGHT & (torch.arange(4) != 2)[:, None]
    given: dict[str, Any] = {"attention_mask": BEHIND.long(), "encoder_hidden_states": memory, "use_cache": False}

    def hidden(mask: Tensor) -> Tensor:
        return decoder(TARGETS, encoder_attention_mask=mask.long(), **given).last_hidden_state * BEHIND[..., None]

    with torch.no_grad():
        expected = hidden(mask)
        fastformer.accelerate(decoder)
        assert "varlen_attention_fwd" in ran(lambda: hidden(RIGHT))
        assert_same(hidden(mask), expected, "a row without memory", 1e-9)


@pytest.mark.parametrize(
    "name", ["BartForSequenceClassification", "BartForQuestionAnswering", "BartForCausalLM", "MarianForCausalLM"]
)
def test_heads_that_read_padding_see_it(name):
    torch.manual_seed(5)
    family = "bart" if "Bart" in name else "marian"
    model = getattr(transformers, name)(make(family).config).double().eval()
    ids = IDS.clone()
    ids[:, -1] = 2  # the end token, which a classifier reads
    masks = {
        "attention_mask": torch.ones(4, 9).long(),
        "decoder_attention_mask": (torch.arange(9) < 5).long().expand(4, 9),
    }
    if "Causal" in name:  # a decoder alone
        masks = {"attention_mask": masks["decoder_attention_mask"]}
    with torch.no_grad():
        expected = model(input_ids=ids, **masks, use_cache=False)[0]
        fastformer.accelerate(model)
        assert_same(model(input_ids=ids, **masks, use_cache=False)[0], expected, name, 1e-9)


@families
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generates_the_same(num_beams, family):
    model = make(family).eval()
    options = {"attention_mask": RIGHT.long(), "max_new_tokens": 12, "num_beams": num_beams, "do_sample": False}
    expected = model.generate(IDS, **options)
    fastformer.accelerate(model)
    assert "varlen_attention_fwd" in ran(lambda: model.generate(IDS, **options))
    assert torch.equal(model.generate(IDS, **options), expected)
    fastformer.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert not ran(lambda: run(model, RIGHT))


@families
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "none"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_generates_the_same_behind_padded_beginnings(side, use_cache, family):
    """Whoever generates reads the logits of the last position, be that padding."""
    model = make(family).eval()
    real = torch.arange(4) < torch.tensor([[4], [2], [1], [3]])
    real = real if side == "right" else real.flip(1)
    given = {"attention_mask": RIGHT.long(), "decoder_attention_mask": real.long(), "use_cache": use_cache}
    given |= {"decoder_input_ids": TARGETS[:, :4], "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **given)
    fastformer.accelerate(model)
    assert torch.equal(model.generate(IDS, **given), expected)


@families
def test_generates_on_from_a_cache(family):
    """transformers gives an encoder what its signature takes; before 5 that is no cache."""
    model = make(family).eval()
    options = {"attention_mask": RIGHT.long(), "max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}

    def tokens() -> Tensor:
        first = model.generate(IDS, **options)
        given = {"decoder_input_ids": first.sequences, "past_key_values": first.past_key_values}
        found: Tensor = model.generate(IDS, **given, **options).sequences
        return found

    expected = tokens()
    fastformer.accelerate(model)
    assert torch.equal(tokens(), expected)


@families
@pytest.mark.skipif(not RETURNS_TUPLES, reason="transformers 5 has no symbolic tracing")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_is_traced_symbolically(family):
    from transformers.utils import fx

    model = make(family, use_cache=False).eval()
    fastformer.accelerate(model)
    given = {"input_ids": IDS, "attention_mask": RIGHT.long(), "decoder_input_ids": TARGETS}
    traced = fx.symbolic_trace(model, [*given])
    assert_same(traced(**given)["logits"], model(**given).logits, "logits", 1e-9)


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@families
def test_a_wrapped_layer_keeps_its_stack_padded(family):
    results = []
    for accelerated in (False, True):
        model = make(family)
        for stack in (model.model.encoder, model.model.decoder):
            stack.layers[1] = Wrapped(stack.layers[1])
        if accelerated:
            fastformer.accelerate(model)
        results.append(run(model, RIGHT).logits)
    assert_same(results[1], results[0], "logits", 1e-9)


@families
@pytest.mark.parametrize("what", ["hidden states", "weights", "checkpointing", "a hook", "a tuple"])
def test_what_asks_for_more_is_answered(what, family):
    model = make(family, **({"attn_implementation": "eager"} if what == "weights" else {}))
    model.train(what == "checkpointing")
    seen: list[Tensor] = []
    options: dict[str, Any] = {}
    if what == "hidden states":
        options["output_hidden_states"] = True
    elif what == "weights":
        options["output_attentions"] = True
    elif what == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what == "a hook":
        model.model.encoder.layers[1].fc1.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    elif what == "a tuple":
        options["return_dict"] = False
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
        out = run(model, RIGHT, **options)
        if what == "a tuple":
            results.append([out[0], out[1]])
            continue
        grads = torch.autograd.grad(
            out.loss, [p for p in model.model.parameters() if p.requires_grad], allow_unused=True
        )
        more = [*(out.encoder_hidden_states or ()), *(out.decoder_hidden_states or ())]
        more += [*(out.encoder_attentions or ()), *(out.cross_attentions or ())]
        results.append([out.logits, *more, *[g for g in grads if g is not None and g.abs().max() > 1e-12]])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs, what, 1e-9)
    if what == "a hook":
        assert len(seen) == 2
        assert_same(seen[1], seen[0], "what the hook saw", 1e-9)


@families
def test_a_tuple_holds_what_a_dict_does(family):
    model = make(family).eval()
    fastformer.accelerate(model, padding="skip")
    given = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    with torch.no_grad():
        expected = model.base_model.encoder(**given).to_tuple()
        logits = run(model, RIGHT).logits
        for configured in (False, True):
            model.config.return_dict = not configured
            told = {} if configured else {"return_dict": False}
            found = model.base_model.encoder(**given, **told)
            assert type(found) is tuple and len(found) == len(expected)
            assert torch.equal(found[0], expected[0]) and not found[0][~RIGHT].any()
            if not configured:
                assert torch.equal(run(model, RIGHT, **told)[1], logits)


@families
def test_packs_again_when_nothing_is_recorded(family):
    model = make(family).eval()
    fastformer.accelerate(model)
    run(model, RIGHT, output_hidden_states=True)
    assert "varlen_attention_fwd" in ran(lambda: run(model, RIGHT))
    assert "varlen_attention_fwd" not in ran(lambda: run(model, RIGHT, output_hidden_states=True))


@families
def test_dropout_acts_in_training(family):
    model = make(family, dropout=0.4, attention_dropout=0.3, activation_dropout=0.2)
    fastformer.accelerate(model)
    assert not torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits)
    model.eval()
    assert torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits)
