"""Encoder-only models convert to models.BERT and back, with the same hidden states, logits and gradients."""

from __future__ import annotations

import pytest
import torch

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import BERT, BERTConfig
from fastformer.nn import SequenceLayout
from fastformer.special_ids import SpecialIds
from tests.checkpoints.present import ENCODERS
from tests.checks import assert_accurate
from tests.covering import each
from tests.integrations.decoders import Wide, made_wide
from tests.integrations.encoders import (
    BASE,
    CASES,
    HEAD,
    LABELS,
    VOCAB,
    Case,
    drawn,
    gradients_of,
    hidden_of,
    packed,
    padded,
    texts_of,
)
from tests.nn.comparing import assert_same

cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def check(case: Case, side: str, lengths: tuple[int, ...] = (13, 7, 1)) -> None:
    """Checks hidden states and logits in fp64, where only a different computation makes a difference."""
    theirs = case.make()
    ours = from_huggingface(theirs)
    assert isinstance(ours, BERT) and not ours.training
    texts = texts_of(theirs, lengths)
    batch = padded(theirs, texts, side)
    expected = hidden_of(theirs, batch)
    if case.head == HEAD and side == "right":  # on the left padding has the place of the first token
        with Wide():
            logits = theirs(**batch).logits
        assert_same(ours(**packed(texts, batch)), logits, "logits", 1e-11)
    assert_same(ours.encode(**packed(texts, batch)), expected, "packed", 1e-11)
    right = padded(theirs, texts)
    hidden = ours.encode(right["input_ids"], token_types=right.get("token_type_ids"))
    assert_same(hidden[right["attention_mask"].bool()], expected, "padded", 1e-11)
    for kind in ("cls", "mean"):
        rows = ours.pooled(hidden, ours.layout_of(right["input_ids"]), kind)
        split = expected.split([*map(len, texts)])
        assert_same(rows, torch.stack([each[0] if kind == "cls" else each.mean(0) for each in split]), kind, 1e-11)


@cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_are_the_same(case, side) -> None:
    check(case, side)


@pytest.mark.slow  # every option with every other, at unusual sizes
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ENCODERS)
def test_random_configs_compute_the_same(kind, seed) -> None:
    case = drawn(kind, seed)
    check(case, ("right", "left")[seed % 2], lengths=(31 - seed, 2, 19))
    ours = from_huggingface(case.make())
    twin = from_huggingface(to_huggingface(ours))
    assert twin.config == ours.config
    assert all(map(torch.equal, twin.state_dict().values(), ours.state_dict().values()))


@cases
def test_loss_and_gradients_are_the_same(case) -> None:
    theirs = case.make()
    ours = from_huggingface(theirs)
    assert isinstance(ours, BERT)
    texts = texts_of(theirs)
    batch = padded(theirs, texts)
    if case.head == HEAD:
        labels = torch.tensor([2, 0, 1]) if ours.config.num_labels > 1 else torch.tensor([0.5, -1.0, 2.0]).double()
        with Wide():
            found = theirs(**batch, labels=labels)
        assert_same(ours(**packed(texts, batch)), found.logits, "logits", 1e-11)
        expected, loss = found.loss, ours.loss(**packed(texts, batch), labels=labels)
    else:  # a pooler learns nothing here
        weight = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        expected = (hidden_of(theirs, batch) @ weight).square().sum()
        loss = (ours.encode(**packed(texts, batch)) @ weight).square().sum()
    assert_same(loss, expected, "loss", 1e-11)
    with Wide():
        expected.backward()
    loss.backward()
    gradients = gradients_of(ours, case.kind)
    unused = ENCODER_FORMS[case.kind].unused_positions(ours.config.special_ids.pad)
    compared = 0
    for name, parameter in (theirs if case.head == HEAD else theirs.base_model).named_parameters():
        if parameter.grad is None:
            continue
        own, their = gradients[name], parameter.grad
        if "position_embeddings" in name:
            own, their = own[unused:], their[unused:]
        if their.abs().max() > 1e-9:  # a bias of keys has none
            assert_same(own, their, name, 1e-9)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("name", ["bert labels", "mpnet labels", "modernbert labels"])
def test_fp32_errs_by_the_rule(name) -> None:
    case, found = CASES[name], []
    for seed in range(3, 7):
        plain, exact = case.make(torch.float32, seed), case.make(seed=seed)
        ours = from_huggingface(plain)
        texts = texts_of(plain)
        batch = padded(plain, texts)
        with Wide():
            expected = exact(**batch).logits
        found.append((ours(**packed(texts, batch)), plain(**batch).logits, expected))
    assert_accurate(*(torch.stack(each) for each in zip(*found, strict=True)))


