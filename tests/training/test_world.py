"""Two processes that torchrun starts train like one, and end like one."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import fastformer
from fastformer.checkpoints.training_state import checkpoints, load_checkpoint
from fastformer.cli import main
from fastformer.data import Example, collate
from fastformer.training import start
from fastformer.training.contents import read_contents
from fastformer.training.run_config import load_config
from fastformer.training.updates import Update, dropout_seed, places_of
from fastformer.training.world import LostRanksError, World, read_parts
from tests.training import worlds
from tests.training.tiny import changed, lines

TOLERANCE = 1e-9


def test_one_process_is_the_identity(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    tensor, model = torch.ones(3), torch.nn.Linear(2, 2)
    with World.join("cpu") as world:
        assert world == World() and not world.is_launched
        assert world.all_reduce_max(3, True) == [3, True] and world.gather("x") == ["x"]
        assert world.all_reduce_sum(tensor) is tensor and world.wrap(model).module is model
        assert world.run_on_rank0(lambda: 5) == world.run_on_all(lambda: 5) == 5
        with pytest.raises(KeyError):
            world.run_on_rank0(lambda: {}["missing"])


def test_an_incomplete_launcher_is_named(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"\bLOCAL_RANK\b"):
        World.join("cpu")


@pytest.mark.parametrize(("accumulate", "size"), [(1, 2), (3, 2), (4, 8)])
def test_batches_that_do_not_divide_are_refused(accumulate, size) -> None:
    with pytest.raises(ValueError, match=r"\baccumulate\b"):
        World(size=size).check_accumulate(accumulate)
    World(size=size).check_accumulate(2 * size)


def test_a_loss_is_reported_once() -> None:
    world = World(size=2)
    with pytest.raises(LostRanksError) as found, world.reporting_loss(), world.reporting_loss():
        raise RuntimeError("gloo: Connection reset by peer")
    assert type(found.value.__cause__) is RuntimeError


def test_cuda_graphs_are_for_one_process(config, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"\bcuda_graphs\b"):
        start(changed(config, cuda_graphs=True, accumulate=2), tmp_path / "run", world=World(size=2))
    assert not (tmp_path / "run").exists()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=12), st.integers(2, 4))
def test_all_processes_together_make_the_update_of_one(sides, size) -> None:
    class Model:
        d_model, vocab_size, num_layers = 8, 10, 1

    groups = [[*range(i, len(sides), 4)] for i in range(4)]
    examples = [Example([5] * source, [6] * target) for source, target in sides]
    for padded in (True, False):
        batches = [collate([examples[i] for i in group], packed=not padded) for group in groups]
        lengths = [torch.tensor([sides[i] for i in group]) for group in groups]
        whole, dealt = Update(batches), []
        for rank in range(size):
            places = places_of(lengths, Model, rank, size, padded=padded)
            part = Update([batches[place] for place in places], places, lengths, padded=padded)
            assert (part.num_target_tokens, part.num_tokens, part.num_slots) == (
                *(whole.num_target_tokens, whole.num_tokens, whole.num_slots),
            )
            dealt += places
        assert sorted(dealt) == whole.places == [0, 1, 2, 3]


def test_dropout_seeds_differ() -> None:
    seeds = {dropout_seed(seed, step, place) for seed in range(9) for step in range(30) for place in range(9)}
    assert len(seeds) == 9 * 30 * 9 and all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def test_without_a_launcher_dropout_follows_one_generator(config, tmp_path) -> None:
    trainer = start(config, tmp_path / "run")
    assert trainer.config.dropout_seeds == "auto"
    state = torch.get_rng_state()
    trainer.model.train()
    trainer.update(next(trainer.updates()))
    drawn = torch.get_rng_state()
    assert not torch.equal(drawn, state)
    trainer.config = changed(trainer.config, dropout_seeds="batch")
    ends: list[torch.Tensor] = []
    for _ in range(2):
        torch.manual_seed(len(ends))  # what was drawn before makes no difference
        trainer.update(next(trainer.updates()))
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


def test_no_other_module_uses_torch_distributed() -> None:
    modules = list(Path(fastformer.__file__).parent.rglob("*.py"))
    assert any(path.name == "world.py" for path in modules)
    for path in modules:
        if path.name != "world.py" and "torch.distributed" in path.read_text():
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in getattr(node, "names", ())] + [getattr(node, "module", None) or ""]
                assert not any(name.startswith("torch.distributed") for name in names), path


def test_two_processes_make_one_run(tmp_path) -> None:
    """Weights after updates whose gradients are above and below the bound of clipping, and with an eps that shows their
    size: alone, AdamW hides a constant factor."""
    small = {"model__num_encoder_layers": 1, "model__num_decoder_layers": 1, "model__d_model": 16, "model__d_ff": 16}
    settings = {"steps": 4, "warmup": 1, "eps": 0.1, "clip": 2.7, "accumulate": 2, "val_examples": 0, **small}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with worlds.two(tmp_path / "ddp", tmp_path / "fsdp", **settings) as each:
            for words in each:
                assert main(words) == 0
        assert main([*words[:1], str(tmp_path / "one"), *words[2:], "--dropout_seeds", "batch"]) == 0
    finally:
        torch.set_default_dtype(before)
    norms = [line["grad_norm"] for line in lines(tmp_path / "one", "train")]
    assert min(norms) < 2.7 < max(norms)
    (one,) = lines(tmp_path / "one", "validation")
    for name in ("ddp", "fsdp"):
        assert worlds.difference(tmp_path / "one", tmp_path / name) <= TOLERANCE
        assert [line["grad_norm"] for line in lines(tmp_path / name, "train")] == pytest.approx(norms)
        (two,) = lines(tmp_path / name, "validation")
        assert abs(one["nll"] - two["nll"]) <= TOLERANCE
        assert load_config(tmp_path / name).dropout_seeds == "batch"  # with any number of processes
    _check_damaged_parts_are_named(checkpoints(tmp_path / "fsdp")[-1])


def _check_damaged_parts_are_named(checkpoint: Path) -> None:
    parts = sorted(checkpoint.glob("__*"))
    assert len(parts) == 2
    for part in parts:
        data = part.read_bytes()
        for damaged in (data[: len(data) // 2] + b"\x55\xaa" + data[len(data) // 2 + 2 :], data + b"\0"):
            part.write_bytes(damaged)
            with pytest.raises(ValueError, match=part.name):
                load_checkpoint(checkpoint, read_parts)
        part.write_bytes(data)
    load_checkpoint(checkpoint, read_parts)


# The table of contents of a sharded checkpoint is read without running any code that it names.


class _Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_parts_are_read_whole(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(3, 5), "step": torch.tensor([7])}
    save(dict(tensors), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert set(read_contents(tmp_path).state_dict_metadata) == set(tensors)
    found = read_parts(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_table_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Touches(tmp_path / "run")))
    with pytest.raises(pickle.UnpicklingError):
        read_contents(tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        read_parts(tmp_path)
    assert not (tmp_path / "run").exists()
