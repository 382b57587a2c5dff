"""transformers' BERT, accelerated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, BertForSequenceClassification, BertModel

import fastformer
from fastformer.integrations.known import RETURNS_TUPLES
from fastformer.ops import record_backends
from tests.integrations.test_bart import Wrapped
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])
LEFT = RIGHT.flip(1)


def config(**options: Any) -> BertConfig:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    settings = {"vocab_size": 60, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **sizes, **options}
    return BertConfig(**settings)


def make(kind: Any = BertModel, **options: Any) -> Any:
    torch.manual_seed(3)
    model = kind(config(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.5 if parameter.dim() == 1 else 0))
    return model


def ran(call: Any) -> set[str]:
    with record_backends() as backends:
        call()
    return {name for name, _ in backends}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("mask", [None, RIGHT, LEFT], ids=["no mask", "right", "left"])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu", "mish"])
def test_computes_the_same(act, mask, mode):
    model = make(hidden_act=act)
    getattr(model, mode)()
    options = {} if mask is None else {"attention_mask": mask.long()}
    real = torch.ones(4, 9, 1) if mask is None else mask[..., None].double()
    results = []
    for accelerated in (False, True):
        if accelerated:
            report = fastformer.report(fastformer.accelerate(model))
            kinds = Counter(report.swapped.values())
            assert (
                kinds["Linear"] == 2 * 6 + 1 and len(report.swapped) - kinds["Linear"] == 2 + 2 * 4 and not report.left
            )
            names = ran(lambda: model(IDS, **options))
            expected = {"add_layer_norm_fwd", "varlen_attention_fwd" if mask is RIGHT else "attention_fwd"}
            assert expected <= names and ("feed_forward_fwd" in names) == (act != "mish")
        out = model(IDS, **options)
        loss = (out.last_hidden_state * real).square().sum() + out.pooler_output.sum()
        results.append(
            [out.last_hidden_state * real, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]
        )
    for ours, theirs in zip(results[1], results[0], strict=True):
        if theirs is None or theirs.abs().max() < 1e-12:  # a bias of keys has no gradient, but for rounding
            assert ours is None or ours.abs().max() < 1e-12
        else:
            assert_same(ours, theirs, "output or gradient", 1e-9)


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForSequenceClassification])
def test_heads_and_losses(kind):
    model = make(kind).eval()
    labels = IDS.masked_fill(~RIGHT, -100) if kind is BertForMaskedLM else torch.tensor([0, 1, 1, 0])
    before = model(IDS, attention_mask=RIGHT.long(), labels=labels)
    fastformer.accelerate(model)
    after = model(IDS, attention_mask=RIGHT.long(), labels=labels)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-9, atol=0)
    real = RIGHT[..., None] if kind is BertForMaskedLM else torch.ones(4, 1)
    assert_same(after.logits * real, before.logits * real, "logits", 1e-9)


class Running(torch.nn.Linear):
    """A projection that sums over the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(1)


@pytest.mark.parametrize("what", ["answers", "chunks", "other tokens", "no token"])
def test_padding_stays_where_it_is_seen(what):
    """A softmax over the sequence, chunks of it, a module that looks at other tokens, a row without any."""
    model = (
        make(BertForQuestionAnswering) if what == "answers" else make(chunk_size_feed_forward=3 * (what == "chunks"))
    )
    model.eval()
    if what == "other tokens":
        model.encoder.layer[0].attention.output.dense = Running(
            *model.encoder.layer[0].output.dense.weight.shape[:1] * 2
        )
        model.double()
    options: dict[str, Any] = {"attention_mask": (RIGHT & (what != "no token")).long()}
    if what == "answers":
        options |= {"start_positions": torch.tensor([0, 1, 2, 0]), "end_positions": torch.tensor([1, 2, 2, 0])}
    before = model(IDS, **options)
    fastformer.accelerate(model)
    after = model(IDS, **options)
    assert_same(after[0], before[0], "loss or hidden states", 1e-9)
    assert_same(after[1], before[1], "logits or pooled", 1e-9)


class Mixing(torch.nn.Module):
    """What transformers may have for families that aren't known."""

    __module__ = "transformers.models.other.modeling_other"

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


@pytest.mark.parametrize("activation", [
    torch.nn.Softmax(-1), torch.nn.LogSoftmax(-1), torch.nn.Sigmoid(), torch.nn.PReLU(), torch.nn.LayerNorm(40),
    torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.0)),
], ids=str)  # fmt: skip
def test_what_looks_at_one_token_is_packed_through(activation):
    assert "varlen_attention_fwd" in with_activation(activation)


@pytest.mark.parametrize("activation", [
    torch.nn.Softmax(1), torch.nn.Softmax(2), torch.nn.LogSoftmax(1), torch.nn.Softmax2d(), torch.nn.PReLU(9),
    torch.nn.LocalResponseNorm(3), torch.nn.CrossMapLRN2d(3), torch.nn.LayerNorm((9, 40)), torch.nn.GroupNorm(3, 9),
    torch.nn.Dropout1d(0.5), torch.nn.Sequential(torch.nn.Softmax(1)), Mixing(),
], ids=str)  # fmt: skip
def test_what_looks_at_others_sees_the_batch(activation):
    if isinstance(activation, torch.nn.CrossMapLRN2d):
        activation = torch.nn.Sequential(torch.nn.Unflatten(2, (8, 5)), activation, torch.nn.Flatten(2))
    assert "varlen_attention_fwd" not in with_activation(activation)