@cases
def test_a_model_survives_the_conversion_and_back(case, tmp_path) -> None:
    theirs = case.make()
    ours = from_huggingface(theirs)
    with made_wide():
        back = to_huggingface(ours)
    assert back.dtype == torch.float64 and not back.training
    twin = from_huggingface(back)
    assert twin.config == ours.config
    for name, weight in ours.state_dict().items():
        assert torch.equal(twin.state_dict()[name], weight), name
    # With a head it is the class that it was, or one that computes the same; the table of positions was cut.
    texts = texts_of(theirs)
    expected = hidden_of(theirs, padded(theirs, texts))
    assert_same(hidden_of(back, padded(back, texts)), expected, "output", 1e-11)
    form = ENCODER_FORMS[case.kind]
    settings, weights = form.from_model(ours)
    same = type(theirs.config)(**{name: value for name, value in settings.items() if name != "architectures"})
    assert same.pad_token_id == theirs.config.pad_token_id
    assert form.to_model(Checkpoint(settings, weights)).config == ours.config
    if case.head == HEAD:
        state = theirs.state_dict()
        unread = {name for name in state if name.endswith(("position_ids", "token_type_ids"))}
        assert weights.keys() == state.keys() - unread
    ours.save_pretrained(tmp_path)
    loaded = BERT.from_pretrained(tmp_path)
    assert loaded.config == ours.config
    assert torch.equal(
        loaded.encode(**packed(texts, padded(theirs, texts))), ours.encode(**packed(texts, padded(theirs, texts)))
    )


def test_a_class_that_transformers_lacks_is_named(monkeypatch) -> None:
    ours = from_huggingface(CASES["electra"].make())
    later = FAMILIES["electra"]._replace(config_class="LaterConfig")
    monkeypatch.setitem(FAMILIES, "electra", later)
    with pytest.raises(ValueError, match="LaterConfig"):
        to_huggingface(ours)


def test_an_omitted_head_is_named(caplog) -> None:
    from_huggingface(CASES["bert words"].make())
    assert "cls.predictions" in caplog.text


