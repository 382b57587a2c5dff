"""Settings of a tiny training, for the tests of run folders, and folders that transformers saved."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import decoders, encoders, families, multilingual
from tests.training.conftest import config as config
from tests.training.conftest import no_tensorboard as no_tensorboard

FOLDERS = families.FOLDERS | decoders.FOLDERS | encoders.FOLDERS | multilingual.FOLDERS


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Returns a folder of a kind, or as described in FOLDERS. It is made once and must not be changed."""

    @functools.cache
    def get(kind: str) -> Any:
        folder = tmp_path_factory.mktemp("saved") / "model"
        return FOLDERS[kind](folder) or folder

    return get


@pytest.fixture
def copy(made: Callable[[str], Any], tmp_path: Path) -> Callable[[str], Path]:
    """Returns a folder of a kind that a test may change."""

    def get(kind: str) -> Path:
        found = made(kind)
        return shutil.copytree(getattr(found, "folder", found), tmp_path / "model")

    return get
