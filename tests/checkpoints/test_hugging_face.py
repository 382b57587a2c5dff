"""What the folders of transformers have in common: weights in several files, and files that hold something else."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fastformer.checkpoints import load_model
from fastformer.cli import main
from tests.checkpoints import test_bart as bart
from tests.checkpoints import test_marian as marian
from tests.checkpoints import test_t5 as t5

FAMILIES = {"bart": bart.make, "marian": marian.make, "t5": t5.make}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in found:
            found[family] = tmp_path_factory.mktemp(family) / "model"
            FAMILIES[family](found[family])
        return found[family]

    return get


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made("bart"), tmp_path / "model")


def shard(folder: Path, kind: str, count: int = 3) -> Path:
    """The weights in several files of a kind, with the index that transformers writes."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file, some = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}", {name: state[name] for name in names[i::count]}
        weight_map |= dict.fromkeys(some, file)
        safetensors.torch.save_file(some, folder / file) if suffix != "bin" else torch.save(some, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_several_files(family, kind, made, tmp_path) -> None:
    folder = shutil.copytree(made(family), tmp_path / "model")
    expected, _ = load_model(folder, ("Transformer",))
    index = shard(folder, kind)
    loaded, _ = load_model(folder, ("Transformer",))
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    for path in (sorted(folder.glob("*-00002-of-*"))[0], index):
        whole = path.read_bytes()
        for data in (whole[: len(whole) * 2 // 3], b"", None):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(ValueError, match=path.name if path != index or data is not None else "model"):
                load_model(folder, ("Transformer",))
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_in_several_files_are_quantised(kind, folder, tmp_path, capsys) -> None:
    shard(folder, kind)
    assert main(["quantize", str(folder), str(tmp_path / "small")]) == 0
    assert ("instead of" in capsys.readouterr().out) == (kind == "safetensors")
    assert load_model(tmp_path / "small", ("Transformer",))[0].precision == "int8"


def unsafe(folder: Path, change: Callable[[dict], object]) -> str:
    """The weights as an older file, with a change."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(state), folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def deflated(folder: Path) -> str:
    name = unsafe(folder, lambda state: state)
    with zipfile.ZipFile(folder / name) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    return name


def setting(file: str, **values: object) -> Callable[[Path], str]:
    def put(folder: Path) -> str:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return next(iter(values))

    return put


NORM = "model.encoder.layernorm_embedding.weight"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: unsafe(folder, lambda state: state | {NORM: state[NORM].to_sparse()}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: 3}),
        lambda folder: unsafe(folder, lambda state: state | {3: state[NORM]}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: state[NORM] / 0}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: torch.zeros(1).expand(10**12)}),
        lambda folder: unsafe(folder, lambda state: [*state.values()]),
        deflated,
        setting("generation_config.json", bad_words_ids=[[10**9]]),
        setting("generation_config.json", bad_words_ids=[["a"]]),
        setting("config.json", scale_embedding="yes"),
        setting("config.json", tie_word_embeddings="no"),
        setting("config.json", encoder_layers=1_000_000),
        setting("config.json", max_position_embeddings=10**9),
        setting("config.json", pad_token_id="x"),
        setting("config.json", decoder_start_token_id=10**9),
        setting("config.json", encoder_ffn_dim=10**11, decoder_ffn_dim=10**11),
    ],
)
def test_what_is_no_model_is_named(damage, folder, capsys) -> None:
    said = damage(folder)
    assert main(["translate", str(folder), "two birds"]) == 1
    error = capsys.readouterr().err
    shown = {"max_position_embeddings": "source_position.table", "encoder_ffn_dim": "linear1"}
    shown |= {"decoder_start_token_id": "start"}
    assert shown.get(said, said) in error and "a bug" not in error and "out of memory" not in error


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX")
@pytest.mark.parametrize("command", ["translate", "quantize", "average", "generate"])
def test_pipes_and_devices_are_not_opened(command, folder, capsys) -> None:
    for put in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (folder / "config.json").unlink()
        put(folder / "config.json")
        assert main([command, str(folder), *([] if command == "average" else ["x"])]) == 1
        assert str(folder) in capsys.readouterr().err
