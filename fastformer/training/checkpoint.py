"""Checkpoints of a run: written beside and moved into place, read back to the last one that is whole.

RUN/checkpoints/step-00000500.pt holds all that training needs to go on (weights, optimizer, counters, random states),
with a checksum in front: a file that was cut anywhere is recognised, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch

from fastformer.files import write_atomically

logger = logging.getLogger("fastformer")

_MAGIC = b"fastformer checkpoint 1\n"
FOLDER = "checkpoints"


def save_checkpoint(run: Path, step: int, state: dict[str, Any], *, keep_last: int) -> Path:
    """Writes a checkpoint and removes old ones, the kept ones staying whole whatever happens meanwhile.

    Raises:
        OSError: it could not be written (a full disk, say); what was there before is still there.
    """
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
    for old in checkpoints(run)[:-keep_last]:
        old.unlink()
    return path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / FOLDER).glob("step-*.pt"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """One checkpoint.

    Raises:
        ValueError: the file is damaged or cut short.
    """
    data = path.read_bytes()
    head = len(_MAGIC) + hashlib.sha256().digest_size
    payload = data[head:]
    if not data.startswith(_MAGIC) or hashlib.sha256(payload).digest() != data[len(_MAGIC) : head]:
        raise ValueError(f"{path} is damaged or cut short ({len(data):,} bytes)")
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


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

    Raises:
        ValueError: no paths, or a damaged file.
    """
    if not paths:
        raise ValueError("expected at least one checkpoint to average, got none")
    sums: dict[str, torch.Tensor] = {}
    for path in paths:
        for name, weight in load_checkpoint(path)["model"].items():
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
    reference = load_checkpoint(paths[-1])["model"]
    return {name: (total / len(paths)).to(reference[name].dtype) for name, total in sums.items()}
