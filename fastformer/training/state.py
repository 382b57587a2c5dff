"""What a checkpoint holds of a trainer. It is the same with and without graphs, so that a run may go on either way."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from fastformer.special_ids import SpecialIds
from fastformer.training.fingerprint import check_same

if TYPE_CHECKING:
    from fastformer.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that training needs to go on as if it had never stopped: tensors and plain values."""
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
            "batch": trainer.batch,
            "validated": trainer.validated,
            "finished": trainer.finished,
        },
        "best": trainer.best.state_dict(),
        "trained_seconds": trainer.trained_seconds,
        "losses": [list(entry) for entry in trainer.losses],
        "meter": trainer.meter.state_dict(),
        "data": trainer.fingerprint,
        "special_ids": asdict(trainer.special_ids),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(trainer.device) if trainer.device.type == "cuda" else None,
    }


def restore(trainer: Trainer, state: dict[str, Any], origin: object) -> None:
    """Puts a trainer where `state_of` found one; see `Trainer.load_state_dict`.

    Raises:
        ValueError: the state is of other data or of another model, or incomplete.
    """
    try:
        # Checkpoints of earlier versions name no special ids: they had the defaults.
        SpecialIds.from_dict(state.get("special_ids", {})).check_tokenizer(trainer.special_ids, str(origin))
        check_same(state["data"], trainer.fingerprint, origin)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.rate = float(trainer.optimizer.param_groups[0]["lr"])
        if state["scaler"] and trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict(state["scaler"])
        if trainer.ema is not None:
            trainer.ema.load_state_dict(state["ema"])
        counters = {name: int(value) for name, value in state["counters"].items()}
        trainer.step, trainer.epoch, trainer.batch = counters["step"], counters["epoch"], counters["batch"]
        trainer.validated, trainer.finished = counters["validated"], bool(counters["finished"])
        trainer.best.load_state_dict(state["best"])
        trainer.trained_seconds = float(state["trained_seconds"])
        trainer.losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        trainer.meter.load_state_dict(state["meter"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], trainer.device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{origin} is of another model than the settings describe, or incomplete: {error}") from error
