"""Tests accelerated BART and Marian."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.logging import warning_once

import fastformer
from fastformer.integrations.known import CACHE
from tests.covering import covering
from tests.integrations.families import (
    IDS,
    PACKED,
    RIGHT,
    TARGETS,
    assert_all_same,
    before_and_after,
    gradients,
    make,
    ran,
)
from tests.nn.comparing import assert_same

# Of the decoder, whole where the encoder's row isn't.
BEHIND = torch.arange(6) < torch.tensor([[2], [6], [1], [4]])
families = pytest.mark.parametrize("family", ["bart", "marian"])


def run_both(model: Any, mask: Tensor | None, own: Tensor, **options: Any) -> Any:
    """Runs both models with a mask for the decoder, and without labels where the mask is 0."""
    options = {"labels": TARGETS.masked_fill(~own, -100), "decoder_input_ids": TARGETS.flip(1)} | options
    encoder_mask = None if mask is None else mask.long()
    return model(IDS, attention_mask=encoder_mask, decoder_attention_mask=own.long(), **options)


@pytest.mark.parametrize(
    ("family", "fused_loss", "mask", "own"),
    covering(["bart", "marian"], [False, True], ["no mask", "right", "left"], ["right", "left", "holes"]),
)
def test_a_decoder_leaves_padding_out(mask, own, fused_loss, family):
    model = make(family).train()
    mask = {"no mask": None, "right": RIGHT, "left": RIGHT.flip(1)}[mask]
    own = {"right": BEHIND, "left": BEHIND.flip(1), "holes": BEHIND & (torch.arange(6) != 1)}[own]

    def step() -> list[Tensor]:
        out = run_both(model, mask, own)
        logits = [] if fused_loss else [out.logits * own[..., None]]
        return [out.loss, *logits, *gradients(model, out.loss)]

    expected, found = before_and_after(model, step, fused_loss=fused_loss)
    assert_all_same(found, expected, "output or gradient")
    # Nothing else is packed where the encoder has no mask, nor is anything attended to with padding.
    names = ran(lambda: run_both(model, mask, own))
    assert PACKED in names and ("attention_fwd" in names) == (mask is None)
    given = {"decoder_input_ids": TARGETS, "decoder_attention_mask": own.long(), "use_cache": False}
    assert model.model(input_ids=IDS, **given).last_hidden_state[~own].any()  # called by itself it may be read
    fastformer.accelerate(model.model, padding="skip")
    hidden = model.model(input_ids=IDS, **given).last_hidden_state
    assert not hidden[~own].any() and hidden[own].all()


@families
def test_no_warning_is_added(family, caplog, monkeypatch):
    """A loss of padded sequences says no more than before: a model that asks for no loss function is not asked."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, said = make(family), []
    for _ in range(2):
        caplog.clear()
        warning_once.cache_clear()  # which says each warning once a process
        assert run_both(model, RIGHT, BEHIND).loss.isfinite()
        said.append([record.getMessage() for record in caplog.records if record.name.startswith("transformers")])
        fastformer.accelerate(model)
    assert said[1] == said[0]


@families
@pytest.mark.parametrize("what", ["labels", "cache", "hook", "hidden states"])
def test_a_decoder_stays_padded_if_a_call_reads_padding(what, family):
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
            assert (PACKED in ran(lambda: run_both(model, None, BEHIND))) == (what != "hook")
            assert PACKED not in ran(lambda: run_both(model, None, BEHIND, **options))
        results.append(run_both(model, None, BEHIND, **options))
    assert_same(results[1].logits, results[0].logits, what, 1e-9)
    assert bool(results[1].get(CACHE)) == bool(results[0].get(CACHE))


@families
@pytest.mark.parametrize("name", ["encoder.self_attn", "decoder.self_attn", "decoder.encoder_attn"])
def test_an_attention_that_was_made_causal_or_no_longer_is(name, family):
    """A mask, if there is one, overrules this attribute; packed tokens have none."""
    model = make(family)
    stack, name = name.split(".")
    attention = getattr(getattr(model.model, stack).layers[1], name)
    attention.is_causal = not attention.is_causal
    expected, found = before_and_after(model, lambda: run_both(model, RIGHT, BEHIND).logits[BEHIND])
    assert_same(found, expected, name, 1e-9)


@families
def test_a_row_without_memory_is_unchanged(family):
    """Such a row attends to none of the ignored keys."""
    decoder = make(family).model.decoder.eval()
    memory, mask = torch.randn(4, 9, 24, dtype=torch.float64), RIGHT & (torch.arange(4) != 2)[:, None]
    given: dict[str, Any] = {"attention_mask": BEHIND.long(), "encoder_hidden_states": memory, "use_cache": False}

    def hidden(mask: Tensor) -> Tensor:
        return decoder(TARGETS, encoder_attention_mask=mask.long(), **given).last_hidden_state * BEHIND[..., None]

    with torch.no_grad():
        expected = hidden(mask)
        fastformer.accelerate(decoder)
        assert PACKED in ran(lambda: hidden(RIGHT))
        assert_same(hidden(mask), expected, "a row without memory", 1e-9)


@families
def test_generation_continues_from_a_cache(family):
    """transformers passes an encoder the arguments in its signature."""
    model = make(family).eval()
    options = {"attention_mask": RIGHT.long(), "max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}

    def tokens() -> Tensor:
        first = model.generate(IDS, **options)
        given = {"decoder_input_ids": first.sequences, CACHE: first[CACHE]}
        found: Tensor = model.generate(IDS, **given, **options).sequences
        return found

    assert torch.equal(*before_and_after(model, tokens))
