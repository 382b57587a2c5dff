"""Reads decoders that CTranslate2 converted. `tests.foreign.ctranslate2_folders` wrote them, and what it computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import as_tensors
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.run import architecture_of
from fastformer.cli import main
from fastformer.generation.folder_options import folder_options
from tests.checkpoints.test_ctranslate2 import written
from tests.foreign.ctranslate2_folders import DECODER_FOLDERS, DECODERS

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, ("GPT",), **options)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(DECODER_FOLDERS / "llama", tmp_path / "llama"))


@pytest.mark.parametrize(("name", "quantization"), [(name, kind) for name, _, _, kind in DECODERS])
def test_log_probs_and_tokens_equal_ctranslate2(name, quantization) -> None:
    model, tokenizer = load(DECODER_FOLDERS / name, dtype=torch.float32)
    expected = json.loads((DECODER_FOLDERS / name / "expected.json").read_text())
    names = json.loads((DECODER_FOLDERS / name / "vocabulary.json").read_text())
    assert model.precision == ("int8" if quantization == "int8" else None)
    for prompt, log_probs, continuation in zip(*expected.values(), strict=True):
        ids = tokenizer.encode(" ".join(prompt))
        with torch.inference_mode():
            rows = model(torch.tensor([ids]))[0].log_softmax(-1)
        found = rows[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, torch.tensor(log_probs, dtype=torch.float32), rtol=1e-4, atol=1e-4)
        new = model.generate([ids], max_new_tokens=20, precision="fp32")[0].tolist()[len(ids) :]
        assert [names[i] for i in new if i != model.config.special_ids.first_eos] == continuation


def test_int8_keeps_the_files_numbers_and_bf16_its_dtype() -> None:
    stored = as_tensors(read_variables(DECODER_FOLDERS / "llama" / MODEL)[1])
    model = load(DECODER_FOLDERS / "llama")[0]
    name = "decoder/layer_1/ffn/linear_1/weight"
    expected = stored[name].float() / stored[f"{name}_scale"].float()[:, None]
    assert torch.equal(model.decoder.layers[1].linear2.weight, expected)
    dtypes = {name: next(load(DECODER_FOLDERS / name)[0].parameters()).dtype for name in ("qwen3", "mistral")}
    assert dtypes == {"qwen3": torch.bfloat16, "mistral": torch.float32}


@pytest.mark.parametrize("name", ["mistral", "gemma2"])  # a Gemma multiplies by 1 + gamma, which has more digits
def test_matrices_decide_the_dtype(name, tmp_path) -> None:
    folder = Path(shutil.copytree(DECODER_FOLDERS / name, tmp_path / name))
    specification, variables = read_variables(folder / MODEL)
    halved = {key: each.bfloat16() if each.dim() else each.clone() for key, each in as_tensors(variables).items()}
    for key, dtype in (("none", torch.bfloat16), ("decoder/layer_1/ffn/linear_1/weight", torch.float32)):
        wide = {other: each.float() + 2**-20 if other == key else each for other, each in halved.items()}
        (folder / MODEL).write_bytes(written(wide, specification))
        assert next(load(folder)[0].parameters()).dtype == dtype


def changed(folder: Path, changes: dict[str, torch.Tensor | None]) -> Any:
    """Loads a folder of which some variables have other values; a name with a * is one of each layer."""
    specification, variables = read_variables(folder / MODEL)
    stored: dict[str, Any] = as_tensors(variables)
    for name, value in changes.items():
        stored |= {name.replace("*", str(layer)): value for layer in range(2)}
    (folder / MODEL).write_bytes(written({name: x for name, x in stored.items() if x is not None}, specification))
    return load(folder)[0]


def few(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int8)


def whole(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


ATTENTION = "decoder/layer_*/self_attention"
# Variables, and the options of the model.
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"decoder/final_logit_softcapping": torch.tensor(20.0)}, {"logit_softcap": 20.0}),
    ({"decoder/final_logit_softcapping": torch.tensor(0.0)}, {"logit_softcap": None}),
    ({f"{ATTENTION}/queries_scale": torch.tensor(0.25)}, {"attention_scale": 0.25}),
    ({f"{ATTENTION}/queries_scale": torch.tensor(0.5)}, {"attention_scale": None}),  # of heads of 4 numbers
    ({f"{ATTENTION}/rotary_scaling_type": few(0), f"{ATTENTION}/rotary_scaling_factor":
      torch.tensor(2.0)}, {"rotary_scaling": {"kind": "linear", "factor": 2.0}}),
    ({f"{ATTENTION}/rotary_scaling_type": few(-1)}, {"rotary_scaling": None}),
    ({f"{ATTENTION}/rotary_dim": whole(2)}, {"rotary_fraction": 0.5}),
    ({f"{ATTENTION}/rotary_dim": whole(4)}, {"rotary_fraction": 1.0}),
    ({f"{ATTENTION}/sliding_window": whole(5)}, {"window_size": 4, "windows": (True, True)}),
    ({"decoder/layer_1/self_attention/sliding_window": whole(5)}, {"windows": (False, True)}),
    ({"decoder/projection/bias": torch.zeros(40)}, {"output_bias": False}),
    ({"decoder/scale_embeddings": few(1)}, {"embedding_scale": 4.0}),
    ({"decoder/scale_embeddings": torch.tensor(3.0)}, {"embedding_scale": 3.0}),
    ({"decoder/layer_0/self_attention/rotary_base": torch.tensor(500.0),
      "decoder/layer_0/self_attention/sliding_window": whole(5)},
     {"rotary_base": 10_000.0, "local_rotary_base": 500.0}),
]  # fmt: skip
# Variables, and words of the error.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"decoder/projection/bias": torch.ones(40)}, "bias"), ({"decoder/alibi": few(1)}, "alibi"),
    ({"decoder/pre_norm": few(0)}, "norms after"),
    ({f"{ATTENTION}/head_dim": whole(0)}, "head_dim"),
    ({f"{ATTENTION}/rotary_interleave": few(1)}, "rotary_interleave"),
    ({f"{ATTENTION}/rotary_scaling_type": few(1)}, "rotary_scaling_type 1"),
    ({f"{ATTENTION}/rotary_scaling_type": few(0)}, "rotary_scaling_factor"),
    ({f"{ATTENTION}/rotary_scaling_type": few(2), f"{ATTENTION}/rotary_scaling_factor":
      torch.tensor(2.0)}, "rotary_scaling_factor"),
    ({"decoder/layer_0/self_attention/rotary_dim": whole(2)}, "rotary_dim"),
    ({"decoder/layer_0/self_attention/rotary_base": torch.tensor(5.0)}, "rotary_base"),
    ({"decoder/layer_0/self_attention/sliding_window": whole(5),
      "decoder/layer_1/self_attention/sliding_window": whole(7)}, "one window"),
    ({"decoder/activation": few(0)}, "gated activation"),
    ({"decoder/embeddings/weight": torch.ones(39, 16), "decoder/embeddings/weight_scale": None}, "40 tokens"),
    ({"decoder/unheard_of": few(1)}, "unheard_of"),
]  # fmt: skip


def test_each_variable_is_an_option_or_refused(folder) -> None:
    data = (folder / MODEL).read_bytes()
    for changes, options in READ:
        config = changed(folder, changes).config
        found = {name: getattr(config, name) for name in options}
        assert {**found, "rotary_scaling": found.get("rotary_scaling") and dict(found["rotary_scaling"])} == {
            "rotary_scaling": None, **options}, changes  # fmt: skip
        (folder / MODEL).write_bytes(data)
    for changes, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            changed(folder, changes)
        (folder / MODEL).write_bytes(data)


def test_layers_may_share_a_norm(tmp_path) -> None:
    folder = Path(shutil.copytree(DECODER_FOLDERS / "gpt2", tmp_path / "gpt2"))
    names = [f"{place}/layer_norm/{part}" for place in (ATTENTION, "decoder/layer_*/ffn") for part in ("gamma", "beta")]
    gamma, beta = torch.rand(16), torch.rand(16)
    place = "decoder/layer_*/shared_layer_norm"
    model = changed(folder, {**dict.fromkeys(names), f"{place}/gamma": gamma, f"{place}/beta": beta})
    assert model.config.parallel_residual
    for layer in model.decoder.layers:
        for norm in (layer.norm1, layer.norm2):
            assert torch.equal(norm.weight, gamma) and torch.equal(norm.bias, beta)


def test_commands_take_a_folder(folder, capsys) -> None:
    assert architecture_of(folder) == "GPT" and folder_options(folder) == {}
    assert main(["generate", str(folder), "t5 t9", "--greedy", "--max_new_tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("t5 t9")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.5}))
    assert load(folder)[0].config.special_ids.eos == (1, 7)
    assert folder_options(folder) == {"temperature": 0.5}


def test_a_llama_whose_scaling_is_lost_is_computed_as_ctranslate2_does(folder, caplog) -> None:
    data = bytearray((folder / MODEL).read_bytes())
    more = b""
    for layer in range(2):
        for name, kind, value in (("rotary_scaling_type", 1, b"\2"), ("rotary_low_freq_factor", 0, b"\0\0\x80?")):
            key = f"decoder/layer_{layer}/self_attention/{name}".encode() + b"\0"
            more += len(key).to_bytes(2, "little") + key + b"\0" + bytes([kind])
            more += len(value).to_bytes(4, "little") + value
    place = data.index(b"TransformerDecoderSpec\0") + 23 + 4
    count = int.from_bytes(data[place : place + 4], "little") + 4
    data[place : place + 4] = count.to_bytes(4, "little") + more
    (folder / MODEL).write_bytes(data)
    assert load(folder)[0].config.rotary_scaling is None and "not scaled" in caplog.text


def test_errors_name_what_is_wrong(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_type": 1}))
    with pytest.raises(ValueError, match="quantization_type"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "vocabulary.json").read_text())
    for other, message in ((tokens[:-1], "39"), ([*tokens[:-1], "t5"], "vocabulary.json")):
        (folder / "vocabulary.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=message):
            load(folder)
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        load(folder)
