"""The C++ libraries read tensors as Python does, with and without the library bound to this PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.engine.frozen import layout_of
from fastformer.ops import _dispatch, _extension
from tests.conftest import leave_out_extension
from tests.covering import each

pytestmark = pytest.mark.skipif(_extension.module() is None, reason="no C++ extension for this CPU")

PLACES = _dispatch.TensorIndices(torch.ops.fastformer.linear.default._schema)


def functions(name: str) -> list[Callable[..., Any]]:
    """Returns the functions of the engine's library and, if it exists, of the one that is bound to this PyTorch."""
    first, last = _extension.host_function(name), getattr(_extension.module(), name)
    assert first is not None
    return [last] if first is last else [last, first]


class Subclass(Tensor):
    pass


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2)


def _batched() -> Tensor:
    leaked: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        leaked.append(x)
        return x

    torch.func.vmap(keep)(torch.ones(2, 2))
    return leaked[0]


TENSORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.ones(2, 2),
    "a view": lambda: torch.ones(3, 2, 2)[1].t(),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "with a gradient": lambda: torch.ones(2, 2, requires_grad=True),
    "bfloat16": lambda: torch.ones(2, 2, dtype=torch.bfloat16),
    "a subclass": lambda: torch.ones(2, 2).as_subclass(Subclass),
    "meta": lambda: torch.ones(2, 2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "conjugated": lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
    "of inference mode": _inference,
    "of a transform": _batched,
    "no tensor": lambda: 3,
}


@each("name", TENSORS)
@each("place", [0, 1, 2])
def test_places_of_the_tensors_of_a_call(name: str, place: int) -> None:
    args: list[Any] = [torch.ones(2, 2), torch.ones(2, 2), None]
    args[place] = TENSORS[name]()
    due = _dispatch.device_of(tuple(args), PLACES)
    for function in functions("device_of"):
        assert function(tuple(args), PLACES) == due


def test_tensors_of_inference_mode_and_weights_are_plain() -> None:
    """All activations of a search are made in inference mode, its weights aren't."""
    args = (_inference(), torch.nn.Parameter(torch.ones(2, 2)), None)
    for function in (*functions("device_of"), _dispatch.device_of):
        assert function(args, PLACES) == ("cpu", True)


def _swapped(tensors: list[Tensor]) -> None:
    tensors[0], tensors[1] = tensors[1], tensors[0]


def _of_another_dtype(tensors: list[Tensor]) -> None:
    tensors[1].data = tensors[1].data.view(torch.int32)


def _transposed(tensors: list[Tensor]) -> None:
    tensors[0].data = tensors[0].data.t()


def _moved(tensors: list[Tensor]) -> None:
    tensors[0].data = tensors[0].data.clone()


@pytest.mark.parametrize("change", [_swapped, _of_another_dtype, _transposed, _moved, list.pop])
def test_a_layout_describes_tensors_and_strides(change: Callable[[list[Tensor]], Any]) -> None:
    for function in functions("tensor_layout"):
        tensors = [torch.nn.Parameter(torch.ones(3, 3)), torch.ones(4)]
        before = function(tensors)
        with torch.no_grad():
            tensors[0].add_(1)
        assert function(tensors) == before == function([*tensors])
        change(tensors)
        assert function(tensors) != before


def test_layouts_that_cpp_lacks_are_read_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(2, 2, device="meta"), torch.ones(2)]
    monkeypatch.setattr(_extension, "host_function", lambda name: getattr(_extension.module(), name))
    layout = layout_of(tensors)
    assert layout is not None and layout == layout_of(tensors) and layout != layout_of(tensors[::-1])
    leave_out_extension(monkeypatch)
    assert layout_of(tensors[1:]) == layout_of([*tensors[1:]])


def test_changes_are_counted() -> None:
    for function in functions("tensor_versions"):
        tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
        before = function(tensors)
        assert function(tensors) == before
        with torch.no_grad():
            tensors[1].add_(1)
        assert function(tensors) != before
        with pytest.raises((TypeError, AttributeError)):
            function([3])


def test_the_geometry_of_calls() -> None:
    (function,) = functions("geometry")
    x = torch.zeros(8, 6)
    alike = [(x, 2, "a", None, True, [1, 2], torch.float32), (x.clone(), 2, "a", None, True, [1, 2], torch.float32)]
    assert function(alike[0]) == function(alike[1]) is not None
    others = [
        (x.t(), *alike[0][1:]),
        (x.double(), *alike[0][1:]),
        (x[:, :5], *alike[0][1:]),
        (x.flatten()[1:43].view(7, 6), *alike[0][1:]),
        (torch.zeros(8 * 6 + 1)[1:].view(8, 6), *alike[0][1:]),  # at another address modulo 16
        *((x, *alike[0][1:place], value, *alike[0][place + 1 :]) for place, value in enumerate(
            [3, "b", 0.0, False, [1, 3], torch.int32], 1)),
        (x, 2.0, *alike[0][2:]),
        alike[0][:-1],
    ]  # fmt: skip
    keys = [function(arguments) for arguments in (alike[0], *others)]
    assert None not in keys and len(set(keys)) == len(keys)
    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not was)
        assert function(alike[0]) != keys[0]
    finally:
        torch.use_deterministic_algorithms(was)
    assert function((x, object())) is None and function((3, x)) is None and function(()) is None
