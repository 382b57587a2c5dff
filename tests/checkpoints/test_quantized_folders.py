"""Folders that GPTQ and AWQ quantised have the weights that the formats define, and decode as int4.

The writers here follow the formats: words of eight nibbles, GPTQ's along the inputs with zeros less 1 ("gptq") or as
they are ("gptq_v2"), AWQ's along the outputs in an order of their own.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from fastformer.checkpoints import load_model
from fastformer.checkpoints.hf import FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.compressed_tensors import METHOD
from fastformer.checkpoints.hf.quantized import dequantized, note_precision, quantization_settings
from fastformer.generation import generate
from fastformer.models import GPT
from fastformer.models.quantization import from_groups, groups_of, is_on
from fastformer.models.stored import stand_in
from fastformer.models.weights import SavedWeights
from tests.checkpoints.decoders import FOLDERS
from tests.checkpoints.present import PRESENT
from tests.generation.small import needs_cpp
from tests.integrations.config_fields import Change, Nested, made

INPUTS, HIDDEN, VOCAB = 128, 256, 40
SETTINGS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": INPUTS, "intermediate_size": HIDDEN,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LAYERS = {
    **{f"self_attn.{name}_proj": (size, 128) for name, size in (("q", 128), ("k", 64), ("v", 64), ("o", 128))},
    **{f"mlp.{name}_proj": (256, 128) for name in ("gate", "up")},
    "mlp.down_proj": (128, 256),
}


def words(nibbles: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Packs numbers from 0 to 15, (rows, 8 n), into (rows, n) int32: bits 4 i to 4 i + 3 are number order[i]."""
    parts = nibbles.long().view(len(nibbles), -1, 8)
    word = sum(parts[..., place] << 4 * i for i, place in enumerate(order))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def layer(method: str, outputs: int, inputs: int, size: int, generator: torch.Generator, **options: bool):
    """Returns the tensors of a layer, and the weight (out, in) that they represent."""
    size = inputs if size == -1 else size
    groups = inputs // size
    q = torch.randint(16, (inputs, outputs), generator=generator)
    zeros = torch.full((groups, outputs), 8)
    if not options.get("sym"):
        zeros = torch.randint(1, 16, (groups, outputs), generator=generator)
    scales = (torch.rand(groups, outputs, generator=generator) * 0.05 + 1e-3).half()
    index = torch.arange(inputs) // size
    if options.get("shuffled"):
        index = index[torch.randperm(inputs, generator=generator)]
    weight = (q - zeros[index]).double() * scales[index].double()
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(q, order), "qzeros": words(zeros, order), "scales": scales}, weight.T
    stored = zeros if options.get("v2") else zeros - 1
    tensors = {"qweight": words(q.T.contiguous()).T.contiguous(), "qzeros": words(stored), "scales": scales}
    return {**tensors, "g_idx": index.to(torch.int32)}, weight.T


