"""`accelerate(model, fused_loss=True)` gives the original loss and gradients, without logits."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel
from transformers.loss import loss_utils

import fastformer
from fastformer.integrations.known import CACHE
from fastformer.ops import use_backend
from tests.covering import by_turns
from tests.integrations import families as small
from tests.integrations.families import IDS, LEFT, RIGHT, assert_all_same, exactly, gradients, ran
from tests.integrations.test_replaced import source
from tests.nn.comparing import assert_same

DECODERS = small.CAUSAL
HEADS = {family: small.HEADS[family] for family in (*DECODERS, *small.SEQ2SEQ)}
families = pytest.mark.parametrize("family", HEADS)
decoders = pytest.mark.parametrize("family", DECODERS)


def make(family: str) -> Any:
    model = small.make(family, **({"use_cache": False} if family == "t5" else {}))
    if family in ("bart", "marian"):
        model.final_logits_bias.normal_()
    return model.train()


def fused(family: str) -> Any:
    return fastformer.accelerate(make(family), fused_loss=True)


def labels_of(family: str, mask: Tensor | None) -> Tensor:
    """Returns the ids where the mask has tokens; for an encoder-decoder, other targets, some of them ignored."""
    if family in DECODERS:
        return small.labels_of(mask)
    return small.TARGETS.masked_fill(torch.arange(6) > torch.tensor([[5], [2], [3], [0]]), -100)


def run(model: Any, family: str, mask: Tensor | None = None, **options: Any) -> Any:
    options = {"labels": labels_of(family, mask)} | options
    return model(IDS, attention_mask=None if mask is None else mask.long(), **options)


def assert_same_as_plain(family: str, mask: Tensor | None = None, **options: Any) -> None:
    """Checks loss and gradients in fp64."""
    model, plain = fused(family), make(family)
    report = fastformer.report(model)
    assert report.swapped[""] == HEADS[family] and not report.left
    with exactly(family):
        expected = run(plain, family, mask, **options)
        gradients_expected = gradients(plain, expected.loss)
    assert "linear_cross_entropy_fwd_bwd" in ran(lambda: run(model, family, mask, **options))
    found = run(model, family, mask, **options)
    assert found.logits is None and type(found) is type(expected)
    assert {name for name in expected if name != "logits"} == set(found)
    # transformers takes a decoder's loss in fp32, whatever the model's dtype.
    tolerance = 1e-6 if family in DECODERS else 1e-9
    ours, theirs = [found.loss, *gradients(model, found.loss)], [expected.loss, *gradients_expected]
    assert_all_same(ours, theirs, "loss or gradient", tolerance)


@pytest.mark.parametrize("family, mask", by_turns([*HEADS], [None, RIGHT, LEFT]))
def test_the_loss_of_the_plain_model(family, mask):
    assert_same_as_plain(family, mask)


@families
def test_positions_after_the_last_label_are_skipped(family):
    """This needs no mask, because nothing that the loss reads depends on these positions."""
    model = fused(family)
    labels = labels_of(family, RIGHT if family in DECODERS else None)
    packs = lambda **options: "varlen_attention_fwd" in ran(lambda: run(model, family, **options))  # noqa: E731
    assert packs(labels=labels, use_cache=False)
    # All before a label that counts is read. (A decoder alone predicts nothing at its last position.)
    ends = labels.clone()
    ends[:, -1] = 7
    assert packs(labels=ends, use_cache=False) == (family in DECODERS)
    if family in DECODERS:
        assert not packs(labels=labels, use_cache=True)  # a cache holds it
    assert_same_as_plain(family, labels=labels, use_cache=False)
    # A hook on the stack sees what it saw before.
    stack = {"gpt2": "transformer", "llama": "model", "t5": "decoder"}.get(family, "model.decoder")
    seen: list[Tensor] = []
    model.get_submodule(stack).register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    run(model, family, labels=labels, use_cache=False)
    assert seen[0].any(-1).all() and not packs(labels=labels, use_cache=False)


SHIFTED = torch.randint(5, 60, (4, 9)).masked_fill(torch.rand(4, 9) < 0.3, -100)
DOCUMENTS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]).expand(4, -1)
# What a call may be given -> the families, the mask, the options.
GIVEN: dict[str, tuple[Iterable[str], Tensor | None, dict[str, Any]]] = {
    "num_items_in_batch": (DECODERS, RIGHT, {"num_items_in_batch": 50}),
    "num_items_in_batch as a tensor": (DECODERS, RIGHT, {"num_items_in_batch": torch.tensor(50)}),
    # Without a mask transformers reads from the positions that a row has several documents.
    "positions": (DECODERS, None, {
        "labels": IDS.masked_fill(torch.arange(9) > 6, -100), "position_ids": DOCUMENTS, "use_cache": False}),
    "labels that are shifted already": (DECODERS, None, {"shift_labels": SHIFTED}),
    "an index that is ignored": (DECODERS, None, {"labels": IDS.masked_fill(IDS % 3 == 0, 7), "ignore_index": 7}),
    "hidden states": (HEADS, None, {"output_hidden_states": True}),
    "inputs of the decoder": (HEADS.keys() - {*DECODERS}, None, {"decoder_input_ids": small.TARGETS.flip(0)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), [(name, each) for name, row in GIVEN.items() for each in sorted(row[0])])
def test_the_loss_of_a_call_with_options(name, family):
    _, mask, options = GIVEN[name]
    assert_same_as_plain(family, mask, **options)


@families
def test_a_loss_without_labels_is_nan(family):
    model = fused(family)
    loss = run(model, family, labels=torch.full_like(labels_of(family, None), -100)).loss
    assert loss.isnan()
    assert not any(gradient.any() for gradient in gradients(model, loss)), "a step that learns nothing breaks nothing"


@families
def test_logits_are_returned_if_no_loss_is_trained(family):
    model = fused(family)
    assert run(model, family, labels=None, **decoder_inputs(family)).logits is not None
    if family in DECODERS:  # or if some are requested
        assert run(model, family, labels=IDS[:, -3:], logits_to_keep=3).logits.shape == (4, 3, 60)
    assert run(model.eval(), family).logits is not None


def decoder_inputs(family: str) -> dict[str, Tensor]:
    return {} if family in DECODERS else {"decoder_input_ids": small.TARGETS}


@families
@pytest.mark.parametrize("surgery", ["tuple", "hook", "class", "weight"])
def test_code_that_the_fused_loss_would_skip(surgery, family):
    """If code reads the logits or replaces the head, transformers' own loss runs."""
    results = []
    for made in (make, fused):
        model = made(family)
        seen: list[Tensor] = []
        options: dict[str, Any] = {}
        if surgery == "tuple":
            options = {"return_dict": False}
        elif surgery == "hook":
            model.lm_head.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        elif surgery == "class":
            model.lm_head.__class__ = type(
                "Doubled", (nn.Linear,), {"forward": lambda s, x: 2 * nn.Linear.forward(s, x)}
            )
        else:
            nn.utils.parametrizations.weight_norm(model.lm_head)
        with exactly(family):
            out = run(model, family, **options)
        loss, logits = (out[0], out[1]) if isinstance(out, tuple) else (out.loss, out.logits)
        results.append((loss, logits, len(seen)))
    (loss, logits, calls), (theirs, their_logits, their_calls) = results[1], results[0]
    assert calls == their_calls == (surgery == "hook")
    torch.testing.assert_close(loss, theirs, rtol=1e-9, atol=0)
    torch.testing.assert_close(logits, their_logits, rtol=1e-9, atol=1e-9)


