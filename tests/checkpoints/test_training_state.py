"""A checkpoint is complete or refused, contains no code, and the right checkpoints are kept."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fastformer.checkpoints.training_state import (
    average_weights,
    begin_parts,
    checkpoints,
    finish_parts,
    latest_checkpoint,
    load_checkpoint,
    remove_left_parts,
    save_checkpoint,
    step_of,
)


def comment_of(data: bytes) -> int:
    """Returns the length of an archive's comment, which has the checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return len(archive.comment)


def state(step: int, scale: float = 1.0, **more) -> dict:
    weights = {"a": torch.arange(6.0).reshape(2, 3) * scale, "b": torch.tensor([scale], dtype=torch.bfloat16)}
    return {"config": "{}", "model": weights, "counters": {"step": step}, "ema": None, **more}


def stems(run) -> list[int]:
    return [step_of(path) for path in checkpoints(run)]


def test_torch_load_and_zip_can_read_a_checkpoint(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 3, state(3), keep_last=1)
    assert path.name == "step-00000003.pt"
    assert path.read_bytes() == save_checkpoint(tmp_path / "again", 3, state(3), keep_last=1).read_bytes()
    for found in (torch.load(path, weights_only=True), load_checkpoint(path), latest_checkpoint(tmp_path)[1]):
        assert found["counters"] == {"step": 3} and torch.equal(found["model"]["a"], state(3)["model"]["a"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and archive.comment.startswith(b"sha256:")


def test_a_kill_while_parts_replace_others_leaves_some(tmp_path, monkeypatch) -> None:
    def write(scale: float) -> None:
        folder = begin_parts(tmp_path, 3)
        (folder / "part").write_bytes(b"1")
        finish_parts(folder, tmp_path, 3, {**state(3, scale), "parts": {}}, keep_last=1)

    write(1.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))  # takes long
        write(2.0)
    found = latest_checkpoint(tmp_path, lambda folder: {})
    assert found is not None and torch.equal(found[1]["model"]["a"], state(3, 2.0)["model"]["a"])
    remove_left_parts(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_the_tensors_of_parts_take_their_places(tmp_path) -> None:
    whole = {**state(3), "optimizer": {"state": {"a": {"step": 1, "sum": None}}}}
    weights = whole.pop("model")
    places = {"x": ["model", "a"], "y": ["model", "b"], "z": ["optimizer", "state", "a", "sum"]}
    tensors = {"x": weights["a"], "y": weights["b"], "z": torch.ones(2)}

    def write(**given) -> Path:
        folder = begin_parts(tmp_path, 3)
        (folder / "part").write_bytes(b"1")
        return finish_parts(folder, tmp_path, 3, {**whole, "model": {}, "parts": places, **given}, keep_last=1)

    path = write()
    found = load_checkpoint(path, lambda folder: tensors)
    assert torch.equal(found["model"]["a"], weights["a"]) and torch.equal(found["model"]["b"], weights["b"])
    assert found["optimizer"]["state"]["a"]["sum"] is tensors["z"] and found["optimizer"]["state"]["a"]["step"] == 1
    assert found.keys() == {"config", "model", "counters", "ema", "optimizer"}
    for others in ({"x": tensors["x"]}, {**tensors, "more": torch.ones(1)}, {"x": 0, "y": 0, "other": 0}):
        with pytest.raises(ValueError, match="hold 3 tensors"):
            load_checkpoint(path, lambda folder, others=others: others)  # type: ignore[misc]
    with pytest.raises(ValueError, match="one file"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match="one file"):
        load_checkpoint(write(parts=None), lambda folder: tensors)
    with pytest.raises(ValueError, match="finite"):
        load_checkpoint(write(), lambda folder: {**tensors, "x": weights["a"] / 0})
    (path / "part").write_bytes(b"2")
    with pytest.raises(ValueError, match="part is damaged"):
        load_checkpoint(path, lambda folder: tensors)


def test_a_cut_or_flipped_byte_anywhere_is_noticed(tmp_path, caplog) -> None:
    before = save_checkpoint(tmp_path, 2, state(2), keep_last=2)
    newest = save_checkpoint(tmp_path, 4, state(4), keep_last=2)
    data = newest.read_bytes()
    for cut in (0, 1, 4, 30, len(data) // 2, len(data) - comment_of(data), len(data) - 1):
        newest.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"\bstep-00000004\.pt\b"):
            load_checkpoint(newest)
    for place in [*range(0, len(data), 41), len(data) - 1, len(data) - comment_of(data) - 1]:
        newest.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"\bdamaged\b"):
            load_checkpoint(newest)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path)[0] == before
    assert "using the checkpoint before it" in caplog.text
    before.write_bytes(b"")
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "nowhere") is None