def checkpoint(method: str, size: int, **options: bool) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Returns settings, the quantised state, and a plain state with the same weights."""
    generator = torch.Generator().manual_seed(size + 2 * len(method))
    plain = {
        "model.embed_tokens.weight": torch.randn(VOCAB, INPUTS, generator=generator).half(),
        "lm_head.weight": torch.randn(VOCAB, INPUTS, generator=generator).half() * 0.1,
        "model.norm.weight": torch.ones(INPUTS).half(),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{i}.{norm}.weight"] = torch.rand(INPUTS, generator=generator).half() + 0.5
    rounded = dict(plain)
    for i in range(2):
        for name, (outputs, inputs) in LAYERS.items():
            tensors, weight = layer(method, outputs, inputs, size, generator, **options)
            rounded |= {f"model.layers.{i}.{name}.{part}": tensor for part, tensor in tensors.items()}
            plain[f"model.layers.{i}.{name}.weight"] = weight.float()
    config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": size}
    if method == "gptq":
        config |= {"desc_act": options.get("shuffled", False), "sym": options.get("sym", False)}
        config |= {"checkpoint_format": "gptq_v2"} if options.get("v2") else {}
    else:
        config |= {"zero_point": True, "version": "gemm"}
    return {**SETTINGS, "quantization_config": config}, rounded, plain


def read(folder, settings: dict[str, Any], rounded: dict[str, Tensor]) -> GPT:
    how = quantization_settings(folder, settings)
    assert how is not None
    plain = dequantized(settings, how, rounded, folder)
    model = FAMILIES["llama"].to_model(Checkpoint(plain.settings, plain.state, dtype=torch.float32))
    assert isinstance(model, GPT)
    note_precision(model, plain, folder)
    return model


CASES = [
    ("gptq", 32, {}),
    ("gptq", 128, {"sym": True}),
    ("gptq", 64, {"v2": True}),
    ("gptq", 128, {"v2": True, "sym": True}),
    ("gptq", -1, {}),
    ("awq", 32, {}),
    ("awq", 128, {}),
    ("awq", 64, {}),
]


@pytest.mark.parametrize(("method", "size", "options"), CASES)
def test_weights_follow_the_formats_definition(method, size, options, tmp_path) -> None:
    settings, rounded, plain = checkpoint(method, size, **options)
    model = read(tmp_path, settings, rounded)
    expected = FAMILIES["llama"].to_model(Checkpoint(SETTINGS, plain, dtype=torch.float32))
    assert model.precision == "int4" and not model.training
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    matrices = {f"decoder.layers.{i}.{name}" for i in range(2) for name in ("linear1.weight", "linear2.weight")}
    matrices |= {
        f"decoder.layers.{i}.self_attn.{name}" for i in range(2) for name in ("in_proj_weight", "out_proj.weight")
    }
    assert model.int4_groups is not None and model.int4_groups.keys() == matrices  # lm_head isn't rounded
    for name, groups in model.int4_groups.items():
        weight = model.get_parameter(name)
        assert torch.equal(from_groups(groups, weight.shape[1], torch.float32), weight)
        assert (groups.zero is None) == options.get("sym", False)


@needs_cpp
@pytest.mark.parametrize(("method", "size", "options"), [CASES[0], ("awq", 128, {}), ("gptq", 32, {"shuffled": True})])
def test_quantised_folders_decode_in_int4(method, size, options, tmp_path) -> None:
    settings, rounded, plain = checkpoint(method, size, **options)
    model = read(tmp_path / "none", settings, rounded)
    exact = FAMILIES["llama"].to_model(Checkpoint(SETTINGS, plain, dtype=torch.float64))
    prompt = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    found = generate(model, prompt, min_new_tokens=8, max_new_tokens=8, return_dict_in_generate=True)
    due = exact(found.sequences[:, :-1])[:, 8:].log_softmax(-1)
    chosen = due.gather(-1, found.sequences[:, 9:, None]).squeeze(-1)
    assert (found.token_log_probs.double() - chosen).square().mean().sqrt() < 0.1 * due.std()
    assert stand_in(model) is not model  # the engine packed it from the file
    # Saved and loaded, it is the same.
    model.save_pretrained(tmp_path)
    again = generate(
        GPT.from_pretrained(tmp_path), prompt, min_new_tokens=8, max_new_tokens=8, return_dict_in_generate=True
    )
    assert torch.equal(again.sequences, found.sequences) and torch.equal(again.scores, found.scores)


@needs_cpp
@pytest.mark.parametrize(("method", "size"), [("gptq", 32), ("awq", 64)])
def test_a_shortlist_keeps_the_zero_points_of_the_output(method, size, tmp_path) -> None:
    settings, rounded, plain = checkpoint(method, size)
    tensors, weight = layer(method, VOCAB, INPUTS, size, torch.Generator().manual_seed(1))
    del rounded["lm_head.weight"]
    rounded |= {f"lm_head.{part}": tensor for part, tensor in tensors.items()}
    model = read(tmp_path, settings, rounded)
    exact = FAMILIES["llama"].to_model(
        Checkpoint(SETTINGS, plain | {"lm_head.weight": weight.float()}, dtype=torch.float64)
    )
    prompt = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    allowed = [*range(3, VOCAB, 4)]
    found = generate(model, prompt, shortlist=allowed, min_new_tokens=8, max_new_tokens=8, return_dict_in_generate=True)
    logits = exact(found.sequences[:, :-1])[:, 8:]
    due = torch.full_like(logits, -torch.inf)
    due[..., allowed] = logits[..., allowed]
    chosen = due.log_softmax(-1).gather(-1, found.sequences[:, 9:, None]).squeeze(-1)
    assert (found.token_log_probs.double() - chosen).square().mean().sqrt() < 0.1 * logits.std()


def test_groups_out_of_order_keep_their_numbers(tmp_path, caplog) -> None:
    settings, rounded, plain = checkpoint("gptq", 64, shuffled=True)
    with caplog.at_level("WARNING", logger="fastformer"):
        model = read(tmp_path, settings, rounded)
    assert "desc_act" in caplog.text and "14 of 14" in caplog.text
    expected = FAMILIES["llama"].to_model(Checkpoint(SETTINGS, plain, dtype=torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert model.int4_groups == {} and model.precision == "int4" and groups_of(model, model.parameters()) == {}
    # desc_act alone says nothing: groups of neighbours are int4.
    settings, rounded, _ = checkpoint("gptq", 64)
    settings["quantization_config"]["desc_act"] = True
    assert len(read(tmp_path, settings, rounded).int4_groups or {}) == 8


def test_settings_of_older_folders(tmp_path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False}))
    found = quantization_settings(tmp_path, SETTINGS)
    assert found is not None and found["quant_method"] == "gptq" and found["form"] == "gptq"
    (tmp_path / "quantize_config.json").unlink()
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    found = quantization_settings(tmp_path, SETTINGS)
    assert found is not None and found["quant_method"] == "awq" and found["group_size"] == 64
    (tmp_path / "quant_config.json").unlink()
    assert quantization_settings(tmp_path, SETTINGS) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": None}, "quantization_config"),
        ({"bits": 8}, r"\bbits 8\b"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"is_marlin_format": True}, "checkpoint_format"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"group_size": 48}, r"\bgroup_size 48\b"),
        ({"group_size": 16}, r"\bgroup_size 16\b"),
        ({"group_size": 64}, r"\bscales\b"),
    ],
)
def test_other_ways_are_refused_by_name(change, message, tmp_path) -> None:
    settings, rounded, _ = checkpoint("gptq", 32)
    settings["quantization_config"] |= change
    with pytest.raises(ValueError, match=message):
        read(tmp_path, settings, rounded)


def test_tensors_that_do_not_fit_are_named(tmp_path) -> None:
    settings, rounded, _ = checkpoint("gptq", 32)
    name = "model.layers.1.mlp.up_proj"
    for part, value in (
        ("scales", None),
        ("qzeros", None),
        ("qweight", rounded[f"{name}.qweight"].float()),
        ("qzeros", rounded[f"{name}.qzeros"][:-1]),
        ("qzeros", rounded[f"{name}.qzeros"][:, :-1]),
        ("scales", rounded[f"{name}.scales"][:, :-1]),
        ("scales", rounded[f"{name}.scales"][:-1]),
        ("scales", rounded[f"{name}.scales"].int()),
        ("g_idx", rounded[f"{name}.g_idx"] + 1),
        ("g_idx", rounded[f"{name}.g_idx"][:-1]),
    ):
        changed = {key: tensor for key, tensor in rounded.items() if key != f"{name}.{part}"}
        if value is not None:
            changed[f"{name}.{part}"] = value
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj"):
            read(tmp_path, settings, changed)
    with pytest.raises(ValueError, match=r"\bqweight\b"):
        read(tmp_path, settings, {key: tensor for key, tensor in rounded.items() if not key.endswith("qweight")})


def test_biases_of_zero_that_the_model_lacks(tmp_path) -> None:
    settings, rounded, _ = checkpoint("gptq", 128)
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert read(tmp_path, settings, {**rounded, bias: torch.zeros(128)}).precision == "int4"
    with pytest.raises(ValueError, match="bias"):
        read(tmp_path, settings, {**rounded, bias: torch.ones(128)})


@pytest.mark.parametrize("flag, place", [("attention_bias", "self_attn"), ("mlp_bias", "mlp")])
def test_biases_of_zero_that_the_model_has(flag, place, tmp_path) -> None:
    settings, rounded, _ = checkpoint("gptq", 128)
    zeros = {
        name.replace("scales", "bias"): torch.zeros(tensor.shape[1])
        for name, tensor in rounded.items()
        if name.endswith("scales") and place in name
    }
    model = read(tmp_path, {**settings, flag: True}, {**rounded, **zeros})
    assert sum(name.endswith("bias") for name in model.state_dict()) and model.precision == "int4"


def test_layers_that_are_transposed(tmp_path) -> None:
    """GPT-2's weights are (in, out), and a square one must not be mistaken for its transpose."""
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=1)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    generator, rounded = torch.Generator().manual_seed(3), theirs.state_dict()
    for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.0.{part}"
        inputs, outputs = rounded.pop(f"{name}.weight").shape
        tensors, weight = layer("gptq", outputs, inputs, 32, generator)
        rounded |= {f"{name}.{kind}": tensor for kind, tensor in tensors.items()}
        theirs.get_parameter(f"{name}.weight").data.copy_(weight.T)
    settings = config.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    plain = dequantized(settings, quantization_settings(tmp_path, settings) or {}, rounded, tmp_path)
    model = FAMILIES["gpt2"].to_model(Checkpoint(plain.settings, plain.state, dtype=torch.float32))
    note_precision(model, plain, tmp_path)
    assert isinstance(model, GPT) and len(model.int4_groups or {}) == 4
    ids = torch.randint(40, (2, 9), generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_moved_model_is_rounded_again(tmp_path) -> None:
    settings, rounded, _ = checkpoint("awq", 64)
    model = copy.deepcopy(read(tmp_path, settings, rounded))
    name = "decoder.layers.0.linear1.weight"
    assert model.int4_groups is not None and is_on(model.int4_groups[name], model.get_parameter(name))
    with torch.no_grad():
        model.get_parameter(name)[3, 5] += 1
    weight = model.get_parameter(name)
    moved = groups_of(model, [weight])[id(weight)]
    assert moved.zero is None and not is_on(moved, weight)


def test_a_whole_folder(tmp_path, monkeypatch) -> None:
    """Read from disk without transformers, the model decodes like one with the same weights."""
    FOLDERS["llama3"](tmp_path / "plain")
    state = SavedWeights.in_folder(tmp_path / "plain").read()
    for file in (tmp_path / "plain").glob("*.safetensors*"):
        file.unlink()
    shutil.copytree(tmp_path / "plain", tmp_path / "gptq")
    generator, rounded = torch.Generator().manual_seed(3), dict(state)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        tensors, weight = layer("gptq", len(state[name]), state[name].shape[1], -1, generator)
        del rounded[name]
        rounded |= {name.removesuffix("weight") + part: tensor for part, tensor in tensors.items()}
        state[name] = weight.float().contiguous()
    safetensors.torch.save_file(state, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(rounded, tmp_path / "gptq" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "transformers", None)
    model, tokenizer = load_model(tmp_path / "gptq", ("GPT",))
    plain, _ = load_model(tmp_path / "plain", ("GPT",))
    assert model.precision == "int4" and plain.precision is None and len(model.int4_groups) > 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    ids = [tokenizer.encode("two birds")]
    for engine in ("kv_cache", "recompute"):
        assert torch.equal(*(generate(one, ids, max_new_tokens=6, engine=engine) for one in (model, plain)))


# Matrices that programs which quantise leave as they are.
_LEFT = re.compile(
    r"embed|shared\.weight|wte|wpe|lm_head|relative|router|gate\.weight|position|token_type|cls|pooler|head|classifier"
)
_FAST = ("bart", "gpt2", "gpt_neox", "llama", "mixtral", "bert")


@pytest.mark.parametrize(
    "kind", [kind if kind in _FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in PRESENT]
)
def test_every_family_has_the_numbers_of_a_quantised_folder(kind, tmp_path) -> None:
    """By GPTQ and AWQ in 4 bits, and by llm-compressor in 8."""
    family = FAMILIES[kind]
    one = Nested(type_vocab_size=1) if kind == "bert" else Nested()  # a matrix of one row
    made(Change(kind, "", one, family.kind == "encoder")).save_pretrained(tmp_path)
    state, settings = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    matrices = [name for name, tensor in state.items() if tensor.dim() == 2 and name.endswith(".weight")]
    names = [name for name in matrices if not _LEFT.search(name)]
    draw = torch.Generator().manual_seed(3)
    for method in ("gptq", "awq", METHOD):
        plain, rounded = dict(state), dict(state)
        for name in names:
            matrix, module = state[name], name.removesuffix(".weight")
            if method == METHOD:
                scale = matrix.abs().amax(1, keepdim=True) / 127
                rounded[name] = (matrix / scale).round().to(torch.int8)
                rounded[f"{name}_scale"], plain[name] = scale, rounded[name].float() * scale
                continue
            if any(size % 8 for size in matrix.shape):
                continue
            del rounded[name]
            turned = kind == "gpt2"
            outputs, inputs = matrix.T.shape if turned else matrix.shape
            tensors, weight = layer(method, outputs, inputs, -1, draw, sym=True)
            rounded |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
            plain[name] = (weight.T if turned else weight).float().contiguous()
        config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": -1}
        if method == METHOD:
            weights = {"num_bits": 8, "strategy": "channel"}
            groups = {"all": {"targets": ["Linear"], "weights": weights}}
            config = {"quant_method": method, "format": "int-quantized", "config_groups": groups}
        how = quantization_settings(tmp_path, {"quantization_config": config})
        assert how is not None and len(names) > 3
        source = dequantized({**settings, "quantization_config": config}, how, rounded, tmp_path)
        found = family.to_model(Checkpoint(source.settings, source.state, dtype=torch.float32))
        expected = family.to_model(Checkpoint(settings, plain, dtype=torch.float32))
        note_precision(found, source, tmp_path)
        assert found.config == expected.config and found.precision == ("int8" if method == METHOD else "int4")
        if method == "gptq" and kind in ("bart", "gpt_neox", "llama"):  # which join and reorder rows
            assert any(name.endswith("in_proj_weight") for name in found.int4_groups or {}), kind
        ours = found.state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in expected.state_dict().items())
