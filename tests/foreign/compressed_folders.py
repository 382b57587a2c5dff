"""Writes the folders in `compressed_tensors/`, by the package compressed-tensors itself.

Run it with the folder of the package, which the tests don't need, and that of version 0.12.2, the last that stores the
order of activations:

    PYTHONPATH=.:SITE python -m tests.foreign.compressed_folders
    PYTHONPATH=.:SITE_0_12_2 python -m tests.foreign.compressed_folders actorder

Each folder also has expected.json: the logits of a text by transformers, in fp64, with the weights as the package
decompresses them from scales in fp64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

FOLDERS = Path(__file__).parent / "compressed_tensors"
TEXT = [3, 17, 5, 30, 8, 8, 21, 11, 26]
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LINEAR = ["Linear"]
_HALF = r"re:.*self_attn\.[qk]_proj"
_REST = r"re:.*(v|o|gate|up|down)_proj$"


def _group(targets: list[str], inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, **({} if inputs is None else {"input_activations": inputs})}


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}
_FLOATS = {"num_bits": 8, "type": "float"}
_FOUR = {"num_bits": 4, "type": "int"}
_EIGHT = {"num_bits": 8, "type": "int"}
# By folder: the dtype, and the schemes.
CASES: dict[str, tuple[torch.dtype, list[dict[str, Any]], list[str]]] = {
    "w4a16": (torch.bfloat16, [_group(_LINEAR, **_FOUR, strategy="group", group_size=32)], ["lm_head"]),
    "w4a16_asym": (
        torch.float16,
        [_group([_HALF], **_FOUR, strategy="group", group_size=64, symmetric=False),
         _group([_REST], **_FOUR, strategy="channel", symmetric=False)],
        ["re:.*head"],
    ),
    "w8a16": (
        torch.bfloat16,
        [_group([_HALF], **_EIGHT, strategy="group", group_size=32, symmetric=False),
         _group([_REST], **_EIGHT, strategy="channel")],
        ["lm_head"],
    ),
    "w8a8": (
        torch.float16,
        [_group([_HALF], _STATIC, **_EIGHT, strategy="channel"),
         _group([_REST], _DYNAMIC, **_EIGHT, strategy="tensor", symmetric=False)],
        ["lm_head"],
    ),
    "fp8": (
        torch.bfloat16,
        [_group([_HALF], {**_FLOATS, "strategy": "tensor"}, **_FLOATS, strategy="tensor"),
         _group([r"re:.*[vo]_proj"], {**_FLOATS, "strategy": "token", "dynamic": True}, **_FLOATS, strategy="channel"),
         _group(_LINEAR, {**_FLOATS, "strategy": "group", "group_size": 32, "dynamic": True}, **_FLOATS,
                strategy="block", block_structure=[32, 32])],
        ["lm_head"],
    ),
    "mixed": (
        torch.bfloat16,
        [_group(["model.layers.0.mlp.down_proj"], **_EIGHT, strategy="group", group_size=32),
         _group([r"re:.*q_proj$"], _DYNAMIC, **_FOUR, strategy="channel"),
         _group([r"re:.*v_proj$"], {**_FLOATS, "strategy": "tensor"}, **_FLOATS, strategy="channel"),
         _group(_LINEAR, **_FOUR, strategy="group", group_size=16)],
        ["lm_head", r"re:.*k_proj"],
    ),
    "actorder": (
        torch.float16,
        [_group([r"re:.*mlp.*_proj"], **_FOUR, strategy="group", group_size=32, actorder="group"),
         _group([r"re:.*self_attn.*_proj"], **_FOUR, strategy="group", group_size=32, actorder="weight")],
        ["lm_head"],
    ),
}  # fmt: skip


def model_of(dtype: torch.dtype) -> Any:
    """Makes a small Llama."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 2 else 0.1
            parameter.copy_(torch.randn(parameter.shape) * scale + ("norm" in name))
    return model.to(dtype)


def write(name: str) -> None:
    """Writes a folder."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    dtype, groups, ignore = CASES[name]
    model, folder = model_of(dtype), FOLDERS / name
    config = QuantizationConfig(config_groups={f"group_{i}": each for i, each in enumerate(groups)}, ignore=ignore)
    apply_quantization_config(model, config)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        args, weight = scheme.weights, module.weight.detach().float()
        order = None
        if hasattr(module, "weight_g_idx") and args.actorder == "group":
            order = torch.randperm(weight.shape[1])
            module.weight_g_idx.data[order] = torch.arange(weight.shape[1], dtype=torch.int32) // args.group_size
            weight = weight[:, order]
        parts = _parts(weight, args)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
            if hasattr(module, "input_zero_point"):
                module.input_zero_point.data.fill_(3 if scheme.input_activations.type == "int" else 0)
    if name == "actorder":
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
        model.save_pretrained(folder, state_dict=compressor.compress(model))
    else:
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
    compressor.update_config(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "expected.json").write_text(json.dumps(_logits(model, load_file(folder / "model.safetensors"))))


def _parts(weight: Any, args: Any) -> Any:
    """Returns the numbers that share a scale along the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "group":
        return weight.unflatten(1, (-1, args.group_size))
    if args.strategy == "block":
        rows, columns = args.block_structure
        return weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    return weight


def _logits(model: Any, state: dict[str, Any]) -> list[list[float]]:
    """Returns the logits of `TEXT`, with the weights as the package decompresses them."""
    plain = model_of(torch.float64)
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            plain_state = {
                key.rsplit(".", 1)[1]: value for key, value in state.items() if key.rsplit(".", 1)[0] == name
            }
            with torch.no_grad():
                for key, value in plain_state.items():
                    getattr(plain.get_submodule(name), key).copy_(value)
            continue
        parts = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        parts["weight_scale"] = parts["weight_scale"].double()
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(_decompressed(parts, scheme))
    with torch.inference_mode():
        logits: list[list[float]] = plain(torch.tensor([TEXT])).logits[0].tolist()
    return logits


def _decompressed(parts: dict[str, Any], scheme: Any) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    if scheme.weights.actorder is None and hasattr(scheme, "format"):
        return BaseCompressor.get_value_from_registry(str(scheme.format.value)).decompress(parts, scheme)["weight"]
    compressor = BaseCompressor.load_from_registry("pack-quantized")  # the last version with an order
    return compressor.decompress_weight(parts, quantization_args=scheme.weights)


if __name__ == "__main__":
    for each in sys.argv[1:] or [name for name in CASES if name != "actorder"]:
        write(each)
