"""Builds a run from its settings (data, model, trainer): a new one, one that fine-tunes, or one that resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fastformer.baseline import LSTMSeq2Seq
from fastformer.checkpoints.lock import LOCK, RunLock
from fastformer.checkpoints.run import check_saved, load_model
from fastformer.checkpoints.training_state import (
    checkpoint_folder,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    remove_left_parts,
)
from fastformer.data import BPETokenizer, ByteTokenizer, PairTokenizer, Tokenizer, load_tokenizer
from fastformer.data.backend import NUM_BYTES
from fastformer.data.order import Order
from fastformer.data.pair import contents
from fastformer.data.tokenizer import TOKENIZER
from fastformer.devices import choose_device
from fastformer.files import check_places, remove_left_overs
from fastformer.generation.request_builder import EXTRA_LENGTH
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import CONFIG as MODEL_CONFIG
from fastformer.models.weights import WEIGHTS
from fastformer.settings import suggestion
from fastformer.special_ids import SpecialIds
from fastformer.training.config import TrainConfig, plain_values
from fastformer.training.examples import TrainingData, load_data
from fastformer.training.graph_updates import check_device
from fastformer.training.interrupts import Interrupts
from fastformer.training.moved import check_origin, check_there, check_tokenizer, digest_of
from fastformer.training.progress import METRICS
from fastformer.training.report import template
from fastformer.training.run_config import CONFIG, absolute_paths, check_unchanged, save_config
from fastformer.training.run_log import RunLog
from fastformer.training.schedule import surprises
from fastformer.training.sections import OF_TOKENIZER, Architecture
from fastformer.training.state import fingerprint
from fastformer.training.trainer import Trainer
from fastformer.training.world import World, read_parts

logger = logging.getLogger("fastformer")

# The files that a run writes, other than checkpoints and the lock.
WRITTEN = (TOKENIZER, MODEL_CONFIG, WEIGHTS, CONFIG, METRICS)
KINDS: dict[str, Architecture] = {"Transformer": "transformer", "GPT": "gpt", "LSTMSeq2Seq": "lstm"}


def build_model(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds = SpecialIds(),
    source_vocab_size: int | None = None,
) -> nn.Module:
    """Builds the freshly initialised model of the settings, after seeding.

    Args:
        config: the settings.
        vocab_size, special_ids: the size and the special ids of the tokenizer's vocabulary.
        source_vocab_size: the size of a separate source vocabulary; None: both sides share one.

    Raises:
        ValueError: an unknown preset or setting (the nearest one is suggested).
    """
    torch.manual_seed(config.seed)
    longest = config.seqlen if config.model == "gpt" else config.max_len + EXTRA_LENGTH
    settings = config.model_config(vocab_size, longest, special_ids, source_vocab_size)
    if config.model == "lstm":
        return LSTMSeq2Seq(**asdict(settings))
    return GPT(settings) if config.model == "gpt" else Transformer(settings)


def start(
    config: TrainConfig,
    run: str | os.PathLike[str],
    *,
    resume: bool | str = False,
    interrupts: Interrupts | None = None,
    world: World | None = None,
) -> Trainer:
    """Builds a trainer at its first update, or at the one after the last checkpoint.

    The folder stays locked until training ends or the trainer is deleted.

    Args:
        config: the settings; to resume, those of the run (`run_config`), perhaps with changes.
        run: the folder. It must be new, unless resuming.
        resume: resume the run in the folder; "auto": resume if the folder holds a run, else begin a new one.
        interrupts: catches signals from now on; by default the trainer catches them while it trains.
        world: the processes that train together; each of them calls this function. By default this process trains
            alone.

    Raises:
        ValueError: a folder that holds a run already, or, to resume, holds no run or one with other settings or data; a
            folder that another process trains in; broken data; a measure that best_by can't be; cuda_graphs without a
            GPU.
    """
    if not isinstance(config, TrainConfig):
        raise ValueError(f"expected a TrainConfig, got {type(config).__name__} (see TrainConfig.from_dict)")
    if not os.fspath(run):
        raise ValueError("expected a run folder, got an empty name")
    if "\0" in os.fspath(run):
        raise ValueError(f"expected a run folder, got a name with a zero character in it: {os.fspath(run)!r}")
    try:
        os.fspath(run).encode("utf-8")
    except UnicodeEncodeError as error:  # libraries that write into the folder would fail later
        raise ValueError(f"expected a run folder with a name in UTF-8, got {os.fspath(run)!r}") from error
    if os.path.exists(run) and not os.path.isdir(run):
        raise ValueError(f"expected a run folder, got the file {os.fspath(run)}")
    if resume not in (False, True, "auto"):
        raise ValueError(f"expected resume to be true, false or 'auto', got {resume!r}")
    if config.report:
        template()  # raises before anything is trained
    world = world or World()
    folder, device = Path(run), world.device_of(choose_device(config.device))
    if config.cuda_graphs is True:
        if world.size > 1:
            raise ValueError(
                f"expected no cuda_graphs for {world.size} processes, whose messages no graph holds: leave cuda_graphs "
                "out, or train with one process"
            )
        check_device(device)
    world.check_accumulate(config.accumulate)
    lock = RunLock(folder)
    going_on, made = world.run_on_rank0(lambda: _enter(folder, resume, lock))
    try:
        world.run_on_all(lambda: _check_visible(folder))
        log = RunLog(folder)
        with log.listening():
            options = {"lock": lock, "interrupts": interrupts, "log": log}
            return _start(absolute_paths(config), folder, device, going_on, world, **options)
    except BaseException:
        lock.release()
        if world.rank == 0 and made:  # a mistake leaves no folder behind
            _leave(folder)
        raise


def _enter(folder: Path, resume: bool | str, lock: RunLock) -> tuple[bool, bool]:
    """Creates and locks the run folder; returns whether it holds a run to resume, and whether the folder is new."""
    going_on = bool(checkpoints(folder)) and bool(resume)
    if not going_on and resume is True:
        raise ValueError(f"expected a run to continue, but {folder} has no checkpoints")
    if not going_on and (checkpoints(folder) or (folder / WEIGHTS).exists()):
        raise ValueError(f"the folder {folder} already holds a run: give --resume to continue it, or another folder")
    if not going_on and folder.is_dir() and not (folder / LOCK).exists():  # else from a killed run
        unknown = [name for name in WRITTEN if os.path.lexists(folder / name)]
        if unknown:
            raise ValueError(
                f"expected a new run folder, got {folder} with a {unknown[0]} that no run wrote: give another"
            )
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except BaseException:
        if made:
            _leave(folder)
        raise
    return going_on, made


def _leave(folder: Path) -> None:
    """Removes a run folder that nothing was written into; else the lock stays, so that a next start may use it."""
    if {path.name for path in folder.iterdir()} <= {LOCK}:
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"expected the run folder {folder} on a file system that all machines share, but it isn't there"
        )


def _start(
    config: TrainConfig, folder: Path, device: torch.device, resume: bool, world: World, **options: Any
) -> Trainer:
    world.run_on_rank0(lambda: _tidy(folder))
    beginning = _read_checkpoint(config, folder, world) if resume else _read_origin(config)
    config = replace(beginning.config, dropout_seeds=_dropout_seeds(beginning.config, world))
    data = _load_same_data(config, beginning.tokenizer, world)
    source_vocab_size = getattr(data.tokenizer, "source_vocab_size", None)
    model = build_model(config, data.tokenizer.vocab_size, data.tokenizer.special_ids, source_vocab_size)
    if beginning.weights is not None:
        model.load_state_dict(beginning.weights)
    trainer = Trainer(config, folder, model, data, device, world=world, **options)
    trainer.identity.init_weights = None if beginning.weights is None else digest_of(beginning.weights)
    if config.epochs:
        _count_epochs(trainer)
    done, rate = 0, 0.0
    if beginning.checkpoint is not None:
        path, state = beginning.checkpoint
        world.run_on_all(lambda: trainer.load_state_dict(state, path))
        logger.info("continuing from %s", path)
        done, rate = trainer.step, trainer.optimization.rate
    else:
        world.run_on_rank0(lambda: data.tokenizer.save(folder))
    world.run_on_rank0(lambda: save_config(folder, trainer.config))
    for sentence in surprises(trainer.config, model.config.d_model, done, rate):  # type: ignore[union-attr, arg-type]
        logger.warning(sentence)
    _log_sizes(trainer, model, data)
    return trainer


class _Beginning(NamedTuple):
    """The state that a run begins with; the parts that don't exist yet are None.

    Attributes:
        config: the settings, with those that the state decides.
        tokenizer: the tokenizer of the run, or of the run that it starts from.
        weights: the weights of the run that it starts from.
        checkpoint: the path and the contents of the checkpoint that it goes on from.
    """

    config: TrainConfig
    tokenizer: Tokenizer | None = None
    weights: dict[str, Any] | None = None
    checkpoint: tuple[Path, dict[str, Any]] | None = None


def _read_checkpoint(config: TrainConfig, folder: Path, world: World) -> _Beginning:
    """Reads the state of a run that goes on, and checks the settings against it."""
    checkpoint = _latest(folder, world)
    if checkpoint is None:
        raise ValueError(f"every checkpoint in {folder} is damaged: train anew in another folder")
    path, state = checkpoint
    before = check_unchanged(config, state["config"], path)
    check_there(config)
    tokenizer = None
    if (folder / TOKENIZER).is_file():
        tokenizer = load_tokenizer(folder)
        check_tokenizer(config, before, tokenizer)
    check_origin(config, before, state.get("init_weights"))
    return _Beginning(config, tokenizer, checkpoint=checkpoint)


def _read_origin(config: TrainConfig) -> _Beginning:
    """Reads the model that a new run starts from, if the settings name one."""
    if not config.init_from:
        return _Beginning(config)
    config, source, tokenizer = take_over(config)
    return _Beginning(config, tokenizer, source.state_dict())


def _load_same_data(config: TrainConfig, tokenizer: Tokenizer | None, world: World) -> TrainingData:
    """Loads the data, and compares them among all processes."""
    data = world.run_on_all(lambda: load_data(config, tokenizer))
    if world.size > 1:
        found_here: dict[str, object] = {
            "training data": fingerprint(data.train),
            "validation data": fingerprint(data.val),
            "tokenizer": hashlib.sha256(repr(contents(data.tokenizer)).encode()).hexdigest(),
        }
        world.check_same(found_here, "give all machines the same files")
    return data


def _count_epochs(trainer: Trainer) -> None:
    """Sets the number of updates of a run whose settings give epochs."""
    config = trainer.config
    steps = count_updates(config, trainer.order)
    logger.info(
        "%g epoch%s %s %d update%s",
        config.epochs, "" if config.epochs == 1 else "s", "is" if config.epochs == 1 else "are", steps,
        "" if steps == 1 else "s",
    )  # fmt: skip
    trainer.config = replace(config, steps=steps, epochs=0.0)


def _log_sizes(trainer: Trainer, model: nn.Module, data: TrainingData) -> None:
    config, size = trainer.config, trainer.world.size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    source_vocab_size = getattr(data.tokenizer, "source_vocab_size", None)
    logger.info(
        "%s: %s parameters, %s training examples, vocabulary %s, %s",
        config.model,
        f"{parameters:,}",
        f"{len(data.train):,}",
        f"{source_vocab_size} to {data.tokenizer.vocab_size}" if source_vocab_size else data.tokenizer.vocab_size,
        json.dumps(
            {
                "device": str(trainer.device),
                "batching": config.batching,
                "precision": config.precision,
                "best_by": trainer.best.measure,
                **({"processes": size} if size > 1 else {}),
            }
        ),
    )


def _tidy(folder: Path) -> None:
    check_places(folder, WRITTEN)
    remove_left_overs(folder, WRITTEN)
    remove_left_overs(checkpoint_folder(folder), ["step-*.pt"])
    remove_left_parts(folder)


def _latest(folder: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """Returns the last undamaged checkpoint, which rank 0 chooses."""
    checkpoint: list[tuple[Path, dict[str, Any]] | None] = [None]

    def read() -> Path | None:
        checkpoint[0] = latest_checkpoint(folder, read_parts)
        return None if checkpoint[0] is None else checkpoint[0][0]

    path = world.run_on_rank0(read)
    if path is None:
        return None
    return world.run_on_all(lambda: checkpoint[0] or (path, load_checkpoint(path, read_parts)))


def _dropout_seeds(config: TrainConfig, world: World) -> Literal["auto", "run", "batch"]:
    """Returns the setting dropout_seeds for the rest of the run: several processes can't share one generator."""
    if config.dropout_seeds == "auto" and world.is_launched and config.cuda_graphs is not True:
        return "batch"
    if config.dropout_seeds == "run" and world.size > 1:
        logger.info("from here on dropout_seeds is batch, for there are %d processes", world.size)
        return "batch"
    return config.dropout_seeds


