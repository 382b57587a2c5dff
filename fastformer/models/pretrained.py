"""Saves and loads models: folders with model.safetensors, config.json and, optionally, tokenizer.json.

The weights may also be in several files with an index; see `fastformer.models.weights`, also for the checksums.

For a quantised model config.json has "quantization": "int8", and the file holds each rounded matrix X as int8,
with the scales of its rows beside it as X.scale. For "int4" X holds two numbers in a byte, X.scale the scales of 32
columns each, and X.zero or X.levels, if it is there, their zeros or their levels (`fastformer.models.quantization`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastformer.files import read_json, write_atomically
from fastformer.models.quantization import (
    INT8,
    QUANTIZED,
    SCALE,
    Groups,
    packed_entries,
    packed_state,
    round_weights,
    unpacked_state,
)
from fastformer.models.weights import FLOATING, WEIGHTS, Entry, SavedWeights, check_entries, to_bytes
from fastformer.settings import suggestion
from fastformer.special_ids import SpecialIds

CONFIG = "config.json"
_QUANTIZATION, _SOURCE = "quantization", "source"  # in config.json
_FEW_LAYERS = 100  # layers that are made on "meta" at once
_TABLES = 1 << 28  # bytes of memory that tables of positions may take in any model

Model = TypeVar("Model", bound="PretrainedModel")
AnyModel = TypeVar("AnyModel", bound=nn.Module)


class Undrawn(TorchFunctionMode):
    """A context for models whose weights are loaded next: it doesn't draw parameters, which would take as long as
    reading them, and would advance the caller's random numbers.
    """

    # Methods of tensors, which xavier_uniform_ and xavier_normal_ call, and functions of torch.nn.init. While
    # transformers builds a model, in whichever thread, functions of its own with these names are in their places.
    _DRAWS = frozenset({"uniform_", "normal_", "kaiming_uniform_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in self._DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class Unallocated(Undrawn):
    """An `Undrawn` in which matrices have no memory: their numbers are one NaN until `allocate` is called."""

    @staticmethod
    def is_empty(tensor: Tensor) -> bool:
        """Returns whether a tensor was made without memory."""
        return tensor.dim() > 1 and _is_one_number(tensor)

    @classmethod
    def allocate(cls, parameter: nn.Parameter) -> None:
        """Gives a parameter memory, whose contents are undefined, if it has none."""
        if cls.is_empty(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty and (kwargs or {}).get("device") in (None, "cpu"):
            shape = args[0] if args and isinstance(args[0], tuple | list) else args
            if len(shape) > 1:
                return torch.full((1,) * len(shape), torch.nan, dtype=kwargs.get("dtype")).expand(*shape)
        if func is Tensor.clone and self.is_empty(args[0]):
            return args[0].detach()
        if func in (Tensor.zero_, Tensor.fill_) and _is_one_number(args[0]):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def _is_one_number(tensor: Tensor) -> bool:
    """Returns whether several numbers of a tensor are all one in memory."""
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.numel() > 1 and not any(strides)


class Saved(Protocol):
    """The interface of a tokenizer for `save_pretrained`."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""


def config_from_dict(config_class: type[Any], values: dict[str, Any]) -> Any:
    """Builds a config dataclass from plain values; `special_ids` may be a mapping, as in config.json, or missing.

    Raises:
        ValueError: a key that the config doesn't have (the nearest one is suggested), one that is missing, or a value
            that is not allowed.
    """
    names = [field.name for field in dataclasses.fields(config_class)]
    for key in values:
        if key not in names:
            raise ValueError(f"{config_class.__name__} has no setting {key!r}{suggestion(key, names)}")
    if "vocab_size" not in values:  # the one that has no default
        raise ValueError(f"expected {config_class.__name__} to have a vocab_size, got {values}")
    special = values.get("special_ids")
    if isinstance(special, Mapping):
        values = {**values, "special_ids": SpecialIds.from_dict(special)}
    return config_class(**values)


