"""A model that is named as on the Hugging Face Hub, but isn't on the disk: every way to load one says how to get it."""

import pytest

import fastformer


@pytest.mark.parametrize(
    "load",
    [
        fastformer.Translator.from_pretrained,
        fastformer.Chat.from_pretrained,
        fastformer.Encoder.from_pretrained,
        fastformer.CrossEncoder.from_pretrained,
        fastformer.MultiVectorEncoder.from_pretrained,
        fastformer.TokenClassifier.from_pretrained,
        fastformer.WhisperModel,
    ],
)
def test_the_error_says_how_to_get_the_folder(load, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="maker/model.*hf download"):
        load("maker/model")
