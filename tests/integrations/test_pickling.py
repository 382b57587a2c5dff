"""Pickled accelerated models and their configs load in a process that has not imported fastformer."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastformer
from fastformer.integrations.attention_interface import patch_attention, patched_attention
from fastformer.ops import record_backends
from tests.integrations import families as small
from tests.integrations.families import IDS, RIGHT, TARGETS

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("DistilBertModel", {"vocab_size": 60, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 1}),
    "roberta": ("RobertaForMaskedLM", SIZES),
}
# What a fresh process does with each file, in a child of its own: what one import leaves behind, no other sees.
LOADS = """
import os, sys, torch, transformers
import transformers.modeling_utils
failed = []
for path in sys.argv[1:]:
    if pid := os.fork():
        failed += [path] if os.waitpid(pid, 0)[1] else []
        continue
    status = 1
    try:
        assert not any(name.partition(".")[0] == "fastformer" for name in sys.modules)
        made, inputs, expected, told = torch.load(path, weights_only=False)
        if isinstance(made, transformers.PretrainedConfig):
            name, weights = told
            model = getattr(transformers, name)(made).eval()
            model.load_state_dict(weights)
            with torch.no_grad():
                torch.testing.assert_close(model(**inputs)[0][0], expected[0])
        else:
            from fastformer.ops import record_backends
            with torch.no_grad(), record_backends() as ran:
                torch.testing.assert_close(made(**inputs)[0], expected)
            assert sorted(name for name, _ in ran) == told, ran
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def make(family: str) -> tuple[Any, dict[str, Any]]:
    """Makes a small model in evaluation mode, and the arguments of a call."""
    torch.manual_seed(0)
    if family == "torch":
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), {"src": torch.randn(3, 7, 16)}
    inputs = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    if family in small.SEQ2SEQ:
        inputs["decoder_input_ids"] = TARGETS
    if family in small.FAMILIES:
        return small.make(family).float().eval(), inputs
    name, sizes = OTHERS[family]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval(), inputs


def written(folder: Path, family: str, kind: str) -> Path:
    """Writes a file with an accelerated model or its config, a call, its result, and the expected result."""
    model, inputs = make(family)
    if kind == "led alone":
        patch_attention(model)
        assert patched_attention(model)
    else:
        fastformer.accelerate(model)
    with torch.no_grad(), record_backends() as ran:
        out = model(**inputs)[0]
    told: Any = (type(model).__name__, model.state_dict()) if kind == "config" else sorted(name for name, _ in ran)
    path = folder / f"{family}, {kind}.pt"
    torch.save((model.config if kind == "config" else model, inputs, out, told), path)
    return path


# What is found again by a class, a function, a module of torch and a config; the slow ones are each family.
FEW = [("bert", "accelerated"), ("t5", "accelerated"), ("torch", "accelerated"), ("qwen2", "led alone")]
FEW.append(("distilbert", "config"))
ALL = [
    *((family, "accelerated") for family in (*small.FAMILIES, *OTHERS, "torch")),
    ("qwen2", "led alone"),
    ("bert", "config"),
    FEW[-1],
]


@pytest.mark.parametrize("kinds", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_fresh_process_loads_them_all(kinds, tmp_path):
    files = [written(tmp_path, *each) for each in kinds]
    done = subprocess.run([sys.executable, "-c", LOADS, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_config_does_not_mention_fastformer(tmp_path):
    model, _ = make("bert")
    before = copy.deepcopy(model.config)
    fastformer.accelerate(model)
    for config in (model.config, copy.copy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert config._attn_implementation == "sdpa" and config.to_dict() == before.to_dict()
    model.config.save_pretrained(tmp_path)
    assert "fastformer" not in (tmp_path / "config.json").read_text()
