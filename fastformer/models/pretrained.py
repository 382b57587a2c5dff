"""Saving and loading a model: a folder with model.safetensors, config.json and, if there is one, tokenizer.json."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

Model = TypeVar("Model", bound="PretrainedModel")


def config_from_dict(config_class: type, values: dict[str, Any]) -> Any:
    """A config dataclass from plain values.

    Raises:
        ValueError: a key that the config doesn't have; the nearest one is suggested.
    """
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{config_class.__name__} has no setting {key!r}{hint}")
    return config_class(**values)


class PretrainedModel(nn.Module):
    """What the models share: presets, `save_pretrained`, `from_pretrained`.

    A model sets `config_class` and `presets`, and is built from its config alone.
    """

    config_class: type
    presets: dict[str, dict[str, Any]]
    config: Any

    @classmethod
    def from_preset(cls: type[Model], name: str, *, device: Any = None, dtype: Any = None, **settings: Any) -> Model:
        """A freshly initialised model.

        Args:
            name: one of `presets`.
            device, dtype: of the parameters.
            settings: fields of the config, over the preset's values; vocab_size has to be among them.

        Raises:
            ValueError: an unknown preset or setting.
        """
        if name not in cls.presets:
            raise ValueError(f"expected a preset out of {sorted(cls.presets)}, got {name!r}")
        config = config_from_dict(cls.config_class, {**cls.presets[name], **settings})
        return cls(config, device=device, dtype=dtype)  # type: ignore[call-arg]

    def save_pretrained(self, folder: str | os.PathLike, tokenizer: Any = None) -> None:
        """Writes the model for `from_pretrained`. No pickle; each file is replaced as a whole or not at all.

        Args:
            folder: made if it isn't there.
            tokenizer: something with `save(folder)`, which writes tokenizer.json.
        """
        safetensors = _safetensors()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        config = {"architecture": type(self).__name__, **dataclasses.asdict(self.config)}
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        _replace(path / WEIGHTS, lambda file: safetensors.save_file(state, file, metadata={"format": "pt"}))
        _replace(path / CONFIG, lambda file: file.write_text(json.dumps(config, indent=2) + "\n"))
        if tokenizer is not None:
            tokenizer.save(path)

    @classmethod
    def from_pretrained(cls: type[Model], folder: str | os.PathLike, *, device: Any = None, dtype: Any = None) -> Model:
        """Loads what `save_pretrained` wrote, in evaluation mode.

        Args:
            folder: with model.safetensors and config.json.
            device: where the parameters go; None: the CPU.
            dtype: what they become; None: what they were saved as.

        Raises:
            ValueError: no such folder or file, a damaged or truncated one, another architecture, an unknown setting,
                missing, unexpected or misshapen tensors.
        """
        safetensors = _safetensors()
        path = Path(folder)
        config = config_from_dict(cls.config_class, cls._read_config(path))
        weights = path / WEIGHTS
        if not weights.is_file():
            raise ValueError(f"expected the file {weights}, which isn't there: was the model saved completely?")
        try:
            state = safetensors.load_file(weights)
        except Exception as error:  # safetensors raises a type of its own, and OSError for an empty file
            raise ValueError(f"{weights} is damaged or cut short ({error}): save or copy the model again") from error
        saved = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
        dtype = dtype or (saved.pop() if len(saved) == 1 else None)
        model = cls(config, device=device, dtype=dtype)  # type: ignore[call-arg]
        _check_state(weights, state, model.state_dict())
        model.load_state_dict(state)
        return model.eval()

    @classmethod
    def _read_config(cls, path: Path) -> dict[str, Any]:
        if not path.is_dir():
            raise ValueError(f"expected a folder with {WEIGHTS} and {CONFIG}, but there is no folder {path}")
        file = path / CONFIG
        if not file.is_file():
            raise ValueError(f"expected the file {file}, which isn't there: is {path} a model's folder?")
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is no JSON or cut short ({error}): save or copy the model again") from error
        if not isinstance(values, dict) or "architecture" not in values:
            raise ValueError(f"expected {file} to name an 'architecture': it wasn't written by fastformer")
        architecture = values.pop("architecture")
        if architecture != cls.__name__:
            raise ValueError(f"expected a folder of {cls.__name__}, got one of {architecture!r}: {path}")
        return values


def read_architecture(folder: str | os.PathLike) -> str:
    """The architecture that a folder's config.json names, such as "Transformer" or "GPT".

    Raises:
        ValueError: no such folder or file, or a damaged one.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: is {folder} a model's folder?")
    try:
        return str(json.loads(file.read_text())["architecture"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is cut short or names no 'architecture' ({error!r})") from error


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    # A reader sees the old file or the new one, and a full disk leaves the old one.
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, file)
    except Exception as error:  # safetensors raises a type of its own
        message = f"could not write {file} ({error}): free some space; what was saved before is whole"
        raise OSError(message) from error
    finally:
        temporary.unlink(missing_ok=True)


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
