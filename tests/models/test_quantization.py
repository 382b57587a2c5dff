"""Quantised models: what is rounded, and what their folders give back."""

from __future__ import annotations

import copy
import json

import pytest
import safetensors.torch
import torch

from fastformer.generation import generate
from fastformer.models import GPT, Transformer
from fastformer.models.quantization import from_grid, quantized_names, to_grid
from fastformer.nn import MultiheadAttention
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn

SMALL = {"vocab_size": 24, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_len": 9, "attention_bias": True}


def make(kind: str, **options) -> Transformer | GPT:
    torch.manual_seed(3)
    if kind == "gpt":
        return GPT.from_preset("tiny", vocab_size=24, d_model=16, num_layers=2, num_heads=2, max_len=9, **options)
    return Transformer.from_preset("tiny", **SMALL, tie_embeddings=kind == "tied", **options)


KINDS = pytest.mark.parametrize("kind", ["tied", "untied", "gpt"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 1e-5, 1e4])
def test_a_row_keeps_its_largest_and_nothing_moves_by_more_than_half_a_step(dtype, spread) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(2000, 33) * torch.rand(2000, 1) * spread).to(dtype)
    weight[5] = 0.0
    q, scale = to_grid(weight)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (2000,)
    largest = weight.float().abs().amax(1)
    assert torch.equal(q.abs().amax(1) == 127, largest > 0) and scale[5] == 0
    assert ((scale * 127 - largest).abs() <= 2e-7 * largest).all()
    rounded = from_grid(q, scale, dtype)
    step = scale.double()[:, None] * (0.5 + 1e-5) + weight.double().abs() * torch.finfo(dtype).eps
    assert ((rounded.double() - weight.double()).abs() <= step + torch.finfo(dtype).smallest_normal).all()
    again, same = to_grid(rounded)
    assert torch.equal(from_grid(again, same, dtype), rounded)
    if dtype != torch.float16:  # whose subnormal numbers are coarser than the grid
        assert torch.equal(again, q)


def test_a_scale_is_found_again_whatever_the_mantissa() -> None:
    largest = torch.arange(2**23, 2**24, 7, dtype=torch.int32).float()
    scale = largest / 127
    assert torch.equal(scale * 127 / 127, scale)


def test_rows_without_numbers_to_speak_of() -> None:
    weight = torch.tensor([[1e-44, -3e-45], [1e-37, 1e-36], [3e38, -3.4e38]])
    q, scale = to_grid(weight)
    assert q.tolist() == [[0, 0], [0, 0], [112, -127]] and scale[:2].tolist() == [0, 0]
    assert from_grid(q, scale, torch.float32).isfinite().all()
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError):
            to_grid(torch.tensor([[1.0, bad]]))


@KINDS
def test_matrices_are_rounded_and_nothing_else(kind) -> None:
    model = make(kind)
    before = copy.deepcopy(model.state_dict())
    names = set(quantized_names(model))
    matrices = {name for name, value in before.items() if value.dim() == 2 and "position" not in name}
    assert names == matrices and len(names) == len(quantized_names(model))
    attentions = sum(isinstance(module, MultiheadAttention) for module in model.modules())
    assert sum(name.endswith("in_proj_weight") for name in names) == attentions
    found = model.quantize()
    assert type(found) is type(model) and found.config == model.config and found.precision == "int8"
    assert model.precision is None
    for name, value in found.state_dict().items():
        assert torch.equal(model.state_dict()[name], before[name])
        expected = from_grid(*to_grid(before[name]), value.dtype) if name in names else before[name]
        assert torch.equal(value, expected)
        assert not torch.equal(value, before[name]) or name not in names
    for copied in (copy.deepcopy(found), found.to(torch.bfloat16), found.quantize()):
        assert copied.precision == "int8"


def test_a_state_dict_holds_the_weights_alone() -> None:
    model, found = make("tied"), make("tied").quantize()
    model.load_state_dict(found.state_dict())
    assert model.precision is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


