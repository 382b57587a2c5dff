"""Holds a model in evaluation while threads decode with it, and restores its modes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from torch import nn

from fastformer.generation.model_protocols import Model, modules_of

_lock = threading.Lock()
# The modules that were in training, by their ids, and how many are at work that want them in evaluation.
_held: dict[int, int] = {}


class Evaluation:
    """The modules of a model in evaluation, for as long as a thread decodes with it.

    Args:
        model: what decodes.
    """

    def __init__(self, model: Model) -> None:
        self._modules = modules_of(model) if isinstance(model, nn.Module) else []
        self._own: dict[int, nn.Module] = {}  # which of them count this one in

    def hold(self) -> None:
        """Sets what is in training to evaluation: at the beginning, and where another thread has trained meanwhile."""
        if not _held and not any(module.training for module in self._modules):
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
        """Sets back to training what was, unless others still want it in evaluation."""
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
    """Sets a model to evaluation; behind it each of its modules is as it was.

    It may be entered for one model, or for several that share modules, by any threads at once: the last one to leave
    sets them back. A thread that sets the model to training meanwhile gets its way behind that; what looks at modules
    in several steps calls `Evaluation.hold` before each. Within one step nothing keeps another thread from it.
    """
    evaluation = Evaluation(model)
    try:
        evaluation.hold()
        yield evaluation
    finally:
        evaluation.end()


def _renew() -> None:
    # A child process has none of the threads that might hold the lock, or models.
    global _lock
    _lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)
