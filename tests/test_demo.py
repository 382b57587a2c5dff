"""The demo deletes only files that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastformer import demo
from fastformer.training.config import TrainConfig
from tests.training.tiny import SIZES


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def small(seed: int) -> TrainConfig:
    return TrainConfig(
        task="numbers", settings=SIZES, tokenizer="bytes", max_len=140, steps=1, val_examples=0, seed=seed
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    """Makes the demo short and silent: one update of a tiny model. A demo that starts wrongly is noticed at once."""
    monkeypatch.setattr(demo, "demo_config", small)
    monkeypatch.setattr(demo, "train_and_show", lambda trainer, folder, seed: trainer.train() and 0.0)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Makes a user's folder whose files have names like those of a run."""
    folder = tmp_path / "project"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("thesis.tex", "config.yaml", "model.safetensors", "checkpoints/step-00000001.pt", "checkpoints/mine"):
        (folder / name).write_text(f"my {name}")
    return folder


@pytest.mark.parametrize("out", [".", "", "../project", "absolute"])
def test_a_users_folder_is_not_changed(project, out, monkeypatch, ran) -> None:
    before = contents(project)
    monkeypatch.chdir(project)
    assert "--out" in ran("demo", "--out", str(project) if out == "absolute" else out, code=1).err
    assert contents(project) == before


def test_a_second_demo_replaces_only_its_own_files(tmp_path) -> None:
    folder = tmp_path / "demo"
    demo.run_demo(folder)
    written = set(contents(folder))
    demo.clear(folder)
    assert {path.name for path in folder.iterdir()} <= {demo.MARK, ".lock"}, "the demo leaves some of its own files"
    (folder / "checkpoints").mkdir()
    for name in written & {"model.safetensors", "metrics.jsonl", "checkpoints/step-00000001.pt"}:
        (folder / name).write_text("of a demo")
    user_files = {
        "notes.txt": "my notes",
        "train-2.log": "my log",
        "checkpoints/best.pt": "my model",
        "checkpoints/step-1.pt": "mine",
        "sub/x": "x",
    }
    for name, text in user_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    demo.clear(folder)
    for name, text in user_files.items():
        assert (folder / name).read_text() == text
    assert "model.safetensors" in written and not written & {"notes.txt", "checkpoints/best.pt"}
    assert set(contents(folder)) == {demo.MARK, ".lock", "checkpoints", "sub", *user_files}


def test_links_are_not_followed(tmp_path, project) -> None:
    before = contents(project)
    folder = tmp_path / "demo"
    demo.clear(folder)
    (folder / "checkpoints").symlink_to(project / "checkpoints")
    with pytest.raises(ValueError, match=r"\blink\b"):
        demo.clear(folder)
    (folder / "checkpoints").unlink()
    (folder / "config.yaml").symlink_to(project / "config.yaml")
    demo.clear(folder)
    assert contents(project) == before and not (folder / "config.yaml").exists()


def test_commands_work_as_pasted(tmp_path, monkeypatch) -> None:
    from fastformer.commands import command_line

    script = tmp_path / "bin" / "fastformer"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("translate", "run", "two words") == f"{script} translate run 'two words'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert command_line("translate", "a b") == "fastformer translate 'a b'"
    monkeypatch.setattr("sys.argv", ["/somewhere/fastformer/cli.py"])
    assert command_line("doctor").endswith(" -m fastformer.cli doctor")
