"""A folder of a small BERT, and a copy in which a test writes other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.encoding.folders import bert


@pytest.fixture(scope="package")
def plain(tmp_path_factory) -> tuple[Path, Any]:
    """Returns a folder of transformers without sentence-transformers' files, and its model."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, bert(folder)


@pytest.fixture
def folder(tmp_path, plain) -> Path:
    """Returns a folder with links to the same model, in which a test writes other files."""
    for file in plain[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path