@KINDS
@DTYPES
def test_a_folder_gives_the_same_bits_back(kind, dtype, tmp_path) -> None:
    model = make(kind, dtype=dtype).quantize()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.precision == "int8" and not loaded.training and loaded.config == model.config
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, state[name]), name
    assert type(model).from_pretrained(tmp_path, dtype=torch.float64).output_weight.dtype == torch.float64
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    names = set(quantized_names(model))
    assert stored.keys() == state.keys() | {f"{name}.scale" for name in names}
    for name in names:
        assert stored[name].dtype == torch.int8 and stored[f"{name}.scale"].shape == stored[name].shape[:1]
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == "int8"


def test_a_folder_has_about_a_quarter_of_the_bytes(tmp_path) -> None:
    model = GPT.from_preset("tiny", vocab_size=300)
    sizes = []
    for name, one in (("plain", model), ("int8", model.quantize())):
        one.save_pretrained(tmp_path / name)
        sizes.append((tmp_path / name / "model.safetensors").stat().st_size)
    assert sizes[1] < 0.32 * sizes[0]  # its learned positions stay in fp32


def test_saving_rounds_what_training_has_moved(tmp_path) -> None:
    model = make("tied").quantize()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded, rounded = Transformer.from_pretrained(tmp_path), model.quantize()
    for a, b in zip(loaded.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_damaged_or_foreign_folder_is_named(tmp_path) -> None:
    model = make("gpt").quantize()
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, settings = safetensors.torch.load_file(weights), json.loads(config.read_text())
    bytes_ = bytearray(weights.read_bytes())
    bytes_[-3] ^= 4
    weights.write_bytes(bytes_)
    with pytest.raises(ValueError):
        GPT.from_pretrained(tmp_path)
    name = "embedding.weight"
    for change, message in (
        ({name: whole[name].float()}, "float32"),
        ({f"{name}.scale": whole[f"{name}.scale"][:-1]}, "embedding.weight.scale"),
        ({f"{name}.scale": whole[f"{name}.scale"].double()}, "float64"),
        ({f"{name}.scale": None}, "embedding.weight.scale"),
        ({name: None}, "embedding.weight"),
        ({f"{name}.scale": whole[f"{name}.scale"] * torch.nan}, "embedding.weight.scale"),
    ):
        changed = {key: value for key, value in {**whole, **change}.items() if value is not None}
        safetensors.torch.save_file(changed, weights)
        with pytest.raises(ValueError, match=message):
            GPT.from_pretrained(tmp_path)
    safetensors.torch.save_file(whole, weights)
    assert GPT.from_pretrained(tmp_path).precision == "int8"
    config.write_text(json.dumps({**settings, "quantization": "int4"}))
    with pytest.raises(ValueError, match=r"\bconfig\.json\b"):
        GPT.from_pretrained(tmp_path)
    del settings["quantization"]
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError):
        GPT.from_pretrained(tmp_path)


def test_a_model_with_nan_is_not_quantised() -> None:
    model = make("gpt")
    model.decoder.layers[1].linear2.weight.data[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"\bdecoder\.layers\.1\.linear2\.weight\b"):
        model.quantize()


@needs_cpp
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_embeddings_are_all_that_a_folder_differs_in_from_a_model_in_int8(tie_embeddings) -> None:
    model = drawn(Transformer, tie_embeddings=tie_embeddings)
    source = torch.randint(3, 70, (12, 9), generator=torch.Generator().manual_seed(1))

    def found(model: Transformer) -> torch.Tensor:
        out = generate(model, source, max_new_tokens=8, precision="int8", return_dict_in_generate=True)
        return out.token_log_probs

    others, full = copy.deepcopy(model), model.quantize()
    state = others.state_dict()
    for name in quantized_names(others):
        if "embedding" not in name:
            state[name].copy_(from_grid(*to_grid(state[name]), torch.float32))
    assert torch.equal(found(others), found(model)) and not torch.equal(found(full), found(model))
    for name in quantized_names(full):
        if "embedding" in name:
            full.state_dict()[name].copy_(model.state_dict()[name])
    assert torch.equal(found(full), found(model))