def with_activation(activation: torch.nn.Module) -> set[str]:
    """What ran of ours in a model whose activation is another, and which computes as it did."""
    model = make()
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = activation.double()

    def run() -> Tensor:
        torch.manual_seed(0)
        return model(IDS, attention_mask=RIGHT.long()).last_hidden_state * RIGHT[..., None]

    before = run()
    fastformer.accelerate(model)
    assert_same(run(), before, "hidden states", 1e-9)
    return ran(run)


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no mask", "right"])
def test_a_scale_of_ones_own(mask):
    model = make().eval()
    for layer in model.encoder.layer:
        if not hasattr(layer.attention.self, "scaling"):
            pytest.skip("before transformers 5 there is none")
        layer.attention.self.scaling *= 0.25
    options = {} if mask is None else {"attention_mask": mask.long()}
    real = 1 if mask is None else mask[..., None]
    before = model(IDS, **options).last_hidden_state * real
    fastformer.accelerate(model)
    assert_same(model(IDS, **options).last_hidden_state * real, before, "hidden states", 1e-9)


def test_padding_comes_out_as_zeros():
    model = make().eval()
    fastformer.accelerate(model)
    out = model(IDS, attention_mask=RIGHT.long()).last_hidden_state
    assert not out[~RIGHT].any() and out[RIGHT].abs().min() > 0


@pytest.mark.parametrize("what", ["hidden states", "weights", "eager", "a mask of its own", "checkpointing", "a hook"])
def test_what_asks_for_more_runs_as_before(what):
    """Where somebody looks inside, the batch isn't packed, and what they see is what they saw."""
    model = make(**({"attn_implementation": "eager"} if what in ("weights", "eager") else {}))
    model.train(what == "checkpointing")
    options: dict[str, Any] = {"attention_mask": RIGHT.long()}
    seen: list[Tensor] = []
    if what == "hidden states":
        options["output_hidden_states"] = True
    elif what == "weights":
        options["output_attentions"] = True
    elif what == "a mask of its own":
        own = torch.rand(4, 1, 9, 9) < 0.5
        own[..., 0] = True
        options["attention_mask"] = own[:, 0] if RETURNS_TUPLES else own  # before 5 a BERT has one for all heads
    elif what == "checkpointing":
        # What transformers before 5 does unless told is nothing for autograd.grad.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what == "a hook":
        model.encoder.layer[1].intermediate.register_forward_hook(lambda module, args, out: seen.append(out))
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
            assert "varlen_attention_fwd" not in ran(lambda: model(IDS, **options))
            seen = seen[:1]
        out = model(IDS, **options)
        tensors = [out.last_hidden_state * RIGHT[..., None], *(out.hidden_states or ()), *(out.attentions or ())]
        grads = torch.autograd.grad(out.last_hidden_state[RIGHT].square().sum(), [*model.encoder.parameters()])
        results.append([*tensors, *grads])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs, what, 1e-9) if theirs.abs().max() > 1e-12 else None
    if what == "a hook":
        assert_same(seen[-1], seen[0], "what the hook saw", 1e-9)


def test_a_decoder_with_a_cache():
    model = make(is_decoder=True).eval()
    whole = model(IDS).last_hidden_state
    fastformer.accelerate(model)
    assert_same(model(IDS).last_hidden_state, whole, "causal", 1e-9)
    first = model(IDS[:, :5], use_cache=True)
    # transformers before 5 writes fp64's lowest number into a mask of the default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        second = model(IDS[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(second.last_hidden_state, whole[:, 5:], "with a cache", 1e-9)


def test_adapters_and_restore():
    model = make().eval()
    run = lambda: model(IDS, attention_mask=RIGHT.long()).last_hidden_state * RIGHT[..., None]  # noqa: E731
    before = run()
    fastformer.accelerate(model)

    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for layer in model.encoder.layer:
        layer.intermediate.dense.__class__ = Doubled
    changed = run()
    # Those that somebody gave another class are that.
    restored = fastformer.restore(model)
    assert len(restored) == 10 + 2 * 5 + 1 and "encoder.layer.0.intermediate.dense" not in restored
    assert_same(changed, run(), "adapter", 1e-9)
    assert not torch.allclose(changed, before)


def test_dropout_acts_in_training():
    model = make(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    fastformer.accelerate(model)
    run = lambda: model(IDS, attention_mask=RIGHT.long()).last_hidden_state  # noqa: E731
    assert not torch.equal(run(), run())
    model.eval()
    assert torch.equal(run(), run())


@pytest.mark.parametrize("order", ["wrapped first", "accelerated first"])
@pytest.mark.parametrize(
    "place", ["", ".attention", ".attention.self", ".attention.output", ".intermediate", ".output"]
)
def test_a_wrapped_layer_is_called(place, order):
    model = make().eval()
    expected = model(IDS, attention_mask=RIGHT.long()).last_hidden_state
    if order == "accelerated first":
        fastformer.accelerate(model)
    layers, name = model.encoder.layer, f"0{place}"
    parent, _, own = name.rpartition(".")
    setattr(layers.get_submodule(parent), own, Wrapped(layers.get_submodule(name)))
    fastformer.accelerate(model)
    real = RIGHT[..., None]
    assert_same(model(IDS, attention_mask=RIGHT.long()).last_hidden_state * real, expected * real, place, 1e-9)
