"""Folders of gpt-oss as it is published, with experts in MXFP4, have the numbers that transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastformer.checkpoints import load_model
from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.hf.mxfp4 import take_matrices
from fastformer.generation import generate
from fastformer.models import GPT
from fastformer.models.quantization import from_groups
from fastformer.models.stored import has_stored
from tests.checkpoints.families import ENGLISH, byte_level
from tests.foreign.gguf_files import to_mxfp4
from tests.generation.small import needs_cpp

IDS = torch.tensor([[5, 17, 40, 23, 9, 30, 31, 12]])


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any]:
    """Returns a folder, and transformers' model with its numbers."""
    backend = byte_level(["<|begin|>", "<|end|>", "<|pad|>"])._tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    config = transformers.GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        max_position_embeddings=64, pad_token_id=2, eos_token_id=1, initializer_range=0.2,
        experts_implementation="eager", rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(0.0, 0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    to_mxfp4(tmp_path, model)
    return tmp_path, model


def test_numbers_are_those_of_transformers(published: tuple[Path, Any]) -> None:
    folder, theirs = published
    model, tokenizer = load_model(folder, ("GPT",), dtype=torch.float32)
    assert isinstance(model, GPT) and model.precision == "int4" and model.config.attention_sinks
    assert tokenizer.decode(tokenizer.encode(ENGLISH[0])) == ENGLISH[0]
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    # Tokens of several blocks, rows of gates apart from those of the maps beside them.
    state = theirs.state_dict()
    rows = model.state_dict()["decoder.layers.1.mixture.linear1.weight"].view(4, 2, 96, 64)
    whole = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(rows[:, 0], whole[:, :, ::2].mT) and torch.equal(rows[:, 1], whole[:, :, 1::2].mT)
    rows = model.state_dict()["decoder.layers.0.mixture.linear2.weight"].view(4, 64, 96)
    assert torch.equal(rows, state["model.layers.0.mlp.experts.down_proj"].mT)


@needs_cpp
def test_the_engine_generates_from_a_folder(published: tuple[Path, Any]) -> None:
    folder, theirs = published
    model, _ = load_model(folder, ("GPT",), dtype=torch.float32)
    assert isinstance(model, GPT)
    mask = torch.ones_like(IDS)
    due = theirs.generate(IDS, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    found = generate(model, IDS.tolist(), max_new_tokens=12, min_new_tokens=12, precision="fp32")
    assert torch.equal(found.cpu(), due)
    rounded = generate(model, IDS.tolist(), max_new_tokens=12, min_new_tokens=12)  # in int4, the others in int8
    with torch.inference_mode():
        logits = model(rounded[:, :-1])[:, -12:]
    chosen = logits.gather(-1, rounded[:, -12:, None]).squeeze(-1)
    assert (logits.amax(-1) - chosen).mean() < 0.1 * logits.std()


@needs_cpp
def test_the_engine_keeps_the_numbers_of_4_bits(published: tuple[Path, Any]) -> None:
    folder, _ = published
    ids = torch.randint(3, 200, (1024, 9), generator=torch.Generator().manual_seed(1))
    read = load_model(folder, ("GPT",), dtype=torch.float32)[0].eval()
    with torch.inference_mode():
        due = read(ids)[:, -1].double().log_softmax(-1)

    def error(precision: str | None) -> float:
        model, _ = load_model(folder, ("GPT",), dtype=torch.float32)
        groups = model.int4_groups or {}
        assert {name for name, part in groups.items() if part.levels is not None} == {
            f"decoder.layers.{layer}.mixture.linear{i}.weight" for layer in (0, 1) for i in (1, 2)
        }
        out = generate(
            model, ids.tolist(), max_new_tokens=1, precision=precision, engine="cpp", return_dict_in_generate=True
        )
        assert has_stored(model.modules())  # the engine packs the weights from the file
        gap = out.token_log_probs[:, -1].double() - due.gather(1, out.sequences[:, -1:])[:, 0]
        return float(gap.abs().median())  # the few tokens that go to other experts differ more

    assert error(None) == error("int4") < error("int8")


def without(end: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]

    return change


def instead(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: change(tensor).contiguous() for name, tensor in tensors.items() if name.endswith(end)}

    return apply


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": (without("down_proj_scales"), "down_proj_scales"),
    "no blocks": (without("_blocks"), "_blocks"),
    "short scales": (instead("down_proj_scales", lambda x: x[..., :1]), "down_proj_scales"),
    "blocks of 8 bytes": (instead("gate_up_proj_blocks", lambda x: x[..., :8]), "gate_up_proj_blocks"),
    "blocks of another dtype": (instead("down_proj_blocks", Tensor.char), "down_proj_blocks"),
    "fewer experts": (instead("down_proj_bias", lambda x: x[:3]), "down_proj_bias"),
    "fewer rows": (instead("down_proj_blocks", lambda x: x[:, :32]), "down_proj"),
    "a gate alone": (
        lambda tensors: [instead(f"gate_up_proj_{end}", lambda x: x[:, 1:])(tensors) for end in ("blocks", "scales")],
        "gate_up_proj_blocks of pairs",
    ),
    "no number": (instead("down_proj_scales", lambda x: x.fill_(255)), "finite"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, published: tuple[Path, Any]) -> None:
    folder, _ = published
    change, match = DAMAGE[name]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=match):
        load_model(folder, ("GPT",))[0].state_dict()


def test_the_smallest_and_the_largest_numbers_are_exact() -> None:
    nibbles = torch.arange(16, dtype=torch.uint8)
    blocks = (nibbles | nibbles.flip(0) << 4).expand(1, 1, 3, 16).contiguous()
    tensors = {"x_blocks": blocks, "x_scales": torch.tensor([[[0, 127, 252]]], dtype=torch.uint8)}
    take_matrices(tensors, Path("a folder"))
    (matrix,) = tensors.values()
    assert isinstance(matrix, FileMatrix)
    assert torch.equal(from_groups(matrix.groups(0, 1), 96, torch.float32), matrix.read())
    halves = {"x_blocks": torch.full_like(blocks, 0x11), "x_scales": torch.tensor([[[255, 127, 127]]]).byte()}
    take_matrices(halves, Path("a folder"))
    for read in (lambda part: part.read(), lambda part: part.groups(0, 1)):
        with pytest.raises(ValueError, match="finite"):
            read(halves["x"])
    row = matrix.read()[0].view(3, 16, 2).double()
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    due = torch.cat([positive, -positive])
    for place, power in enumerate((-127, 0, 125)):
        assert torch.equal(row[place, :, 0], due * 2.0**power)
        assert torch.equal(row[place, :, 1], due.flip(0) * 2.0**power)
