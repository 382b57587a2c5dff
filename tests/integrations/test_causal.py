"""Tests the common properties of accelerated decoder-only models, GPT-2 and Llama."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from fastformer.integrations.known import CACHE
from tests.integrations.families import (
    CAUSAL,
    IDS,
    LEFT,
    PACKED,
    RIGHT,
    assert_all_same,
    before_and_after,
    gradients,
    labels_of,
    make,
    ran,
    run,
)
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")

families = pytest.mark.parametrize("family", CAUSAL)


def step_of(model: Any, **options: Any) -> list[Tensor]:
    """Returns the loss of a batch with padding on the right, and the gradients."""
    loss = run(model, RIGHT, **options).loss
    return [loss, *gradients(model, loss)]


@families
def test_a_cache_is_filled_and_goes_on(family):
    """A packed run fills the cache with everything that later tokens need."""
    model = make(family).eval()
    mask, more = LEFT.long(), torch.randint(5, 60, (4, 3))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    longer = torch.cat((mask, mask.new_ones(4, 3)), 1)
    behind = positions[:, -1:] + torch.arange(1, 4)
    call = partial(model, IDS, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)

    def both_steps() -> Tensor:
        first = call()
        assert first[CACHE].get_seq_length() == 9
        options = {"attention_mask": longer, "position_ids": behind, CACHE: first[CACHE]}
        logits: Tensor = model(more, **options).logits
        return logits

    expected, found = before_and_after(model, both_steps)
    assert_same(found, expected, "with a cache", 1e-9)
    assert PACKED in ran(call)


@families
def test_a_label_at_padding_that_a_token_predicts_changes_nothing(family):
    model, labels = make(family), labels_of(RIGHT)
    labels[1, 4] = 7
    fastformer.accelerate(model)
    assert PACKED in ran(partial(run, model, RIGHT, labels=labels))


@families
def test_a_loss_outside_of_the_call_reads_the_prediction_of_the_first_token(family):
    """It is made at the padding before that token. Trainer's label smoothing computes its loss in this way."""
    model = make(family)
    targets = IDS.masked_fill(~LEFT, -100)

    def step() -> list[Tensor]:
        logits = run(model, LEFT, labels=None).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return [loss, *gradients(model, loss)]

    expected, found = before_and_after(model, step)
    assert_all_same(found, expected, "loss with padding on the left")
    # On the right, padding predicts no token of the sequence.
    assert PACKED in ran(lambda: run(model, RIGHT, labels=None))


@families
def test_a_loss_of_the_user_sees_padding(family):
    """A user's loss may count padded positions."""
    model = make(family)
    model.loss_function = lambda logits, labels, **options: logits.square().mean()
    expected, found = before_and_after(model, partial(step_of, model))
    assert_all_same(found, expected, "a loss of one's own")
    assert PACKED not in ran(lambda: run(model, RIGHT))
    assert PACKED in ran(lambda: run(model, RIGHT, labels=None))


@families
@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 0], [0, 0, 1]], ids=str)
def test_layers_that_occur_several_times(order, family):
    model = make(family)
    stack = model.base_model
    name = "h" if family == "gpt2" else "layers"
    layers = getattr(stack, name)
    setattr(stack, name, nn.ModuleList([layers[i] for i in order]))
    stack.config.num_hidden_layers = len(order)
    expected, found = before_and_after(model, partial(step_of, model, use_cache=False))
    assert_all_same(found, expected, "layers again")
    assert (PACKED in ran(lambda: run(model, RIGHT, use_cache=False))) == (order[-1] == 1 and len(order) == 3)


def test_a_hooked_attention_drops_once():
    """GPT-2's attention has its own dropout, which is called if it has a hook."""
    model = make("gpt2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0, n_layer=1).train()
    fastformer.accelerate(model)
    block, dropped = model.transformer.h[0], []
    block.attn.register_forward_hook(lambda module, args, out: None)
    before: list[Tensor] = []
    block.ln_1.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    block.ln_2.register_forward_pre_hook(lambda module, args: dropped.append(args[0] - before[-1]))
    for _ in range(20):
        run(model, None)
    share = float(torch.stack(dropped).eq(0).double().mean())
    assert abs(share - 0.5) < 0.03


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no mask", "right"])
@pytest.mark.parametrize(
    "family, name",
    [("gpt2", "resid_pdrop"), ("gpt2", "embd_pdrop"), ("gpt2", "attn_pdrop"), ("llama", "attention_dropout")],
)
def test_dropout_of_everything_gives_zeros(family, name, mask):
    """A probability of one leaves nothing to chance: each dropout acts, and where transformers' acts."""
    model = make(family, **{name: 1.0})
    real = 1.0 if mask is None else mask[..., None]
    expected, found = before_and_after(model, lambda: run(model, mask).logits * real)
    assert_same(found, expected, name, 1e-9)


@families
@pytest.mark.slow
def test_compiles(family):
    model = make(family).eval()
    fastformer.accelerate(model)
    expected = run(model, RIGHT).logits * RIGHT[..., None]
    compiled = torch.compile(model)
    # The angles of rotary embeddings are fp32, whose cosine the compiler takes otherwise.
    assert_same(run(compiled, RIGHT).logits * RIGHT[..., None], expected, "compiled", 1e-6)
