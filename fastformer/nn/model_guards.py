"""Is a whole model still what it was when something was decided about it, and are its tensors where they were?

For what takes over all that a model computes and calls none of its modules: the C++ engine, which reads its weights,
and CUDA graphs, which replay the work of one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from fastformer.nn.guards import Guards
from fastformer.ops import _extension

_SCALARS = (bool, int, float, str, tuple)


class ModelGuards:
    """A model as it was when this was made: its modules with their settings and hooks, and where its tensors are.

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
        stores: list[dict[str, Any]] = []
        for module in every:
            stores += (cast(dict[str, Any], module._parameters), module._buffers)
        self._guards = Guards(model, (), functions, wholly=every[1:], spaces=stores)
        self._own = _own_state(model)
        self.tensors = [tensor for store in stores for tensor in store.values() if tensor is not None]
        self.layout = layout_of(self.tensors)

    def hold(self, model: nn.Module) -> bool:
        """Whether the model is what it was."""
        return self._guards.hold(model) and self._own == _own_state(model) and self.layout == layout_of(self.tensors)


def layout_of(tensors: list[Tensor]) -> object:
    """Which tensors these are, where they are, and how their memory is read."""
    in_cpp = _extension.host_function("tensor_layout")
    found = None if in_cpp is None else in_cpp(tensors)
    if found is not None:
        return found
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
