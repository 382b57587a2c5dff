"""Checks that every row of the table of models is true."""

from __future__ import annotations

import re

import pytest
import transformers

import fastformer
from fastformer.checkpoints.gguf.architectures import ARCHITECTURES
from fastformer.checkpoints.gguf.blocks import Kind
from fastformer.checkpoints.hf import FAMILIES
from tests.checkpoints.present import PRESENT
from tests.covering import each
from tests.docs.pages import DOCS

_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "embedding_size": 16, "dim": 16, "n_layers": 1, "n_heads": 2,
    "hidden_dim": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "max_position_embeddings": 16,
    "n_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_OF_KIND = {
    "granitemoehybrid": {"mamba_n_heads": 1, "num_local_experts": 0, "layer_types": ["full_attention"]},
    "lfm2_moe": {"layer_types": ["full_attention"], "num_dense_layers": 0},
    "modernbert": {"num_hidden_layers": 2},  # transformers 5.16 takes no model whose layers are all of one type
}
PAGE = (DOCS / "models" / "index.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Returns the other columns of the table by family. Names in brackets are relatives without own classes."""
    found = {}
    for line in PAGE.split("The columns mean")[0].splitlines():
        if line.startswith("| ") and not line.startswith(("| Family", "| ---", "| `")):
            first, *others = (cell.strip() for cell in line.strip("| ").split(" | "))
            for name in re.sub(r" ?\([^)]*\)", "", first).split(", "):
                found[name] = others
    return found


def test_every_family_has_a_row(rows: dict[str, list[str]]) -> None:
    names = {family.name for family in FAMILIES.values()}
    assert names <= set(rows)
    assert set(rows) - names == {"LSTM with attention", "Whisper"}


def test_the_tables_of_gguf_have_its_architectures_and_kinds() -> None:
    tables = PAGE.split("## GGUF files")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ")[0] for line in tables.splitlines() if line.startswith("| ")]
    assert {name for cell in cells for name in re.findall("`([^`.]+)`", cell)} == {*ARCHITECTURES}
    assert {name for cell in cells for name in re.findall(r"\b[A-Z]+[0-9]+\w*", cell)} == {kind.name for kind in Kind}


@each("kind", PRESENT)
def test_a_row_matches_accelerate_and_the_engine(rows: dict[str, list[str]], kind: str) -> None:
    family = FAMILIES[kind]
    config = getattr(transformers, family.config_class)(**_SIZES | _OF_KIND.get(kind, {}))
    report = fastformer.report(fastformer.accelerate(getattr(transformers, family.model_class)(config).eval()))
    has_layers = any(re.search(r"(?:Layer|Block)$", name) for name in report.swapped.values())
    engine = {"decode": report.generate, "encode": report.encode}
    assert rows[family.name][:-1] == [
        "yes",
        "layers" if has_layers else "attention",
        ", ".join(what for what, way in engine.items() if "".join(way.values()).startswith("on the C++ engine")),
        "yes",
    ]
    assert rows[family.name][-1].startswith("`to_huggingface`")
