"""LoRA adapters (Hu et al. 2021) of decoders, in the folders that peft saves.

adapter_config.json          r, lora_alpha, target_modules and the other settings of peft's LoraConfig
adapter_model.safetensors    A and B of each module that the adapter changes
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.hf import DECODER_FORMS
from fastformer.checkpoints.hf.decoder import Form, as_saved, parts_of
from fastformer.files import read_json
from fastformer.models import GPT
from fastformer.models.weights import FLOATING, SavedWeights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
# The weights that an adapter may change, by their ends in fastformer's names.
_LINEARS = (
    *("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"),
    *("self_attn.gate_proj.weight", "self_attn.in_proj.weight", "self_attn.gates.weight"),
)
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Settings that are read, and those that matter only in training or for the base model's place.
_READ = frozenset({"alpha_pattern", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora"})
_OF_TRAINING = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
))  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",)}  # values, besides those that are empty, that change nothing
# How A and B may begin. Other ways change the base model's weights, too.
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
_MOST_RANK, _MOST_PATTERN = 4096, 200


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter of a `GPT`, by which a weight's product W x becomes W x + B (A x).

    Attributes:
        factors: A, (rank, inputs), and B, (outputs, rank), for each weight that changes, by its name in the model's
            state_dict; fp32. B contains the scale.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]


def load_adapter(folder: str | os.PathLike[str], model: object) -> Adapter:
    """Reads the adapter of a folder that peft saved, for a model. No code of the folder runs.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors.
        model: the `GPT` that the adapter changes.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: a missing or damaged file; a kind of adapter that isn't supported, such as DoRA; or one that doesn't
            fit the model.
    """
    path = Path(folder)
    if not isinstance(model, GPT):
        raise ValueError(f"expected a decoder-only model for the adapter {path}, got {type(model).__name__}")
    try:
        settings = read_json(path / CONFIG)
        _check_settings(settings)
        return _converted(_factors_of(path, settings), model, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for an adapter of another kind than those that are supported."""
    if (kind := settings.get("peft_type")) != "LORA":
        raise ValueError(f"expected an adapter of peft_type LORA, got {kind!r:.60}")
    if (begun := settings.get("init_lora_weights")) not in _BEGINNINGS:
        raise ValueError(f"expected an adapter of unchanged base weights, got init_lora_weights={begun!r:.60}")
    if (task := settings.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ValueError(f"expected an adapter of task_type CAUSAL_LM, got {task!r:.60}")
    for name, value in settings.items():
        if name not in _READ | _OF_TRAINING and value and value not in _NEUTRAL.get(name, ()):
            raise ValueError(f"expected an adapter without {name}, which isn't supported, got {value!r:.60}")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        _check_number(name, settings.get(name), kinds)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"expected {name} to be an object, got {patterns!r:.60}")
        for pattern, value in patterns.items():
            _check_number(f"{name}[{pattern!r:.60}]", value, int if name == "rank_pattern" else int | float)
            if len(pattern) > _MOST_PATTERN or not _is_pattern(pattern):
                raise ValueError(f"expected {name} to have names of modules, got {pattern!r:.60}")
    targets = settings.get("target_modules")
    if not (isinstance(targets, str) or (isinstance(targets, list) and all(isinstance(one, str) for one in targets))):
        raise ValueError(f"expected target_modules to be names or a pattern, got {targets!r:.60}")


def _check_number(name: str, value: Any, kinds: Any) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"expected {name} to be a number above 0, got {value!r:.60}")


