"""Checkpoints of a run, each written as a whole or not at all; reading falls back to the last undamaged one.

RUN/checkpoints/step-00000500.pt holds all that a training resumes from (weights, optimizer, counters, random states).
It is a file of torch.save, which torch.load(path, weights_only=True) opens. Such a file is a zip archive, and the
comment at its end holds a SHA-256 of everything before it. So a file that was cut short or changed is recognised, and
the checkpoint before it is used. Only tensors and plain values are unpickled.
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

from fastformer.checkpoints.torch_archive import read_archive
from fastformer.files import is_plain_file, write_atomically
from fastformer.models.weights import Entry, check_entries, check_finite, check_plain, entries_of

logger = logging.getLogger("fastformer")

FOLDER = "checkpoints"
_MARK = b"sha256:"
_COMMENT_LENGTH = len(_MARK) + 2 * hashlib.sha256().digest_size
_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})[.]pt")
_PARTS = {"config": str, "model": dict, "counters": dict}


def save_checkpoint(
    run: Path, step: int, state: dict[str, Any], *, keep_last: int, regular: Callable[[int], bool] = lambda step: True
) -> Path:
    """Writes a checkpoint and removes old ones. An interruption at any point damages none that is kept.

    Args:
        run: the run folder.
        step: the update.
        state: tensors and plain values.
        keep_last: the number of checkpoints to keep.
        regular: whether an update has a scheduled checkpoint. Others, which an interrupted run leaves, are removed with
            the next one, so that an interrupted run ends with the same checkpoints as an uninterrupted one.

    Raises:
        OSError: it could not be written, for instance to a full disk; the older checkpoints are still there.
    """
    folder = checkpoint_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = bytearray(buffer.getbuffer())
    data[-2:] = _COMMENT_LENGTH.to_bytes(2, "little")  # the archive's last field, the length of its comment
    data += _MARK + hashlib.sha256(data).hexdigest().encode()
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, data)
    older = [old for old in checkpoints(run) if step_of(old) < step and is_plain_file(old)]
    planned = [old for old in older if regular(step_of(old))]
    kept = {path, *planned[max(0, len(planned) + 1 - keep_last) :]}
    for old in checkpoints(run):  # later ones too: they were damaged, or training would have resumed from them
        if old not in kept and is_plain_file(old):  # this program makes no links
            old.unlink()
    return path


def checkpoint_folder(run: Path) -> Path:
    """Where the checkpoints of a run are, or will be.

    Raises:
        ValueError: a link or a file of that name. Old checkpoints are deleted, and behind a link they may belong to
            another run.
    """
    folder = run / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        found = "a link" if folder.is_symlink() else "something else"
        raise ValueError(
            f"expected {folder} to be a folder, got {found} of that name: take it away. To keep a run on another disk, "
            "make the whole run folder a link"
        )
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first: files with the names that `save_checkpoint` gives.

    Raises:
        ValueError: see `checkpoint_folder`.
    """
    found = [path for path in checkpoint_folder(run).glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The update that a checkpoint's name tells."""
    return int(path.stem.removeprefix("step-"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """One checkpoint, on the CPU.

    Raises:
        ValueError: the file is damaged, cut short, or no checkpoint of a training.
    """
    if not path.is_file():  # a pipe may never be written to
        raise ValueError(f"expected the file {path}, got something else of that name")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _COMMENT_LENGTH))
        comment = file.read()
        file.seek(0)  # a file without a checksum may be of any size
        data = file.read() if comment.startswith(_MARK) else b""
    body = memoryview(data)[:-_COMMENT_LENGTH]
    if not data or comment != _MARK + hashlib.sha256(body).hexdigest().encode():
        raise ValueError(f"{path} is damaged or cut short ({size:,} bytes)")
    state = read_archive(io.BytesIO(data), path, "checkpoint")
    if not isinstance(state, dict):
        raise ValueError(f"expected {path} to hold a dict, got {type(state).__name__}")
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"expected {path} to hold {name!r} as {kind.__name__}, got {state.get(name)!r:.80}")
    if (found := state["counters"].get("step")) != step_of(path):
        raise ValueError(f"expected {path} to be of that update, got {found!r:.40}: was the file renamed?")
    check_plain(path, state["model"])
    check_finite(path, state["model"])
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
    expected: dict[str, Entry] = {}
    for path in paths:
        weights = _validated_weights(path)
        expected = expected or entries_of(weights)
        check_entries(path, f"{paths[0].name}, with which it is averaged", entries_of(weights), expected)
        for name, weight in weights.items():
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
    return {name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()}


def describe_average(paths: list[Path]) -> str:
    """ "the average of updates 800, 900, 1000"."""
    return f"the average of updates {', '.join(str(step_of(path)) for path in paths)}"


def _validated_weights(path: Path) -> dict[str, torch.Tensor]:
    state = load_checkpoint(path)
    weights: dict[str, torch.Tensor] = state["model"]
    ema = state.get("ema")
    if ema is None:
        return weights
    averaged: dict[str, Any] = {name: ema.get(f"module.{name}") for name in weights} if isinstance(ema, dict) else {}
    check_plain(path, averaged)
    return averaged
