"""The parts of a training that a checkpoint restores: each saves and loads itself, as torch's `Stateful` objects do.

The state is the same with and without CUDA graphs, so a run may switch between them when it resumes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fastformer.data import Examples
from fastformer.data.shards.reading import ShardedExamples
from fastformer.engine.checks import is_sharded
from fastformer.models.weights import check_entries, check_finite, check_plain, entries_of
from fastformer.special_ids import SpecialIds
from fastformer.training.world import part_like

_ELSEWHERE = object()
State = dict[str, Any]  # tensors and plain values


class Component(Protocol):
    """A part of a training."""

    def state_dict(self) -> State:
        """Returns the part's own entries of a checkpoint."""

    def load_state_dict(self, state: State, origin: object) -> None:
        """Restores the part from a whole checkpoint.

        Args:
            state: the entries of all parts.
            origin: the source of the state, for messages.

        Raises:
            AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError: an entry is missing, or of
                another type.
            ValueError: an entry is of another run, or a value that no training has.
        """


def restore(components: Iterable[Component], state: State, origin: object) -> None:
    """Restores the parts of a training.

    Raises:
        ValueError: the state is of other data or of another model, incomplete, or holds values that no training has.
    """
    try:
        for component in components:
            component.load_state_dict(state, origin)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"{origin} is of another model than the settings describe, or incomplete: {error}") from error
    except ValueError as error:
        raise error if str(origin) in str(error) else ValueError(f"{origin}: {error}") from error


@dataclass
class Identity:
    """What a run is about, which a checkpoint has to share.

    Attributes:
        fingerprint: that of the training data.
        special_ids: those of the model.
        flags: the flags that name the data, for messages.
        init_weights: the digest of the weights that init_from loaded.
    """

    fingerprint: dict[str, int | str]
    special_ids: SpecialIds
    flags: str
    init_weights: str | None = None

    def state_dict(self) -> State:
        return {
            "data": self.fingerprint, "init_weights": self.init_weights, "special_ids": asdict(self.special_ids)
        }  # fmt: skip

    def load_state_dict(self, state: State, origin: object) -> None:
        # Checkpoints of earlier versions don't name special ids: theirs are the defaults.
        SpecialIds.from_dict(state.get("special_ids", {})).check_tokenizer(self.special_ids, str(origin))
        check_same(state["data"], self.fingerprint, origin, self.flags)
        self.init_weights = state.get("init_weights")


@dataclass
class Position:
    """The place that a training has reached.

    Attributes:
        accumulate: the batches of an update.
        step, epoch, window, batch: the updates done, and the batches done in the epoch's window.
        validated: the update of the last validation.
        finished: nothing is left to do with these settings.
        trained_seconds: the time that training took.
        losses: (update, mean loss since the last entry).
    """

    accumulate: int
    step: int = 0
    epoch: int = 0
    window: int = 0
    batch: int = 0
    validated: int = 0
    finished: bool = False
    trained_seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> State:
        names = ("step", "epoch", "window", "batch", "validated", "finished")
        return {
            "counters": {name: getattr(self, name) for name in names},
            "trained_seconds": self.trained_seconds,
            "losses": [list(entry) for entry in self.losses],
        }

    def load_state_dict(self, state: State, origin: object) -> None:
        # Checkpoints of earlier versions have no windows: all examples were a single one.
        counters = {name: _count(name, value) for name, value in {"window": 0, **state["counters"]}.items()}
        self.step, self.epoch, self.batch = counters["step"], counters["epoch"], counters["batch"]
        self.window = counters["window"]
        self.validated, self.finished = counters["validated"], bool(counters["finished"])
        for name, most in (("batch", self.step * self.accumulate), ("validated", self.step), ("finished", 1)):
            if counters[name] > most:
                raise ValueError(f"expected {name} of at most {most} after update {self.step}, got {counters[name]}")
        self.trained_seconds = amount("trained_seconds", state["trained_seconds"])
        self.losses = [(_count("a step", step), float(loss)) for step, loss in state["losses"]]