def count_updates(config: TrainConfig, order: Order) -> int:
    """Counts the updates in `epochs` passes over the data, at least one.

    Args:
        config: the settings.
        order: the order of the training data.
    """
    batches = 0.0
    for epoch in range(math.ceil(config.epochs)):
        planned = sum(len(order.plan(epoch, window)) for window in range(order.num_windows))
        batches += planned * min(1.0, config.epochs - epoch)
    # The batches of an update may come from two epochs, so only the very last batches can be too few for an update.
    return max(1, math.floor(batches / config.accumulate + 1e-9))


def take_over(config: TrainConfig) -> tuple[TrainConfig, Any, Tokenizer]:
    """Loads the model that `init_from` names and its tokenizer; returns them and the settings with the model's sizes.

    The settings may change dropout rates, because no weight depends on them.

    Raises:
        ValueError: no such run, or a setting that contradicts it.
    """
    run = config.init_from
    assert run is not None
    check_saved(run, "a run folder to begin from")
    model, tokenizer = load_model(run)
    kind, sizes, plain = KINDS[type(model).__name__], plain_values(asdict(model.config)), TrainConfig()
    sizes = {name: value for name, value in sizes.items() if name not in OF_TOKENIZER}
    shared, target = not isinstance(tokenizer, PairTokenizer), getattr(tokenizer, "target", tokenizer)

    def refuse(name: str, given: object, has: object) -> None:
        raise ValueError(f"init_from {run} has {name} {has!r}, got {given!r}: leave {name} out")

    # A setting with its default value counts as not given.
    if config.model not in (kind, plain.model):
        refuse("model", config.model, kind)
    if shared and not config.shared_vocab:
        refuse("shared_vocab", False, True)
    vocab_size = target.vocab_size - (NUM_BYTES if isinstance(target, BPETokenizer) else 0)  # as the setting counts
    if config.vocab_size not in (vocab_size, plain.vocab_size):
        refuse("vocab_size", config.vocab_size, vocab_size)
    has = "bytes" if isinstance(target, ByteTokenizer) else "bpe"
    if config.tokenizer not in (has, plain.tokenizer):
        refuse("tokenizer", config.tokenizer, has)
    given = dict(config.settings)
    if config.preset != plain.preset:
        model_config = config.model_config(max(config.vocab_size, 2), source_vocab_size=None if shared else 2)
        values = plain_values(asdict(model_config))
        given = {name: values[name] for name in sizes if name in values and name != "max_len"} | given
    for name, value in given.items():
        if name not in sizes:
            raise ValueError(f"model {kind} has no setting {name!r}{suggestion(name, sizes)}")
        if value != sizes[name] and not name.endswith("dropout"):
            refuse(name, value, sizes[name])
    longest = "seqlen" if kind == "gpt" else "max_len"
    if getattr(config, longest) > sizes["max_len"]:
        logger.info("%s is %d, for %s has no more positions", longest, sizes["max_len"], run)
        config = replace(config, **{longest: sizes["max_len"]})
    dropout = {name: value for name, value in config.settings.items() if name.endswith("dropout")}
    settings = {**sizes, **dropout}
    return replace(config, model=kind, settings=settings, shared_vocab=shared), model, tokenizer