class Hostile:
    def __reduce__(self):
        return print, ("code ran",)


def sealed(data: bytes) -> bytes:
    """Returns bytes with the right checksum."""
    return data + b"sha256:" + hashlib.sha256(data).hexdigest().encode()


def archive_of(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (archive_of(Hostile()), "not a checkpoint of plain tensors and values"),
        (pickle.dumps(Hostile()), "not a checkpoint of plain tensors and values"),
        (b"", "not a checkpoint of plain tensors and values"),
        (b"hello", "not a checkpoint of plain tensors and values"),
        (archive_of([1, 2]), "to hold a dict, got list"),
        (archive_of({}), "to hold 'config' as str, got None"),
        (archive_of({"config": "{}", "model": 3}), "to hold 'model' as dict, got 3"),
        (archive_of({"config": "{}", "model": {}, "counters": None}), "to hold 'counters' as dict, got None"),
    ],
    ids=["code", "pickle", "empty", "text", "list", "nothing", "model", "counters"],
)
def test_odd_files_run_no_code_and_are_named(tmp_path, capsys, data, message) -> None:
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / "step-00000001.pt"
    file.write_bytes(sealed(data))
    with pytest.raises(ValueError, match=f"step-00000001.pt.*{message}"):
        load_checkpoint(file)
    assert latest_checkpoint(tmp_path) is None
    assert "code ran" not in capsys.readouterr().out


