"""The device and the dtype that a caller asks for are those of the parameters, whatever wrote the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.checkpoints import load_model
from fastformer.checkpoints.run import load_models
from fastformer.data import ByteTokenizer
from fastformer.models import BERT, GPT, Transformer
from fastformer.models.pretrained import save_model
from tests.checkpoints import decoders, encoders
from tests.checkpoints.families import marian
from tests.foreign.ctranslate2_folders import ARGOS
from tests.foreign.gguf_files import FOLDER as GGUF
from tests.generation.small import tiny

pytest.importorskip("transformers", reason="some folders are written by transformers")

KINDS = ("Transformer", "GPT", "BERT", "LSTMSeq2Seq")
DECODERS = GGUF.parent / "ctranslate2_decoders"


def run(kind: type[Any]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        if kind is LSTMSeq2Seq:
            save_model(LSTMSeq2Seq(vocab_size=ByteTokenizer().vocab_size, d_model=16, num_layers=1), folder)
            ByteTokenizer().save(folder)
        else:
            tiny(kind).save_pretrained(folder, ByteTokenizer())

    return make


# What writes a folder, or the folder itself.
FOLDERS: dict[str, Any] = {
    "transformer": run(Transformer), "gpt": run(GPT), "lstm": run(LSTMSeq2Seq),
    "llama": decoders.llama3, "marian": marian, "bert": encoders.bert, "gguf": GGUF / "mistral.gguf",
    "gguf encoder": GGUF / "bert.gguf", "ctranslate2 decoder": DECODERS / "llama", "argos": ARGOS,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*which is a no-op:UserWarning")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_is_loaded_where_and_as_it_is_asked_for(name, tmp_path) -> None:
    folder = FOLDERS[name]
    if not isinstance(folder, Path):
        folder(tmp_path / "model")
        folder = tmp_path / "model"
    for device, dtype in (("meta", torch.bfloat16), ("cpu", torch.bfloat16), (None, torch.float32)):
        (model,), _ = load_models([folder], KINDS, device=device, dtype=dtype)
        found = {(each.device.type, each.dtype) for each in model.parameters()}
        assert found == {(device or "cpu", dtype)}, (device, dtype)
    assert type(load_model(folder, KINDS)[0]) in (Transformer, GPT, BERT, LSTMSeq2Seq)


@pytest.mark.parametrize("name", ["gpt", "gguf"])
def test_a_load_draws_nothing_while_transformers_builds_a_model(name, tmp_path) -> None:
    """Meanwhile transformers' functions are in the places of torch.nn.init's, in every thread."""
    from transformers.initialization import guard_torch_init_functions

    folder = FOLDERS[name]
    if not isinstance(folder, Path):
        folder(tmp_path / "model")
        folder = tmp_path / "model"
    before = torch.get_rng_state()
    with guard_torch_init_functions():
        load_model(folder, KINDS)
    assert torch.equal(torch.get_rng_state(), before)
