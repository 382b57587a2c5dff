"""A training of a second (forty pairs, a model of a few thousand weights), and readers of its run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastformer.data import Batch, Example, Examples
from fastformer.training import TrainConfig, Trainer
from fastformer.training.evaluate import Scores, losses_of, mean_of
from fastformer.training.graph_updates import pad_batch, size_of

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
PAIRS = [(f"{'a' * (i % 7 + 1)} {i % 10}", f"{i % 10} {'b' * (i % 5 + 1)}") for i in range(40)]


class Crash(Exception):
    """Ends a process in the middle of its work, as far as a test can do that."""


def write_pairs(file: Path, pairs: list[tuple[str, str]] = PAIRS) -> str:
    file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(file)


def changed(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, **changes)


def lines(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl of one kind."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run, "train")]


def contents(run: Path) -> dict[str, tuple[bytes, int]]:
    """Returns the contents of a run, and when they were written."""
    return {
        str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in run.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()


def before_updates(trainer: Trainer, call: Callable[[Any], object]) -> Trainer:
    """Makes a trainer call a function with the batches of each update before it."""
    update = trainer.update

    def called(batches: Any) -> Any:
        call(batches)
        return update(batches)

    trainer.update = called
    return trainer


def crash_at(trainer: Trainer, step: int) -> None:
    """Trains until the process crashes in the update of a step."""

    def crash(_: object) -> None:
        if trainer.step == step:
            raise Crash

    before_updates(trainer, crash)
    with pytest.raises(Crash):
        trainer.train()


def broken_from(trainer: Trainer, step: int, norm: float | None = None) -> None:
    """Makes the weights NaN from an update on; with `norm`, after an update whose loss is still a number."""
    update = trainer.update

    def broken(batches: Any) -> Any:
        loss, found = update(batches) if norm is not None else (None, None)
        if trainer.step == step:
            nn.init.constant_(trainer.model.output_weight, math.nan)
            found = torch.tensor(norm) if norm is not None else None
        return (loss, found) if norm is not None else update(batches)

    trainer.update = broken


def on_padded_batches(trainer: Trainer) -> Trainer:
    """Makes an ordinary trainer use the batches of one with graphs."""
    max_tokens, max_len, pad = trainer.config.max_tokens, trainer.model.config.max_len, trainer.special_ids.pad

    def placed(batches: list[Batch]) -> list[Batch]:
        size = size_of(batches, max_tokens, max_len)
        return [pad_batch(batch, size, pad).to(trainer.device) for batch in batches]

    trainer.place = placed
    return trainer


def assert_same_lines(run: Path, other: Path, *keys: str) -> None:
    """Checks that each line of metrics.jsonl has the same numbers."""
    for key in keys:
        assert [line.get(key) for line in lines(run)] == [line.get(key) for line in lines(other)], key


def nll_of(model: nn.Module, examples: Sequence[Example], *, max_tokens: int = 999, packed: bool = False) -> float:
    """Returns the mean negative log-likelihood of a target token, as a validation computes it."""
    device, kept = next(model.parameters()).device, Examples(examples)
    return mean_of(losses_of(model, kept, max_tokens=max_tokens, packed=packed, device=device), kept)


def scripted(trainer: Trainer, nll: dict[int, float], **scores: float) -> Trainer:
    """Makes validations return the results that a test sets."""
    trainer.validate = lambda model: Scores(nll[trainer.step], **scores)
    return trainer
