"""Settings of a tiny training."""

from __future__ import annotations

import sys

import pytest

from fastformer.training import TrainConfig
from tests.training.tiny import PAIRS, SIZES, write_pairs


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return TrainConfig(
        train_tsv=write_pairs(tmp_path / "train.tsv"),
        val_tsv=write_pairs(tmp_path / "val.tsv", PAIRS[:8]),
        settings=dict(SIZES),
        tokenizer="bytes",
        max_tokens=64,
        steps=12,
        warmup=4,
        log_every=1,
        val_examples=0,
        max_len=64,
        device="cpu",
    )


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch) -> None:
    """Turns TensorBoard off: its import and its event files take most of the time of a tiny run."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
