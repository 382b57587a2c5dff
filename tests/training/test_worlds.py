"""Long tests of several processes that torchrun starts: the numbers of one process, and failures."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fastformer.checkpoints.training_state import checkpoints, load_checkpoint, step_of
from fastformer.training.world import read_parts
from tests.training import worlds
from tests.training.tiny import lines

pytestmark = pytest.mark.slow
TOLERANCE = 1e-9
CONSTANT = {"schedule": "constant"}  # the rate of an update doesn't depend on how many are to come
SLOWNESS = float(os.environ.get("FASTFORMER_TEST_SLOWNESS", "1"))  # of a machine on which others work
LOST = re.compile(r"^fastformer: rank \d\b.*--resume", re.MULTILINE)  # the error of a process that waited for others
KILLS, SIGNALS = (int(os.environ.get(f"FASTFORMER_TEST_{name}", "2")) for name in ("KILLS", "SIGNALS"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Trains twenty updates in one process, with dropout."""
    run = tmp_path_factory.mktemp("whole") / "run"
    (run.parent / "updates").mkdir()
    worlds.train(0, run, dropout_seeds="batch", options={"updates": str(run.parent / "updates")}, **CONSTANT)
    return run


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}, {"batching": "bucketed"}, {"checkpointing": True}], ids=str)
def test_fsdp_and_ddp_are_one_process(whole, tmp_path, changes) -> None:
    """Compares the weights after twenty updates, packed and padded, with DDP and FSDP; FSDP keeps the layers fused.

    FSDP gathers all weights for an update, or a layer at a time if there is no room for all.
    """
    if changes:
        whole = tmp_path / "one"
        worlds.train(0, whole, dropout_seeds="batch", **CONSTANT, **changes)
    for sharding, options in (("ddp", {}), ("fsdp", {}), ("fsdp", {"by_layer": True})):
        run = tmp_path / f"{sharding}-{len(options)}"
        worlds.train(2, run, sharding=sharding, options=options, **CONSTANT, **changes)
        assert worlds.difference(whole, run) <= TOLERANCE, run


def test_fp32_gradients_are_summed_too(tmp_path) -> None:
    """PyTorch sums fp32 gradients in another way than fp64 gradients, which not every backend supports."""
    runs = {name: tmp_path / name for name in ("plain", "ddp", "fsdp", "fsdp by layer")}
    for name, run in runs.items():
        settings = {"dropout_seeds": "batch"} if name == "plain" else {"sharding": name.partition(" ")[0]}
        options = {"dtype": "float32", "by_layer": "layer" in name}
        worlds.train(0 if name == "plain" else 2, run, options=options, **settings, **CONSTANT)
    plain, *others = ([line["loss"] for line in lines(run, "train")] for run in runs.values())
    for losses in others:
        assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "fsdp by layer"])
def test_another_number_of_processes_resumes(whole, tmp_path, sharding) -> None:
    """Two processes save at update 10; one without torchrun, and four, continue with the same weights and batches."""
    (tmp_path / "updates").mkdir()
    options = {"updates": str(tmp_path / "updates"), "by_layer": "layer" in sharding}
    sharding = sharding.partition(" ")[0]
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
    """One process begins, FSDP continues from its file, DDP from the parts, and `average` reads both."""
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


# What may go wrong.


@pytest.mark.parametrize("seed", range(2))
def test_nan_in_one_process_ends_all_processes_in_the_same_update(tmp_path, seed) -> None:
    chooser = random.Random(seed)
    rank, step, sharding = chooser.randrange(2), chooser.randrange(2, 15), ("ddp", "fsdp")[seed % 2]
    options = {"nan": [rank, step], "late": 1.0}  # a checkpoint that is being written then is not lost
    said = worlds.train(2, tmp_path / "run", options=options, save_every=2, sharding=sharding, fails=True)
    assert re.search(f"loss became nan at update {step + 1}", said), said
    assert step_of(checkpoints(tmp_path / "run")[-1]) == step - step % 2
    exits = re.findall(r"exitcode *: *(-?\d+)", said)
    assert exits and set(exits) <= {"1", "-15"}, said


def test_other_files_in_one_process_are_named_before_anything_is_written(tmp_path) -> None:
    (tmp_path / "other.tsv").write_text("a\tb\n" * 200)
    options = {"data": [1, str(tmp_path / "other.tsv")]}
    said = worlds.train(2, tmp_path / "run", options=options, fails=True)
    assert re.search(r"expected the same training data .* rank 1 ", said), said
    assert not (tmp_path / "run" / "model.safetensors").exists() and not checkpoints(tmp_path / "run")


