"""Tests updates as real CUDA graphs; plain updates never make the host wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastformer.training import TrainConfig, Trainer, start
from fastformer.training import trainer as trainer_module
from fastformer.training.schedule import rate_of
from tests.no_sync import no_waiting
from tests.training.tiny import PAIRS, changed, lines, losses, on_padded_batches, weights, write_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SIZES = {"d_model": 64, "d_ff": 128, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}


@pytest.fixture
def config(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    # A graph takes its rate as fp32.
    monkeypatch.setattr(trainer_module, "rate_of", lambda *given: float(torch.tensor(rate_of(*given))))
    train_tsv = write_pairs(tmp_path / "train.tsv", PAIRS * 5)
    options = {"settings": SIZES, "max_tokens": 192, "steps": 30, "device": "cuda", "cuda_graphs": True}
    return changed(config, train_tsv=train_tsv, **options)


def assert_same_run(one: Trainer, other: Trainer, moved: float) -> None:
    """Checks the loss of each update, the random numbers, and the weights up to the effects of atomics."""
    assert losses(one.run) == pytest.approx(losses(other.run), rel=1e-3)
    for key in ("lr", "padding"):
        assert [line[key] for line in lines(one.run, "train")] == [line[key] for line in lines(other.run, "train")]
    assert torch.equal(one.state_dict()["cuda_rng"], other.state_dict()["cuda_rng"])
    assert float((weights(one) - weights(other)).abs().mean()) < 0.02 * moved


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16"}, {"accumulate": 2, "ema": 0.9, "label_smoothing": 0.1}],
    ids=["fp32", "bf16", "accumulate-average"],
)
def test_graphs_train_like_calls(config, tmp_path, changes) -> None:
    config = changed(config, **changes)
    eager = on_padded_batches(start(changed(config, cuda_graphs=False), tmp_path / "eager"))
    before = weights(eager)
    eager.train()
    captured = start(config, tmp_path / "graphs")
    captured.train()
    assert sum(slot.graph is not None for slot in captured.graphs.slots.values()) >= 2
    moved = float((weights(eager) - before).abs().mean())
    assert moved > 1e-3
    assert_same_run(captured, eager, moved)
    assert losses(captured.run)[-1] < 0.9 * losses(captured.run)[0]
    if config.ema:
        average, other = (t.ema.module.output_weight for t in (captured, eager))
        assert float((average - other).abs().mean()) < 0.02 * moved
        assert int(captured.state_dict()["ema"]["n_averaged"]) == config.steps


def test_a_replayed_update_is_one_launch_and_never_waits(config, tmp_path) -> None:
    trainer = start(changed(config, ema=0.9), tmp_path / "run")
    trainer.model.train()
    updates = trainer.updates()
    group = next(updates)
    for _ in range(3):
        trainer.update(group)
        trainer.position.step += 1
    with no_waiting():
        for _ in range(3):
            trainer.update(group)
            trainer.position.step += 1
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.update(group)
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("cudaGraphLaunch") == 1
    # Besides it, the generator's seed and offset for this replay.
    assert sum(count for name, count in calls.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))) <= 4


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "ema": 0.9, "accumulate": 2}], ids=["fp32", "bf16"])
def test_an_ordinary_update_never_waits(config, tmp_path, changes) -> None:
    trainer = start(changed(config, cuda_graphs=False, **changes), tmp_path / "run")
    trainer.model.train()
    updates = trainer.updates()
    for _ in range(3):  # compiles
        trainer.update(next(updates))
        trainer.position.step += 1
    with no_waiting():
        for _ in range(3):
            batches = next(updates)  # its copies too
            loss, norm = trainer.update(batches)
            trainer.note(loss, norm)
            trainer.meter.count(batches)
            trainer.position.step += 1
    assert bool(trainer.finite)
