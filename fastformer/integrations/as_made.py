"""The properties that a model of transformers has to share with a new one of its config, for the engine to run it.

Its modules are transformers', or those that `accelerate` put in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastformer.engine import as_made
from fastformer.engine.as_made import Made
from fastformer.engine.checks import is_written_as_known
from fastformer.engine.frozen import ModelGuards
from fastformer.integrations.known import is_unhooked_or_recorded, own_function, replaced_in_sources
from fastformer.integrations.replace import has_own_class, original_class

# Numbers of a module that don't change its output in evaluation; all those with "drop" in their names don't, either.
# Sizes are ignored since the shapes of the parameters are compared: resizing embeddings leaves some sizes unchanged.
_FREE = frozenset(
    {
        *("training", "gradient_checkpointing", "name_or_path", "loss_type", "inplace", "p"),
        *("vocab_size", "num_embeddings", "in_features", "out_features"),
    }
)


def guards_of(model: nn.Module) -> ModelGuards:
    """Returns guards that hold as long as nothing that `why_not_as_made` examined has changed."""
    return ModelGuards(model, map(vars, _configs(model)))


def _configs(model: nn.Module) -> list[Any]:
    found = [vars(module).get("config") for module in model.modules()]
    return [*{id(config): config for config in found if config is not None}.values()]


def tables_of(model: nn.Module) -> Iterator[Tensor]:
    """Returns a model's non-persistent buffers, which no state_dict contains, and which the model reads as they are."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (table := module._buffers.get(name)) is not None and not _is_rewritten(module, name):
                yield table


def _is_rewritten(module: nn.Module, name: str) -> bool:
    """Returns whether each forward writes a buffer before it reads it, as with "longrope", by the batch's length."""
    return name == "inv_freq" and vars(module).get("rope_type") == "longrope"


def why_not_as_made(model: Any, *, device: str | torch.device = "cpu", **options: Any) -> str | None:
    """Returns why the engine's results would differ from those of a model's modules; None if they would not.

    Args:
        model: a model of a class of transformers.
        device: the device that the engine runs on.
        options: the options of the class, besides the config.
    """
    if (replaced := replaced_in_sources({type(module) for module in model.modules()})) is not None:
        return replaced
    if model.config._attn_implementation not in ("eager", "sdpa"):
        return f"its attention is {model.config._attn_implementation!r}, and not 'eager' or 'sdpa'"
    kind: Any = original_class(model)

    def make() -> nn.Module:
        with torch.inference_mode(False), torch.random.fork_rng(devices=()), Weightless():
            new: nn.Module = kind(copy.deepcopy(model.config), **options)
        return new

    return as_made.why_not_as_made(model, make, replace(_MADE, device=torch.device(device)))


def _is_free(module: nn.Module, name: str) -> bool:
    if name == "padding_idx":  # in an embedding, and in a stack around one, it only names the row that learns nothing
        return isinstance(module, nn.Embedding) or (
            bool(module._modules) and "position_embeddings" not in module._modules
        )
    return name[0] == "_" or name in _FREE or "drop" in name


def _why_not(module: Any, new: Any) -> str | None:
    if type(module) is not type(new) and has_own_class(module):
        return f"has another class, {type(module).__name__}, than accelerate gave it"
    if not is_written_as_known(type(module)):
        return f"has a class whose forward was replaced, {type(module).__name__}"
    if (own := own_function(module)) is not None:
        return f"has a function of yours, {own}"
    config, expected = vars(module).get("config"), vars(new).get("config")
    if config is None or expected is None or vars(config) == vars(expected) or config.to_dict() == expected.to_dict():
        return None
    return "has a config that differs from the model's"


_MADE = Made(
    _is_free,
    _why_not,
    class_of=original_class,
    has_hook=lambda module: not is_unhooked_or_recorded(module),
    is_rewritten=_is_rewritten,
    has_tables=True,
)


class Weightless(TorchFunctionMode):
    """Makes tensors for weights on "meta" and doesn't fill them. Other tensors, such as tables, are made as usual."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See `TorchFunctionMode`."""
        options, name = dict(kwargs or {}), func.__name__
        if func in (torch.empty, torch.randn, torch.rand):
            options["device"] = "meta"
        target = args[0] if args else options.get("tensor")
        if name.endswith("_") and not name.endswith("__") and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **options)