@decoders
def test_a_loss_function_of_the_user(family):
    model = make(family)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().sum()
    fastformer.accelerate(model, fused_loss=True)
    out = run(model, family)
    assert out.loss == out.logits.square().sum()


def times(factor: float, function: Any) -> Any:
    @functools.wraps(function)  # as a careful hand would
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return factor * function(*args, **kwargs)

    return wrapped


LOSSES = ("cross_entropy", "fixed_cross_entropy", "forward", "__call__", "CrossEntropyLoss")


@pytest.mark.parametrize(
    ("family", "name"),
    # A decoder's code knows no class of a loss.
    [(family, name) for family in HEADS for name in LOSSES if name != "CrossEntropyLoss" or family not in DECODERS],
)
def test_a_users_loss_is_called(family, name, monkeypatch):
    """It acts as without fastformer, and the loss is fused again after its removal."""
    owner = {"cross_entropy": F, "fixed_cross_entropy": loss_utils, "CrossEntropyLoss": source(family)}
    place = owner.get(name, nn.CrossEntropyLoss)
    model, plain = fused(family), make(family)
    with exactly(family):
        before = run(plain, family).loss
    with monkeypatch.context() as patched:
        old = getattr(place, name)
        new = functools.partial(old, label_smoothing=0.3) if name == "CrossEntropyLoss" else times(3.0, old)
        patched.setattr(place, name, new)
        with exactly(family):
            expected = run(plain, family)
        found = run(model, family)
        assert_same(found.loss, expected.loss, "loss", 1e-6)
        is_asked = name == "cross_entropy" or (name == "fixed_cross_entropy") == (family in DECODERS)
        assert torch.allclose(expected.loss, before, rtol=1e-6) != is_asked
        assert found.logits is not None or not is_asked
    assert run(model, family).logits is None


