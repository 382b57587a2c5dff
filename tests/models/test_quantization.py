"""Tests quantised models: the rounding, and their folders."""

from __future__ import annotations

import copy
import json

import pytest
import safetensors.torch
import torch

from fastformer.generation import generate
from fastformer.models import GPT, Transformer
from fastformer.models.quantization import (
    Groups,
    from_grid,
    from_groups,
    groups_of,
    is_on,
    quantized_names,
    quantized_weights,
    to_grid,
    to_groups,
)
from fastformer.nn import MultiheadAttention
from tests.covering import covering
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
BOTH = pytest.mark.parametrize("precision", ["int8", "int4"])


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 1e-5, 1e4])
def test_rounding_keeps_the_largest_weight_and_errs_by_at_most_half_a_step(dtype, spread) -> None:
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
    requantized, same = to_grid(rounded)
    assert torch.equal(from_grid(requantized, same, dtype), rounded)
    if dtype != torch.float16:  # whose subnormal numbers are coarser than the grid
        assert torch.equal(requantized, q)


def test_rows_of_tiny_numbers() -> None:
    weight = torch.tensor([[1e-44, -3e-45], [1e-37, 1e-36], [3e38, -3.4e38]])
    q, scale = to_grid(weight)
    assert q.tolist() == [[0, 0], [0, 0], [112, -127]] and scale[:2].tolist() == [0, 0]
    assert from_grid(q, scale, torch.float32).isfinite().all()
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError):
            to_grid(torch.tensor([[1.0, bad]]))


@KINDS
@BOTH
def test_matrices_are_rounded_and_nothing_else(kind, precision) -> None:
    model = make(kind)
    before = copy.deepcopy(model.state_dict())
    names = set(quantized_names(model))
    matrices = {name for name, value in before.items() if value.dim() == 2 and "position" not in name}
    assert names == matrices and len(names) == len(quantized_names(model))
    attentions = sum(isinstance(module, MultiheadAttention) for module in model.modules())
    assert sum(name.endswith("in_proj_weight") for name in names) == attentions
    rounded = {
        "int8": lambda weight: from_grid(*to_grid(weight), weight.dtype),
        "int4": lambda weight: from_groups(to_groups(weight), weight.shape[1], weight.dtype),
    }
    quantized = model.quantize(precision)
    assert type(quantized) is type(model) and quantized.config == model.config and quantized.precision == precision
    assert model.precision is None
    for name, value in quantized.state_dict().items():
        assert torch.equal(model.state_dict()[name], before[name])
        assert torch.equal(value, rounded[precision](before[name]) if name in names else before[name])
        assert torch.equal(value, before[name]) == (name not in names)
    model.load_state_dict(quantized.state_dict())
    assert model.precision is None  # a state_dict contains only the weights
    for copied in (copy.deepcopy(quantized), quantized.to(torch.bfloat16), quantized.quantize(precision)):
        assert copied.precision == precision


