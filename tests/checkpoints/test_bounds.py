"""Each bound of a file at its edge: just so much is read, and a bit more is refused by its name."""

from __future__ import annotations

import itertools
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.gguf.file import read_gguf
from fastformer.checkpoints.hf.adapters import load_adapter
from fastformer.checkpoints.hf.compressed_tensors import read_schemes
from fastformer.checkpoints.model_bin import read_tokens
from tests.checkpoints.test_argos import FILES
from tests.checkpoints.test_argos import load as load_argos
from tests.checkpoints.test_gguf import Tensors, Values, to_bytes
from tests.foreign.ctranslate2_folders import ARGOS


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(
    "values, tensors, alignment, named",
    [
        ({"general.alignment": (4, 8)}, {}, 8, None),
        ({"general.alignment": (4, 1 << 16)}, {}, 1 << 16, "alignment"),
        ({}, {"x": (0, (1, 1, 1, 1), b"\0" * 4)}, 32, "4 dimensions"),
        ({}, {"x": (2, (32, 3), b"\0" * 54)}, 32, "blocks of 32"),
    ],
    ids=["least alignment", "alignment", "dimensions", "row"],
)
def test_a_gguf_file(more, values, tensors, alignment, named, tmp_path) -> None:
    values, tensors = {**values}, {"a": (0, (2,), struct.pack("<2f", 1, 2)), **tensors}
    if more and values:
        alignment = alignment // 2 if named is None else alignment * 2
        values = {"general.alignment": (4, alignment)}
    elif more:
        kind, sizes, data = tensors["x"]
        tensors["x"] = kind, (*sizes, 1) if len(sizes) == 4 else (sizes[0] + 16, sizes[1]), data
    (path := tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors, alignment=alignment))
    if more:
        with pytest.raises(ValueError, match=named or "alignment"):
            read_gguf(path)
        return
    file = read_gguf(path)
    assert file.tensors["a"].numbers_of((2,), file.tensors["a"].data).tolist() == [1, 2]
    assert [*file.tensors] == ["a", *[name for name in tensors if name != "a"]]


def test_each_type_of_a_gguf_value(tmp_path) -> None:
    """Its numbers, and lists of them, whose ends a file must not be cut at."""
    forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    due: dict[str, Any] = {}
    values: Values = {}
    for kind, form in forms.items():
        highest = (
            True if form == "?" else 0.5 if form in "fd" else 2 ** (8 * struct.calcsize(form) - form.islower()) - 1
        )
        lowest = -highest - 1 if form in "bhiq" else type(highest)(0)
        values[f"one.{kind}"] = kind, struct.pack(f"<{form}", highest)
        values[f"list.{kind}"] = 9, struct.pack(f"<IQ2{form}", kind, 2, lowest, highest)
        due |= {f"one.{kind}": highest, f"list.{kind}": [lowest, highest]}
    values["text"], due["text"] = (8, "ä"), "ä"
    values["texts"], due["texts"] = (9, (8, ["", "ä"])), ["", "ä"]
    tensors: Tensors = {}
    (path := tmp_path / "x.gguf").write_bytes(data := to_bytes(values, tensors, version=2, alignment=1))
    found = read_gguf(path).values
    assert found == due and all(type(found[key]) is type(value) for key, value in due.items())
    for end in range(0, len(data), 3):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="expected"):
            read_gguf(path)
    for kind in (8 + 5, 9):  # an unknown type, and a list of lists
        path.write_bytes(to_bytes({"key": (9, struct.pack("<IQ", kind, 0))}, tensors))
        with pytest.raises(ValueError, match="'key'.* type"):
            read_gguf(path)
    for version in (1, 2, 3):
        path.write_bytes(b"GGUF" + struct.pack(">I", version) + data[8:])
        with pytest.raises(ValueError, match="big-endian"):
            read_gguf(path)


@pytest.mark.parametrize(("count", "named"), [(999, "no file .*00002-of-00999"), (1000, "NAME-00001-of-01000")])
def test_the_parts_of_a_gguf_model(count, named, tmp_path) -> None:
    (path := tmp_path / f"x-00001-of-{count:05}.gguf").write_bytes(to_bytes({"split.count": (4, count)}, {}))
    with pytest.raises(ValueError, match=named):
        read_gguf(path)


