"""The documentation's examples run, in a folder with small models and without a network."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from tests.covering import each
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, commands, environment, examples, own_commands, understood
from tests.docs.workshop import workshop

README = ROOT / "README.md"
# Blocks that aren't run: output, diagrams, files.
SHOWN = {"", "text", "yaml", "json", "toml", "nginx", "dockerfile", "ini", "cpp", "html", "http"}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


@each("page", PAGES)
def test_a_block_runs_or_says_why_not(page: Path) -> None:
    """No test runs blocks in other languages, which would go unnoticed."""
    for head, text in blocks(page):
        if head.startswith("{code-block}") and head.split()[1] in ("python", "console"):
            assert ":class: no-test" in text, f"{page}: {text}"
        elif not head.startswith("{"):
            assert head in SHOWN | {"python", "console"}, f"{page}: {head}"
            assert head != "console" or commands(text), f"{page}: no line begins with '$ ' in {text}"


@each("page", [README, *PAGES])
def test_a_command_line_is_understood(page: Path) -> None:
    """This includes blocks that don't run: their flags exist, and their settings are consistent."""
    for head, text in blocks(page):
        if head and "console" not in head:
            continue
        for words in own_commands(text):
            understood(words)


def test_the_text_names_commands_and_flags_that_exist() -> None:
    for page in [README, *PAGES]:
        for code in re.findall(r"`fastformer ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            name, *words = code.split()
            assert name in COMMANDS, f"{page}: {code}"
            flags = {word[2:].partition("=")[0].partition(".")[0] for word in words if word.startswith("--")}
            if flags:
                _, hints = _parsing.make_parser(importlib.import_module(f"fastformer.commands.{name}"), name)
                assert flags <= {*hints, "help", "model"}, f"{page}: {code}"


@each("page", [README, *PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files are tested; Sphinx checks anchors. (GitHub shows these pages as well.)"""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            path = page.parent / target.partition("#")[0]
            made = "generated" in path.parts or path.exists()
            if not made and target.startswith("fastformer/"):
                pytest.skip("the sources are not here")
            assert made, f"{page}: {target}"


def test_pages_are_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120
    for page in PAGES:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 250, page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks and console blocks of a page run, in order."""
    found = list(examples(page))
    if not found:
        return
    monkeypatch.chdir(workshop(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(os.getcwd())  # as `python file.py` does
    for example in found:
        example.evaluate()


# The tutorials are notebooks in text form, and run from the first cell to the last.


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


# Runs the recipes for many machines as two launchers on this machine.


PAGE = (DOCS / "guide" / "distributed.md").read_text(encoding="utf-8")
# By hand, in a batch script of Slurm, in a manifest of Kubernetes.
RECIPES = [
    " ".join(found.replace("\\\n", " ").split()) for found in re.findall(r"torchrun --nnodes.*?auto", PAGE, re.S)
]
SETTINGS = """
steps: 4
save_every: 2
warmup: 2
val_examples: 4
device: cpu
tokenizer: bytes
train_tsv: {folder}/train.tsv
rank_timeout: 60
model: {{name: transformer, d_model: 32, d_ff: 32, num_heads: 2, num_encoder_layers: 1, num_decoder_layers: 1}}
"""


def test_all_recipes_are_found() -> None:
    assert len(RECIPES) == 3 and all("--nnodes" in recipe for recipe in RECIPES)


@pytest.mark.slow  # 30 s each: a training of two launchers ends well, and the same commands find that it did
@pytest.mark.parametrize("number", range(3))
def test_a_recipe_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("".join(f"{i} birds\t{i} Vögel\n" for i in range(300)), encoding="utf-8")
    (tmp_path / "train.yaml").write_text(SETTINGS.format(folder=tmp_path))
    command = RECIPES[number].replace("/shared", str(tmp_path)).replace("--nproc-per-node 8", "--nproc-per-node 1")
    if "--config" not in command:
        command += f" --config {tmp_path}/train.yaml"
    for said in ("is update", "nothing is left to do"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here = re.sub(r"first-machine|\$first|\"\$first|training-0\.training", "127.0.0.1", command)
        here = here.replace("29500", str(port)).replace('"127', "127").replace(f'{port}"', str(port))
        launchers = [
            subprocess.Popen(
                ["bash", "-euc", here],
                env={**environment(), "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "JOB_COMPLETION_INDEX": index},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
            )
            for index in "01"
        ]
        outputs = [launcher.communicate(timeout=150)[0] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
        assert any(said in output for output in outputs), outputs
        assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "RANK" not in os.environ
