"""Checkpoints of a run: written beside and moved into place, read back to the last one that is whole.

RUN/checkpoints/step-00000500.pt holds all that training needs to go on (weights, optimizer, counters, random states).
It is a file of torch.save, which torch.load(path, weights_only=True) opens. Such a file is a zip archive, and the
comment at its end holds a SHA-256 of all before it, so that a file that was cut or changed anywhere is recognised, and
the one before it is used. Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastformer.files import write_atomically

logger = logging.getLogger("fastformer")

FOLDER = "checkpoints"
_MARK = b"sha256:"
_COMMENT_LENGTH = len(_MARK) + 2 * hashlib.sha256().digest_size
_PARTS = {"config": str, "model": dict, "counters": dict}


def save_checkpoint(
    run: Path, step: int, state: dict[str, Any], *, keep_last: int, regular: Callable[[int], bool] = lambda step: True
) -> Path:
    """Writes a checkpoint and removes old ones, the kept ones staying whole whatever happens meanwhile.

    Args:
        run: the run folder.
        step: the update.
        state: tensors and plain values.
        keep_last: how many stay.
        regular: whether an update has a checkpoint by plan. Others, as an interrupted run leaves them, go with the next
            one, so that a run that was interrupted ends with the same checkpoints as one that was not.

    Raises:
        OSError: it could not be written (a full disk, say); what was there before is still there.
    """
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = bytearray(buffer.getbuffer())
    data[-2:] = _COMMENT_LENGTH.to_bytes(2, "little")  # the archive's last field, the length of its comment
    data += _MARK + hashlib.sha256(data).hexdigest().encode()
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, data)
    older = [old for old in checkpoints(run) if step_of(old) < step]
    planned = [old for old in older if regular(step_of(old))]
    kept = {path, *planned[max(0, len(planned) + 1 - keep_last) :]}
    for old in checkpoints(run):  # later ones too: they were damaged, or this update would come after them
        if old not in kept:
            old.unlink()
    return path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The update that a checkpoint's name tells."""
    return int(path.stem.removeprefix("step-"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """One checkpoint, on the CPU.

    Raises:
        ValueError: the file is damaged, cut short, or no checkpoint of a training.
    """
    if not path.is_file():  # nobody may ever write into a pipe
        raise ValueError(f"expected the file {path}, got something else of that name")
    data = path.read_bytes()
    body = memoryview(data)[:-_COMMENT_LENGTH]
    if data[len(body) :] != _MARK + hashlib.sha256(body).hexdigest().encode():
        raise ValueError(f"{path} is damaged or cut short ({len(data):,} bytes)")
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the unpickler and the archive's reader raise
        raise ValueError(f"{path} is no checkpoint of plain tensors and values ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"expected {path} to hold a dict, got {type(state).__name__}")
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"expected {path} to hold {name!r} as {kind.__name__}, got {state.get(name)!r:.80}")
    return state


def latest_checkpoint(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole; None if there is none. Damaged ones are named in the log."""
    for path in reversed(checkpoints(run)):
        try:
            return path, load_checkpoint(path)
        except ValueError as error:
            logger.warning("%s; going back to the checkpoint before it", error)
    return None


def average_weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of the weights of some checkpoints (Vaswani et al. 2017, section 6.1), in each weight's dtype.

    Of a run with `ema` it is the mean of the running averages, for those are the weights that it validates.

    Raises:
        ValueError: no paths, a damaged file, or checkpoints of different models.
    """
    if not paths:
        raise ValueError("expected at least one checkpoint to average, got none")
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        weights = _validated_weights(load_checkpoint(path))
        if sums and {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in sums.items()}:
            raise ValueError(f"expected checkpoints of one model, but {path} differs from {paths[0]}")
        for name, weight in weights.items():
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
            dtypes[name] = weight.dtype
    return {name: (total / len(paths)).to(dtypes[name]) for name, total in sums.items()}


def describe_average(paths: list[Path]) -> str:
    """ "the average of updates 800, 900, 1000"."""
    return f"the average of updates {', '.join(str(step_of(path)) for path in paths)}"


def _validated_weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    averaged: dict[str, torch.Tensor] | None = state.get("ema")
    weights: dict[str, torch.Tensor] = state["model"]
    return weights if averaged is None else {name: averaged[f"module.{name}"] for name in weights}