@each(
    "case, settings, name",
    [
        ("bert", {"hidden_act": "tanh"}, "hidden_act"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"pad_token_id": 60}, "pad_token_id"),
        ("bert", {"num_hidden_layers": 4}, "layer.3"),
        ("bert", {"num_hidden_layers": 2}, "layer.2"),
        ("bert", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
        ("gte", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("nomic_bert", {"hidden_size": None, "n_embd": 24}, "n_embd"),
        ("nomic_bert", {"hidden_act": "relu"}, "hidden_act"),
        ("distilbert", {"activation": "tanh"}, "activation"),
        ("modernbert", {"hidden_activation": "relu"}, "hidden_activation"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation"),
        ("modernbert", {"attention_dropout": 0.1}, "attention_dropout"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
        ("electra", {"embedding_size": 8}, "embedding"),
        ("eurobert", {"hidden_act": "relu"}, "hidden_act"),
        ("eurobert", {"classifier_pooling": "cls"}, "classifier_pooling"),
        ("eurobert", {"clf_pooling": "mean"}, "clf_pooling"),
        ("eurobert", {"mlp_bias": "no"}, "mlp_bias"),
        ("eurobert", {"attention_bias": 0}, "attention_bias"),
        ("eurobert", {"num_key_value_heads": 2.5}, "num_key_value_heads"),
        ("eurobert", {"num_key_value_heads": 4}, "num_kv_heads"),
        ("eurobert", {"head_dim": 0}, "head_dim"),
        ("eurobert", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("eurobert", {"eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_unsupported_settings_are_named(case, settings, name) -> None:
    if case not in ENCODERS:
        pytest.skip(f"transformers has no {case}")
    theirs = CASES[case].make()
    with pytest.raises(ValueError, match=name):
        ENCODER_FORMS[case].to_model(Checkpoint({**theirs.config.to_dict(), **settings}, theirs.state_dict()))


def test_settings_of_version_4_give_the_same_outputs() -> None:
    theirs = CASES["modernbert"].make()
    form, settings = ENCODER_FORMS["modernbert"], theirs.config.to_dict()
    expected = form.to_model(Checkpoint(settings, theirs.state_dict())).config
    for name in ("layer_types", "rope_parameters"):
        settings.pop(name, None)
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    assert form.to_model(Checkpoint(settings | old, theirs.state_dict())).config == expected
    assert form.to_model(Checkpoint(settings, theirs.state_dict())).config == expected
    assert expected.windows == (False, True, True) and expected.local_rotary_base == 10_000.0
    assert old.items() <= form.from_model(form.to_model(Checkpoint(settings, theirs.state_dict())))[0].items()


def test_other_heads_and_options_are_refused() -> None:
    import transformers

    config = CASES["bert"].make().config
    with pytest.raises(ValueError, match="BertForTokenClassification"):
        from_huggingface(transformers.BertForTokenClassification(config))
    with pytest.raises(ValueError, match="token_types"):
        to_huggingface(BERT.from_preset("tiny", vocab_size=60, token_types=0, num_labels=LABELS))
    with pytest.raises(ValueError, match="norm_first"):
        to_huggingface(BERT.from_preset("tiny", vocab_size=60, norm_first=True))


def test_gamma_and_beta_of_old_files_are_read() -> None:
    theirs = CASES["bert"].make()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in theirs.state_dict().items()
    }
    old["embeddings.position_ids"] = torch.arange(48)[None]
    settings = theirs.config.to_dict() | {"architectures": [f"Bert{BASE}"]}
    found, expected = (
        ENCODER_FORMS["bert"].to_model(Checkpoint(settings, each)) for each in (old, theirs.state_dict())
    )
    assert all(map(torch.equal, found.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize("ends", [1, [2, 1]], ids=str)
def test_a_euroberts_texts_end_with_the_id_that_pads_them(ends) -> None:
    theirs = CASES["eurobert labels"].make(eos_token_id=ends)
    ours = from_huggingface(theirs)
    assert isinstance(ours, BERT) and ours.config.special_ids.pad in ours.config.special_ids.eos
    texts = [[*text[:4], 1, *text[4:], 1] for text in texts_of(theirs)]  # pairs
    batch = padded(theirs, texts)
    with Wide():
        expected = theirs(**batch).logits
    layout = SequenceLayout.from_mask(batch["attention_mask"])
    assert_same(ours(batch["input_ids"], layout=layout), expected, "logits", 1e-11)
    for text, logits in zip(texts, expected, strict=True):
        assert_same(ours(torch.tensor([text]))[0], logits, "logits", 1e-11)
    back = to_huggingface(ours)
    assert back.config.eos_token_id == ends and back.config.pad_token_id == 1
    assert from_huggingface(back).config == ours.config


@pytest.mark.parametrize("kind", ["modernbert", "eurobert"])
def test_how_a_later_head_pools_is_kept_without_a_head(kind) -> None:
    theirs = CASES[kind].make(classifier_pooling="mean")
    assert to_huggingface(from_huggingface(theirs)).config.classifier_pooling == "mean"


def test_a_family_with_one_end_keeps_the_first_of_several() -> None:
    ours = BERT(BERTConfig(VOCAB, 48, 4, token_types=2, num_layers=1, special_ids=SpecialIds(0, eos=(2, 3), unk=None)))
    assert from_huggingface(to_huggingface(ours)).config.special_ids.eos == (2,)


def test_heads_that_have_all_their_own_keys_are_those_of_a_bert() -> None:
    config = BERTConfig(VOCAB, token_types=2, num_kv_heads=12)
    assert ENCODER_FORMS["bert"].settings(config)["num_attention_heads"] == 12
    with pytest.raises(ValueError, match=r"\bnum_kv_heads\b"):
        ENCODER_FORMS["bert"].settings(BERTConfig(VOCAB, token_types=2, num_kv_heads=4))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"norm": "layer"}, "norm"), ({"norm_first": False}, "norm_first"), ({"dropout": 0.1}, "dropout"),
        ({"embedding_norm": True}, "embedding_norm"), ({"head_dropout": 0.1}, "head_dropout"),
        ({"head": "roberta"}, "head"), ({"linear1_bias": True}, "linear1_bias"),
        ({"d_model": 50, "head_dim": 8}, "d_model"),
    ],
)  # fmt: skip
def test_what_no_eurobert_has_is_named(options, name) -> None:
    usual = {
        "d_model": 48, "num_heads": 4, "num_layers": 1, "num_kv_heads": 2, "norm": "rms", "norm_first": True,
        "embedding_norm": False, "bias": False, "norm_bias": False, "positions": "rotary", "activation": "swiglu",
        "num_labels": 2, "head": "electra", "head_pooling": "late",
        **dict.fromkeys(("dropout", "attention_dropout", "head_dropout"), 0.0),
    }  # fmt: skip
    form = ENCODER_FORMS["eurobert"]
    assert form.settings(BERTConfig(VOCAB, **usual))["num_key_value_heads"] == 2
    with pytest.raises(ValueError, match=rf"EuroBERT.*\b{name}\b"):
        form.settings(BERTConfig(VOCAB, **usual | options))


def test_positions_are_counted_from_the_id_that_the_model_was_made_with() -> None:
    theirs = CASES["roberta"].make(torch.float32)
    theirs.config.pad_token_id += 1  # as where a tokenizer's id is written into a config
    with pytest.raises(ValueError, match=r"\bpad_token_id\b"):
        from_huggingface(theirs)
    theirs = CASES["bert"].make(torch.float32)  # whose positions begin at 0
    theirs.config.pad_token_id += 1
    from_huggingface(theirs)
