"""Lists the public names with their signatures, the flags of the commands, and the state_dict of a tiny model of each
class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastformer.cli import COMMANDS
from fastformer.commands._parsing import make_parser
from fastformer.settings import describe_bounds
from tests.frozen.models import STATE_DICTS

# Where people import from; README and DIFFERENCES.md name them.
PACKAGES = (
    "fastformer",
    "fastformer.baseline",
    "fastformer.data",
    "fastformer.functional",
    "fastformer.generation",
    "fastformer.integrations",
    "fastformer.models",
    "fastformer.nn",
    "fastformer.nn.errors",
    "fastformer.ops",
    "fastformer.run_folder",
    "fastformer.training",
)
# A class of which only the name is promised: its methods serve the modules and the engines.
NAME_ALONE = {"KVCache"}
# Methods that classes call on each other, and users don't.
INTERNAL = {
    "GenerationSettings": {"from_options", "samples", "alpha", "least_tokens", "keeps_scores", "check_model"},
    "MultiheadAttention": {"project_memory"},
    "RelativePositionBias": {"buckets"},
    "SequenceLayout": {"read_seqlens"},
    "SpecialIds": {"check", "check_tokenizer"},
    "TrainConfig": {"data_flags", "weights", "pair_filter"},
    "Trainer": {"interrupted"},
    "TransformerDecoder": {"store_memory"},
    "Translator": {"answers", "new_scheduler", "settings", "encode_item", "encode_prefix"},
}


def public_names(package: str) -> list[str]:
    """Returns the names that a package's file defines, or imports under their own name (`from x import y as y`)."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]  # some are for type checkers alone
    found = {alias.asname for node in imports for alias in node.names if alias.asname == alias.name}
    found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return sorted(name for name in found if name is not None and not name.startswith("_"))


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the parameters of a callable in order, each with its kind and its default."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, default = parameter.kind.name.lower(), ""
        if parameter.default is not inspect.Parameter.empty:
            value = parameter.default
            default = f" = {getattr(value, '__qualname__', None) or repr(value)}"
        found[name] = kind + default
    return found


def described(value: object) -> dict[str, Any] | str:
    """Returns the promises of a public name: the signature of a function, or of a class and its own public methods."""
    if inspect.isclass(value):
        found: dict[str, Any] = {}
        if value.__name__ in NAME_ALONE:
            return "class"
        if issubclass(value, Exception):
            return "error: " + ", ".join(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
        if not getattr(value, "_is_protocol", False) and value.__init__ is not object.__init__:
            found["()"] = parameters(value)
        for owner in reversed(value.__mro__):
            if owner.__module__.startswith("fastformer"):
                for name, member in vars(owner).items():
                    if name.startswith("_") or isinstance(member, type) or name in INTERNAL.get(value.__name__, ()):
                        continue
                    if isinstance(member, property):
                        found[name] = "property"
                    elif callable(getattr(value, name)):
                        found[name] = parameters(getattr(value, name))
        return found
    if callable(value):
        return {"()": parameters(value)}
    return "value"


def names_now() -> dict[str, dict[str, Any]]:
    """Returns all current public names, package by package."""
    return {
        package: {name: described(getattr(importlib.import_module(package), name)) for name in public_names(package)}
        for package in PACKAGES
    }


def missing(frozen: dict[str, Any] | str, now: dict[str, Any] | str, name: str) -> list[str]:
    """Returns the parts of a frozen description that are gone or different; additions are not differences."""
    if isinstance(frozen, str) or isinstance(now, str):
        return [] if frozen == now else [f"{name}: was {frozen}, is {now}"]
    found = []
    for member, expected in frozen.items():
        where = f"{name}{member}" if member == "()" else f"{name}.{member}"
        if member not in now:
            found.append(f"{where} is gone")
        elif isinstance(expected, dict) and isinstance(now[member], dict):
            found += changed_parameters(expected, now[member], where)
        elif expected != now[member]:
            found.append(f"{where}: was {expected}, is {now[member]}")
    return found


def lost(frozen: Any, now: Any, place: str = "") -> list[str]:
    """Returns the places of what is gone, different or new."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        parts = [(f"{place} {name}", frozen.get(name), now.get(name)) for name in {**frozen, **now}]
        return [one for name, each, other in parts for one in lost(each, other, name)]
    return [] if frozen == now else [f"{place}: was {frozen}, is {now}"]


def changed_parameters(frozen: dict[str, str], now: dict[str, str], where: str) -> list[str]:
    """Returns the changes of a callable that would break working calls. New optional parameters don't."""
    found = [
        f"{where}: {name} was {kind}, is {now.get(name)}" for name, kind in frozen.items() if now.get(name) != kind
    ]
    positional = [name for name, kind in frozen.items() if kind.startswith("positional")]
    if [name for name, kind in now.items() if kind.startswith("positional")][: len(positional)] != positional:
        found.append(f"{where}: the order of its parameters changed")
    for name, kind in now.items():
        if name not in frozen and not (" = " in kind or kind.startswith("var_")):
            found.append(f"{where}: {name} is new, and has no default")
    return found


def flags_now() -> dict[str, dict[str, str]]:
    """Returns the flags of each command, with the allowed values and the default."""
    found = {}
    for command in COMMANDS.keys() - {"doctor"}:
        module = importlib.import_module(f"fastformer.commands.{command}")
        parser, hints = make_parser(module, command)
        actions = {flag: action for action in parser._actions for flag in action.option_strings}
        found[command] = {
            name: f"{describe_bounds(hint)} = {actions[f'--{name}'].default!r}"
            for name, hint in sorted(hints.items())
            if f"--{name}" in actions
        }
    return dict(sorted(found.items()))


def state_dicts_now() -> dict[str, dict[str, list[int]]]:
    """Returns the keys and shapes of a tiny model of each class."""
    found = {}
    for name, make in STATE_DICTS.items():
        with torch.device("meta"):
            model: nn.Module = make()
        found[name] = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    return found
