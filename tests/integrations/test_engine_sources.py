"""Encoders of encoder-decoders on the C++ engine: their results, and which calls run there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastformer.encoding import source_engine
from fastformer.integrations import accelerate, engine_encode
from tests.checks import assert_accurate
from tests.covering import by_turns
from tests.integrations.conversions import CASES, T5, Case
from tests.integrations.decoders import Wide

NAMES = [name for name, case in CASES.items() if case.family != "MT5"]
# One of each kind of positions; slow: every option of every family.
FEW = ("Marian separate", "MBart scaled, bias", "M2M100 real", "T5 1.1")


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often an encoder was packed separately."""
    found, plain = [0], source_engine.pack_source

    def counting(*args: Any) -> Any:
        found[0] += 1
        return plain(*args)

    monkeypatch.setattr(engine_encode, "pack_source", counting)
    return found


def pair(name: str = "Bart real", **options: Any) -> tuple[Any, Any]:
    """Returns a model, unchanged and accelerated."""
    plain = CASES[name].make(torch.float32)
    return plain, accelerate(copy.deepcopy(plain), **options)


def inputs(batch: int = 3, seqlen: int = 9) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 58, (batch, seqlen), generator=torch.Generator().manual_seed(2))}


def padded(side: str = "right") -> dict[str, Tensor]:
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    if side == "holes":
        mask[0, 3] = False
    return inputs() | {"attention_mask": (mask.flip(1) if side == "left" else mask).long()}


def whole(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"decoder_input_ids": torch.tensor([[5, 9, 20, 7]]).expand(len(batch["input_ids"]), -1)}


@torch.no_grad()
def agree(plain: Any, ours: Any, batch: dict[str, Tensor] | None = None) -> None:
    """Compares the states of the encoder, or the outputs of whole models."""
    batch = inputs() if batch is None else batch
    if "decoder_input_ids" not in batch:
        plain, ours = plain.get_encoder(), ours.get_encoder()
    found, expected = ours(**batch)[0], plain(**batch)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def check(case: Case, batch: dict[str, Tensor]) -> None:
    plain = case.make(torch.float32)
    ours = accelerate(copy.deepcopy(plain))
    with torch.no_grad():
        found, expected = ours(**batch), plain(**batch)
        with Wide(), case.exactly():
            exact = case.make()(**batch)
    assert type(found) is type(expected) and [*found.keys()] == [*expected.keys()]
    mask = batch["attention_mask"].bool()
    states, others = found.encoder_last_hidden_state, expected.encoder_last_hidden_state
    assert states.dtype == others.dtype and not states[~mask].any()
    assert_accurate(states[mask], others[mask], exact.encoder_last_hidden_state[mask])
    assert_accurate(found.logits, expected.logits, exact.logits)


