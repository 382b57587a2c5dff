"""Shards that are damaged, changed or forged are refused by name; links are as good as files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import cast

import pytest

from fastformer.data.shards.arrow_file import arrow, lists, read_table, write_table
from fastformer.data.shards.manifest import Stored
from fastformer.data.shards.reading import ShardedExamples
from fastformer.training import TrainConfig
from fastformer.training.examples import load_data
from tests.data.shards.test_shards import config_of, made, pairs_of, planned, texts_of, tsv

pytest.importorskip("pyarrow", reason="shards are files of Arrow")


@pytest.fixture(scope="module")
def folder_once(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("shards")
    made(config_of(*(tsv(place / f"{name}.tsv", pairs_of(name, 9)) for name in "xy")), place / "out", shards=2)
    return place / "out"


@pytest.fixture
def folder(folder_once, tmp_path) -> Path:
    return shutil.copytree(folder_once, tmp_path / "out")


def test_a_damaged_index(folder) -> None:
    index = json.loads((folder / "index.json").read_text())
    for broken in ({**index, "version": 9}, {**index, "shards": [1]}, {k: index[k] for k in list(index)[:4]}):
        (folder / "index.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"index\.json"):
            ShardedExamples(folder)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"fastformer prepare"):
        ShardedExamples(folder)


def test_files_may_be_links(folder, tmp_path) -> None:
    expected = texts_of(ShardedExamples(folder))
    (tmp_path / "store").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        (tmp_path / "store" / f"{number}").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(f"../store/{number}")
    config = TrainConfig(train_data=str(folder))
    assert texts_of(load_data(config).train) == expected
    (tmp_path / "store" / "0").unlink()
    with pytest.raises(ValueError, match=r"index\.json"):
        load_data(config)


def read_all(folder: Path) -> None:
    data = load_data(TrainConfig(train_data=str(folder)))
    planned(data.train, 0)


def forged(folder: Path, values: dict, version: int = 1) -> None:
    """Writes an index, by default as an earlier version did, without a checksum."""
    values = {name: value for name, value in values.items() if name != "sha256" or version != 1}
    (folder / "index.json").write_text(json.dumps({**values, "version": version}))


def test_an_index_without_a_checksum_loads_and_a_changed_one_does_not(folder) -> None:
    index = json.loads((folder / "index.json").read_text())
    forged(folder, index)
    read_all(folder)
    forged(folder, {**index, "settings": {}}, version=index["version"])
    with pytest.raises(ValueError, match=r"index\.json"):
        read_all(folder)
    forged(folder, {name: value for name, value in index.items() if name != "sha256"}, version=index["version"])
    with pytest.raises(ValueError, match=r"index\.json"):
        read_all(folder)


INDEX: list[tuple[str, str, object]] = [
    *(("shards", name, value) for name in ("examples", "source_tokens", "longest") for value in (1, "x", -1, None)),
    *(("shards", "by_source", value) for value in ([], [1], ["x", "y"], None, [10**30, 0], [-1, 10**9])),
    *(("shards", "file", value) for value in (3, "../x", "/etc/passwd", "", ".", "a/b", "..\\x", "a\0b", None)),
    *(("shards", "sha256", value) for value in (3, None, "0" * 64)),
    *(("shards", "size", value) for value in (None, "1", 1.5, True)),
    *(("sources", "weight", value) for value in (-1, 0, float("nan"), 1e308, "1", None)),
    *(("sources", "examples", value) for value in (0, "x")),
    *(("sources", "left_out", value) for value in cast(list[object], [[], {"a": "b"}])),
    *(("", name, value) for name in ("sources", "shards") for value in cast(list[object], [[], {}, None, [3]])),
    *(("", name, 3) for name in ("tokenizer", "kind", "settings", "validation", "validation_texts")),
    ("", "validation_characters", None),
    ("", "validation_size", "5"),
    ("validation", "file", "/etc/passwd"),
]


@pytest.mark.parametrize(("part", "name", "value"), INDEX)
def test_every_wrong_value_of_an_index_is_refused(folder, part, name, value) -> None:
    index = json.loads((folder / "index.json").read_text())
    owner = index[part] if part else index
    (owner[0] if isinstance(owner, list) else owner)[name] = value
    forged(folder, index)
    with pytest.raises(ValueError, match=r"index\.json|shard-0000"):
        read_all(folder)


def columns_of(table) -> dict:
    return {name: table.column(name) for name in table.schema.names}


FORGED = {
    "floats": lambda t: {"source": t["source"].cast(arrow().list_(arrow().float32()))},
    "texts": lambda t: {"target": arrow().array(["a"] * len(t["source"]))},
    "a large id": lambda t: {"target": lists([[3, 2**24]] * len(t["source"]))},
    "a negative id": lambda t: {"source": lists([[-3]] * len(t["source"]))},
    "no value": lambda t: {"target": arrow().array([None] * len(t["source"]), arrow().list_(arrow().int32()))},
    "no id": lambda t: {"target": arrow().array([[None]] * len(t["source"]), arrow().list_(arrow().int32()))},
    "another source": lambda t: {"origin": arrow().array([60_000] * len(t["source"]), arrow().uint16())},
    "a column less": lambda t: {"origin": None},
    "a column more": lambda t: {"more": t["origin"]},
    "fewer rows": lambda t: {name: column.slice(1) for name, column in t.items()},
}


@pytest.mark.parametrize("file", ["shard-00001.arrow", "validation.arrow"])
@pytest.mark.parametrize("how", FORGED)
def test_a_forged_shard_is_named(folder, how, file) -> None:
    columns = columns_of(read_table(folder / file))
    columns |= FORGED[how](columns)
    write_table(folder / file, arrow().table({name: column for name, column in columns.items() if column is not None}))
    index = json.loads((folder / "index.json").read_text())
    entry = index["validation"] if file.startswith("validation") else index["shards"][1]
    entry |= vars(Stored.of(folder / file))
    forged(folder, index)
    if (how, file) == ("another source", "validation.arrow"):
        return  # of which only a shard's weights would know
    with pytest.raises(ValueError, match=re.escape(file)):
        read_all(folder)


@pytest.mark.parametrize("line", ["3", '["a"]', '["a", 3]', "{", '{"a": 1, "b": 2}'])
def test_forged_texts_of_validation(folder, line) -> None:
    (folder / "validation.jsonl").write_text(f"{line}\n")
    index = json.loads((folder / "index.json").read_text())
    forged(folder, {**index, "validation_texts": vars(Stored.of(folder / "validation.jsonl"))})
    with pytest.raises(ValueError, match=r"validation\.jsonl"):
        read_all(folder)
