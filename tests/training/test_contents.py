"""The table of contents of a sharded checkpoint is read without running any code that it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from fastformer.training.contents import read_contents
from fastformer.training.world import read_parts


class _Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_parts_are_read_whole(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(3, 5), "step": torch.tensor([7])}
    save(dict(tensors), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert set(read_contents(tmp_path).state_dict_metadata) == set(tensors)
    found = read_parts(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_table_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Touches(tmp_path / "run")))
    with pytest.raises(pickle.UnpicklingError):
        read_contents(tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        read_parts(tmp_path)
    assert not (tmp_path / "run").exists()
