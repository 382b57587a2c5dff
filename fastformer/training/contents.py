"""Reads the table of contents of a checkpoint in parts without running code that it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

# The types in the table of contents of a folder of parts. The table is a pickle, and a pickle may call any function.
_OF_CONTENTS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of DCP's tables, a dtype or a size, and refuses anything else."""
        kind = super().find_class(module, name) if module in (*_OF_CONTENTS, "torch", "torch.serialization") else None
        if (module in _OF_CONTENTS and isinstance(kind, type)) or isinstance(
            kind, torch.dtype | torch.layout | torch.memory_format
        ):
            return kind
        if (module, name) in (
            *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
            *(("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib", "PurePosixPath")),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def read_contents(folder: Path) -> Any:
    """Returns the table that torch.distributed.checkpoint wrote into a folder of parts.

    Raises:
        OSError: the folder has no table.
        pickle.UnpicklingError: the table is damaged, or names something other than tensors' descriptions.
    """
    with (folder / ".metadata").open("rb") as file:
        return _PlainUnpickler(file).load()
