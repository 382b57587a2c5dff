"""Evaluation mode during decoding. Speech has a model that isn't PyTorch's: it has no such mode, and no PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from fastformer.locks import ForkSafeLock

if TYPE_CHECKING:
    from torch import nn

    from fastformer.generation.model_protocols import Model

_is_training = attrgetter("training")

_lock = ForkSafeLock()
# The modules that were in training mode, by id, and the number of threads that decode with each of them.
_held: dict[int, int] = {}


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns all modules of a model, each once; the order is not that of `model.modules()`.

    Each call of generate asks several times. The modules are found again only after one of them was replaced.
    """
    from fastformer.engine.frozen import notes_of

    findings = notes_of(model).findings
    # The modules inside of the model, and the children of all its modules, from which these were collected.
    inside, children = findings.get("modules", ((), None))
    every = [model, *inside]
    if children != [*itertools.chain.from_iterable([module._modules.values() for module in every])]:
        every, seen, children = [model], {model}, []
        for module in every:  # the list grows during the loop
            for child in module._modules.values():
                children.append(child)
                if child is not None and child not in seen:
                    seen.add(child)
                    every.append(child)
        findings["modules"] = every[1:], children
    return every


class Evaluation:
    """Holds the modules of a model in evaluation mode while a thread decodes with it.

    Args:
        model: the model that decodes.
    """

    def __init__(self, model: Model) -> None:
        # Unless PyTorch is imported, no model is a module of it.
        module = getattr(sys.modules.get("torch.nn"), "Module", ())
        self._modules = modules_of(cast("nn.Module", model)) if isinstance(model, module) else []
        self._own: dict[int, nn.Module] = {}  # the modules whose counts in `_held` include this object

    def hold(self) -> None:
        """Sets modules in training mode to evaluation, at the start and after another thread has changed the mode."""
        if not _held and True not in map(_is_training, self._modules):
            return
        with _lock:
            for module in self._modules:
                place = id(module)
                if place in self._own:
                    module.training = False
                elif module.training or place in _held:
                    module.training = False
                    self._own[place] = module
                    _held[place] = _held.get(place, 0) + 1

    def end(self) -> None:
        """Restores training mode in the modules that were in it, unless another thread still decodes with them."""
        if not self._own:
            return
        with _lock:
            for place, module in self._own.items():
                if _held[place] > 1:
                    _held[place] -= 1
                else:  # in this order: a look without the lock sees one of the two
                    module.training = True
                    del _held[place]
            self._own = {}


@contextlib.contextmanager
def evaluating(model: Model) -> Iterator[Evaluation]:
    """Sets a model to evaluation; afterwards each of its modules is in the mode that it was in.

    Any threads may enter it at once, for one model or for several that share modules: the last one to leave restores
    the modes. A thread may set the model to training meanwhile. Code that decodes in several steps therefore calls
    `Evaluation.hold` before each of them; within a step nothing prevents the change.
    """
    evaluation = Evaluation(model)
    try:
        evaluation.hold()
        yield evaluation
    finally:
        evaluation.end()
