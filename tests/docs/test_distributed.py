"""Runs the recipes for many machines as two launchers on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, environment

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
