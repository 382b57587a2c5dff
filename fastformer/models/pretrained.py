"""Saving and loading a model: a folder with model.safetensors, config.json and, if there is one, tokenizer.json.

The metadata of model.safetensors holds the SHA-256 of the file (taken with 64 zeros in its own place), so that a
changed bit is noticed. A file without one, as other programs write it, loads all the same.

Of a quantised model config.json says "quantization": "int8", and the file holds each of its rounded matrices X as int8,
with the scales of its rows beside it as X.scale (`fastformer.models.quantization`).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastformer.files import write_atomically
from fastformer.models.quantization import INT8, SCALE, packed_state, round_weights, unpacked_state
from fastformer.settings import suggestion
from fastformer.special_ids import SpecialIds

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_QUANTIZATION = "quantization"  # in config.json
_NO_DIGEST = "0" * 64

Model = TypeVar("Model", bound="PretrainedModel")
AnyModel = TypeVar("AnyModel", bound=nn.Module)


class Undrawn(TorchFunctionMode):
    """A model that is made in here is to be loaded next, so its parameters aren't drawn: that would take as long as to
    read them, and move the caller's random numbers on.
    """

    # xavier_uniform_ and xavier_normal_ call the first two.
    _DRAWS = frozenset({Tensor.uniform_, Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class Saved(Protocol):
    """What `save_pretrained` asks of a tokenizer."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        ...


def config_from_dict(config_class: type[Any], values: dict[str, Any]) -> Any:
    """A config dataclass from plain values; `special_ids` may be a mapping, as config.json holds them, or left out.

    Raises:
        ValueError: a key that the config doesn't have (the nearest one is suggested), one that is missing, or a value
            that is not allowed.
    """
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in values:
        if key not in known:
            raise ValueError(f"{config_class.__name__} has no setting {key!r}{suggestion(key, known)}")
    if "vocab_size" not in values:  # the one that has no default
        raise ValueError(f"expected {config_class.__name__} to have a vocab_size, got {values}")
    special = values.get("special_ids")
    if isinstance(special, Mapping):
        values = {**values, "special_ids": SpecialIds.from_dict(special)}
    return config_class(**values)


