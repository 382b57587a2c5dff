"""Weight files are checked before memory is allocated, may be split, and are written reproducibly."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from fastformer.checkpoints import load_model
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import save_model
from tests.models.test_pretrained import CONFIG


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(1)
    return Transformer.from_preset("tiny", **CONFIG)


@pytest.fixture
def folder(model, tmp_path) -> Path:
    model.save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def configure(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shard(folder: Path, form: str = "safetensors", count: int = 3) -> Path:
    """Writes the weights to several files of a kind, with the index that transformers writes."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for i in range(count):
        file, part = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}", {name: state[name] for name in names[i::count]}
        weight_map |= dict.fromkeys(part, file)
        safetensors.torch.save_file(part, folder / file) if suffix != "bin" else torch.save(part, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_the_same_weights_and_notes_give_the_same_bytes(model, tmp_path) -> None:
    notes = {f"note {i}": 'of "ü" \x07\n' for i in range(9)}
    digests = set()
    for i in range(8):
        save_model(model, tmp_path / str(i), notes=notes)
        digests.add(hashlib.sha256((tmp_path / str(i) / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
    plain = safetensors.torch.load_file(tmp_path / "0" / "model.safetensors")
    assert all(torch.equal(plain[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["Transformer", "GPT", "int8"])
def test_several_files_equal_one(kind, model, tmp_path) -> None:
    model = {
        "Transformer": lambda: model,
        "GPT": lambda: GPT.from_preset("tiny", vocab_size=20, d_model=24, num_layers=2, num_heads=2),
        "int8": model.quantize,
    }[kind]()
    model.save_pretrained(tmp_path)
    shard(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.precision == model.precision
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def remap(index: Path, **files: str) -> None:
    values = json.loads(index.read_text())
    for name, file in files.items():
        values["weight_map"][name.replace("__", ".")] = file
    index.write_text(json.dumps(values))


SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: (index.parent / SECOND).unlink(), SECOND),
        (lambda index: os.truncate(index.parent / SECOND, 100), SECOND),
        (lambda index: (index.parent / SECOND).write_bytes(b""), SECOND),
        (lambda index: os.truncate(index, 100), "index.json"),
        (lambda index: index.write_text('{"weight_map": {}}'), "weight_map"),
        (lambda index: index.write_text('{"weight_map": {"a": 3}}'), "got 3 for a"),
        (lambda index: index.write_text("[]"), "index.json"),
        (lambda index: remap(index, encoder__norm__weight="../run/" + SECOND), r"\.\./run"),
        (lambda index: remap(index, encoder__norm__weight="/dev/zero"), "/dev/zero"),
        (lambda index: remap(index, encoder__norm__weight="none.safetensors"), "none.safetensors"),
        (lambda index: remap(index, encoder__norm__weights=SECOND), "encoder.norm.weights"),
        (
            lambda index: index.write_text(
                index.read_text().replace('"weight_map": {', f'"weight_map": {{"encoder.norm.weight": "{SECOND}", ')
            ),
            "'encoder.norm.weight' is there twice",
        ),
        (
            lambda index: safetensors.torch.save_file(
                safetensors.torch.load_file(index.parent / SECOND)
                | safetensors.torch.load_file(index.parent / SECOND.replace("2", "1", 1)),
                index.parent / SECOND,
            ),
            f"{SECOND}.* holds ",
        ),
    ],
)
def test_files_that_contradict_their_index_are_named(folder, damage, message) -> None:
    index = shard(folder)
    Transformer.from_pretrained(folder)
    damage(index)
    with pytest.raises(ValueError, match=message):
        Transformer.from_pretrained(folder)


@pytest.mark.parametrize("dtype", ["I32", "U32", "XYZ", "C64"])
def test_weights_that_are_not_floating_point_are_named(folder, dtype) -> None:
    file = folder / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file), file)  # without a checksum
    file.write_bytes(file.read_bytes().replace(b'"dtype":"F32"', f'"dtype":"{dtype}"'.encode(), 1))
    with pytest.raises(ValueError, match=rf"\bmodel\.safetensors\b.*{dtype[-2:]}"):
        Transformer.from_pretrained(folder)


def test_a_size_without_end_is_an_error(folder) -> None:
    file, header = folder / "model.safetensors", b'{"encoder.norm.weight":{"dtype":"F32","shape":[Infinity]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"\bmodel\.safetensors\b"):
        Transformer.from_pretrained(folder)


def test_integers_of_the_right_size_are_not_accepted_as_weights(model, folder) -> None:
    state = model.state_dict()
    for wrong in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2):
        changed = state | {"encoder.norm.weight": state["encoder.norm.weight"].to(wrong)}
        safetensors.torch.save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"\bencoder\.norm\.weight\b"):
            Transformer.from_pretrained(folder)


SIZES = [
    {"num_encoder_layers": 1_000_000},
    {"num_decoder_layers": 20_000},
    {"max_len": 10_000_000},
    {"d_model": 1_000_000},
    {"d_ff": 10**11},
    {"vocab_size": 10**9},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_settings_of_a_huge_model_allocate_nothing(folder, sizes) -> None:
    configure(folder, **sizes)
    patched = mock.patch.object(Transformer, "__init__", autospec=True, side_effect=Transformer.__init__)
    with patched as calls, pytest.raises(ValueError, match="config.json"):
        Transformer.from_pretrained(folder)
    assert [str(call.kwargs["device"]) for call in calls.mock_calls] in ([], ["meta"])


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_tables_of_positions_are_compared_with_the_weights(positions, tmp_path) -> None:
    GPT.from_preset("tiny", vocab_size=20, d_model=32, num_layers=1, num_heads=2, positions=positions).save_pretrained(
        tmp_path
    )
    configure(tmp_path, max_len=20_000)
    assert GPT.from_pretrained(tmp_path).config.max_len == 20_000
    configure(tmp_path, max_len=100_000_000)
    with pytest.raises(ValueError, match=r"\bmax_len\b"):
        GPT.from_pretrained(tmp_path)


def test_a_header_or_settings_of_gigabytes_are_not_read(folder) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    with weights.open("wb") as file:
        file.write((30 << 30).to_bytes(8, "little") + b"{")
        file.truncate((30 << 30) + 100)
    with pytest.raises(ValueError, match=r"\bmodel\.safetensors\b"):
        Transformer.from_pretrained(folder)
    os.truncate(config, 30 << 30)
    with pytest.raises(ValueError, match=r"\bconfig\.json\b"):
        Transformer.from_pretrained(folder)


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_pipes_and_devices_are_not_opened(name, folder) -> None:
    (folder / "tokenizer.json").write_text('{"type": "bytes"}')
    if "index" in name:
        (folder / "model.safetensors").unlink()
    for put in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (folder / name).unlink(missing_ok=True)
        put(folder / name)
        with pytest.raises(ValueError, match=name.removesuffix(".index.json")):
            load_model(folder, ("Transformer",))
