"""`fastformer average` reports what it averages, and changes only the run's own model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from fastformer.checkpoints.lock import RunLock
from fastformer.checkpoints.training_state import checkpoints, load_checkpoint, save_checkpoint
from fastformer.cli import main
from fastformer.models import Transformer
from fastformer.models.weights import read_notes
from fastformer.training import TrainConfig, start
from tests.training.conftest import config as config
from tests.training.conftest import no_tensorboard as no_tensorboard
from tests.training.tiny import changed, contents


@pytest.fixture(scope="module")
def trained() -> dict[str, Path]:
    return {}


@pytest.fixture
def run(trained, config, tmp_path, tmp_path_factory) -> Path:
    if not trained:
        trained["run"] = tmp_path_factory.mktemp("average") / "run"
        start(changed(config, steps=4, save_every=1, keep_last=4, val_every=0), trained["run"]).train()
    return shutil.copytree(trained["run"], tmp_path / "run")


def mean(paths: list[Path]) -> torch.Tensor:
    return torch.stack([load_checkpoint(path)["model"]["embedding.weight"] for path in paths]).double().mean(0).float()


def test_the_number_of_averaged_checkpoints(run, capsys, caplog) -> None:
    found = checkpoints(run)
    assert len(found) == 4  # what --keep_last keeps
    with RunLock(run):
        assert main(["average", str(run)]) == 1 and "is in use by process" in capsys.readouterr().err
    assert read_notes(run)["model"] == "update 4"
    for last, paths in (("", found), ("2", found[2:]), ("4", found), ("10", found)):
        words = ["--last", last] if last else []
        caplog.clear()
        assert main(["average", str(run), *words]) == 0
        assert torch.equal(Transformer.from_pretrained(run).embedding.weight, mean(paths))
        assert read_notes(run)["model"].endswith(", ".join(str(int(path.stem[5:])) for path in paths))
        said = capsys.readouterr().out
        assert str(run) in said and "--reference" in said  # which gives a score
        assert ("--keep_last" in caplog.text) == ("--keep_last 10" in caplog.text) == (last == "10")


def test_a_run_without_checkpoints_is_named(run, tmp_path, ran) -> None:
    for path in checkpoints(run):
        path.unlink()
    before = contents(run)
    assert str(run) in ran("average", str(run), code=1).err and contents(run) == before
    assert "--last" in ran("average", str(run), "--last", "0", code=1).err


def test_a_language_model_has_no_translations_to_score(tmp_path, ran) -> None:
    (text := tmp_path / "text").write_text("a line of text\n" * 30)
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_layers": 1}
    options = {"tokenizer": "bytes", "seqlen": 16, "max_tokens": 64, "steps": 1, "device": "cpu"}
    start(TrainConfig(train_text=str(text), model="gpt", settings=sizes, **options), tmp_path / "run").train()
    out = ran("average", str(tmp_path / "run")).out
    assert str(tmp_path / "run") in out and "translate" not in out


def sparse(weight: torch.Tensor) -> object:
    return weight.to_sparse()


@pytest.mark.parametrize(
    "change",
    [
        sparse,
        lambda weight: 3,
        lambda weight: weight.to(torch.int32),
        lambda weight: weight.double(),
        lambda weight: weight[:1],
        lambda weight: torch.zeros(1, 1).expand(10**7, 10**7),
        lambda weight: weight * torch.nan,
    ],
    ids=["sparse", "plain", "integers", "fp64", "misshapen", "expanded", "nan"],
)
def test_a_checkpoint_without_proper_weights_is_named(change, run, ran) -> None:
    last = checkpoints(run)[-1]
    state = load_checkpoint(last)
    state["model"]["embedding.weight"] = change(state["model"]["embedding.weight"])
    save_checkpoint(run, 4, state, keep_last=3)
    before = contents(run)
    error = ran("average", str(run), code=1).err
    assert last.name in error and "embedding.weight" in error and "a bug" not in error
    assert contents(run) == before


@pytest.mark.skipif(os.name != "posix", reason="links need no rights on POSIX alone")
def test_links_are_not_followed_out_of_the_run(run, tmp_path, ran) -> None:
    other = tmp_path / "other"
    (run / "checkpoints").rename(other)
    (run / "checkpoints").symlink_to(other)
    before = contents(other), contents(run)
    assert "checkpoints to be a folder, got a link" in ran("average", str(run), code=1).err
    assert (contents(other), contents(run)) == before
    # The run itself may be a link, and its files may be: they are replaced, and what they point to stays.
    (run / "checkpoints").unlink()
    other.rename(run / "checkpoints")
    for name in ("model.safetensors", "config.json"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    (tmp_path / "link").symlink_to(run)
    outside = [(tmp_path / name).read_bytes() for name in ("model.safetensors", "config.json")]
    assert main(["average", str(tmp_path / "link")]) == 0
    assert outside == [(tmp_path / name).read_bytes() for name in ("model.safetensors", "config.json")]
    assert "average" in read_notes(run)["model"]
