"""Multilingual translators use the languages of the caller, and errors name a wrong language."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch

from fastformer.cli import main
from fastformer.data import load_tokenizer
from fastformer.generation import AsyncTranslator, Translator
from tests.checkpoints import families
from tests.checkpoints.multilingual import FOLDERS

FEW = {"max_new_tokens": 16, "no_repeat_ngram_size": 2, "beam_rules": "transformers"}


@pytest.mark.parametrize("kind", FOLDERS)
def test_outputs_equal_transformers(kind, made, tmp_path, capsys) -> None:
    spoken = made(kind)
    expected = spoken.said(no_repeat_ngram_size=2)
    file = tmp_path / "in.txt"
    file.write_text("\n".join(spoken.saved.texts) + "\n", encoding="utf-8")
    words = ["translate", str(spoken.saved.folder), "--file", str(file), "--device", "cpu"]
    flags = {**FEW, **{name: value for name, value in spoken.languages.items() if value is not None}}
    assert main([*words, *(f"--{name}={value}" for name, value in flags.items())]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == expected
    assert len(set(expected)) > 2
    source, target = spoken.short
    translator = Translator.from_pretrained(spoken.saved.folder, source_lang=source, target_lang=target)
    for text in spoken.saved.texts:
        assert translator.encode(text) == spoken.read(text)
    # By the other rules a forced language counts as no token.
    count = 16 if spoken.token is not None or kind == "mbart" else 15
    assert translator.translate(spoken.saved.texts, max_new_tokens=count) == spoken.said()


def test_settings_that_a_tokenizers_folder_omits_are_the_usual_ones(made, tmp_path) -> None:
    spoken = made("nllb")
    folder = shutil.copytree(spoken.saved.folder, tmp_path / "nllb")
    settings = json.loads((file := folder / "tokenizer_config.json").read_text())
    file.write_text(json.dumps({name: value for name, value in settings.items() if name != "legacy_behaviour"}))
    translator = Translator.from_pretrained(folder, **spoken.languages)
    assert [translator.encode(text) for text in spoken.saved.texts] == [*map(spoken.read, spoken.saved.texts)]


@pytest.mark.parametrize("kind, penalty", [("nllb", 0.0), ("nllb", 2.0), ("mbart", 1.0), ("madlad", 1.0)])
def test_beams_by_transformers_rules_equal_its_own(kind, penalty, made) -> None:
    spoken = made(kind)
    options = {"num_beams": 4, "length_penalty": penalty, "early_stopping": "never", "max_new_tokens": 12}
    translator = Translator.from_pretrained(spoken.saved.folder, **spoken.languages)
    found = translator.translate(spoken.saved.texts, beam_rules="transformers", min_new_tokens=3, **options)
    assert found == spoken.said(min_new_tokens=3, **options)
    # Where n-grams are forbidden, the language is no exception.
    found = translator.translate(spoken.saved.texts, **{**FEW, **options})
    assert found == spoken.said(no_repeat_ngram_size=2, **options)


@pytest.mark.parametrize("penalty, ends", [(1.0, [2, 37, 50, 19]), (2.0, [2, 37, 50]), (1.0, [2, 71, 37])])
def test_the_language_counts_in_the_length_of_beams_that_end(penalty, ends, made) -> None:
    """By transformers' rules it counts. If it didn't, other hypotheses would be the best."""
    spoken = made("nllb")
    options = {"num_beams": 4, "length_penalty": penalty, "max_new_tokens": 12, "eos_token_id": ends}
    translator = Translator.from_pretrained(spoken.saved.folder, **spoken.languages)
    expected = spoken.said(early_stopping=False, **options)
    assert translator.translate(spoken.saved.texts, beam_rules="transformers", **options) == expected
    assert len({*map(len, expected)}) > 2


@pytest.mark.parametrize("kind", ["nllb", "m2m100", "madlad"])
def test_a_folder_converts_to_fastformers_format(kind, made, tmp_path) -> None:
    spoken = made(kind)
    translator = Translator.from_pretrained(spoken.saved.folder, **spoken.languages)
    expected = translator.translate(spoken.saved.texts, max_new_tokens=8)
    translator.model.save_pretrained(tmp_path, translator.tokenizer)
    assert isinstance(load_tokenizer(tmp_path), type(translator.tokenizer))
    again = Translator.from_pretrained(tmp_path, source_lang=spoken.short[0], target_lang=spoken.short[1])
    assert again.translate(spoken.saved.texts, max_new_tokens=8) == expected
    assert again.languages == translator.languages
    file = tmp_path / "tokenizer.json"
    wrong: list[dict[str, object]] = [{"ids": {}}, {"ids": {"de": 10**6}}, {"places": "above"}, {"ids": None}]
    for languages in wrong:
        values = json.loads(file.read_text())
        (tmp_path / "bad").mkdir(exist_ok=True)
        changed = values | {"languages": values["languages"] | languages}
        (tmp_path / "bad" / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path / "bad")


def test_languages_of_each_text(made) -> None:
    spoken = made("nllb")
    translator = Translator.from_pretrained(spoken.saved.folder)
    texts, targets = spoken.saved.texts, ["deu_Latn", "fra_Latn", "zho_Hans", "de"]
    each = [
        translator.translate(text, source_lang="eng_Latn", target_lang=target, max_new_tokens=8)
        for text, target in zip(texts, targets, strict=True)
    ]
    assert len(set(each)) == 4, each
    options = {"source_lang": "en", "max_new_tokens": 8}
    assert translator.translate(texts, target_lang=targets, **options) == each
    assert [*translator.stream(iter(texts), target_lang=iter(targets), **options)] == each
    assert "".join(translator.stream(texts[1], target_lang="fr", **options)) == each[1]
    speaking = Translator.from_pretrained(spoken.saved.folder, source_lang="en", target_lang="fr")
    assert speaking.translate(texts, target_lang=["de", None, "zho_Hans", "de"], max_new_tokens=8) == each
    prefixed = speaking.translate(texts[1], target_prefix="two", max_new_tokens=4)
    assert prefixed.startswith("two") and prefixed != speaking.translate(texts[1], max_new_tokens=4)
    split = speaking.translate("two birds. Men read in the park.", split=True, max_new_tokens=8)
    assert split == " ".join(speaking.translate(["two birds.", "Men read in the park."], max_new_tokens=8))

    async def at_once() -> list[str]:
        async with AsyncTranslator(speaking) as front:
            tasks = [
                front.translate(text, target_lang=to, max_new_tokens=8) for text, to in zip(texts, targets, strict=True)
            ]
            streamed = [piece async for piece in front.stream(texts[2], target_lang="zho_Hans", max_new_tokens=8)]
            return [*await asyncio.gather(*tasks), "".join(streamed)]

    assert asyncio.run(at_once()) == [*each, each[2]]


def test_scores_and_alignments_omit_the_language_tokens(made, tmp_path, capsys) -> None:
    spoken = made("nllb")
    translator = Translator.from_pretrained(spoken.saved.folder, **spoken.languages)
    text = spoken.saved.texts[0]
    found = translator.translate(text, return_token_scores=True, max_new_tokens=8)
    scored = translator.score(text, found.text)
    told = [translator.language_ids().begin[0], *translator.encode_target(found.text), 2]
    source, labels = torch.tensor([spoken.read(text)]), torch.tensor([told])
    with torch.inference_mode():
        log_probs = spoken.saved.model(source, labels=labels).logits[0].log_softmax(-1)
    expected = log_probs[range(1, len(told)), told[1:]]
    assert [value for _, value in scored.tokens] == pytest.approx(expected.tolist(), abs=1e-4)
    words, said = len(text.split()), len(found.text.split())
    aligned = translator.align(text, found.text)
    assert (
        aligned and {place for _, place in aligned} <= {*range(said)} and {at for at, _ in aligned} <= {*range(words)}
    )
    tokens = translator.align(text, found.text, unit="tokens")
    assert [place for _, place in tokens] == [*range(len(told) - 2)]
    seen, shown, weights = translator.attention(text)
    assert seen[0] == "eng_Latn" and shown[0] == "deu_Latn" and weights.shape[2:] == (len(shown), len(seen))
    for name, line in (("source", text), ("target", found.text)):
        (tmp_path / name).write_text(line + "\n")
    files = ["--file", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    flags = ["--source_lang", "eng_Latn", "--target_lang", "deu_Latn", "--device", "cpu"]
    assert main(["score", str(spoken.saved.folder), *files, *flags]) == 0
    assert float(capsys.readouterr().out.split("\t")[0]) == pytest.approx(scored.score, abs=1e-3)
    with pytest.raises(ValueError, match="token"):
        Translator.from_pretrained(made("nllb-legacy").saved.folder, **spoken.languages).align(text, "two")


@pytest.mark.parametrize(
    "kind, languages, named",
    [
        ("nllb", {"target_lang": "deu_Lant"}, "target_lang.*'deu_Lant'.*'deu_Latn'"),
        ("nllb", {"target_lang": "zho"}, "'zho_Hans' or 'zho_Hant'"),
        ("nllb", {"source_lang": "Klingon", "target_lang": "de"}, "source_lang.*'Klingon'"),
        ("nllb", {"target_lang": "es"}, "'es'"),
        ("nllb", {"source_lang": "en"}, "target_lang.*none"),
        ("nllb", {"target_lang": 3}, "target_lang.*int"),
        ("m2m100", {"source_lang": "xx", "target_lang": "de"}, "source_lang.* 100 languages"),
        ("mbart", {"target_lang": "de_DE"}, "'ro_RO'.*'de_DE'"),
        ("madlad", {"source_lang": "en", "target_lang": "de"}, "source_lang.*'en'"),
        ("madlad", {"target_lang": "es"}, "target_lang.*'es'"),
        ("t5", {"target_lang": "de"}, "target_lang.*Transformer.*'de'"),
        ("t5", {"source_lang": "en"}, "source_lang"),
    ],
)
def test_wrong_languages_are_named(kind, languages, named, made, tmp_path) -> None:
    folder = families.t5(tmp_path / "t5").folder if kind == "t5" else made(kind).saved.folder
    with pytest.raises(ValueError, match=named):
        Translator.from_pretrained(folder).translate("two birds", **languages)
    with pytest.raises(ValueError, match=named):
        Translator.from_pretrained(folder, **languages).translate("two birds")


def test_the_command_reports_a_wrong_language(made, capsys) -> None:
    words = ["translate", str(made("nllb").saved.folder), "two birds", "--device", "cpu", "--source_lang", "en"]
    capsys.readouterr()  # what was said while the folder was made
    assert main([*words, "--target_lang", "klingon"]) == 1
    said = capsys.readouterr().err
    assert "'klingon'" in said and said.count("\n") == 1


def test_a_text_whose_language_is_unknown_may_be_skipped(made, caplog) -> None:
    translator = Translator.from_pretrained(made("nllb").saved.folder, source_lang="en", max_batch_size=2)
    options = {"target_lang": ["de", "klingon"], "max_new_tokens": 4}
    with pytest.raises(ValueError, match="text 2.*'klingon'"):
        translator.translate(["two birds", "the dog"], **options)
    found = translator.translate(["two birds", "the dog"], on_error="skip", **options)
    assert found == [translator.translate("two birds", target_lang="de", max_new_tokens=4), ""]
    for wrong in (["de"], 7):
        with pytest.raises(ValueError, match="target_lang"):
            translator.translate(["two birds", "the dog"], target_lang=wrong)
    with pytest.raises(ValueError, match="max_new_tokens"):
        translator.translate("two", target_lang="de", max_new_tokens=1, beam_rules="transformers")


def test_a_folder_lists_its_languages(made, tmp_path, caplog) -> None:
    folder = shutil.copytree(made("nllb").saved.folder, tmp_path / "model")
    expected = Translator.from_pretrained(folder).translate("two birds", source_lang="en", target_lang="fr")
    settings = json.loads((folder / "generation_config.json").read_text())
    forced = Translator.from_pretrained(folder).languages.ids["fra_Latn"]
    (folder / "generation_config.json").write_text(json.dumps(settings | {"forced_bos_token_id": forced}))
    assert Translator.from_pretrained(folder).translate("two birds") == expected
    assert "forced_bos_token_id" not in caplog.text
    for file, values, named in (
        ("generation_config.json", {"forced_bos_token_id": 5}, "forced_bos_token_id.* 5"),
        ("tokenizer_config.json", {"src_lang": "eng"}, "'eng'"),
        ("tokenizer_config.json", {"tokenizer_class": "SMALL100Tokenizer"}, "SMALL100Tokenizer"),
    ):
        path = folder / file
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | values))
        with pytest.raises(ValueError, match=named):
            Translator.from_pretrained(folder)
        path.write_text(before)


def test_marians_with_many_targets_need_a_language(tmp_path) -> None:
    saved = families.marian(tmp_path / "model")
    translator = Translator.from_pretrained(saved.folder)
    expected = translator.translate(">>deu<< two birds", max_new_tokens=8)
    assert translator.translate("two birds", target_lang="deu", max_new_tokens=8) == expected
    assert (
        translator.encode("two birds", languages=translator.language_ids(None, "DEU"))
        == saved.tokenizer(">>deu<< two birds")["input_ids"]
    )
    with pytest.raises(ValueError, match="'fra'"):
        translator.translate("two birds", target_lang="fra")