@pytest.mark.parametrize(("sharding", "rank"), [("ddp", 0), ("fsdp", 0), ("fsdp", 1)])
def test_a_file_that_may_not_grow_ends_all_and_loses_nothing(tmp_path, sharding, rank) -> None:
    """The system refuses to write more, as if a disk were full or a quota used up."""
    run = tmp_path / "run"
    options = {"small": [rank, 5, 3000], "pace": 0.3}  # when the parts that were begun at update 3 are written
    said = worlds.train(2, run, options=options, save_every=3, sharding=sharding, fails=True)
    assert re.search("^fastformer: .*(could not write|File too large)", said, re.MULTILINE), said
    assert [step_of(path) for path in checkpoints(run)] == [3]
    worlds.train(2, run, resume="true", steps=7)
    assert step_of(checkpoints(run)[-1]) == 7 and not [*(run / "checkpoints").glob(".step*")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_network_is_named_by_all(tmp_path, rank) -> None:
    began = time.monotonic()
    options = {"deaf": [rank, 3]}
    said = worlds.train(2, tmp_path / "run", options=options, save_every=2, rank_timeout=20, fails=True)
    # The launcher ends with a traceback of its own.
    assert LOST.search(said) and 'launched.py", line' not in said and "terminate called" not in said, said
    assert step_of(checkpoints(tmp_path / "run")[-1]) == 2
    assert time.monotonic() - began < 60 * SLOWNESS


def test_parts_that_reach_the_disk_late_are_of_their_own_update(whole, tmp_path) -> None:
    """A checkpoint that is complete some updates later has nothing of these: training continues from it exactly."""
    run = tmp_path / "run"
    worlds.train(2, run, sharding="fsdp", options={"late": 1.5, "pace": 0.1}, save_every=7, keep_last=9, **CONSTANT)
    for path in checkpoints(run):
        steps = {int(kept["step"]) for kept in load_checkpoint(path, read_parts)["optimizer"]["state"].values()}
        assert steps == {step_of(path)}
        if step_of(path) > 7:
            shutil.rmtree(path)
    worlds.train(0, run, resume="true", **CONSTANT)
    assert worlds.difference(whole, run) <= TOLERANCE


def test_a_damaged_shard_is_named_and_the_previous_checkpoint_is_used(tmp_path) -> None:
    run = tmp_path / "run"
    worlds.train(2, run, steps=4, save_every=2, sharding="fsdp")
    last = checkpoints(run)[-1]
    (part,) = last.glob("__1_*")
    part.write_bytes(part.read_bytes()[:-100])
    assert part.name in worlds.train(0, run, steps=5, resume="true")
    assert step_of(checkpoints(run)[-1]) == 5


def test_a_silent_process_is_not_waited_for_forever(tmp_path) -> None:
    began = time.monotonic()
    said = worlds.train(2, tmp_path / "run", options={"freeze": [1, 3]}, rank_timeout=20, fails=True)
    assert LOST.search(said), said
    assert time.monotonic() - began < 120


def descendants(pid: int) -> list[int]:
    """Returns the processes that a launcher started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def launch(run: Path, restarts: int = 0, **others) -> subprocess.Popen:
    words = worlds.command(2, run, restarts=restarts, **others)
    return subprocess.Popen(words, env=worlds.ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(run: Path, what: str, launched: subprocess.Popen) -> None:
    while what not in ((run / "train.log").read_text() if (run / "train.log").exists() else ""):
        assert launched.poll() is None, launched.stdout.read()
        time.sleep(0.05)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_process_changes_nothing(whole, tmp_path, seed) -> None:
    """After kill -9 of any process at any time, a restarted run has the same numbers and batches as one without it."""
    random.seed(seed)
    run, seen, sharding = tmp_path / "run", tmp_path / "updates", ("ddp", "fsdp")[seed % 2]
    seen.mkdir()
    options = {"updates": str(seen), "pace": 0.1}
    launched = launch(run, restarts=3, options=options, sharding=sharding, save_every=3, **CONSTANT)
    wait_for(run, "parameters", launched)
    time.sleep(random.uniform(0, 4))
    if (found := descendants(launched.pid)) and launched.poll() is None:
        os.kill(random.choice(found), signal.SIGKILL)
    said, _ = launched.communicate(timeout=300)
    assert launched.returncode == 0, said
    assert worlds.difference(whole, run) <= TOLERANCE
    assert worlds.batches(seen) == worlds.batches(whole.parent / "updates")


@pytest.mark.parametrize("seed", range(SIGNALS))
def test_sigterm_ends_all_in_the_same_update(whole, tmp_path, seed) -> None:
    """After SIGTERM to torchrun or to a process at any time, all save the same update and end within 10 seconds."""
    random.seed(seed)
    run, sharding = tmp_path / "run", ("ddp", "fsdp")[seed % 2]
    launched = launch(run, options={"pace": 0.1}, sharding=sharding, save_every=7, **CONSTANT)
    wait_for(run, "update      1", launched)
    time.sleep(random.uniform(0, 2))
    pids, began = descendants(launched.pid), time.monotonic()
    for pid in random.choice([[launched.pid], pids[:1], pids[1:], [launched.pid, *pids]]):
        os.kill(pid, signal.SIGTERM)
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids):
        assert time.monotonic() - began < 10 * SLOWNESS
        time.sleep(0.05)
    said, _ = launched.communicate(timeout=60)
    step = int(re.findall(r"SIGTERM: saved at update (\d+)", (run / "train.log").read_text())[-1])
    assert step_of(checkpoints(run)[-1]) == step < 20 and (run / "model.safetensors").exists(), said
    worlds.train(0, run, resume="true", **CONSTANT)
    assert worlds.difference(whole, run) <= TOLERANCE
