"""Reads packages of Argos Translate. `tests.foreign.ctranslate2_folders` wrote one, and what CTranslate2 translates."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastformer import Translator
from fastformer.checkpoints import load_model
from fastformer.checkpoints.run import architecture_of
from fastformer.cli import main
from fastformer.data import load_tokenizer
from tests.foreign.ctranslate2_folders import ARGOS

pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")

EXPECTED = json.loads((ARGOS / "expected.json").read_text())
FILES = [path for path in sorted(ARGOS.rglob("*")) if path.is_file() and path.name != "expected.json"]


def zipped(
    path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None] = lambda name, data: (name, data)
) -> Path:
    """Writes a package; `change` gets the name and the bytes of each file, and returns others, or None to omit it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for each in FILES:
            if (part := change(f"translate-en_de/{each.relative_to(ARGOS)}", each.read_bytes())) is not None:
                file.writestr(*part)
    return path


def load(path: Path) -> Any:
    return load_model(path, ("Transformer",))


@pytest.mark.parametrize("is_zip", [False, True])
def test_translations_equal_ctranslate2(is_zip, tmp_path) -> None:
    path = zipped(tmp_path / "en_de.argosmodel") if is_zip else ARGOS
    translator = Translator.from_pretrained(path, precision="fp32")
    for beams in (1, 3):
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 12, "min_new_tokens": 1}
        if beams > 1:
            options |= {"beam_rules": "transformers", "early_stopping": True, "length_penalty": 1.0}
        found = [translator.translate(text, **options) for text in EXPECTED["texts"]]
        assert found == EXPECTED[f"translations_{beams}"]
    assert architecture_of(path) == "Transformer"
    assert {*tmp_path.iterdir()} == ({path} if is_zip else set())  # nothing was unpacked


def test_a_converted_package_keeps_sources_without_eos(tmp_path, capsys) -> None:
    model, tokenizer = load(ARGOS)
    assert model.precision == "int8" and not tokenizer.ends_sources
    assert model.config.special_ids.pad == 1  # <blank>
    tokenizer.save(tmp_path)
    assert not load_tokenizer(tmp_path).ends_sources
    assert main(["quantize", str(ARGOS), str(tmp_path / "small")]) == 0
    options = ["--max_new_tokens", "12", "--min_new_tokens", "1", "--device", "cpu"]
    capsys.readouterr()
    for folder in (ARGOS, tmp_path / "small"):
        assert main(["translate", str(folder), EXPECTED["texts"][0], *options]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


@pytest.mark.parametrize("ends", [True, False])
def test_the_settings_say_whether_sources_end_with_eos(ends, tmp_path) -> None:
    folder = shutil.copytree(ARGOS, tmp_path / "package")
    settings = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(settings | {"add_source_eos": ends}))
    assert load(folder)[1].ends_sources is ends


def test_a_server_knows_the_languages(tmp_path) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from fastformer.serving import open_service

    service: Any = open_service(zipped(tmp_path / "x.argosmodel"))
    assert service.kind == "translator" and service.codes.pair == ("en", "de")


def test_old_packages_have_a_vocabulary_of_lines_and_no_settings(tmp_path) -> None:
    def change(name: str, data: bytes) -> tuple[str, bytes] | None:
        if name.endswith("shared_vocabulary.json"):
            return name.replace(".json", ".txt"), "".join(f"{token}\n" for token in json.loads(data)).encode()
        return None if name.endswith("config.json") else (name, data)

    translator = Translator.from_pretrained(zipped(tmp_path / "x.argosmodel", change), precision="fp32")
    found = translator.translate(EXPECTED["texts"][0], max_new_tokens=12, min_new_tokens=1)
    assert found == EXPECTED["translations_1"][0]


def test_a_package_may_have_a_vocabulary_of_each_side(tmp_path) -> None:
    with zipfile.ZipFile(zipped(tmp_path / "x.argosmodel")) as packed:
        packed.extractall(tmp_path)
    [shared] = tmp_path.rglob("shared_vocabulary.json")
    for side in ("source", "target"):
        shutil.copy(shared, shared.with_name(f"{side}_vocabulary.json"))
    shared.unlink()
    translator = Translator.from_pretrained(shared.parents[1], precision="fp32")
    found = translator.translate(EXPECTED["texts"][0], max_new_tokens=12, min_new_tokens=1)
    assert found == EXPECTED["translations_1"][0]


def renamed(old: str, new: str) -> Any:
    return lambda name, data: (name.replace(old, new), data)


def replaced(end: str, new: bytes) -> Any:
    return lambda name, data: (name, new if name.endswith(end) else data)


BAD = {
    "another tokenizer": (renamed("sentencepiece.model", "bpe.model"), "bpe.model"),
    "no model": (renamed("model.bin", "other.bin"), "model.bin"),
    "no vocabulary": (renamed("shared_vocabulary", "words"), "vocabulary"),
    "climbs out": (renamed("translate-en_de/metadata", "translate-en_de/../../metadata"), r"\.\."),
    "absolute": (renamed("translate-en_de/metadata", "/metadata"), "metadata"),
    "two folders": (renamed("translate-en_de/metadata", "other/metadata"), "one folder"),
    "bomb": (replaced("model.bin", bytes(1 << 24)), "compressed"),
    "no JSON": (replaced("vocabulary.json", b"[" * 10_000), "vocabulary.json"),
    "no list": (replaced("vocabulary.json", b'{"a": 1}'), "list of tokens"),
    "settings": (replaced("config.json", b"[]"), "config.json"),
    "begins with BOS": (replaced("config.json", b'{"add_source_bos": true}'), "add_source_bos"),
    "no pieces": (replaced("sentencepiece.model", b"no"), "sentencepiece.model|SentencePiece"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_what_is_wrong(name, tmp_path) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        load(zipped(tmp_path / "x.argosmodel", change))


def test_files_that_are_cut_damaged_or_missing_are_errors(tmp_path) -> None:
    path = zipped(tmp_path / "x.argosmodel")
    data = path.read_bytes()
    for end in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="expected"):
            load(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    for other in (path, tmp_path / "none.argosmodel"):
        with pytest.raises(ValueError, match="no file"):
            load(other)
    folder = Path(shutil.copytree(ARGOS, tmp_path / "folder"))
    (folder / "sentencepiece.model").unlink()
    with pytest.raises(ValueError, match=r"sentencepiece\.model"):
        load(folder)


# What is changed in each entry's place in the directory at the end, and what zipfile says of it.
DAMAGED = {"checksum": (16, "CRC"), "encrypted": (8, "encrypted"), "method": (10, "compression")}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_zipfile_says_is_told(name, tmp_path) -> None:
    offset, message = DAMAGED[name]
    data = bytearray(zipped(path := tmp_path / "x.argosmodel").read_bytes())
    place = data.find(b"PK\1\2")
    while place >= 0:
        data[place + offset] ^= 1
        place = data.find(b"PK\1\2", place + 1)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"(?s)x\.argosmodel.*{message}"):
        load(path)