def _is_pattern(text: str) -> bool:
    """Returns whether a text is a pattern whose match takes no time: few parts repeat, and none inside of another."""
    if "(" in text or len(re.findall(r"[*+{?]", text)) > 3:
        return False
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _factors_of(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and B, with its scale, of each module, by peft's names."""
    file = folder / WEIGHTS
    if not file.is_file():
        what = f"; {_PICKLE} may hold code: save it as safetensors" if (folder / _PICKLE).is_file() else ""
        raise ValueError(f"expected the file {WEIGHTS}, which doesn't exist{what}")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in SavedWeights(file, (file,), {}, {}).read().items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ValueError(f"expected the tensors lora_A and lora_B of modules, got {name!r:.120}")
        if tensor.dtype not in FLOATING or tensor.dim() != 2:
            raise ValueError(f"expected matrices of numbers, got {name} of {tensor.dtype} and shape {(*tensor.shape,)}")
        halves.setdefault(match[1], {})[match[2]] = tensor.float()
    if not halves:
        raise ValueError(f"expected the tensors of an adapter in {WEIGHTS}, got none")
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for module, half in halves.items():
        if len(half) < 2:
            raise ValueError(f"expected lora_A and lora_B of {module}, got only lora_{next(iter(half))}")
        rank = int(_by_pattern(settings.get("rank_pattern"), module, settings["r"]))
        if half["A"].shape[0] != rank or half["B"].shape[1] != rank or rank > _MOST_RANK:
            shapes = (*half["A"].shape,), (*half["B"].shape,)
            raise ValueError(f"expected matrices of rank {rank} for {module}, got {shapes[0]} and {shapes[1]}")
        alpha = _by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
        factors[module] = half["A"], half["B"] * (alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
    return factors


def _by_pattern(patterns: Mapping[str, float] | None, module: str, otherwise: float) -> float:
    """Returns the value of the first pattern that a module's name ends with, as peft does."""
    found = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, otherwise)


def _converted(factors: Mapping[str, tuple[Tensor, Tensor]], model: GPT, settings: Mapping[str, Any]) -> Adapter:
    """Returns the adapter under the model's names."""
    results = []
    for form, model_settings in _forms(model, factors):
        linears = dict(_linears(form, model))
        modules = [module for parts in linears.values() for module in parts]
        pairs, parts_of = _opened(factors, form, model_settings)
        _check_modules(pairs, modules, settings, parts_of)
        results.append(
            {
                name: _whole(name, [pairs.get(module) for module in parts], parts, form, model)
                for name, parts in linears.items()
                if any(module in pairs for module in parts)
            }
        )
    first, *others = results
    for other in others:
        if other.keys() != first.keys() or any(
            not torch.equal(mine, its)
            for name, pair in first.items()
            for mine, its in zip(pair, other[name], strict=True)
        ):
            raise ValueError("expected a model that was loaded from a folder of transformers, which names its family")
    return Adapter(first)


def _opened(
    factors: Mapping[str, tuple[Tensor, Tensor]], form: Form, settings: Mapping[str, Any]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, set[str]]]:
    """Returns the factors of the modules that the form's names have, and the last names of those that one consists of.

    A module of the family may be several of these, whose last names are given by its own.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    parts_of: dict[str, set[str]] = {}
    for module, (a, b) in factors.items():
        opened = form.open({f"{module}.weight": b}, settings)
        own = {name.removesuffix(".weight"): (a, part) for name, part in opened.items()}
        parts_of.setdefault(_last(module), set()).update(map(_last, own))
        pairs |= own
    return pairs, parts_of


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _forms(model: GPT, factors: Iterable[str]) -> list[tuple[Form, Mapping[str, Any]]]:
    """Returns the family of a model, with its settings; of a model from elsewhere all families that it may have.

    A model that was converted names its family, also in a run folder. So others have none of the families whose
    settings say how to read their weights, unless no other family fits.
    """
    if (source := model.source_settings) is not None:
        if (kind := source["model_type"]) not in DECODER_FORMS:
            raise ValueError(f"expected a model of a family in {sorted(DECODER_FORMS)}, got {kind!r}")
        return [(DECODER_FORMS[kind], source)]
    opened = None
    forms: list[tuple[Form, Mapping[str, Any]]] = []
    for form in DECODER_FORMS.values():
        try:
            found = form.settings(model.config)
        except ValueError:
            continue
        if form.open is as_saved:
            forms.append((form, found))
        else:
            opened = opened or form.name
    if opened is not None and not forms:
        raise ValueError(f"expected a {opened} that was loaded from a folder of transformers")
    names = [{part for parts in dict(_linears(form, model)).values() for part in parts} for form, _ in forms]
    fitting = [form for form, known in zip(forms, names, strict=True) if known.issuperset(factors)]
    if not forms:
        raise ValueError("expected a model of a family of transformers, got one with options that no family has")
    return fitting or forms[:1]


def _linears(form: Form, model: GPT) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of the layers' matrices, each with the family's names of the modules that it consists of."""
    for name, parts in form.names(model.config).items():
        if name.startswith("decoder.layers.") and name.split(".", 3)[3] in _LINEARS:
            yield name, [form.prefix + part.removesuffix(".weight") for part in parts]


def _check_modules(
    factors: Mapping[str, Any], modules: Sequence[str], settings: Mapping[str, Any], parts_of: Mapping[str, set[str]]
) -> None:
    """Raises ValueError unless the adapter has factors for just the modules that its settings name."""
    kinds = ", ".join(sorted({*map(_last, modules)}))
    if unknown := factors.keys() - set(modules):
        raise ValueError(f"expected an adapter of the model's modules {kinds}, got one of {min(unknown)!r:.120}")
    targets = settings["target_modules"]
    if isinstance(targets, list):
        split = [target.rpartition(".") for target in targets]
        targets = [f"{place}{dot}{part}" for place, dot, last in split for part in sorted(parts_of.get(last, {last}))]
        for target in targets:
            if not any(_names(target, module) for module in modules):
                raise ValueError(f"expected target_modules among {kinds}, got {target!r:.60}, which the model lacks")
    elif targets != "all-linear":
        return  # a pattern, which may choose any modules
    if any(settings.get(name) for name in ("exclude_modules", "layers_to_transform", "layers_pattern")):
        return
    wanted = modules if isinstance(targets, str) else [m for m in modules if any(_names(one, m) for one in targets)]
    if missing := [module for module in wanted if module not in factors]:
        raise ValueError(f"expected lora_A and lora_B of {missing[0]}, got none")


def _names(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _whole(
    name: str,
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    modules: Sequence[str],
    form: Form,
    model: GPT,
) -> tuple[Tensor, Tensor]:
    """Returns A and B of a matrix that consists of several modules, some of which have factors."""
    outputs, inputs = model.get_parameter(name).shape
    whole = torch.empty(outputs, 1, device="meta")
    sizes = [len(part) for part in parts_of(name, whole, model.config, len(modules))]
    all_a, all_b, first = [], [], 0
    for module, pair, size in zip(modules, pairs, sizes, strict=True):
        if pair is not None:
            a, b = pair
            if a.shape[1] != inputs or len(b) != size:
                raise ValueError(
                    f"expected lora_A with {inputs} columns and lora_B with {size} rows for {module}, got "
                    f"{a.shape[1]} and {len(b)}: it is the adapter of a model of another size"
                )
            all_a.append(a)
            all_b.append(torch.nn.functional.pad(b, (0, 0, first, outputs - first - size)))
        first += size
    b = torch.cat(all_b, 1)
    is_turned = len(form.convert(name, whole, model.config)) != outputs  # the family's matrices are (inputs, outputs)
    return torch.cat(all_a), form.convert(name, b.t() if is_turned else b, model.config).contiguous()