@pytest.mark.parametrize(
    # slow: more options, and the families that differ in them alone
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_every_family_equals_its_modules(name: str, calls: list[int]) -> None:
    case = CASES[name]
    source, target = case.batch
    mask = (source != case.ids[0]).long()
    check(case, {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target})
    assert calls == [1]
    plain, ours = pair(name)
    agree(plain, ours)
    assert calls == [2]
    with torch.no_grad():
        for options in ({}, {"return_dict": False}):
            found, expected = (model.get_encoder()(**inputs(1), **options) for model in (ours, plain))
            assert type(found) is type(expected) and len(found) == len(expected) == 1


@pytest.mark.parametrize(
    "name, side",
    [
        *by_turns([*FEW], ["left", "holes"]),
        # slow: the families that differ in other options alone
        *(
            pytest.param(name, side, marks=pytest.mark.slow)
            for name in NAMES
            if name not in FEW
            for side in ("left", "holes")
        ),
    ],
)
def test_padding_may_be_anywhere(name: str, side: str, calls: list[int]) -> None:
    check(CASES[name], whole(padded(side)))
    assert calls == [1]


def test_an_encoder_whose_padding_may_be_read_computes_it(calls: list[int]) -> None:
    plain, ours = pair()
    agree(plain, ours, padded())  # not by a call of the model
    assert calls == [0]
    agree(plain, ours, whole(padded()))
    assert calls == [1]
    plain, ours = pair(padding="compute")
    agree(plain, ours, whole(padded()))
    assert calls == [1]


@pytest.mark.parametrize("name", ["Marian real", "MBart real"])
def test_other_requested_outputs_are_returned(name: str, calls: list[int]) -> None:
    plain, ours = pair(name, fused_loss=False)
    asked = {"output_attentions": True, "output_hidden_states": True}
    plain.set_attn_implementation("eager"), ours.set_attn_implementation("eager")  # the other gives no attentions
    with torch.no_grad():
        found, expected = ours(**whole(inputs()), **asked), plain(**whole(inputs()), **asked)
    assert [*found.keys()] == [*expected.keys()] and calls == [0]
    for key in ("encoder_attentions", "encoder_hidden_states"):
        assert len(found[key]) == len(expected[key]) > 1
        torch.testing.assert_close(found[key][-1], expected[key][-1], rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        embeds = {"inputs_embeds": plain.get_encoder().embed_tokens(inputs()["input_ids"])}
    agree(plain, ours, embeds)
    assert calls == [0]
    labels = {"labels": torch.tensor([[5, 9, 7]] * 3)}
    with torch.no_grad():
        torch.testing.assert_close(ours(**padded(), **labels).loss, plain(**padded(), **labels).loss)
    assert calls == [1]
    assert ours(**inputs(), **labels).encoder_last_hidden_state.requires_grad
    ours.train()
    with torch.no_grad():
        ours(**inputs(), **labels)
    assert calls == [1]


def first_of(stack: Any) -> None:
    stack.layers = stack.layers[:1]


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "another activation": (lambda model: setattr(model.get_encoder().layers[0], "activation_fn", nn.Tanh()), 0),
    "fewer layers": (lambda model: first_of(model.get_encoder()), 0),
    "another table": (lambda model: model.get_encoder().embed_positions.weight.data.mul_(0.5), 0),
    "a weight written unseen": (lambda m: m.get_encoder().layers[0].fc1.weight.data.numpy().__imul__(1.5), 1),
    "another decoder": (lambda model: first_of(model.get_decoder()), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_computes_its_changes(name: str, calls: list[int]) -> None:
    (plain, ours), (change, served) = pair("Marian real"), CHANGES[name]
    agree(plain, ours, whole(inputs()))
    assert calls == [1]
    change(plain), change(ours)
    agree(plain, ours, whole(inputs()))
    assert calls == [1 + served]


@pytest.mark.parametrize(
    "name",
    [
        "Bart real",
        # slow: other ways by which a model has its encoder
        *(pytest.param(name, marks=pytest.mark.slow) for name in ["MBart real", "T5 1.0"]),
    ],
)
def test_decoding_and_encoding_share_their_weights(name: str, calls: list[int], packs: list[int]) -> None:
    plain, ours = pair(name)
    agree(plain, ours)
    assert packs == [1]
    said = [model.generate(**inputs(), max_new_tokens=3, do_sample=False) for model in (plain, ours)]
    assert torch.equal(*said)
    encoder = ours.get_encoder()
    with torch.no_grad():
        before = encoder(**inputs())[0]
    assert packs == [1] and calls == [2]
    for model in (plain, ours):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.5)
    agree(plain, ours)  # packed anew, and by itself, since nothing is decoded now
    assert packs == [2] and not torch.allclose(encoder(**inputs())[0], before)
    plain, ours = pair(name)
    ours.generate(**inputs(), max_new_tokens=3)
    agree(plain, ours)
    assert packs == [2]  # decoding came first
    other = pair(name)[1]
    accelerate(other, precision="int8")
    other.generate(**inputs(), max_new_tokens=3)
    with torch.no_grad():
        cosine = torch.cosine_similarity(other.get_encoder()(**inputs())[0], plain.get_encoder()(**inputs())[0], -1)
    assert packs == [2] and 0.9 < float(cosine.min()) < 0.9999999


def test_a_copy_and_a_pickle_pack_their_own(calls: list[int]) -> None:
    plain, ours = pair("MBart real")
    ours.generate(**inputs(), max_new_tokens=2)
    agree(plain, ours)
    twins = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for model in (plain, *twins):
        with torch.no_grad():
            model.get_encoder().layer_norm.weight.mul_(1.5)
    for twin in twins:
        agree(plain, twin)
    assert calls == [3]
    freed = weakref.ref(ours.get_encoder())
    del ours
    gc.collect()
    assert freed() is None


def test_ids_outside_of_the_vocabulary(calls: list[int]) -> None:
    _, ours = pair()
    with torch.no_grad(), pytest.raises(IndexError, match=r"\bids\b"):
        ours.get_encoder()(input_ids=torch.tensor([[5, 60]]))
    calls[0] = 0
    plain, ours = pair("M2M100 real")
    batch = inputs()
    batch["input_ids"][1, 4] = plain.config.pad_token_id  # which its positions don't count
    agree(plain, ours, batch)
    assert calls == [0]
    agree(plain, ours, inputs(1, 40))  # beyond the positions of its config, for which its modules make more
    assert calls == [0]


def test_a_t5_without_a_decoder(calls: list[int]) -> None:
    torch.manual_seed(3)
    plain = transformers.T5EncoderModel(transformers.T5Config(**T5)).eval()
    ours = accelerate(copy.deepcopy(plain))
    for batch in (inputs(2, 40), padded()):
        with torch.no_grad():
            found, expected = ours(**batch)[0], plain(**batch)[0]
        mask = batch.get("attention_mask", torch.ones(batch["input_ids"].shape)).bool()
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=2e-5)
        assert not found[~mask].any()
    assert calls == [2]