@pytest.mark.parametrize(
    ("family", "place"),
    [("bart", "function"), ("marian", "function")]
    + [("t5", place) for place in ("class", "instance") if "t5" in HEADS],
)
def test_another_shift_of_the_labels(family, place, monkeypatch):
    """The decoder reads the result of the shift."""
    model, plain = fused(family), make(family)
    before = run(model, family).loss
    if place == "function":
        theirs = source(family).shift_tokens_right
        own: Any = lambda labels, pad_token_id, decoder_start_token_id: theirs(  # noqa: E731
            labels, pad_token_id, decoder_start_token_id
        ).flip(1)
        monkeypatch.setattr(source(family), "shift_tokens_right", own)
    elif place == "class":
        monkeypatch.setattr(source(family).T5PreTrainedModel, "_shift_right", lambda self, labels: labels.relu())
    else:
        for each in (model, plain):
            each._shift_right = torch.relu
    with exactly(family):
        expected = run(plain, family)
    found = run(model, family)
    assert found.logits is None and found.loss != before
    assert_same(found.loss, expected.loss, "loss", 1e-9)
    pairs = zip(gradients(model, found.loss), gradients(plain, expected.loss), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("family", "dtype", "cast"),
    by_turns(
        [*HEADS], [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True), (torch.bfloat16, True)]
    ),
)
def test_a_loss_has_the_dtype_of_the_plain_one(dtype, cast, family):
    """Its gradients obey the rule, because the cast of the loss comes after them."""
    exact, model, plain = make(family), fused(family).to(dtype), make(family).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast), use_backend("reference"):
        found, expected = run(model, family), run(plain, family)
    assert found.logits is None and found.loss.dtype == expected.loss.dtype
    assert found.loss.dtype == (torch.float32 if cast or family in DECODERS else dtype)
    with exactly(family):
        reference = run(exact, family)
    names = [(exact, reference.loss), (model, found.loss), (plain, expected.loss)]
    right, ours, theirs = (torch.cat([g.double().flatten() for g in gradients(*each)]) for each in names)
    bits = torch.finfo(torch.bfloat16 if cast else dtype).eps
    assert (ours - right).norm() <= 2 * (theirs - right).norm() + bits * right.norm()


@families
def test_accelerate_is_undone_by_restore(family):
    model = fused(family)
    before = fastformer.report(model)
    assert fastformer.report(fastformer.accelerate(model, fused_loss=True)) == before
    fastformer.restore(model)
    assert type(model).__name__ == HEADS[family] and type(model).__module__.startswith("transformers")
    assert run(model, family).logits is not None


@families
def test_memory(family):
    """No tensor is as large as the logits: none has both the vocabulary and all tokens as dimensions."""
    sizes: list[torch.Size] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.shape for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    model, rows = fused(family), labels_of(family, None).numel()
    with Sizes():
        run(model, family).loss.backward()
    assert sizes and not any(size.numel() == rows * 60 and size[-1] == 60 for size in sizes)


def test_models_without_a_fused_loss():
    bert = BertModel(BertConfig(vocab_size=60, hidden_size=24, num_hidden_layers=1, num_attention_heads=3))
    with pytest.raises(ValueError, match=r"\bhead\b"):
        fastformer.accelerate(bert, fused_loss=True)
    assert type(bert.encoder.layer[0]).__module__.startswith("transformers")


@decoders
def test_requested_too_late(family):
    model = make(family)
    fastformer.accelerate(model)
    with pytest.raises(ValueError):
        fastformer.accelerate(model, fused_loss=True)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_t5_keeps_a_cache_only_on_request(is_scaled):
    """Its config requests one in each call. The input of a head is scaled if the head is tied to the embedding."""
    model, plain = (small.make("t5", use_cache=True, tie_word_embeddings=is_scaled).train() for _ in range(2))
    assert model.config.scale_decoder_outputs == is_scaled
    fastformer.accelerate(model, fused_loss=True)
    with exactly("t5"):
        expected = run(plain, "t5", RIGHT)
    found = run(model, "t5", RIGHT)
    assert found.logits is None and found.get(CACHE) is None and expected.get(CACHE) is not None
    assert_same(found.loss, expected.loss, "loss", 1e-9)
    asked = run(model, "t5", RIGHT, use_cache=True)
    assert asked.logits is not None and asked[CACHE].get_seq_length() == 6
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        run(model, "t5", RIGHT)


@families
def test_labels_of_another_length_are_refused(family):
    """The plain model refuses them as well, because its loss pairs labels with tokens."""
    model = fused(family)
    labels = labels_of(family, RIGHT if family in DECODERS else None)
    assert (labels == -100).any()
    for other in (labels[:, :-1], torch.cat([labels, labels], 1)):
        with pytest.raises(ValueError):
            run(model, family, labels=other, **decoder_inputs(family))


@families
def test_the_name_of_the_model_is_saved(family, tmp_path):
    model = make(family).eval()
    expected = run(model, family).logits
    fastformer.accelerate(model, fused_loss=True)
    assert type(model).__name__ == HEADS[family]
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [HEADS[family]]
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(
        run(torch.load(tmp_path / "model.pt", weights_only=False), family).logits, run(model, family).logits
    )
    torch.testing.assert_close(run(model, family).logits, expected, rtol=1e-6, atol=1e-6)
