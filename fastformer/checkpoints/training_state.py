"""Checkpoints of a run, each written as a whole or not at all; reading falls back to the last undamaged one.

RUN/checkpoints/step-00000500.pt holds everything that a training resumes from (weights, optimizer, counters, random
states). It is a file of torch.save, which torch.load(path, weights_only=True) opens. The file is a zip archive, and the
archive's comment, at its end, holds a SHA-256 of everything before it. A file that was cut short or changed is thus
recognised, and the checkpoint before it is used. Only tensors and plain values are unpickled.

If each of several processes holds a part of the weights, the checkpoint is a folder, RUN/checkpoints/step-00000500,
with the parts, and with training.pt, which holds everything else and the SHA-256 of each part. The folder gets its
final name once it is complete.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import secrets
import shutil
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
_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})([.]pt)?")
_LEFT_OVER = re.compile(r"[.]step-[0-9]+[.][0-9a-f]{16}[.]tmp")
REST = "training.pt"  # the file of a checkpoint in parts that holds everything but the parts
Reader = Callable[[Path], dict[str, torch.Tensor]]
_PARTS = {"config": str, "model": dict, "counters": dict}


def save_checkpoint(
    run: Path, step: int, state: dict[str, Any], *, keep_last: int, regular: Callable[[int], bool] = lambda step: True
) -> Path:
    """Writes a checkpoint and removes old ones. An interruption at any point damages no checkpoint that is to stay.

    Args:
        run: the run folder.
        step: the number of the update.
        state: tensors and plain values.
        keep_last: the number of checkpoints to keep.
        regular: whether an update has a scheduled checkpoint. Others, which an interrupted run leaves, are removed with
            the next one, so that an interrupted run ends with the same checkpoints as an uninterrupted one.

    Raises:
        OSError: the checkpoint could not be written, for instance to a full disk; the older ones still exist.
    """
    folder = checkpoint_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, _packed(state))
    _remove_older(run, path, keep_last, regular)
    return path


def begin_parts(run: Path, step: int) -> Path:
    """Creates an empty folder for the parts of a checkpoint; `finish_parts` turns it into the checkpoint."""
    folder = checkpoint_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".step-{step:08d}.{secrets.token_hex(8)}.tmp"
    path.mkdir()
    return path


def finish_parts(
    parts: Path,
    run: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep_last: int,
    regular: Callable[[int], bool] = lambda step: True,
) -> Path:
    """Completes a checkpoint whose parts are all on the disk, and removes old ones as `save_checkpoint` does.

    Args:
        parts: the folder that `begin_parts` returned.
        run, step, keep_last, regular: see `save_checkpoint`.
        state: everything but the parts, and "parts": the place of each part in the whole state, by its name.

    Raises:
        OSError: see `save_checkpoint`.
    """
    files = sorted(path for path in parts.iterdir() if path.name != REST)
    write_atomically(parts / REST, _packed({**state, "files": {path.name: _digest(path) for path in files}}))
    path = checkpoint_folder(run) / f"step-{step:08d}"
    old = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    has_old = path.is_dir() and not path.is_symlink()  # a damaged one, or a run that was over went on from it
    if has_old:
        path.rename(old)  # removed later, for removing takes long, and a kill would leave neither of them
    parts.rename(path)
    if has_old:
        shutil.rmtree(old)
    _remove_older(run, path, keep_last, regular)
    return path


def rewrite_rest(path: Path, state: dict[str, Any]) -> None:
    """Rewrites training.pt of a checkpoint in parts; the parts stay unchanged."""
    files = _read(path / REST)["files"]
    write_atomically(path / REST, _packed({**state, "files": files}))


def remove_left_parts(run: Path) -> None:
    """Removes the folders of checkpoints that a process began and didn't finish."""
    for path in checkpoint_folder(run).glob(".step-*.tmp"):
        if _LEFT_OVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _packed(state: dict[str, Any]) -> bytearray:
    """Returns the bytes of a file of torch.save with a checksum at its end."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = bytearray(buffer.getbuffer())
    data[-2:] = _COMMENT_LENGTH.to_bytes(2, "little")  # the archive's last field, the length of its comment
    data += _MARK + hashlib.sha256(data).hexdigest().encode()
    return data


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove_older(run: Path, path: Path, keep_last: int, regular: Callable[[int], bool]) -> None:
    """Removes the checkpoints that a new one makes superfluous."""
    older = [old for old in checkpoints(run) if step_of(old) < step_of(path) and _is_own(old)]
    planned = [old for old in older if regular(step_of(old))]
    newest = {path, *planned[max(0, len(planned) + 1 - keep_last) :]}
    for old in checkpoints(run):  # later ones too: they were damaged, or training would have resumed from them
        if old not in newest and _is_own(old):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def _is_own(path: Path) -> bool:
    """Checks that a path is a checkpoint and not a link to one; this program makes no links."""
    return is_plain_file(path) or (path.suffix == "" and path.is_dir() and not path.is_symlink())


def checkpoint_folder(run: Path) -> Path:
    """Returns the folder of a run's checkpoints, which may not exist yet.

    Raises:
        ValueError: a link or a file of that name. Old checkpoints are deleted, and behind a link they may belong to
            another run.
    """
    folder = run / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "something else"
        raise ValueError(
            f"expected {folder} to be a folder, got {kind} of that name: remove it. To keep a run on another disk, "
            "make the whole run folder a link"
        )
    return folder


def checkpoints(run: Path) -> list[Path]:
    """Lists the checkpoints of a run, oldest first: files and folders of parts whose names are those of checkpoints.

    Raises:
        ValueError: see `checkpoint_folder`.
    """
    paths = [path for path in checkpoint_folder(run).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """Returns the number of the update in a checkpoint's name."""
    return int(path.name.removesuffix(".pt").removeprefix("step-"))


