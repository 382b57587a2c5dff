"""Every script in examples/ runs, on small models and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, environment
from tests.docs.workshop import workshop

EXAMPLES = ROOT / "examples"
# What each one is called with, in a folder as `workshop` makes it, and a word that it prints.
CALLS = {
    "finetune_bert.py": (["bert-base-uncased", "--steps", "3"], "accelerated: mean loss"),
    "logits_processor.py": (["numbers", "six zero", "--without", "n"], "sechs"),
    "new_op.py": ([], "squared_relu and its gradient are right"),
    "serve_and_call.py": (["numbers", "six zero"], "whole: sechs null"),
    "train_on_two_processes.py": (["shared", "train.tsv", "--steps", "2"], "2 updates by two processes"),
    "translate_file.py": (["numbers", "test.en", "test.hyp", "--num_beams", "2"], "8 lines"),
}


def test_every_example_has_a_call() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == CALLS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """It runs as a user would run it: in a separate process, from another folder."""
    words, due = CALLS[name]
    place = workshop(tmp_path)
    with (place / "test.en").open("ab") as file:
        file.write(b"si\xfc\n")  # not UTF-8
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], cwd=place, env=environment(), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert due in found.stdout, found.stdout
    if name == "translate_file.py":
        assert (place / "test.hyp").read_text().splitlines()[:2] == ["sechs", "sechs null"]
    if name == "finetune_bert.py":
        losses = [line.split()[-3].rstrip(",") for line in found.stdout.splitlines() if "mean loss" in line]
        assert abs(float(losses[0]) - float(losses[1])) < 2e-3, "the same training, faster"
    if name == "serve_and_call.py":
        assert found.stdout.count("event: ") >= 2
    if name == "logits_processor.py":
        assert "n" not in found.stdout.splitlines()[1]
