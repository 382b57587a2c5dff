"""Who reads what stacks give at padding: inside of a model of transformers that may do so they stay padded.

Of two kinds of models it is known: those whose class is ours tell their stacks, and the others `hand_on` what stacks
give. Stacks that `accelerate` sees inside of any other have a mark. A model that it wasn't given is found among the
callers of a stack that runs.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.utils import checkpoint
from transformers import PreTrainedModel

from fastformer.nn.fusing import is_written_as_known

# Classes of transformers that aren't swapped, or needn't be.
_HANDING_ON: set[type[nn.Module]] = set()


def hand_on(*kinds: type[nn.Module]) -> None:
    """Remembers models that give at padding what their stacks give, and read at most first tokens, as stacks know."""
    _HANDING_ON.update(kinds)


# The attribute of a stack that `accelerate` saw in a model that may read what it gives at padding.
_MARK = "_fastformer_stays_padded"


class PackingStack(nn.Module):
    """A stack that may leave padding out."""


def mark(model: nn.Module) -> dict[str, str]:
    """Marks the stacks in a model that stay padded; returns by their names why."""
    names = {module: name for name, module in model.named_modules()}
    marked: dict[str, str] = {}
    for around in names:
        if not isinstance(around, PreTrainedModel) or _is_of_known_class(around):
            continue
        for stack in around.modules():
            if isinstance(stack, PackingStack):
                setattr(stack, _MARK, True)
                reason = f"{type(around).__name__} around it may read what it gives at padding, which it computes"
                marked.setdefault(names[stack], reason)
    return marked


def unmark(model: nn.Module) -> None:
    """Undoes `mark`."""
    for module in model.modules():
        vars(module).pop(_MARK, None)


def may_be_read(stack: nn.Module) -> bool:
    """Whether a model of transformers is around a stack, or calls it, that may read what it gives at padding.

    So it is in a checkpoint, too, which calls again in the backward pass: who was around the first call isn't there.
    """
    if _MARK in vars(stack):
        return True
    frame: FrameType | None = sys._getframe()
    last: object = None
    while frame is not None:
        if frame.f_globals.get("__name__") == checkpoint.__name__:
            return True
        caller = _module_of(frame)
        if caller is not last and isinstance(caller, PreTrainedModel):
            if not (_is_of_known_class(caller) and is_written_as_known(type(caller))):
                return True
            last = caller
        frame = frame.f_back
    return False


# What runs when a module is called, or its forward, as wrappers do; by name, which a compiler's copies of them keep.
_CALLS = ("forward", "_call_impl")


def _module_of(frame: FrameType) -> object:
    """The module whose call a frame is, or whose method, where it is one of transformers' (as `generate` is)."""
    code = frame.f_code
    if code.co_argcount == 0:
        return None
    name = code.co_varnames[0]
    is_method = name == "self" and frame.f_globals.get("__name__", "").startswith("transformers.")
    if not (code.co_name in _CALLS or is_method):
        return None
    local = frame.f_locals
    module = local.get(name)
    if sys.version_info < (3, 13):  # there it is a copy, which the frame would keep, and what it held
        local.clear()
    return module


def _is_of_known_class(model: nn.Module) -> bool:
    # fully_shard derives classes, and people do: it is the forward that reads.
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return owner in _HANDING_ON or owner.__module__.startswith("fastformer.")
