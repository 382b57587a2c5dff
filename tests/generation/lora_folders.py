"""LoRA adapters in folders as peft saves them, and the models that they stand for."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SETTINGS: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "somewhere", "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
    "layers_to_transform": None, "lora_alpha": 6, "lora_dropout": 0.1, "modules_to_save": None, "peft_type": "LORA",
    "r": 3, "rank_pattern": {}, "revision": None, "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
}  # fmt: skip


def linears(model: nn.Module, *ends: str) -> list[str]:
    """Returns the names of a model's matrices, without its head: all of them, or those of modules with these names."""
    named = ((name, type(module).__name__) for name, module in model.named_modules())
    names = [name for name, kind in named if kind in ("Linear", "Conv1D") and ("layers." in name or ".h." in name)]
    return [name for name in names if not ends or name.endswith(tuple(f".{end}" for end in ends))]


def write_adapter(
    folder: Path,
    model: nn.Module,
    modules: Sequence[str],
    *,
    seed: int = 1,
    size: float = 0.5,
    change: Callable[[dict[str, Tensor]], object] = lambda state: None,
    **settings: Any,
) -> Path:
    """Writes an adapter of random numbers for modules of a model of transformers.

    Args:
        folder: the folder.
        model: the model.
        modules: the modules' names.
        seed, size: of the numbers.
        change: changes the tensors before they are written.
        settings: settings other than `SETTINGS`.
    """
    targets = sorted({name.rpartition(".")[2] for name in modules})
    settings = {**SETTINGS, "target_modules": targets, **settings}
    draws = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name in modules:
        weight = model.get_parameter(f"{name}.weight")
        is_turned = type(model.get_submodule(name)).__name__ == "Conv1D"
        outputs, inputs = reversed(weight.shape) if is_turned else weight.shape
        rank = next((r for end, r in settings["rank_pattern"].items() if name.endswith(end)), settings["r"])
        a, b = torch.randn(rank, inputs, generator=draws), torch.randn(outputs, rank, generator=draws)
        state[f"base_model.model.{name}.lora_A.weight"] = a * size / inputs**0.5
        state[f"base_model.model.{name}.lora_B.weight"] = b * size
    change(state)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """Returns a copy of a model of transformers whose matrices contain the adapter of a folder."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    state = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        a = state.get(f"base_model.model.{name}.lora_A.weight")
        if a is None:
            continue
        b = state[f"base_model.model.{name}.lora_B.weight"]
        alpha = next((v for end, v in settings["alpha_pattern"].items() if name.endswith(end)), settings["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if settings["use_rslora"] else len(a))
        product = scale * b.double() @ a.double()
        module.weight += (product.t() if type(module).__name__ == "Conv1D" else product).to(module.weight.dtype)
    return model
