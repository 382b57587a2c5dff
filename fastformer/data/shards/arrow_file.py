"""Examples in one file: Arrow's IPC format, a record batch with the columns source, target and origin.

source and target are lists of int32: the ids with their EOS. A language model's windows have empty sources. origin is
the number of the source that an example came from. Files are mapped into memory and read without copies.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from fastformer.files import replacing

_CHUNK = 1 << 20


def arrow() -> ModuleType:
    """Imports pyarrow.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError("shards need pyarrow: pip install 'fastformer[parquet]'") from error


def lists(sequences: Sequence[Sequence[int]]) -> Any:
    """Makes an Arrow array of lists of ids."""
    return arrow().array(sequences, arrow().list_(arrow().int32()))


def write_table(path: Path, table: Any) -> None:
    """Writes a table as one record batch: the whole file or nothing.

    Raises:
        OSError: the file could not be written; no part of it is left.
    """
    table = table.combine_chunks()
    try:
        with replacing(path) as file, arrow().ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=max(1, table.num_rows))
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {path} ({error.strerror or error}): free some space, and give "
            "the same command again to continue",
        ) from error


def read_table(path: Path) -> Any:
    """Reads the table of a file, mapped into memory.

    Raises:
        ValueError: the file is missing or damaged.
    """
    library = arrow()
    try:
        return library.ipc.open_file(library.memory_map(os.fsencode(path))).read_all()
    except (OSError, library.ArrowInvalid) as error:
        raise ValueError(f"{path} is missing or damaged ({error}): prepare the data again, or copy the file") from error


def read_examples_table(path: Path) -> Any:
    """Reads a table of examples, and checks that its columns are those of `prepare`, with sound lists of ids.

    Raises:
        ValueError: the file is missing, damaged, or not of examples.
    """
    library, table = arrow(), read_table(path)
    ids = library.list_(library.int32())
    expected = {"source": ids, "target": ids, "origin": library.uint16()}
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    if types != expected:
        columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise ValueError(f"expected {path} to have the columns source, target and origin, got {columns or 'none'}")
    try:
        table.validate(full=True)
    except library.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged ({error}): prepare the data again, or copy the file") from error
    if any(
        column.null_count or (name != "origin" and column.combine_chunks().values.null_count)
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ):
        raise ValueError(f"expected {path} to have a value in every row, got rows without one")
    return table


def views(column: Any) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """Returns the ids and the ends of a column of lists, as numpy arrays that share its memory."""
    chunk = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy(zero_copy_only=True)


def sha256_of(path: Path) -> str:
    """Computes the SHA-256 of a file, which is read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()