def placement(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the device and the dtype of parameters as keyword arguments of torch.nn's modules.

    Raises:
        ValueError: a device that PyTorch doesn't know, or a dtype that isn't floating-point.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"expected a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"expected a device that this PyTorch can use, got {device!r}") from error
    return {"device": device, "dtype": dtype}


class PretrainedModel(nn.Module):
    """The base class of the models, with presets, `save_pretrained` and `from_pretrained`.

    A model sets `config_class` and `presets`, and is built from its config alone.

    Attributes:
        precision: "int8" or "int4" for a quantised model, else None; see `quantize`.
        int4_groups: for a model in int4, the integers and scales of its matrices by their names in the state_dict.
        source_settings: for a model that was converted from one of transformers, its config.json with the model_type.
            `save_pretrained` writes them, because adapters for that model fit its family's layout of the weights.
    """

    precision: str | None = None
    int4_groups: dict[str, Groups] | None = None
    source_settings: Mapping[str, Any] | None = None

    config_class: type[Any]
    presets: dict[str, dict[str, Any]]
    config: Any

    @classmethod
    def from_preset(
        cls: type[Model],
        name: str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> Model:
        """Builds a freshly initialised model.

        Args:
            name: one of `presets`.
            device, dtype: of the parameters.
            settings: fields of the config, which override the preset's values; vocab_size is required.

        Raises:
            ValueError: an unknown preset or setting.
        """
        if not isinstance(name, str) or name not in cls.presets:
            hint = suggestion(name, cls.presets)
            raise ValueError(f"expected a preset in {sorted(cls.presets)}, got {name!r}{hint}")
        config = config_from_dict(cls.config_class, {**cls.presets[name], **settings})
        return cls(config, device=device, dtype=dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Saved | None = None) -> None:
        """Writes the model for `from_pretrained`. No pickle; each file is replaced as a whole or not at all.

        Args:
            folder: created if it doesn't exist.
            tokenizer: an object with `save(folder)`, which writes tokenizer.json.

        Raises:
            OSError: a file could not be written; the previous one is unchanged.
        """
        save_model(self, folder, tokenizer)

    def quantize(self: Model, precision: str = INT8) -> Model:
        """Returns a copy with rounded matrices; see `models.quantization`.

        It rounds the weights of attention and linear layers, of the embedding and of the output; norms, biases and
        learned positions stay unchanged. The copy is an ordinary model of the same dtype, and remembers its
        `precision`, also when it is copied or moved: `generate` computes in it if it can, `save_pretrained`
        writes it in about a quarter of fp32's bytes (int8) or a seventh (int4), and `from_pretrained` returns the same
        weights. A state_dict holds the rounded weights, but not the precision. Training moves the weights off
        their grid, and saving rounds them again.

        Args:
            precision: "int8", 255 steps for each row of a matrix, or "int4", 16 steps for 32 neighbours in a row.

        Raises:
            ValueError: another precision; NaN or infinite weights; weights beyond 500,000 for int4.
        """
        if precision not in QUANTIZED:
            raise ValueError(f"expected precision int8 or int4, got {precision!r}")
        model = copy.deepcopy(self)
        model.int4_groups = round_weights(model, precision)
        model.precision = precision
        return model

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Decodes sources or continues prompts; see `fastformer.generate(self, input_ids, **options)`."""
        import fastformer  # imported here, because decoding imports the models

        generate: Any = fastformer.generate
        return generate(self, input_ids, **options)

    @classmethod
    def from_pretrained(
        cls: type[Model],
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Loads a model that `save_pretrained` wrote, in evaluation mode.

        Args:
            folder: the folder with model.safetensors and config.json.
            device: of the parameters; None: the CPU.
            dtype: of the parameters; None: the one that they were saved in.

        Raises:
            ValueError: no such folder or file, a damaged or truncated one, another architecture, an unknown setting,
                missing, unexpected or misshapen tensors, or weights that are NaN or infinite.
        """

        def make(values: dict[str, Any], device: torch.device | str | None, dtype: torch.dtype | None) -> Model:
            config = config_from_dict(cls.config_class, values)
            return cls(config, device=device, dtype=dtype)

        placement(device, dtype)
        return load_saved(folder, cls.__name__, make, device=device, dtype=dtype)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    tokenizer: Saved | None = None,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes any model whose `config` is a dataclass; see `PretrainedModel.save_pretrained`.

    Args:
        model: the model; the name of its class becomes the architecture.
        folder: created if it doesn't exist.
        tokenizer: the tokenizer to save with the model.
        notes: the notes for `weights.read_notes`; they are in the file of the weights, and so always match them.
    """
    path = Path(folder)
    if tokenizer is not None and not hasattr(tokenizer, "save"):
        raise ValueError(f"expected a tokenizer with save(folder), got {type(tokenizer).__name__}")
    path.mkdir(parents=True, exist_ok=True)
    config = {"architecture": type(model).__name__, **dataclasses.asdict(model.config)}  # type: ignore[call-overload]
    if (source := getattr(model, "source_settings", None)) is not None:
        config[_SOURCE] = dict(source)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if (precision := getattr(model, "precision", None)) in QUANTIZED:
        config[_QUANTIZATION] = precision
        state = packed_state(model, state)
    data = to_bytes(state, notes or {})
    write_atomically(path / WEIGHTS, data)
    write_atomically(path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer is not None:
        tokenizer.save(path)


def load_saved(
    folder: str | os.PathLike[str],
    architecture: str,
    make: Callable[[dict[str, Any], torch.device | str | None, torch.dtype | None], AnyModel],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AnyModel:
    """Loads a model that `save_model` wrote, in evaluation mode.

    Args:
        folder: the folder of the model.
        architecture: the required architecture.
        make: builds the model from its settings, on a device, in a dtype.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: as saved.

    Raises:
        ValueError: see `PretrainedModel.from_pretrained`.
    """
    path = Path(folder)
    values = _read_config(path)
    if (saved_as := values.pop("architecture")) != architecture:
        raise ValueError(f"expected a folder of {architecture}, got one of {saved_as!r}: {path}")
    saved = SavedWeights.in_folder(path)
    quantization, source = values.pop(_QUANTIZATION, None), values.pop(_SOURCE, None)
    if source is not None and not (isinstance(source, dict) and isinstance(source.get("model_type"), str)):
        raise ValueError(f"expected a {_SOURCE} with a model_type in {path / CONFIG}, got {source!r:.60}")
    if quantization not in (None, *QUANTIZED):
        raise ValueError(f"expected a {_QUANTIZATION} of int8 or int4 in {path / CONFIG}, got {quantization!r}")
    dtypes: set[Any] = {
        entry.dtype
        for name, entry in saved.entries.items()
        if entry.dtype in FLOATING and not (quantization and name.endswith(SCALE)) and ".router." not in name
    }
    dtype = dtype or (dtypes.pop() if len(dtypes) == 1 else None)

    def check(model: nn.Module) -> None:
        expected = {name: Entry(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        if quantization is not None:
            expected = packed_entries(model, expected, quantization, saved.entries)
        check_entries(saved.path, f"its {CONFIG}", saved.entries, expected)
        check_tables(model, path / CONFIG)

    try:
        for name, value in values.items():
            check_depth(name, value, len(saved.entries), path / CONFIG)
        model = make_to_load(lambda device: make(values, device, dtype), device, check)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{path / CONFIG} has settings that no {architecture} can have ({error})") from error
    state = saved.read()
    if quantization is not None:
        int4_groups: Any
        state, int4_groups = unpacked_state(model, state, quantization)
        model.precision, model.int4_groups = quantization, int4_groups
    model.load_state_dict(state)
    if isinstance(model, PretrainedModel):
        model.source_settings = source
    return model.eval()


def make_to_load(
    make: Callable[[torch.device | str | None], AnyModel],
    device: torch.device | str | None,
    check: Callable[[AnyModel], None],
    context: type[Undrawn] = Undrawn,
) -> AnyModel:
    """Builds a model whose weights are loaded next.

    It builds the model on "meta" first, which needs no memory: settings that don't fit the weights allocate nothing.

    Args:
        make: builds the model on a device.
        device: the device of the model; None: the CPU, whatever the default device is.
        check: raises a ValueError for a model that doesn't fit the weights.
        context: in which the model is built.

    Raises:
        ValueError: see `check`; or a tensor's size has more than 64 bits.
    """
    with Undrawn():
        try:
            model = make("meta")
        except RuntimeError as error:  # a size beyond 64 bits
            raise ValueError(f"expected settings of a model that fits in memory: {error}") from error
    check(model)
    with context():
        return make("cpu" if device is None else device)


def check_depth(name: str, value: object, num_tensors: int, origin: object) -> None:
    """Refuses far more layers than there are tensors: even on "meta" a layer takes time and memory.

    Args:
        name: the name of a setting; those that end with "layers" are checked.
        value: the value of the setting.
        num_tensors: the number of tensors in the file.
        origin: the source of the settings, for messages.

    Raises:
        ValueError: there are too many layers.
    """
    if name.endswith("layers") and isinstance(value, int) and value > max(num_tensors, _FEW_LAYERS):
        raise ValueError(f"expected {origin} to fit its {num_tensors} tensors, got {name} {value}")


def check_tables(model: nn.Module, origin: object) -> None:
    """Refuses settings that require much more memory than the weights: no file limits the size of tables.

    Args:
        model: the model on "meta".
        origin: the source of the settings, for messages.

    Raises:
        ValueError: tables of positions are far larger than the weights.
    """
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    table_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    if table_bytes > max(_TABLES, 8 * weights_bytes):
        config: Any = model.config
        raise ValueError(
            f"expected {origin} to have a max_len that suits a model of {weights_bytes / 2**20:.1f} MiB, got "
            f"{config.max_len}, whose positions take {table_bytes / 2**20:,.0f} MiB"
        )


def read_architecture(folder: str | os.PathLike[str]) -> str:
    """Reads the architecture that a folder's config.json names, such as "Transformer" or "GPT".

    Raises:
        ValueError: no such folder or file, or a damaged one.
    """
    return str(_read_config(Path(folder))["architecture"])


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"expected a folder with {WEIGHTS} and {CONFIG}, but there is no folder {folder}")
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: is {folder} a model's folder?")
    values = read_json(file)
    if "architecture" not in values:
        reason = "it wasn't written by fastformer"
        if "model_type" in values:
            reason = "it is of transformers: load it there, then use fastformer.integrations.from_huggingface"
        raise ValueError(f"expected {file} to name an 'architecture': {reason}")
    return values
