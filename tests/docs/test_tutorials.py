"""The tutorials are notebooks in text form, and run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, environment
from tests.docs.workshop import workshop

TUTORIALS = sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a kernel of its own, offline, in less than three minutes."""
    jupytext = pytest.importorskip("jupytext", reason='not installed: pip install "fastformer[docs]"')
    nbclient = pytest.importorskip("nbclient", reason='not installed: pip install "fastformer[docs]"')
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = jupytext.read(tutorial)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 3
    client = nbclient.NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(workshop(tmp_path))}}
    )
    client.execute()
    assert all(cell["execution_count"] for cell in cells)
