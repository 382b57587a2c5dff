"""README's commands are ones that exist, and its Python runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import fastformer
from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from fastformer.training import TrainConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [
    line
    for language, block in BLOCKS
    if not language
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("fastformer ")
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_understood(line: str) -> None:
    _, name, *words = shlex.split(re.sub(r"\s[<>]\s*\S+", "", line), comments=True)
    assert name in COMMANDS
    if name == "doctor":
        return
    values = _parsing.parse(importlib.import_module(f"fastformer.commands.{name}"), name, words)
    if name == "train":
        TrainConfig.from_dict({key: value for key, value in values.items() if key not in ("run", "config", "resume")})


def test_the_lines_were_found() -> None:
    assert len(LINES) >= 12 and {shlex.split(line, comments=True)[1] for line in LINES} >= {"train", "translate"}


def block_with(text: str) -> str:
    (found,) = [block for language, block in BLOCKS if language == "python" and text in block]
    return found


def test_the_python_of_the_first_minute_runs() -> None:
    names: dict[str, object] = {}
    exec(block_with("from_preset").replace('"base"', '"tiny"'), names)
    assert {"layer", "model", "tokens"} <= names.keys()


def test_a_model_that_exists_is_accelerated(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is downloaded: a small BERT with random weights takes the place of the one that is named."""
    names: dict[str, object] = {"batch": {"input_ids": torch.randint(5, 60, (2, 7))}}
    small = "BertModel(__import__('transformers').BertConfig(vocab_size=60, num_hidden_layers=2))"
    exec(block_with("accelerate(model)").replace('BertModel.from_pretrained("bert-base-uncased")', small), names)
    assert "2 BertLayer" in capsys.readouterr().out


def test_embeddings_and_rerankers(tmp_path: Path) -> None:
    """Small models with random weights take the places of those that are named."""
    from tests.encoding.folders import bert

    for name, labels in (("all-MiniLM-L6-v2", None), ("ms-marco-MiniLM-L6-v2", 1)):
        (tmp_path / name).mkdir()
        bert(tmp_path / name, num_labels=labels)
    block = block_with("CrossEncoder.from_pretrained")
    names: dict[str, Any] = {}
    exec(re.sub(r'from_pretrained\("', f'from_pretrained("{tmp_path}/', block), names)
    assert names["embeddings"].shape[0] == names["scores"].shape[1] == 3


def test_attention_under_pytorchs_name() -> None:
    q, k, v = torch.randn(3, 1, 2, 100, 8)
    model, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 5, 8)
    exec(block_with("activate()"), {"fastformer": fastformer, "q": q, "k": k, "v": v, "model": model, "x": x})
