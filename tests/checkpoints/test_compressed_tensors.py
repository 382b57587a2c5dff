"""Folders of llm-compressor have the weights that compressed-tensors decompresses, and damaged ones are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastformer.checkpoints.hf import FAMILIES, load_folder
from fastformer.checkpoints.hf.common import read_numbers
from fastformer.checkpoints.hf.quantized import dequantized, quantization_settings
from fastformer.generation import generate
from fastformer.models.quantization import from_groups
from fastformer.models.stored import stand_in
from tests.foreign.compressed_folders import CASES, FOLDERS, TEXT, model_of
from tests.generation.small import needs_cpp

LLAMA = FAMILIES["llama"]._replace(read_tokenizer=lambda folder, settings: (None, lambda config: None))  # type: ignore
# By folder: the precision, the dtype, how many matrices are int4, and what the log says about the others.
PRECISIONS: dict[str, tuple[str | None, torch.dtype, int, str]] = {
    "w4a16": ("int4", torch.bfloat16, 4, "2 of 6 matrices"),
    "w4a16_asym": ("int4", torch.float32, 4, "2 of 6 matrices"),
    "w8a16": ("int8", torch.float32, 0, "int8"),
    "w8a8": ("int8", torch.float32, 0, "int8"),
    "fp8": (None, torch.bfloat16, 0, "bfloat16"),
    "mixed": ("int4", torch.float32, 0, "int8"),  # its groups of 16 are too small
    "actorder": ("int4", torch.float32, 2, "3 of 7 matrices"),
}


def read(folder: Path, **options: Any) -> Any:
    return load_folder(folder, LLAMA, **options)[0]


def expected_of(name: str) -> Tensor:
    return torch.tensor(json.loads((FOLDERS / name / "expected.json").read_text()), dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_decompressed_weights(name) -> None:
    settings = json.loads((FOLDERS / name / "config.json").read_text())
    how = quantization_settings(FOLDERS / name, settings)
    assert how is not None
    plain = model_of(torch.float32)
    plain.load_state_dict(dequantized(settings, how, load_file(FOLDERS / name / "model.safetensors"), FOLDERS).state)
    due, ids = expected_of(name), torch.tensor([TEXT])
    with torch.inference_mode():
        ours, theirs = read(FOLDERS / name, dtype=torch.float32)(ids)[0], plain(ids).logits[0]
    assert (theirs - due).abs().max() < 1e-5 * due.abs().max()  # fp32 has the weights
    limit = 2 * (theirs - due).abs().max() + torch.finfo(torch.float32).eps * due.abs().max()
    assert (ours - due).abs().max() <= limit


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_precision_and_what_it_changes(name, stays, caplog, monkeypatch) -> None:
    caplog.set_level("INFO", logger="fastformer")
    if not stays:  # as on a GPU
        monkeypatch.setattr("fastformer.checkpoints.hf.common._stays", lambda device: False)
    model = read(FOLDERS / name)
    precision, dtype, count, text = PRECISIONS[name]
    assert (model.precision, model.embedding.weight.dtype) == (precision, dtype) and text in caplog.text
    assert len(model.int4_groups or {}) == count
    for key, groups in (model.int4_groups or {}).items():
        weight = model.get_parameter(key)
        assert torch.equal(from_groups(groups, weight.shape[1], weight.dtype), weight)


@needs_cpp
@pytest.mark.parametrize("name", CASES)
def test_the_engine_packs_from_the_file_what_it_packs_from_memory(name) -> None:
    model, whole = read(FOLDERS / name), read(FOLDERS / name)
    whole.state_dict()
    texts = torch.tensor([TEXT])
    found, due = (generate(x, texts, max_new_tokens=6, return_dict_in_generate=True) for x in (model, whole))
    assert stand_in(model) is not model and stand_in(whole) is whole  # the first was never in memory
    assert torch.equal(found.sequences, due.sequences) and torch.equal(found.token_log_probs, due.token_log_probs)


@needs_cpp
@pytest.mark.parametrize("name", ["w4a16_asym", "w8a8", "fp8"])
def test_folders_decode_in_their_precision(name) -> None:
    model, exact = read(FOLDERS / name), read(FOLDERS / name, dtype=torch.float64)
    prompt = torch.tensor([TEXT])
    out = generate(model, prompt, min_new_tokens=6, max_new_tokens=6, return_dict_in_generate=True)
    logits = exact(out.sequences[:, :-1])[:, len(TEXT) - 1 :].log_softmax(-1)
    due = logits.gather(-1, out.sequences[:, len(TEXT) :, None]).squeeze(-1)
    assert (out.token_log_probs.double() - due).square().mean().sqrt() < 0.2 * logits.std()


@needs_cpp
def test_a_matrix_of_parts_with_other_bits_is_rounded_to_int4_if_asked_for(tmp_path) -> None:
    """q has 4 bits and zeros, k and v have 8: the engine has the three as one matrix."""

    def scheme(config: dict[str, Any]) -> None:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
        config["config_groups"]["group_2"] = {"targets": [key], "weights": weights, "format": "pack-quantized"}

    key = "model.layers.0.self_attn.q_proj"
    other = load_file(FOLDERS / "w4a16_asym" / "model.safetensors")
    folder = changed(
        tmp_path, "w8a16", config=scheme, tensors={name: other[name] for name in other if name.startswith(key)}
    )
    model, whole = read(folder), read(folder)
    whole.state_dict()
    assert model.precision == "int8"
    options: dict[str, Any] = {"max_new_tokens": 6, "precision": "int4", "return_dict_in_generate": True}
    found, due = (generate(x, torch.tensor([TEXT]), **options) for x in (model, whole))
    assert stand_in(model) is not model
    assert torch.equal(found.sequences, due.sequences) and torch.equal(found.token_log_probs, due.token_log_probs)


def changed(tmp_path: Path, name: str, *, config: Any = None, tensors: dict[str, Tensor | None] | None = None) -> Path:
    """Returns a copy of a folder with other values; a tensor of None is removed."""
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = json.loads((FOLDERS / name / "config.json").read_text())
    if config is not None:
        config(settings["quantization_config"])
    (folder / "config.json").write_text(json.dumps(settings))
    state = {**load_file(FOLDERS / name / "model.safetensors"), **(tensors or {})}
    save_file({key: value for key, value in state.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_an_order_of_minus_one_is_none(tmp_path) -> None:
    index = torch.full((64,), -1, dtype=torch.int32)
    folder = changed(tmp_path, "w4a16", tensors={"model.layers.0.mlp.up_proj.weight_g_idx": index})
    assert all(map(torch.equal, read(folder).parameters(), read(FOLDERS / "w4a16").parameters()))


def test_the_heads_of_quantised_folders_have_their_numbers() -> None:
    """Code that needs a few tensors, such as the head of a reranker, reads them by `read_numbers`."""
    state, whole = read_numbers(FOLDERS / "fp8"), read(FOLDERS / "fp8", dtype=torch.float32)
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, whole.state_dict()["decoder.layers.0.linear2.weight"])
    assert all(tensor.is_floating_point() for tensor in state.values())


@pytest.mark.parametrize(
    ("name", "omitted"),
    [*(("w4a16", omitted) for omitted in ("symmetric", "strategy", "type", "symmetric strategy type")),
     ("w8a16", "num_bits"), ("w8a8", "num_bits type")],
)  # fmt: skip
def test_settings_that_a_scheme_omits_are_the_usual_ones(name, omitted, tmp_path) -> None:
    def omit(config: dict[str, Any]) -> None:
        for group in config["config_groups"].values():
            for setting in omitted.split():
                del group["weights"][setting]

    found, due = read(changed(tmp_path, name, config=omit)), read(FOLDERS / name)
    assert all(map(torch.equal, found.parameters(), due.parameters())) and found.precision == due.precision


def _weights(**values: Any) -> Any:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(values)


def _top(**values: Any) -> Any:
    return lambda config: config.update(values)


def _group(**values: Any) -> Any:
    return lambda config: config["config_groups"]["group_0"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_weights(num_bits=3), r"\bnum_bits\b.* 3\b"),
        (_weights(num_bits="4"), r"\bnum_bits\b"),
        (_weights(type="float"), r"\bfloat\b"),
        (_weights(strategy="tensor_group"), "tensor_group"),
        (_weights(strategy="block"), "block_structure"),
        (_weights(group_size=0), r"\bgroup_size\b"),
        (_weights(group_size=48), "weight_scale"),
        (_weights(group_size=64), "weight_scale"),
        (_weights(symmetric=False), "weight_zero_point"),
        (_group(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (_group(targets=["re:(a+)+b"]), "re:"),
        (_group(targets=["re:("]), "re:"),
        (_group(targets=["re:.*none"]), r"model\.layers\.0\."),
        (_group(format="marlin-24"), "marlin-24"),
        (_group(targets="Linear"), "targets"),
        (_group(weights=[4]), "weights"),
        (_group(weights=None), r"model\.layers\.0\."),
        (_group(format="int-quantized"), r"\bweight\b"),
        (_top(config_groups=[]), "config_groups"),
        (_top(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (_top(sparsity_config=3), "sparsity_config"),
        (_top(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    ],
)
def test_unknown_settings_are_named(change, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        read(changed(tmp_path, "w4a16", config=change))


@pytest.mark.parametrize("name", ["w4a16_asym", "w8a8", "fp8", "actorder"])
def test_tensors_that_do_not_fit_are_named(name, tmp_path) -> None:
    """Each tensor of quantised modules is removed, cut, and made of another dtype."""
    state = load_file(FOLDERS / name / "model.safetensors")
    unread = 0
    for key in [key for key in state if "down_proj" in key or "k_proj" in key]:
        module, tensor = re.escape(key.rsplit(".", 1)[0]), state[key]
        wrong: list[Tensor | None] = [None, tensor.double() if tensor.dtype != torch.float64 else tensor.float()]
        wrong += [torch.cat([tensor, tensor[:1]]), tensor[:0]] if tensor.dim() else []
        if key.endswith("shape"):
            wrong += [tensor + 1, tensor * 10**9, -tensor]
        if key.endswith("g_idx"):
            wrong[0] = tensor + 1
        for value in wrong:
            folder = changed(tmp_path, name, tensors={key: value})
            if ".input_" in key:
                read(folder)
                unread += 1
            elif not (key.endswith("scale") and value is not None and value.shape == tensor.shape):  # of another dtype
                with pytest.raises(ValueError, match=rf"{module}|linear2|in_proj"):
                    read(folder)
    assert bool(unread) == (name in ("w8a8", "fp8"))


def test_numbers_that_are_no_weights_are_refused(tmp_path) -> None:
    key = "model.layers.0.self_attn.q_proj"
    weight = load_file(FOLDERS / "fp8" / "model.safetensors")[f"{key}.weight"].float()
    weight[3, 5] = torch.nan
    folder = changed(tmp_path, "fp8", tensors={f"{key}.weight": weight.to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="finite") as error:
        read(folder).state_dict()
    assert key in str(error.value) and str(folder) in str(error.value)
    outside = torch.full((64, 64), 9, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"-8 to 7"):
        read(changed(tmp_path, "mixed", tensors={f"{key}.weight": outside})).state_dict()
