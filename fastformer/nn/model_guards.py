"""Checks whether a whole model is unchanged since a decision about it, its tensors at the same addresses.

This is for code that computes a whole model without calling its modules: the C++ engine, which reads its weights, and
CUDA graphs, which replay the work of one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from fastformer.nn.guards import Guards
from fastformer.ops import _extension

_SCALARS = (bool, int, float, str, tuple)


class ModelGuards:
    """A snapshot of a model: its modules with their settings and hooks, and the addresses of its tensors.

    The values of tensors may change. The guards keep the tensors and the modules inside of the model alive, but not the
    model, so that a weak dictionary of models can hold them.

    Args:
        model: the model. If one of its methods is an attribute of the instance, the guards keep it alive.
        functions: other watched functions; see `Guards`.

    Attributes:
        tensors: the parameters and buffers; a shared one is listed once for each of its names.
        layout: the addresses and strides of the tensors; see `layout_of`.
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
        """Returns whether the model is unchanged."""
        return self._guards.hold(model) and self._own == _own_state(model) and self.layout == layout_of(self.tensors)


def layout_of(tensors: list[Tensor]) -> object:
    """Returns the identities of tensors, their addresses, and the layout by which their memory is read."""
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
    """Returns the owner's state that `Guards` doesn't watch: its settings and its hooks."""
    own = vars(model)
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"])
    return [
        *(value for value in own.values() if isinstance(value, _SCALARS)),
        *(hook for kept in hooks for hook in kept.values()),
    ]
