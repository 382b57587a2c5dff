"""A run from its settings: data, model, trainer; new, or going on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
from torch import nn

from fastformer.data import load_tokenizer
from fastformer.data.tokenizer import TOKENIZER
from fastformer.generation.generate import EXTRA_LENGTH
from fastformer.models import GPT, Transformer
from fastformer.training.checkpoint import checkpoints, write_atomically
from fastformer.training.config import TrainConfig
from fastformer.training.examples import load_data
from fastformer.training.trainer import Trainer

logger = logging.getLogger("fastformer")

CONFIG = "config.yaml"


def build_model(config: TrainConfig, vocab_size: int) -> nn.Module:
    """The freshly initialised model of the settings, seeded.

    Raises:
        ValueError: an unknown preset or setting (the nearest one is suggested).
    """
    torch.manual_seed(config.seed)
    settings = dict(config.settings)
    if config.model == "gpt":
        return GPT.from_preset(config.preset, vocab_size=vocab_size, **{"max_len": config.seqlen, **settings})
    if config.model == "lstm":
        from fastformer.baseline.lstm import LSTMSeq2Seq

        return LSTMSeq2Seq(vocab_size=vocab_size, max_len=config.max_len + EXTRA_LENGTH, **settings)
    settings = {"max_len": config.max_len + EXTRA_LENGTH, **settings}
    return Transformer.from_preset(config.preset, vocab_size=vocab_size, **settings)


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def start(config: TrainConfig, run: str | os.PathLike, *, resume: bool = False) -> Trainer:
    """A trainer at its first update, or at the one after the last checkpoint.

    Args:
        config: the settings; to resume, those of the run.
        run: the folder. It must be new, unless resuming.
        resume: go on with what is in it.

    Raises:
        ValueError: a folder that holds a run already, or, to resume, none; broken data.
    """
    import yaml

    folder = Path(run)
    if not resume and checkpoints(folder):
        raise ValueError(f"{folder} holds a run already: give --resume to go on with it, or another folder")
    if resume and not checkpoints(folder):
        raise ValueError(f"expected a run to go on with, but {folder} has no checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / TOKENIZER
    data = load_data(config, load_tokenizer(saved) if resume and saved.is_file() else None)
    data.tokenizer.save(folder)
    write_atomically(folder / CONFIG, yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
    model = build_model(config, data.tokenizer.vocab_size)
    trainer = Trainer(config, folder, model, data, choose_device(config.device))
    if resume and not trainer.resume():
        raise ValueError(f"every checkpoint in {folder} is damaged: train anew in another folder")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "%s: %s parameters, %s training examples, vocabulary %d, %s",
        config.model,
        f"{parameters:,}",
        f"{len(data.train):,}",
        data.tokenizer.vocab_size,
        json.dumps({"device": str(trainer.device), "batching": config.batching, "precision": config.precision}),
    )
    return trainer


def load_config(run: str | os.PathLike) -> TrainConfig:
    """The settings of a run.

    Raises:
        ValueError: no such file, or one that is damaged.
    """
    import yaml

    file = Path(run) / CONFIG
    if not file.is_file():
        raise ValueError(f"expected the settings of a run, but there is no file {file}")
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{file} is damaged or empty: expected settings, one `name: value` a line")
    return TrainConfig.from_dict(values)
