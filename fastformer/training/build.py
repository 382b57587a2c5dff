"""A run from its settings: data, model, trainer; new, or going on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import load_tokenizer
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import write_atomically
from fastformer.generation.generate import EXTRA_LENGTH
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import WEIGHTS
from fastformer.training.checkpoint import checkpoints
from fastformer.training.config import TrainConfig
from fastformer.training.examples import load_data
from fastformer.training.trainer import Trainer

logger = logging.getLogger("fastformer")

CONFIG = "config.yaml"
# The weights, the data and their order: a run that goes on can't change them.
FIXED = (
    "model preset settings task train_source train_target train_tsv train_text tokenizer vocab_size seqlen max_len "
    "batching max_tokens accumulate ema seed"
)


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
        return LSTMSeq2Seq(vocab_size=vocab_size, max_len=config.max_len + EXTRA_LENGTH, **settings)
    settings = {"max_len": config.max_len + EXTRA_LENGTH, **settings}
    return Transformer.from_preset(config.preset, vocab_size=vocab_size, **settings)


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # what a build without CUDA raises is an AssertionError
        raise ValueError(f"expected a device that this PyTorch can use, got {name!r}: give cpu or auto") from error
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
    folder, device = Path(run), choose_device(config.device)
    if not resume and (checkpoints(folder) or (folder / WEIGHTS).exists()):
        raise ValueError(f"{folder} holds a run already: give --resume to go on with it, or another folder")
    if resume and not checkpoints(folder):
        raise ValueError(f"expected a run to go on with, but {folder} has no checkpoints")
    saved = folder / TOKENIZER
    data = load_data(config, load_tokenizer(saved) if resume and saved.is_file() else None)
    model = build_model(config, data.tokenizer.vocab_size)
    trainer = Trainer(config, folder, model, data, device)
    if resume and not trainer.resume():
        raise ValueError(f"every checkpoint in {folder} is damaged: train anew in another folder")
    folder.mkdir(parents=True, exist_ok=True)
    data.tokenizer.save(folder)
    write_atomically(folder / CONFIG, _yaml().safe_dump(config.to_dict(), sort_keys=False, explicit_end=True).encode())
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
    file = Path(run) / CONFIG
    values = read_yaml(file)
    # Half of a YAML file is often valid YAML, so the document's end mark is asked for.
    if not file.read_text(encoding="utf-8").rstrip().endswith("\n..."):
        raise ValueError(f"expected {file} to end with a line of three dots, as it was written: is it cut short?")
    return TrainConfig.from_dict(values)


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """The settings that a YAML file holds.

    Raises:
        ValueError: no such file, no YAML, or no settings in it.
    """
    yaml, file = _yaml(), Path(path)
    if not file.is_file():
        raise ValueError(f"expected a YAML file with settings, but there is no file {file}")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ValueError(f"expected settings in {file}, one `name: value` a line, got {found}: is it cut short?")
    return values


def changed_config(run: str | os.PathLike, changes: dict[str, Any]) -> TrainConfig:
    """The settings of a run that goes on, with some of them changed.

    Raises:
        ValueError: a setting that what was done so far depends on.
    """
    before = load_config(run)
    after = TrainConfig.from_dict(before.to_dict() | changes)
    for name in FIXED.split():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            raise ValueError(
                f"a run that goes on keeps its {name}: expected {old!r}, got {new!r}; leave it out, or train anew in "
                "another folder"
            )
    return after


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("training writes its settings as YAML: pip install 'fastformer[train]'") from error
    return yaml