def placement(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Where parameters go and what they are, as the factories of torch.nn take it.

    Raises:
        ValueError: no device that PyTorch knows, or no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"expected a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"expected a device that this PyTorch can use, got {device!r}") from error
    return {"device": device, "dtype": dtype}


class PretrainedModel(nn.Module):
    """What the models share: presets, `save_pretrained`, `from_pretrained`.

    A model sets `config_class` and `presets`, and is built from its config alone.

    Attributes:
        precision: "int8" for a quantised model, else None; see `quantize`.
    """

    precision: str | None = None

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
        """A freshly initialised model.

        Args:
            name: one of `presets`.
            device, dtype: of the parameters.
            settings: fields of the config, over the preset's values; vocab_size has to be among them.

        Raises:
            ValueError: an unknown preset or setting.
        """
        if not isinstance(name, str) or name not in cls.presets:
            hint = suggestion(name, cls.presets)
            raise ValueError(f"expected a preset out of {sorted(cls.presets)}, got {name!r}{hint}")
        config = config_from_dict(cls.config_class, {**cls.presets[name], **settings})
        return cls(config, device=device, dtype=dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Saved | None = None) -> None:
        """Writes the model for `from_pretrained`. No pickle; each file is replaced as a whole or not at all.

        Args:
            folder: made if it isn't there.
            tokenizer: something with `save(folder)`, which writes tokenizer.json.

        Raises:
            OSError: a file could not be written; the one that was there before still is.
        """
        save_model(self, folder, tokenizer)

    def quantize(self: Model) -> Model:
        """A copy whose matrices are rounded to int8, 255 steps for each of their rows: see `models.quantization`.

        These are the weights of attention and linear layers, the embedding's and the output's; norms, biases and
        learned positions stay as they are. The copy is an ordinary model of the same dtype, and remembers
        `precision == "int8"`, also when it is copied or moved: `generate` computes it in int8 where it can,
        `save_pretrained` writes it in about a quarter of the bytes, and `from_pretrained` gives the same weights back.
        A state_dict holds the rounded weights and not that they are. Training takes the weights off their grid, and
        saving rounds them again.

        Raises:
            ValueError: NaN or infinite weights.
        """
        model = copy.deepcopy(self)
        round_weights(model)
        model.precision = INT8
        return model

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Decodes sources, or goes on from prompts: `fastformer.generate(self, input_ids, **options)` says the rest."""
        import fastformer  # its front door: decoding stands above the models

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
        """Loads what `save_pretrained` wrote, in evaluation mode.

        Args:
            folder: with model.safetensors and config.json.
            device: where the parameters go; None: the CPU.
            dtype: what they become; None: what they were saved as.

        Raises:
            ValueError: no such folder or file, a damaged or truncated one, another architecture, an unknown setting,
                missing, unexpected or misshapen tensors, or weights that are NaN or infinite.
        """

        def make(values: dict[str, Any], dtype: torch.dtype | None) -> Model:
            config = config_from_dict(cls.config_class, values)
            return cls(config, device=device, dtype=dtype)

        placement(device, dtype)
        return load_saved(folder, cls.__name__, make, dtype=dtype)


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    tokenizer: Saved | None = None,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes any model whose `config` is a dataclass; `PretrainedModel.save_pretrained` says the rest.

    Args:
        model: its class's name becomes the architecture.
        folder: made if it isn't there.
        tokenizer: is saved along.
        notes: what `read_notes` is to give back; they are in the file of the weights, so that they fit them always.
    """
    path = Path(folder)
    if tokenizer is not None and not hasattr(tokenizer, "save"):
        raise ValueError(f"expected a tokenizer with save(folder), got {type(tokenizer).__name__}")
    path.mkdir(parents=True, exist_ok=True)
    config = {"architecture": type(model).__name__, **dataclasses.asdict(model.config)}  # type: ignore[call-overload]
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if getattr(model, "precision", None) == INT8:
        config[_QUANTIZATION] = INT8
        state = packed_state(model, state)
    metadata = {"format": "pt", **(notes or {}), "sha256": _NO_DIGEST}
    data = bytearray(_safetensors().save(state, metadata))
    place = data.index(f'"sha256":"{_NO_DIGEST}"'.encode()) + len('"sha256":"')
    data[place : place + len(_NO_DIGEST)] = hashlib.sha256(data).hexdigest().encode()
    write_atomically(path / WEIGHTS, data)
    write_atomically(path / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer is not None:
        tokenizer.save(path)


def load_saved(
    folder: str | os.PathLike[str],
    architecture: str,
    make: Callable[[dict[str, Any], torch.dtype | None], AnyModel],
    *,
    dtype: torch.dtype | None = None,
) -> AnyModel:
    """What `save_model` wrote, in evaluation mode.

    Args:
        folder: of the model.
        architecture: the one that it has to be.
        make: builds the model from its settings, in a dtype.
        dtype: of the parameters; None: what they were saved as.

    Raises:
        ValueError: as `PretrainedModel.from_pretrained`.
    """
    path = Path(folder)
    values = _read_config(path, architecture)
    weights = path / WEIGHTS
    state = read_weights(weights)
    quantization = values.pop(_QUANTIZATION, None)
    if quantization not in (None, INT8):
        raise ValueError(f"expected a {_QUANTIZATION} of {INT8!r} in {path / CONFIG}, got {quantization!r}")
    saved = {
        tensor.dtype
        for name, tensor in state.items()
        if tensor.is_floating_point() and not (quantization and name.endswith(SCALE))
    }
    try:
        with Undrawn():
            model = make(values, dtype or (saved.pop() if len(saved) == 1 else None))
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{path / CONFIG} has settings that no {architecture} can have ({error})") from error
    if quantization is not None:
        try:
            state = unpacked_state(model, state)
        except ValueError as error:
            raise ValueError(f"{weights} doesn't fit its {CONFIG}, which says {INT8}: {error}") from error
        model.precision = quantization
    _check_state(weights, state, model.state_dict())
    model.load_state_dict(state)
    return model.eval()


def read_notes(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The notes that `save_model` got; empty where there is no model.

    Raises:
        ValueError: a damaged file.
    """
    file = Path(folder) / WEIGHTS
    if not file.is_file():
        return {}
    metadata, _ = _read_metadata(file)
    return {name: value for name, value in metadata.items() if name not in ("format", "sha256")}


def _read_config(path: Path, architecture: str) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"expected a folder with {WEIGHTS} and {CONFIG}, but there is no folder {path}")
    file = path / CONFIG
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: is {path} a model's folder?")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON or cut short ({error}): save or copy the model again") from error
    if not isinstance(values, dict) or "architecture" not in values:
        raise ValueError(f"expected {file} to name an 'architecture': it wasn't written by fastformer")
    found = values.pop("architecture")
    if found != architecture:
        raise ValueError(f"expected a folder of {architecture}, got one of {found!r}: {path}")
    return values


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, after a look at its checksum and for weights that are no numbers.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no such file, a damaged one, or NaN or infinite weights.
    """
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: was the model saved completely?")
    _check_digest(file)
    try:
        state: dict[str, torch.Tensor] = _safetensors().load_file(file)
    except Exception as error:  # safetensors raises a type of its own, and OSError for an empty file
        raise ValueError(_damaged(file, error)) from error
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{file} holds NaN or infinite weights in {name}: its training went wrong; train anew")
    return state


def _read_metadata(file: Path) -> tuple[dict[str, str], bytes]:
    """The metadata of a safetensors file and its first bytes: the header's length and the header."""
    try:
        with open(file, "rb") as data:
            start = data.read(8)
            size = int.from_bytes(start, "little")
            if len(start) < 8 or size > file.stat().st_size:
                raise ValueError("the header is cut short")
            start += data.read(size)
        metadata = json.loads(start[8:]).get("__metadata__", {})
        return {str(name): str(value) for name, value in metadata.items()}, start
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(_damaged(file, error)) from error


def _check_digest(file: Path) -> None:
    metadata, start = _read_metadata(file)
    expected = metadata.get("sha256")
    if expected is None:
        return
    digest = hashlib.sha256(start.replace(f'"sha256":"{expected}"'.encode(), f'"sha256":"{_NO_DIGEST}"'.encode(), 1))
    with open(file, "rb") as data:
        data.seek(len(start))
        while block := data.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(_damaged(file, "its checksum is another"))


def _damaged(file: Path, why: object) -> str:
    return f"{file} is damaged or cut short ({why}): save or copy the model again"


def read_architecture(folder: str | os.PathLike[str]) -> str:
    """The architecture that a folder's config.json names, such as "Transformer" or "GPT".

    Raises:
        ValueError: no such folder or file, or a damaged one.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: is {folder} a model's folder?")
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["architecture"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is cut short or names no 'architecture' ({error!r})") from error


def _check_state(file: Path, state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    misshapen = [
        f"{name}: expected {tuple(expected[name].shape)}, got {tuple(state[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if expected[name].shape != state[name].shape
    ]
    problems = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problems.append(f"{what} tensors: {shown}")
    if problems:
        raise ValueError(f"{file} doesn't fit its {CONFIG}: {'; '.join(problems)}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading needs safetensors: pip install 'fastformer[train]'") from error
    return safetensors.torch