@pytest.mark.parametrize("kind, dtype, precision", covering(*(mark.args[1] for mark in (KINDS, DTYPES, BOTH))))
def test_a_folder_gives_the_same_bits_back(kind, dtype, precision, tmp_path) -> None:
    plain = make(kind, dtype=dtype)
    before, model = plain.state_dict(), plain.quantize(precision)
    names = set(quantized_names(model))
    model.save_pretrained(tmp_path / "a")
    loaded = type(model).from_pretrained(tmp_path / "a")
    assert loaded.precision == precision and not loaded.training and loaded.config == model.config
    assert loaded.state_dict().keys() == before.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == dtype and torch.equal(value, model.state_dict()[name]), name
    assert type(model).from_pretrained(tmp_path / "a", dtype=torch.float64).output_weight.dtype == torch.float64
    stored = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert stored.keys() == before.keys() | {f"{name}.scale" for name in names}
    for name in names:
        (rows, columns), scale = before[name].shape, stored[f"{name}.scale"]
        groups = -(-columns // 32)
        assert (stored[name].dtype, stored[name].shape, scale.dtype, scale.shape) == {
            "int8": (torch.int8, (rows, columns), torch.float32, (rows,)),
            "int4": (torch.uint8, (rows, 16 * groups), torch.float16, (rows, groups)),
        }[precision]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization"] == precision
    if precision == "int4" or dtype != torch.float16:  # whose subnormal numbers are coarser than the grid of int8
        loaded.save_pretrained(tmp_path / "b")
        first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab")
        assert first == second


@BOTH
def test_saving_rounds_weights_that_were_trained(precision, tmp_path) -> None:
    model = make("tied").quantize(precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded, rounded = Transformer.from_pretrained(tmp_path), model.quantize(precision)
    for a, b in zip(loaded.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a, b)


@BOTH
def test_a_damaged_or_foreign_folder_is_named(precision, tmp_path) -> None:
    model = make("gpt").quantize(precision)
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, settings = safetensors.torch.load_file(weights), json.loads(config.read_text())
    name = "embedding.weight"
    weight, scale = whole[name], whole[f"{name}.scale"]
    for change, message in (
        ({name: weight.float()}, "float32"),
        ({name: weight[:, :-1].contiguous()}, "embedding.weight"),
        ({name: None}, "embedding.weight"),
        ({f"{name}.scale": scale[:-1].contiguous()}, "embedding.weight.scale"),
        ({f"{name}.scale": scale.double()}, "float64"),
        ({f"{name}.scale": None}, "embedding.weight.scale"),
        ({f"{name}.scale": scale * torch.nan}, "embedding.weight.scale"),
        ({f"{name}.zero": weight[:, :1].long()}, "embedding.weight.zero"),
    ):
        changed = {key: value for key, value in {**whole, **change}.items() if value is not None}
        safetensors.torch.save_file(changed, weights)
        with pytest.raises(ValueError, match=message):
            GPT.from_pretrained(tmp_path)
    if precision == "int4":
        safetensors.torch.save_file({**whole, f"{name}.zero": torch.full_like(weight[:, :1], 9)}, weights)
        steps = scale.float().repeat_interleave(32, 1)[:, :16]
        moved = GPT.from_pretrained(tmp_path).embedding.weight
        torch.testing.assert_close(moved, model.embedding.weight - steps)
    safetensors.torch.save_file(whole, weights)
    assert GPT.from_pretrained(tmp_path).precision == precision
    for wrong in ({"quantization": "int2"}, {"quantization": None}):
        config.write_text(json.dumps({name: value for name, value in (settings | wrong).items() if value is not None}))
        with pytest.raises(ValueError, match=r"\bconfig\.json\b|\.scale\b"):
            GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("precision", "bad"), [("int8", torch.nan), *(("int4", bad) for bad in (torch.nan, torch.inf, 1e7))]
)
def test_weights_that_cannot_be_represented_are_not_quantised(precision, bad) -> None:
    model = make("gpt")
    model.decoder.layers[1].linear2.weight.data[3, 2] = bad
    with pytest.raises(ValueError, match=r"\bdecoder\.layers\.1\.linear2\.weight\b"):
        model.quantize(precision)
    with pytest.raises(ValueError, match=r"\bprecision\b"):
        model.quantize("int2")


@needs_cpp
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_folder_differs_from_a_model_in_int8_only_in_embeddings(tie_embeddings) -> None:
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


# ---- int4 ----


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e3])
def test_groups_of_32_are_rounded_on_their_own(dtype, spread) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(400, 75) * torch.rand(400, 1) * spread).to(dtype)
    weight[5], weight[6, 32:64] = 0.0, 0.0
    groups = to_groups(weight)
    assert groups.nibbles.shape == (400, 48) and groups.scale.shape == (400, 3) and groups.zero is None
    rounded = from_groups(groups, 75, torch.float32)
    assert (rounded[5] == 0).all() and (rounded[6, 32:64] == 0).all()
    alone = to_groups(weight[7:8, 32:64])
    assert torch.equal(from_groups(alone, 32, torch.float32), rounded[7:8, 32:64])
    # Half a step, but for what is cut off at either end; the error is that of 4 bits.
    wide = weight.float()
    steps = groups.scale.float().abs().repeat_interleave(32, 1)[:, :75]
    error = (rounded - wide).abs()
    assert (error <= steps * 2.51 + 1e-6).all()
    assert error.square().mean().sqrt() < 0.09 * wide.square().mean().sqrt()
    # No worse than the one scale that keeps the largest.
    largest = wide[:, :32].gather(1, wide[:, :32].abs().argmax(1, keepdim=True))
    one_scale = (largest / -8).half().float()
    plain = torch.where(one_scale != 0, wide[:, :32] / one_scale, 0).round().clamp(-8, 7) * one_scale - wide[:, :32]
    assert (error[:, :32].square().sum(1) <= plain.square().sum(1) * (1 + 1e-5)).all()


def test_nibbles_have_the_documented_order() -> None:
    nibbles, scale = torch.arange(16, dtype=torch.uint8)[None] * 17, torch.tensor([[0.5]], dtype=torch.float16)
    q = torch.arange(16).repeat_interleave(2)[:31]
    assert torch.equal(from_groups(Groups(nibbles, scale), 31, torch.float32)[0], (q - 8) * 0.5)
    assert torch.equal(from_groups(Groups(nibbles, scale, torch.tensor([[16]])), 31, torch.float32)[0], (q - 16) * 0.5)
    squares = (torch.arange(16) ** 2 // 2).to(torch.int8)
    groups = Groups(nibbles, scale.float() * 2.0**-40, levels=squares)
    assert torch.equal(from_groups(groups, 31, torch.float32)[0], squares[q] * 2.0**-41)
    order = Groups(torch.full((1, 16), 0x21, dtype=torch.uint8), scale)
    assert from_groups(order, 4, torch.float32).tolist() == [[-3.5, -3.0, -3.5, -3.0]]


def test_int4_is_kept_by_copies_and_lost_by_training() -> None:
    model = make("tied").quantize("int4")
    name = "encoder.layers.0.linear1.weight"
    before = model.int4_groups[name]
    back = copy.deepcopy(model).to(torch.bfloat16).float()
    for copied in (copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16), back, model.quantize("int4")):
        weight = copied.get_parameter(name)
        groups = groups_of(copied, [weight])[id(weight)]
        assert copied.precision == "int4"
        assert torch.equal(groups.nibbles, before.nibbles) and torch.equal(groups.scale, before.scale)
    with torch.no_grad():
        model.get_parameter(name).add_(0.01)
    weight = model.get_parameter(name)
    assert not is_on(before, weight)
    moved = groups_of(model, [weight])[id(weight)]
    assert all(torch.equal(a, b) for a, b in zip(moved[:2], to_groups(weight)[:2], strict=True))
    assert make("tied").quantize("int4").quantize().int4_groups is None