def test_a_compressed_checkpoint_is_not_inflated(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 3, state(3) | {"rng": torch.zeros(1 << 20)}, keep_last=1)
    length = comment_of(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.comment = b" " * length
    path.write_bytes(sealed(buffer.getvalue()[:-length]))
    with pytest.raises(ValueError, match=r"\bstep-00000003\.pt\b"):
        load_checkpoint(path)
    assert latest_checkpoint(tmp_path) is None


def test_a_file_of_gigabytes_without_a_checksum_is_not_read(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 3, state(3), keep_last=1)
    os.truncate(path, 30 << 30)
    with pytest.raises(ValueError, match=r"\bstep-00000003\.pt\b"):
        load_checkpoint(path)


def test_a_checkpoint_under_the_name_of_another_update(tmp_path) -> None:
    path = save_checkpoint(tmp_path, 3, state(3), keep_last=1)
    path.rename(path.with_name("step-00000900.pt"))
    with pytest.raises(ValueError, match=r"\bstep-00000900\.pt\b.*\b3\b"):
        load_checkpoint(path.with_name("step-00000900.pt"))


@pytest.mark.skipif(os.name != "posix", reason="links need no rights on POSIX alone")
def test_only_files_of_fastformer_are_deleted(tmp_path) -> None:
    folder = save_checkpoint(tmp_path, 7, state(7), keep_last=1).parent
    others = ["step-1.pt", "step-00000001.pt.bak", "step-٠٠٠٠٠٠٠١.pt", "step-000000001.pt"]
    for name in others:
        (folder / name).write_text("mine")
    (tmp_path / "precious").write_text("precious")
    (folder / "step-00000002.pt").symlink_to(tmp_path / "precious")
    (folder / "step-00000003.pt").mkdir()
    os.mkfifo(folder / "step-00000004.pt")
    save_checkpoint(tmp_path, 8, state(8), keep_last=1)
    assert all((folder / name).read_text() == "mine" for name in others)
    assert (tmp_path / "precious").read_text() == "precious"
    left = {path.name for path in folder.iterdir()} - {*others}
    assert left == {f"step-0000000{i}.pt" for i in (2, 3, 4, 8)}


@pytest.mark.skipif(os.name != "posix", reason="links need no rights on POSIX alone")
def test_a_link_in_place_of_the_folder_is_refused(tmp_path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    run.mkdir()
    path = save_checkpoint(other, 1, state(1), keep_last=1)
    for put in (
        lambda path: path.symlink_to(other / "checkpoints"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.write_text("mine"),
    ):
        (run / "checkpoints").unlink(missing_ok=True)
        put(run / "checkpoints")
        for call in (lambda: save_checkpoint(run, 9, state(9), keep_last=1), lambda: checkpoints(run)):
            with pytest.raises(ValueError, match=r"\bcheckpoints\b"):
                call()
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_checkpoints_that_are_kept(tmp_path) -> None:
    for step in (2, 4, 6, 8):
        save_checkpoint(tmp_path, step, state(step), keep_last=3)
    assert stems(tmp_path) == [4, 6, 8]
    (tmp_path / "checkpoints" / "step-best.pt").touch()  # the user's own
    save_checkpoint(tmp_path, 10, state(10), keep_last=1)
    assert stems(tmp_path) == [10] and (tmp_path / "checkpoints" / "step-best.pt").exists()
    for step in (99_999_999, 100_000_000):  # sorted as numbers, also with more than eight digits
        save_checkpoint(tmp_path, step, state(step), keep_last=2)
    assert stems(tmp_path) == [99_999_999, 100_000_000]


def test_files_of_an_interruption_are_removed_by_the_next_run(tmp_path) -> None:
    def regular(step: int) -> bool:
        return step % 5 == 0

    for step, expected in ((3, [3]), (5, [5]), (7, [5, 7]), (10, [5, 10]), (12, [5, 10, 12]), (15, [5, 10, 15])):
        save_checkpoint(tmp_path, step, state(step), keep_last=3, regular=regular)
        assert stems(tmp_path) == expected


def test_a_run_that_goes_back_drops_later_checkpoints(tmp_path) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, state(step), keep_last=3)
    checkpoints(tmp_path)[-1].write_bytes(b"damaged")
    save_checkpoint(tmp_path, 5, state(5), keep_last=3)
    assert stems(tmp_path) == [2, 4, 5]


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch) -> None:
    path = save_checkpoint(tmp_path, 2, state(2), keep_last=1)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, step, state(step), keep_last=1)
    assert [file.name for file in path.parent.iterdir()] == [path.name] and path.read_bytes() == before


def test_the_average_is_the_mean_in_each_dtype(tmp_path) -> None:
    scales = {1: 256.0, 2: 1.0, 3: 1.0}  # in bf16 256 + 1 is 256
    paths = [save_checkpoint(tmp_path, step, state(step, scale), keep_last=9) for step, scale in scales.items()]
    found = average_weights(paths)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3) * 86)
    assert found["b"].dtype == torch.bfloat16 and found["b"].item() == 86.0
    assert average_weights(paths[:1])["a"].tolist() == state(1, 256.0)["model"]["a"].tolist()
    with pytest.raises(ValueError, match=r"\bcheckpoint\b"):
        average_weights([])
    other = save_checkpoint(tmp_path, 4, state(4) | {"model": {"a": torch.zeros(3)}}, keep_last=9)
    with pytest.raises(ValueError, match=r"\bstep-00000004\.pt\b.*\bstep-00000001\.pt\b.*\bb\b"):
        average_weights([*paths, other])


def test_the_average_of_running_averages(tmp_path) -> None:
    paths = []
    for step, scale in ((1, 1.0), (2, 3.0)):
        ema = {"n_averaged": torch.tensor(step)} | {
            f"module.{k}": v * 10 for k, v in state(step, scale)["model"].items()
        }
        paths.append(save_checkpoint(tmp_path, step, state(step, scale, ema=ema), keep_last=2))
    assert torch.equal(average_weights(paths)["a"], torch.arange(6.0).reshape(2, 3) * 20)
