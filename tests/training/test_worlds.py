"""Longer proofs of what several processes do that torchrun starts: the numbers of one, and a good end to all that
may go wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastformer.checkpoints.training_state import checkpoints
from tests.training import worlds

pytestmark = pytest.mark.slow
TOLERANCE = 1e-9
CONSTANT = {"schedule": "constant"}  # the rate of an update doesn't depend on how many are to come
KILLS, SIGNALS = (int(os.environ.get(f"FASTFORMER_TEST_{name}", "2")) for name in ("KILLS", "SIGNALS"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Twenty updates of one process, with dropout."""
    run = tmp_path_factory.mktemp("whole") / "run"
    (run.parent / "updates").mkdir()
    worlds.train(0, run, dropout_seeds="batch", options={"updates": str(run.parent / "updates")}, **CONSTANT)
    return run


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}, {"batching": "bucketed"}, {"checkpointing": True}], ids=str)
def test_fsdp_and_ddp_are_one_process(whole, tmp_path, changes) -> None:
    """The weights after twenty updates, packed and padded, by DDP and by FSDP, which keeps the layers fused."""
    if changes:
        whole = tmp_path / "one"
        worlds.train(0, whole, dropout_seeds="batch", **CONSTANT, **changes)
    for sharding in ("ddp", "fsdp"):
        worlds.train(2, tmp_path / sharding, sharding=sharding, **CONSTANT, **changes)
        assert worlds.difference(whole, tmp_path / sharding) <= TOLERANCE, sharding


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_another_number_of_processes_goes_on(whole, tmp_path, sharding) -> None:
    """Two save at update 10; one without torchrun and four go on: the same weights, and the same batches."""
    (tmp_path / "updates").mkdir()
    options = {"updates": str(tmp_path / "updates")}
    worlds.train(2, tmp_path / "two", sharding=sharding, steps=10, options=options, **CONSTANT)
    assert checkpoints(tmp_path / "two")[-1].is_dir() == (sharding == "fsdp")
    first = worlds.batches(tmp_path / "updates")
    for processes in (0, 4):
        run, seen = tmp_path / str(processes), tmp_path / f"updates-{processes}"
        shutil.copytree(tmp_path / "two", run)
        seen.mkdir()
        worlds.train(processes, run, resume="true", options={"updates": str(seen)}, **CONSTANT)
        assert worlds.difference(whole, run) <= TOLERANCE
        found = {**first, **worlds.batches(seen)}
        assert found == worlds.batches(whole.parent / "updates") and len(found) == 20 * 4


def test_a_file_of_ddp_is_read_by_fsdp_and_back(whole, tmp_path) -> None:
    """One process begins, FSDP goes on from its file, DDP from the parts, and the average reads both."""
    run = tmp_path / "run"
    worlds.train(0, run, steps=6, dropout_seeds="batch", keep_last=9, save_every=3, **CONSTANT)
    worlds.train(2, run, steps=12, sharding="fsdp", resume="true", keep_last=9, save_every=3, **CONSTANT)
    worlds.train(2, run, sharding="ddp", resume="true", keep_last=9, save_every=3, average_last=4, **CONSTANT)
    assert worlds.difference(whole, run) <= TOLERANCE
    assert {path.is_dir() for path in checkpoints(run)} == {True, False}
    done = subprocess.run(
        [*worlds.command(0, run)[:2], "{}", "average", str(run)], env=worlds.ENVIRONMENT, capture_output=True
    )
    assert done.returncode == 0, done.stderr
