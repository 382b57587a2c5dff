"""Reads and writes the weights in a folder: one model.safetensors, or several files and an index of their tensors.

The headers are read first. They are small, and a caller can check their names, shapes and dtypes against a model before
it allocates memory.

The metadata of a model.safetensors that fastformer wrote holds the SHA-256 of the file (taken with 64 zeros in its own
place), so that a changed bit is noticed. A file without one, as other programs write it, loads all the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.files import read_json

WEIGHTS = "model.safetensors"
_INDEX = ".index.json"  # appended to the name that the weights would have in one file
_NO_DIGEST = "0" * 64
_MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# As safetensors calls them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class Entry(NamedTuple):
    """The description of a tensor in a file, or of one that a model expects.

    Attributes:
        shape: its sizes.
        dtype: a dtype of PyTorch, or the file's name of a dtype that no weight has. None: any floating-point dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str | None = None


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """The weights in a folder, of which only the headers are read at first.

    Attributes:
        path: the file that represents them in messages: model.safetensors or the index.
        files: the files with the tensors.
        entries: the descriptions of the tensors in the headers.
        metadata: the metadata of model.safetensors; empty for several files.
    """

    path: Path
    files: tuple[Path, ...]
    entries: dict[str, Entry]
    metadata: dict[str, str]

    @classmethod
    def in_folder(cls, folder: Path) -> SavedWeights:
        """Reads the headers, and verifies the files' checksums.

        Raises:
            ValueError: a missing or damaged file; an index and files that contradict each other.
        """
        path = folder / WEIGHTS
        if (index := index_of(path)) is None:
            metadata, entries = _checked_header(path)
            return cls(path, (path,), entries, metadata)
        all_entries: dict[str, Entry] = {}
        shards = read_index(index)
        for file, names in shards.items():
            _, entries = _checked_header(file)
            check_shard(index, file, names, entries)
            all_entries |= entries
        return cls(index, (*shards,), all_entries, {})

    def read(self) -> dict[str, Tensor]:
        """Reads the tensors, and checks that all weights are finite.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: a damaged file, or NaN or infinite weights.
        """
        state: dict[str, Tensor] = {}
        for file in self.files:
            try:
                tensors: dict[str, Tensor] = safetensors_library().load_file(file)
            except Exception as error:  # safetensors raises a type of its own, and OSError for an empty file
                raise ValueError(_damaged(file, error)) from error
            check_finite(file, tensors)
            state |= tensors
        return state


def weights_size(folder: Path) -> int:
    """Returns the bytes of the weights in a folder, in one file or several; 0 if torch.save wrote them."""
    path = folder / WEIGHTS
    index = index_of(path)
    files = [path] if index is None else [*read_index(index)]
    return sum(file.stat().st_size for file in files if file.is_file())


def to_bytes(state: dict[str, Tensor], notes: Mapping[str, str]) -> bytearray:
    """Returns a safetensors file with its checksum. The same tensors and notes result in the same bytes."""
    data = bytearray(safetensors_library().save(state, {"format": "pt", **notes, "sha256": _NO_DIGEST}))
    # The library writes the metadata in another order each time.
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data[: 8 + size] = len(text).to_bytes(8, "little") + text
    offset = data.index(_digest_field(_NO_DIGEST), 0, 8 + len(text)) + len('"sha256":"')
    data[offset : offset + len(_NO_DIGEST)] = hashlib.sha256(data).hexdigest().encode()
    return data


