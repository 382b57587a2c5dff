"""The state of a trainer in a checkpoint, including a fingerprint by which a resumed run notices changed training data.

The state is the same with and without CUDA graphs, so a run may switch between them when it resumes.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastformer.data import Examples
from fastformer.data.shards.reading import ShardedExamples
from fastformer.models.weights import check_entries, check_finite, check_plain, entries_of
from fastformer.special_ids import SpecialIds
from fastformer.training.world import is_parted, part_like

_ELSEWHERE = object()

if TYPE_CHECKING:
    from fastformer.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Returns everything that training needs to resume as if it had never stopped: tensors and plain values."""
    optimizer = trainer.optimizer.state_dict()
    if trainer.graphs is not None:
        groups = [{**group, "lr": trainer.rate, "capturable": False} for group in optimizer["param_groups"]]
        optimizer = {**optimizer, "param_groups": groups}
    if trainer.ema is not None:
        trainer.ema.n_averaged.fill_(trainer.step)
    return {
        "config": json.dumps(trainer.config.to_dict()),
        "model": trainer.model.state_dict(),
        "optimizer": optimizer,
        "scaler": trainer.scaler.state_dict(),
        "ema": None if trainer.ema is None else trainer.ema.state_dict(),
        "counters": {
            "step": trainer.step,
            "epoch": trainer.epoch,
            "window": trainer.window,
            "batch": trainer.batch,
            "validated": trainer.validated,
            "finished": trainer.finished,
        },
        "best": trainer.best.state_dict(),
        "trained_seconds": trainer.trained_seconds,
        "losses": [list(entry) for entry in trainer.losses],
        "meter": trainer.meter.state_dict(),
        "data": trainer.fingerprint,
        "init_weights": trainer.init_weights,
        "special_ids": asdict(trainer.special_ids),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(trainer.device) if trainer.device.type == "cuda" else None,
    }


def split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits a state into the tensors of which each process holds a part, and the rest.

    Returns:
        The tensors by name, and a copy of the state without them; its "parts" have the place of each. It is a copy
        because it is written when all parts are on the disk: by then later updates have changed the optimizer's counts.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[str, list[int | str]] = {}

    def rest(value: Any, *place: int | str) -> Any:
        if isinstance(value, dict):
            kept = {key: rest(inner, *place, key) for key, inner in value.items()}
            return {key: inner for key, inner in kept.items() if inner is not _ELSEWHERE}
        if not is_parted(value):
            return value
        name = "/".join(map(str, place))
        tensors[name], places[name] = value, [*place]
        return _ELSEWHERE

    return tensors, {**copy.deepcopy(rest(state)), "parts": places}


def restore(trainer: Trainer, state: dict[str, Any], origin: object) -> None:
    """Restores a trainer to a state that `state_of` returned; see `Trainer.load_state_dict`.

    Raises:
        ValueError: the state is of other data or of another model, incomplete, or holds values that no training has.
    """
    try:
        # Checkpoints of earlier versions don't name special ids: theirs are the defaults.
        SpecialIds.from_dict(state.get("special_ids", {})).check_tokenizer(trainer.special_ids, str(origin))
        check_same(state["data"], trainer.fingerprint, origin, trainer.config.data_flags())
        _load_weights(trainer.model, state["model"], origin)
        _load_optimizer(trainer, state["optimizer"], origin)
        if state["scaler"] and trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict(state["scaler"])
        if trainer.ema is not None:
            _load_weights(trainer.ema, state["ema"], origin)
        # Checkpoints of earlier versions have no windows: all examples were a single one.
        counters = {name: _count(name, value) for name, value in {"window": 0, **state["counters"]}.items()}
        trainer.step, trainer.epoch, trainer.batch = counters["step"], counters["epoch"], counters["batch"]
        trainer.window = counters["window"]
        trainer.validated, trainer.finished = counters["validated"], bool(counters["finished"])
        batches = trainer.step * trainer.config.accumulate
        for name, most in (("batch", batches), ("validated", trainer.step), ("finished", 1)):
            if counters[name] > most:
                raise ValueError(f"expected {name} of at most {most} after update {trainer.step}, got {counters[name]}")
        trainer.init_weights = state.get("init_weights")
        trainer.best.load_state_dict(state["best"])
        trainer.trained_seconds = _amount("trained_seconds", state["trained_seconds"])
        trainer.losses = [(_count("a step", step), float(loss)) for step, loss in state["losses"]]
        trainer.meter.load_state_dict({name: _amount(name, value) for name, value in state["meter"].items()})
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], trainer.device)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"{origin} is of another model than the settings describe, or incomplete: {error}") from error
    except ValueError as error:
        raise error if str(origin) in str(error) else ValueError(f"{origin}: {error}") from error


def fingerprint(examples: Examples | ShardedExamples) -> dict[str, int | str]:
    """Returns a fingerprint of training examples: their number, the tokens of both sides, and a SHA-256 of all ids."""
    source_tokens, target_tokens = examples.num_tokens
    return {
        "examples": len(examples),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "sha256": examples.fingerprint(),
    }


def check_same(expected: dict[str, int | str], found: dict[str, int | str], run: object, flags: str = "") -> None:
    """Checks that the data of a run that resumes are those that it began with.

    Args:
        expected, found: fingerprints.
        run: the checkpoint, for messages.
        flags: the flags that name the data, for messages.

    Raises:
        ValueError: other data.
    """
    if expected == found:
        return
    before, now = (
        f"{each['examples']:,} examples of {each['source_tokens']:,} and {each['target_tokens']:,} tokens"
        for each in (expected, found)
    )
    if before == now:
        now = "as many of other content or in another order"
    raise ValueError(
        f"expected {f'{flags} to hold ' if flags else ''}the training data that {run} is about, {before}, got {now}: "
        "give the same files, or train anew in another folder"
    )


def _load_weights(model: nn.Module, weights: Any, origin: object) -> None:
    check_plain(origin, weights)
    check_finite(origin, weights)
    own = model.state_dict()
    check_entries(origin, "the model that the settings describe", entries_of(weights), entries_of(own))
    model.load_state_dict({name: part_like(weight, own[name]) for name, weight in weights.items()})


def _load_optimizer(trainer: Trainer, state: dict[str, Any], origin: object) -> None:
    """Loads the optimizer's averages from the checkpoint; its options stay those of the settings."""
    now = [dict(group) for group in trainer.optimizer.param_groups]
    parameters = [parameter for group in now for parameter in group["params"]]
    for number, kept in state["state"].items():
        check_plain(origin, kept)
        check_finite(origin, kept)
        shape = tuple(parameters[number].shape)
        for name, value in kept.items():
            if tuple(value.shape) not in ((), shape):
                raise ValueError(f"expected {name} of the optimizer of shape {shape}, got {tuple(value.shape)}")
    parts = {
        number: {name: part_like(value, parameters[number]) for name, value in kept.items()}
        for number, kept in state["state"].items()
    }
    trainer.optimizer.load_state_dict({**state, "state": parts})
    trainer.rate = _amount("lr", float(trainer.optimizer.param_groups[0]["lr"]))
    for group, options in zip(trainer.optimizer.param_groups, now, strict=True):
        group.update({name: options[name] for name in ("betas", "eps", "weight_decay")})


def _count(name: str, value: Any) -> int:
    """Checks a number of completed steps, and returns it."""
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"expected {name} to be a count, got {value!r}")
    return int(value)


def _amount(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"expected {name} to be a number of at least 0, got {value!r}")
    return value