@pytest.mark.parametrize(("size", "is_refused"), [(300, False), (301, True)])
def test_a_pattern_of_compressed_tensors(size, is_refused) -> None:
    pattern = "re:" + "a" * size
    group = {"targets": [pattern], "weights": {"num_bits": 8}}
    given = {"format": "int-quantized", "config_groups": {"group_0": group}}
    if is_refused:
        with pytest.raises(ValueError, match="short patterns"):
            read_schemes(given)
    else:
        assert [*read_schemes(given)] == [pattern]


def test_a_block_of_compressed_tensors_has_two_sides() -> None:
    def scheme(block: Any) -> Any:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return read_schemes({"format": "float-quantized", "config_groups": groups})["Linear"].block

    assert scheme([1, 2]) == (1, 2) and scheme("128x64") == (128, 64) and scheme([1, 2**31 - 1]) == (1, 2**31 - 1)
    for wrong in ([1], [1, 2, 3], [0, 2], [True, 2], [1.0, 2], [1, 2**31], "128", "128xx", "ax2", 3):
        with pytest.raises(ValueError, match="block_structure"):
            scheme(wrong)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"alpha_pattern": {"a" * 200: 2}}, None),
        ({"alpha_pattern": {"a" * 201: 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"a*b+c?q": 2}}, None),
        ({"alpha_pattern": {"a*b+c?q{2}": 2}}, "alpha_pattern"),
        ({"r": 4096}, None),
        ({"r": 4097}, "rank 4097"),
        ({"lora_alpha": 0.5}, None),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": True}, "lora_alpha"),
        ({"r": 2.0}, "expected r "),
        ({"rank_pattern": {"x": 2.0}}, "rank_pattern"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_a_setting_of_an_adapter(settings, named, tmp_path) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    from fastformer.integrations import from_huggingface
    from tests.generation.lora_folders import linears, write_adapter
    from tests.integrations.decoders import CASES

    llama = next(case for case in CASES.values() if case.kind == "llama").make()
    folder = write_adapter(
        tmp_path, llama, linears(llama, "q_proj"), r=settings.get("r", 3) if named != "expected r " else 3
    )
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    model = from_huggingface(llama)
    if named is None:
        assert all(torch.isfinite(each).all() for pair in load_adapter(folder, model).factors.values() for each in pair)
    else:
        with pytest.raises(ValueError, match=named):
            load_adapter(folder, model)


@pytest.mark.parametrize("more", [0, 1])
def test_a_package_of_argos_has_so_many_files(more, tmp_path) -> None:
    path = tmp_path / "x.argosmodel"
    with zipfile.ZipFile(path, "w") as file:
        for each in FILES:
            file.write(each, f"a/{each.relative_to(ARGOS)}")
        for number in range(10_000 + more - len(FILES)):
            file.writestr(f"a/more/{number}", b"")
    if more:
        with pytest.raises(ValueError, match="at most 10,000 files"):
            load_argos(path)
    else:
        load_argos(path)


def test_a_file_of_argos_may_be_compressed_so_much(tmp_path) -> None:
    """Up to 200 times: JSON of spaces behind the settings."""

    def write(spaces: int) -> tuple[Path, float]:
        path = tmp_path / "x.argosmodel"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for each in FILES:
                data = each.read_bytes() + b" " * (spaces if each.name == "config.json" else 0)
                file.writestr(f"a/{each.relative_to(ARGOS)}", data)
            info = file.getinfo("a/model/config.json")
        return path, info.file_size / info.compress_size

    low, high = 0, 1 << 17
    while high - low > 1:  # the most spaces within the ratio
        middle = (low + high) // 2
        low, high = (middle, high) if write(middle)[1] <= 200 else (low, middle)
    load_argos(write(low)[0])
    path, ratio = write(high)
    assert 200 < ratio < 202
    with pytest.raises(ValueError, match="up to 200 times"):
        load_argos(path)


def test_a_vocabulary_of_ctranslate2_is_texts(tmp_path) -> None:
    (path := tmp_path / "vocabulary.json").write_text('["a", "b"]')
    assert read_tokens(path) == ["a", "b"]
    for wrong in ('["a", 1]', '[1, "a"]', "[1]"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="list of texts"):
            read_tokens(path)


def test_the_layers_of_a_family_with_its_own_name_for_them(tmp_path) -> None:
    pytest.importorskip("transformers", reason="the folder is written by transformers")
    from tests.checkpoints.decoders import gpt2

    gpt2(folder := tmp_path / "gpt2")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"n_layer": 100_000}))
    with pytest.raises(ValueError, match=r"layers 100000\b"):
        load_model(folder, ("GPT",))