def load_checkpoint(path: Path, read_parts: Reader | None = None) -> dict[str, Any]:
    """Loads a checkpoint onto the CPU.

    Args:
        path: the file, or the folder of parts.
        read_parts: the function that reads the parts in a folder.

    Raises:
        ValueError: the file is damaged, cut short, or no checkpoint of a training.
    """
    is_parted = path.suffix == "" and path.is_dir()
    state = _read(path / REST if is_parted else path)
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"expected {path} to hold {name!r} as {kind.__name__}, got {state.get(name)!r:.80}")
    if (step := state["counters"].get("step")) != step_of(path):
        raise ValueError(f"expected {path} to be of that update, got {step!r:.40}: was the file renamed?")
    if is_parted:
        _add_parts(path, state, read_parts)
    check_plain(path, state["model"])
    check_finite(path, state["model"])
    return state


def _add_parts(path: Path, state: dict[str, Any], read_parts: Reader | None) -> None:
    files, places = state.pop("files", None), state.pop("parts", None)
    if not isinstance(files, dict) or not isinstance(places, dict) or read_parts is None:
        raise ValueError(f"expected {path} to be a checkpoint in one file, got one in parts")
    for name, digest in files.items():
        if os.sep in name or not is_plain_file(path / name) or _digest(path / name) != digest:
            raise ValueError(f"{path / name} is damaged, truncated or missing")
    tensors = read_parts(path)
    if tensors.keys() != places.keys():
        raise ValueError(f"expected {path} to hold {len(places)} tensors in parts, got {len(tensors)} of other names")
    for name, place in places.items():
        *outer, last = place
        inner = state
        for key in outer:
            inner = inner[key]
        inner[last] = tensors[name]


def _read(path: Path) -> dict[str, Any]:
    """Reads the dict in a file that `_packed` made."""
    if not path.is_file():  # reading a named pipe could block forever
        raise ValueError(f"expected the file {path}, got something else of that name")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _COMMENT_LENGTH))
        comment = file.read()
        file.seek(0)  # a file without a checksum may be of any size
        data = file.read() if comment.startswith(_MARK) else b""
    body = memoryview(data)[:-_COMMENT_LENGTH]
    if not data or comment != _MARK + hashlib.sha256(body).hexdigest().encode():
        raise ValueError(f"{path} is damaged or truncated ({size:,} bytes)")
    state = read_archive(io.BytesIO(data), path, "checkpoint")
    if not isinstance(state, dict):
        raise ValueError(f"expected {path} to hold a dict, got {type(state).__name__}")
    return state


def latest_checkpoint(run: Path, read_parts: Reader | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest undamaged checkpoint, or None; logs the names of damaged ones."""
    for path in reversed(checkpoints(run)):
        try:
            return path, load_checkpoint(path, read_parts)
        except ValueError as error:
            logger.warning("%s; using the checkpoint before it", error)
    return None


def average_weights(paths: list[Path], read_parts: Reader | None = None) -> dict[str, torch.Tensor]:
    """Averages the weights of some checkpoints (Vaswani et al. 2017, section 6.1), in each weight's dtype.

    For a run with `ema` it averages the running averages, because those are the weights that the run validates.

    Raises:
        ValueError: no paths, a damaged file, or checkpoints of different models.
    """
    if not paths:
        raise ValueError("expected at least one checkpoint to average, got none")
    sums: dict[str, torch.Tensor] = {}
    expected: dict[str, Entry] = {}
    for path in paths:
        weights = _validated_weights(path, read_parts)
        expected = expected or entries_of(weights)
        check_entries(path, f"{paths[0].name}, with which it is averaged", entries_of(weights), expected)
        for name, weight in weights.items():
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
    return {name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()}


def describe_average(paths: list[Path]) -> str:
    """ "the average of updates 800, 900, 1000"."""
    return f"the average of updates {', '.join(str(step_of(path)) for path in paths)}"


def _validated_weights(path: Path, read_parts: Reader | None) -> dict[str, torch.Tensor]:
    state = load_checkpoint(path, read_parts)
    weights: dict[str, torch.Tensor] = state["model"]
    ema = state.get("ema")
    if ema is None:
        return weights
    averaged: dict[str, Any] = {name: ema.get(f"module.{name}") for name in weights} if isinstance(ema, dict) else {}
    check_plain(path, averaged)
    return averaged
