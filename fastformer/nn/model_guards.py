"""Is a whole model still what it was when something was decided about it, and are its tensors where they were?

For what takes over all that a model computes and calls none of its modules: the C++ engine, which reads its weights,
and CUDA graphs, which replay the work of one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_

from torch import Tensor, nn

from fastformer.nn.guards import Guards

_SCALARS = (bool, int, float, str, tuple)


class ModelGuards:
    """What a model was when this was made: its modules with their settings and hooks, and where its tensors are.

    The values of tensors may change. The guards keep the tensors and the modules inside of the model alive, but not the
    model, so that a weak dictionary of models can hold them.

    Args:
        model: none of its own methods may be bound to the instance, or the guards keep it alive.
        functions: what else is watched; see `Guards`.

    Attributes:
        tensors: the parameters and buffers, with those that stand in several places several times.
        layout: where they are and how their memory is read; see `layout_of`.
    """

    def __init__(self, model: nn.Module, functions: Iterable[tuple[object, str]] = ()) -> None:
        every = [*model.modules()]
        settings: list[tuple[object, str]] = []
        for module in every[1:]:
            own = vars(module)
            settings += [(own, name) for name, value in own.items() if isinstance(value, _SCALARS)]
        self._guards = Guards(model, every[1:], [*settings, *functions])
        self._stores: list[Mapping[str, Tensor | None]] = []
        for module in every:
            self._stores += (module._parameters, module._buffers)
        self._kept = self._kept_now()
        self._own = _own_state(model)
        self.tensors = [tensor for tensor in self._kept if tensor is not None]
        self.layout = layout_of(self.tensors)

    def hold(self, model: nn.Module) -> bool:
        """Whether the model is what it was."""
        return (
            self._guards.hold(model)
            and self._own == _own_state(model)
            and len(self._kept) == len(kept := self._kept_now())
            and all(map(is_, self._kept, kept))
            and self.layout == layout_of(self.tensors)
        )

    def _kept_now(self) -> list[Tensor | None]:
        return [*chain.from_iterable(store.values() for store in self._stores)]


def layout_of(tensors: list[Tensor]) -> tuple[list[object], ...]:
    """Which tensors these are, where they are, and how their memory is read."""
    return (
        [*map(id, tensors)],
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    )


def _own_state(model: nn.Module) -> list[object]:
    """What `Guards` leaves to the owner: its settings and its hooks."""
    own = vars(model)
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"])
    return [
        *(value for value in own.values() if isinstance(value, _SCALARS)),
        *(hook for kept in hooks for hook in kept.values()),
    ]