@needs_cpp
@pytest.mark.parametrize("kind", ["tied", "gpt"])
def test_a_quantised_model_decodes_in_int4_by_itself(kind, tmp_path) -> None:
    model = drawn(GPT if kind == "gpt" else Transformer)
    source = torch.randint(3, 70, (6, 9), generator=torch.Generator().manual_seed(1))

    def found(model, **options) -> torch.Tensor:
        return generate(model, source, max_new_tokens=6, return_dict_in_generate=True, **options).token_log_probs

    rounded = model.quantize("int4")
    rounded.save_pretrained(tmp_path)
    expected = found(rounded)
    for other in (rounded, type(model).from_pretrained(tmp_path)):
        assert torch.equal(found(other, precision="int4"), expected)
    assert torch.equal(found(type(model).from_pretrained(tmp_path)), expected)
    assert not torch.equal(found(rounded, precision="int8"), expected)
    assert not torch.equal(found(rounded, precision="fp32"), expected)
    # A matrix that the model doesn't keep in int4 is multiplied as int8: more exactly than rounded.
    mixed = copy.deepcopy(rounded)
    del mixed.int4_groups["decoder.layers.0.linear1.weight"]
    assert not torch.equal(found(mixed), expected)
    # Of a model that was never rounded, all but the embeddings are.
    for name in quantized_names(rounded):
        if "embedding" in name and not model.config.tie_embeddings:
            rounded.state_dict()[name].copy_(model.state_dict()[name])
    assert not torch.equal(found(model, precision="int4"), found(model))


def by_levels(model: GPT) -> GPT:
    """Returns a model in int4 whose groups say the same numbers by levels in another order."""
    result = copy.deepcopy(model)
    assert model.int4_groups is not None
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    levels, places = (order - 8).to(torch.int8), order.argsort().to(torch.uint8)

    def moved(nibbles: torch.Tensor) -> torch.Tensor:
        return places[(nibbles & 15).long()] | places[(nibbles >> 4).long()] << 4

    result.int4_groups = {
        name: Groups(moved(groups.nibbles), groups.scale.float(), None, levels)
        for name, groups in model.int4_groups.items()
    }
    return result


@needs_cpp
def test_levels_are_computed_copied_and_saved_as_the_numbers_that_they_say(tmp_path) -> None:
    options = {"num_experts": 4, "activation": "swiglu", "d_ff": 64, "tie_embeddings": True}
    plain = drawn(GPT, **options).quantize("int4")
    model = by_levels(plain)
    for name, groups in model.int4_groups.items():
        assert is_on(groups, model.state_dict()[name])
    model.save_pretrained(tmp_path / "a")
    loaded = GPT.from_pretrained(tmp_path / "a")
    source = torch.randint(3, 70, (40, 9), generator=torch.Generator().manual_seed(1))

    def scores(model: GPT) -> torch.Tensor:
        return generate(model, source, max_new_tokens=6, return_dict_in_generate=True).token_log_probs

    for same in (model, loaded, copy.deepcopy(model), model.quantize("int4")):
        assert torch.equal(scores(same), scores(plain))
    assert loaded.int4_groups.keys() == model.int4_groups.keys()
    for name, groups in model.int4_groups.items():
        assert all(torch.equal(a, b) for a, b in zip(groups, loaded.int4_groups[name], strict=True) if a is not None)
    loaded.save_pretrained(tmp_path / "b")
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab")
    assert first == second
    for each in (plain, model):
        each.decoder.layers[1] = each.decoder.layers[0]  # one copy of several names
    assert torch.equal(scores(model), scores(plain))
    with pytest.raises(ValueError, match=r"even steps.*levels"):  # only the C++ engine reads levels
        quantized_weights(model)
    whole, name = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors"), "embedding.weight"
    for change in (
        {f"{name}.levels": whole[f"{name}.levels"][:15].clone()},
        {f"{name}.scale": whole[f"{name}.scale"].half()},
        {f"{name}.zero": torch.full((70, 1), 8, dtype=torch.uint8)},
    ):
        safetensors.torch.save_file({**whole, **change}, tmp_path / "a" / "model.safetensors")
        with pytest.raises(ValueError, match=next(iter(change))):
            GPT.from_pretrained(tmp_path / "a")