def read_notes(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Reads the notes that `to_bytes` stored in model.safetensors; empty without that file.

    Raises:
        ValueError: a damaged file.
    """
    if not (file := Path(folder) / WEIGHTS).is_file():
        return {}
    metadata, _, _ = _read_header(file)
    return {name: value for name, value in metadata.items() if name not in ("format", "sha256")}


def check_entries(origin: object, expects: object, actual: Mapping[str, Entry], expected: Mapping[str, Entry]) -> None:
    """Checks tensors against those that a model expects.

    Args:
        origin: the source of the tensors, for messages.
        expects: the source of the expected shapes, for messages: the settings, say.
        found, expected: the tensors by name.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, or another dtype.
    """
    shared = sorted(expected.keys() & actual.keys())
    misshapen = [
        f"{name}: expected {expected[name].shape}, got {actual[name].shape}"
        for name in shared
        if expected[name].shape != actual[name].shape
    ]
    other = [
        f"{name}: expected {_describe(expected[name].dtype)}, got {_describe(actual[name].dtype)}"
        for name in shared
        if actual[name].dtype not in (FLOATING if expected[name].dtype is None else (expected[name].dtype,))
    ]
    problems = []
    for what, names in (
        ("missing tensors", sorted(expected.keys() - actual.keys())),
        ("unexpected tensors", sorted(actual.keys() - expected.keys())),
        ("misshapen tensors", misshapen),
        ("tensors of another dtype", other),
    ):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problems.append(f"{what}: {shown}")
    if problems:
        raise ValueError(f"expected {origin} to fit {expects}, got {'; '.join(problems)}")


def entries_of(state: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Returns the names, shapes and dtypes of tensors."""
    return {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def check_plain(origin: object, state: Mapping[Any, Any]) -> None:
    """Checks that unpickled values are plain weights.

    Raises:
        ValueError: a name that is not text; a value that is not a tensor, or that is sparse, has no memory of its own
            for each element, or has gradients to come.
    """
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(f"expected {origin} to hold tensors by name, got the name {name!r:.60}")
        if not isinstance(value, Tensor):
            raise ValueError(f"expected {origin} to hold only tensors, got {name} as {type(value).__name__}")
        # A view can claim a huge size: one element, repeated.
        is_dense = value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
        if not is_dense or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"expected {origin} to hold dense tensors, got {name} as a sparse or expanded one")
        if value.requires_grad:
            raise ValueError(f"expected {origin} to hold only weights, got {name} with a gradient history")


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no number is NaN or infinite, in one pass; isfinite().all() takes several.

    After each pass, PyTorch's threads wait for each other, which takes long beside busy processes.
    """
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))  # NaN is both


def check_finite(origin: object, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for weights that are NaN or infinite."""
    for name, tensor in state.items():
        if tensor.dtype in FLOATING and not is_finite(tensor):
            raise ValueError(f"{origin} holds NaN or infinite weights in {name}: the training diverged; train again")


def index_of(path: Path) -> Path | None:
    """Returns the index of weights in several files; None if the weights are in `path` or missing."""
    index = path.with_name(path.name + _INDEX)
    return index if index.is_file() and not path.is_file() else None


def read_index(index: Path) -> dict[Path, list[str]]:
    """Reads the files that an index names, with the tensors of each.

    Raises:
        ValueError: a damaged index, one that names a tensor twice, a file that is missing or outside the index's
            folder.
    """
    listed = read_json(index, unique_names=True).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"expected {index} to hold a weight_map, from tensors to files, got {listed!r:.60}")
    files: dict[Path, list[str]] = {}
    stem, suffix = index.name.removesuffix(_INDEX).rsplit(".", 1)
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ValueError(f"expected {index} to name files next to it, got {file!r} for {name}")
        files.setdefault(index.parent / file, []).append(name)
    for path in index.parent.glob(f"{stem}-*-of-*.{suffix}"):
        if path not in files:
            raise ValueError(
                f"{index.name} doesn't name {path}: it is from another model; remove it, or copy the model again"
            )
    for path, names in files.items():
        if not path.is_file():
            raise ValueError(
                f"expected the file {path}, which isn't there: {index.name} says that it holds {len(names)} of "
                f"{len(listed)} tensors; was the model copied completely?"
            )
    return files


def check_shard(index: Path, file: Path, names: Iterable[str], actual: Iterable[str]) -> None:
    """Checks the tensors of one file against the index.

    Raises:
        ValueError: a missing tensor, or one that the index lacks or names in another file.
    """
    expected, present = {*names}, {*actual}
    for what, names_off in (("lacks", expected - present), ("holds", present - expected)):
        if names_off:
            raise ValueError(
                f"{file} doesn't fit {index.name}: it {what} {min(names_off)}, which {index.name} "
                + ("says is in it" if what == "lacks" else "says is in another file, or nowhere")
                + "; copy the model again"
            )


def _read_header(file: Path) -> tuple[dict[str, str], dict[str, Entry], bytes]:
    """Reads the header of a safetensors file: its metadata, its tensors' descriptions, and the bytes up to its end."""
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which doesn't exist: was the model saved completely?")
    try:
        with open(file, "rb") as data:
            start = data.read(8)
            size = int.from_bytes(start, "little")
            if len(start) < 8 or size > file.stat().st_size:
                raise ValueError("the header is truncated")
            if size > _MOST_HEADER:
                raise ValueError(f"the header has a length of {size:,} bytes")
            start += data.read(size)
        header = json.loads(start[8:])
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        entries = {}
        for name, value in header.items():
            shape = tuple(int(length) for length in value["shape"])
            entries[name] = Entry(shape, _DTYPES.get(value["dtype"], value["dtype"]))
        return metadata, entries, start
    except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(_damaged(file, error)) from error


def _checked_header(file: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """Reads the metadata and the tensors' descriptions in the header of a file, and checks the file's checksum."""
    metadata, entries, start = _read_header(file)
    expected = metadata.get("sha256")
    if expected is not None:
        digest = hashlib.sha256(start.replace(_digest_field(expected), _digest_field(_NO_DIGEST), 1))
        with open(file, "rb") as data:
            data.seek(len(start))
            while block := data.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() != expected:
            raise ValueError(_damaged(file, "its checksum is another"))
    return metadata, entries


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _describe(dtype: torch.dtype | str | None) -> str:
    return "floating-point numbers" if dtype is None else str(dtype).removeprefix("torch.")


def _damaged(file: Path, why: object) -> str:
    return f"{file} is damaged or truncated ({why}): save or copy the model again"


def safetensors_library() -> Any:
    """Imports the safetensors library's module for PyTorch.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading needs safetensors: pip install 'fastformer[train]'") from error
    return safetensors.torch