@dataclass
class Weights:
    """The weights of the model, and their running average if the run has one."""

    model: nn.Module
    ema: AveragedModel | None
    position: Position

    def state_dict(self) -> State:
        if self.ema is not None:
            self.ema.n_averaged.fill_(self.position.step)
        return {"model": self.model.state_dict(), "ema": None if self.ema is None else self.ema.state_dict()}

    def load_state_dict(self, state: State, origin: object) -> None:
        _load_weights(self.model, state["model"], origin)
        if self.ema is not None:
            _load_weights(self.ema, state["ema"], origin)


@dataclass
class Optimization:
    """The optimizer and the scale of its losses. Its options stay those of the settings.

    Attributes:
        rate: the learning rate of the last update.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    rate: float

    def state_dict(self) -> State:
        state = self.optimizer.state_dict()
        if any(group.get("capturable") for group in state["param_groups"]):  # by CUDA graphs
            groups = [{**group, "lr": self.rate, "capturable": False} for group in state["param_groups"]]
            state = {**state, "param_groups": groups}
        return {"optimizer": state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: State, origin: object) -> None:
        self._load_optimizer(state["optimizer"], origin)
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def _load_optimizer(self, state: State, origin: object) -> None:
        now = [dict(group) for group in self.optimizer.param_groups]
        parameters = [parameter for group in now for parameter in group["params"]]
        for number, values in state["state"].items():
            check_plain(origin, values)
            check_finite(origin, values)
            shape = tuple(parameters[number].shape)
            for name, value in values.items():
                if tuple(value.shape) not in ((), shape):
                    raise ValueError(f"expected {name} of the optimizer of shape {shape}, got {tuple(value.shape)}")
        parts = {
            number: {name: part_like(value, parameters[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": parts})
        self.rate = amount("lr", float(self.optimizer.param_groups[0]["lr"]))
        for group, options in zip(self.optimizer.param_groups, now, strict=True):
            group.update({name: options[name] for name in ("betas", "eps", "weight_decay")})


@dataclass
class RandomState:
    """The state of PyTorch's default generators."""

    device: torch.device

    def state_dict(self) -> State:
        on_gpu = self.device.type == "cuda"
        return {"rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state(self.device) if on_gpu else None}

    def load_state_dict(self, state: State, origin: object) -> None:
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)


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
            values = {key: rest(inner, *place, key) for key, inner in value.items()}
            return {key: inner for key, inner in values.items() if inner is not _ELSEWHERE}
        if not is_sharded(value):
            return value
        name = "/".join(map(str, place))
        tensors[name], places[name] = value, [*place]
        return _ELSEWHERE

    return tensors, {**copy.deepcopy(rest(state)), "parts": places}


def fingerprint(examples: Examples | ShardedExamples) -> dict[str, int | str]:
    """Returns a fingerprint of training examples: their number, the tokens of both sides, and a SHA-256 of all ids."""
    source_tokens, target_tokens = examples.num_tokens
    return {
        "examples": len(examples),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "sha256": examples.fingerprint(),
    }


def check_same(expected: dict[str, int | str], actual: dict[str, int | str], run: object, flags: str = "") -> None:
    """Checks that the data of a run that resumes are those that it began with.

    Args:
        expected, actual: fingerprints.
        run: the checkpoint, for messages.
        flags: the flags that name the data, for messages.

    Raises:
        ValueError: other data.
    """
    if expected == actual:
        return
    before, now = (
        f"{each['examples']:,} examples of {each['source_tokens']:,} and {each['target_tokens']:,} tokens"
        for each in (expected, actual)
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
    expected = model.state_dict()
    check_entries(origin, "the model that the settings describe", entries_of(weights), entries_of(expected))
    model.load_state_dict({name: part_like(weight, expected[name]) for name, weight in weights.items()})


def _count(name: str, value: object) -> int:
    """Checks a number of completed steps, and returns it."""
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"expected {name} to be a count, got {value!r}")
    return int(value)


def amount(name: str, value: object) -> float:
    """Checks a number of at least 0, and returns it."""
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"expected {name} to be a number of at least 0, got {value!r}")
    return value
