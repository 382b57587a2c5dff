"""Folders of encoders give the ids, hidden states and logits of transformers, without transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from fastformer.checkpoints.hf import FAMILIES, load_folder, model_type
from fastformer.checkpoints.run import load_model
from fastformer.data import Tokenizer, load_tokenizer
from fastformer.files import read_json
from fastformer.models import BERT
from tests.checkpoints.encoders import FOLDERS, PAIRS, TEXTS
from tests.checkpoints.families import ENGLISH, sentencepiece_model


def load(folder: Path) -> tuple[BERT, Tokenizer]:
    model, tokenizer = load_folder(folder, FAMILIES[model_type(folder) or ""])
    assert isinstance(model, BERT) and tokenizer.role == "encoder"
    return model, tokenizer


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_gives_transformers_outputs(kind, made) -> None:
    folder = made(kind)
    model, tokenizer = load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    special = tokenizer.special_ids
    assert (special.pad, special.unk) == (theirs.pad_token_id, theirs.unk_token_id)
    limit = tokenizer.max_len
    assert limit == (32 if kind in ("bert", "bert head", "bert nomic", "distilbert") else model.config.max_len)
    cut = {"truncation": True, "max_length": limit}
    expected = [theirs(text, **cut)["input_ids"] for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == expected == [tokenizer.encode(text) for text in TEXTS]
    assert max(map(len, expected)) == limit
    for max_len in (limit, 9):
        cut["max_length"] = max_len
        for (first, second), found in zip(PAIRS, tokenizer.encode_pairs(PAIRS, max_len), strict=True):
            both = theirs(first, second, **cut)
            assert found[0] == both["input_ids"]
            assert found[1] == both.get("token_type_ids", [0] * len(found[0]))
            assert tokenizer.has_token_types == kind.startswith("bert") == any(found[1])
    architecture = read_json(folder / "config.json")["architectures"][0]
    reference = getattr(transformers, architecture).from_pretrained(folder)
    with torch.inference_mode():
        for ids, types in [tokenizer.encode_pair("the dog", "two birds"), (tokenizer.encode("a book"), None)]:
            types = types if tokenizer.has_token_types else None
            options = {} if types is None else {"token_type_ids": torch.tensor([types])}
            hidden = reference.base_model(torch.tensor([ids]), **options).last_hidden_state
            own = None if types is None else torch.tensor([types])
            torch.testing.assert_close(model.encode(torch.tensor([ids]), token_types=own), hidden, rtol=1e-4, atol=1e-5)
            if model.config.num_labels:
                logits = reference(torch.tensor([ids]), **options).logits
                torch.testing.assert_close(model(torch.tensor([ids]), token_types=own), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_tokenizer_is_saved_beside_its_model(kind, made, tmp_path) -> None:
    model, tokenizer = load(made(kind))
    model.save_pretrained(tmp_path, tokenizer)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, Tokenizer) and again.role == "encoder"
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert again.encode_pairs(PAIRS) == tokenizer.encode_pairs(PAIRS)
    assert (again.max_len, again.special_ids) == (tokenizer.max_len, tokenizer.special_ids)
    loaded, _ = load_model(tmp_path, ("BERT",))
    ids = torch.tensor([tokenizer.encode("the dog")])
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize("kind", FOLDERS)
def test_special_tokens_in_a_text_are_text(kind, made) -> None:
    _, tokenizer = load(made(kind))
    plain, spelled = tokenizer.encode("the dog"), tokenizer.encode("the </s> [SEP] dog")
    if kind not in ("xlm-roberta", "gte"):  # whose Unigram has </s> among its pieces
        assert spelled.count(plain[-1]) == 1
    assert (
        "the" in tokenizer.decode(plain) and "[" not in tokenizer.decode(plain) and "<" not in tokenizer.decode(plain)
    )
    assert len(tokenizer.tokens(plain)) == len(plain)


def test_a_token_may_stand_for_the_unknown_and_end_texts(made, tmp_path) -> None:
    folder = shutil.copytree(made("bert"), tmp_path / "bert")
    saved = read_json(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text(json.dumps({**saved, "model": {**saved["model"], "unk_token": "[SEP]"}}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, unk_token="[SEP]")
    config = read_json(folder / "config.json") | {"sep_token_id": theirs.sep_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    model, tokenizer = load(folder)
    assert model.config.special_ids.eos == (theirs.sep_token_id,) and model.config.special_ids.unk is None
    assert tokenizer.encode("the \u6f22 dog") == theirs("the \u6f22 dog")["input_ids"]
    assert tokenizer.encode("the \u6f22 dog").count(theirs.sep_token_id) == 2


def test_it_may_be_cut_on_the_left(made, tmp_path) -> None:
    for kind in ("bert", "xlm-roberta pieces"):
        folder = shutil.copytree(made(kind), tmp_path / kind)
        named = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        (folder / "tokenizer_config.json").write_text(json.dumps({**named, "truncation_side": "left"}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        _, tokenizer = load(folder)
        text = "the dog reads a book in the park"
        assert tokenizer.encode(text, 6) == theirs(text, truncation=True, max_length=6)["input_ids"]
        assert tokenizer.encode(text, 6) != tokenizer.encode("the dog", 6)


@pytest.mark.skipif("gte" not in FOLDERS, reason="a later version of transformers has this family")
def test_files_that_name_no_tokenizer_have_that_of_the_family(made, tmp_path) -> None:
    nomic, gte = (shutil.copytree(made(kind), tmp_path / kind) for kind in ("bert nomic", "gte"))
    (nomic / "tokenizer_config.json").write_text("{}")
    saved = read_json(nomic / "tokenizer.json")
    (nomic / "tokenizer.json").write_text(json.dumps({**saved, "normalizer": {**_NORMALISED, "lowercase": False}}))
    theirs, (_, tokenizer) = transformers.AutoTokenizer.from_pretrained(nomic), load(nomic)
    both = theirs("the dog", "Two birds")
    assert tokenizer.encode_pair("the dog", "Two birds") == (both["input_ids"], both["token_type_ids"])
    _, whole = load(gte)
    for file in gte.glob("tokenizer*"):
        file.unlink()
    (gte / "sentencepiece.bpe.model").write_bytes(sentencepiece_model(ENGLISH))
    _, tokenizer = load(gte)
    assert tokenizer.encode_batch(TEXTS) == whole.encode_batch(TEXTS)


def test_names_of_a_gtes_original_code_are_read(made, tmp_path) -> None:
    """A model with a head had a prefix there that no class of transformers has."""
    if "gte" not in FOLDERS:
        pytest.skip("a later version of transformers has this family")
    folder = shutil.copytree(made("gte"), tmp_path / "model")
    expected, _ = load(folder)
    named: dict[str, torch.Tensor] = {}
    for file in folder.glob("model*"):
        if file.suffix == ".safetensors":
            named |= {f"new.{name}": tensor for name, tensor in safetensors.torch.load_file(file).items()}
        file.unlink()
    named |= {"classifier.weight": torch.ones(2, 32), "classifier.bias": torch.ones(2)}
    named |= {"new.pooler.dense.weight": torch.ones(32, 32), "new.pooler.dense.bias": torch.ones(32)}
    safetensors.torch.save_file(named, folder / "model.safetensors")
    settings = read_json(folder / "config.json") | {"architectures": ["NewForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(settings))
    model, _ = load(folder)
    assert model.config.num_labels == 2
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in expected.state_dict().items())


_CUT = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
_NORMALISED = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
_PADDED = {"strategy": {"Fixed": 20}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0}


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"truncation": _CUT}, {}), ({"truncation": _CUT}, {"truncation_side": "right"}),
        ({"truncation": _CUT | {"direction": "Right"}}, {"truncation_side": "left"}),
        ({"truncation": _CUT | {"strategy": "OnlyFirst", "stride": 3}}, {}),
        ({"truncation": _CUT, "padding": _PADDED | {"pad_token": "[PAD]"}}, {"padding_side": "left"}),
        ({"truncation": _CUT | {"direction": "Right"}}, {"max_len": 10}),
        ({"truncation": _CUT}, {"model_max_length": 9, "max_len": 10}), ({}, {"model_max_length": 10**30}),
        ({}, {"do_lower_case": False}), ({}, {"strip_accents": False}), ({}, {"tokenize_chinese_chars": False}),
        ({}, {"model_input_names": ["input_ids", "attention_mask"]}),
        # BertTokenizer reads the case from tokenizer_config.json or lower-cases; other classes read tokenizer.json.
        *(
            ({"normalizer": _NORMALISED | {"lowercase": lowers}}, {"tokenizer_class": name} | case)
            for lowers in (False, True)
            for name in ("BertTokenizer", "DistilBertTokenizerFast", "PreTrainedTokenizerFast", None)
            for case in ({"do_lower_case": None}, {"do_lower_case": not lowers, "strip_accents": True})
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_its_files_remember_counts_as_in_transformers(saved, named, made, tmp_path) -> None:
    folder = shutil.copytree(made("bert"), tmp_path / "model")
    for name, values in (("tokenizer.json", saved), ("tokenizer_config.json", {"model_max_length": None} | named)):
        kept = {key: value for key, value in (read_json(folder / name) | values).items() if value is not None}
        (folder / name).write_text(json.dumps(kept))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model, tokenizer = load(folder)
    assert tokenizer.max_len == min(theirs.model_max_length, model.config.max_len)
    for limit in (tokenizer.max_len, 7):
        cut = {"truncation": True, "max_length": limit}
        for pair in PAIRS:
            assert tokenizer.encode_pair(*pair, limit)[0] == theirs(*pair, **cut)["input_ids"]
            types = theirs(*pair, **cut).get("token_type_ids")
            assert tokenizer.has_token_types == (types is not None)
        texts = [*TEXTS, "Café 漢字 The"]
        assert tokenizer.encode_batch(texts, limit) == [theirs(text, **cut)["input_ids"] for text in texts]


@pytest.mark.parametrize("listed", [None, [], ["BertModel"], ["BertForMaskedLM"], ["BertForSequenceClassification"]])
def test_the_first_of_the_architectures_says_whether_texts_are_classified(listed, made, tmp_path) -> None:
    folder = shutil.copytree(made("bert head"), tmp_path / "model")
    count = load(folder)[0].config.num_labels
    values = {name: value for name, value in read_json(folder / "config.json").items() if name != "architectures"}
    (folder / "config.json").write_text(json.dumps(values | ({} if listed is None else {"architectures": listed})))
    is_classifier = not listed or "Classification" in listed[0]  # without a name the tensors decide
    assert load(folder)[0].config.num_labels == (count if is_classifier else 0) and count > 0


def test_bad_calls_are_named(made) -> None:
    _, tokenizer = load(made("bert"))
    for call in (
        lambda: tokenizer.encode("the", 2),
        lambda: tokenizer.encode_pair("the", "dog", 3),
        lambda: tokenizer.encode("the", True),
    ):
        with pytest.raises(ValueError, match=r"\bmax_len\b"):
            call()
    with pytest.raises(ValueError, match="pairs"):
        tokenizer.encode_pairs(["the dog"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match="encoder"):
        load_model(made("bert"), ("GPT",))


def test_a_list_of_words_is_read_without_settings(made, tmp_path) -> None:
    folder = shutil.copytree(made("bert head"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    words = (folder / "vocab.txt").read_text()
    due = load(folder)[1].encode("the dog reads")
    assert due == load(folder)[1].encode("The DOG reads") and len({*due}) > 3
    (folder / "vocab.txt").write_bytes(words.replace("\n", "\r\n").encode())  # as Windows writes it
    assert load(folder)[1].encode("The dog reads") == due
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load(folder)[1].encode("The dog reads") != due


def test_missing_and_damaged_files_are_named(made, tmp_path) -> None:
    folder = shutil.copytree(made("bert head"), tmp_path / "model")
    words = (folder / "vocab.txt").read_text().splitlines()
    for token in ("[UNK]", "[SEP]", "[CLS]"):
        (folder / "vocab.txt").write_text("".join(f"{'of no use' if word == token else word}\n" for word in words))
        with pytest.raises(ValueError, match=r"vocab\.txt"):
            load(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load(folder)
