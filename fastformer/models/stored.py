"""Models whose matrices stay in a file until they are asked for.

The C++ engine packs such a model from the file, some rows at a time (`stored_in`, `stand_in`). Asking a module for a
parameter, as a forward, `parameters()`, `state_dict()` and a copy do, reads all of the model's matrices into memory;
from then on it is a model like any other.

A module holds its parameters in the dictionary `_parameters`. As long as matrices are in a file, that dictionary is a
`_Waiting`, whose entries are placeholders: NaN of the right shape and dtype, without memory. Its methods read the
matrices first. `dict.values(module._parameters)` and its like don't, and see the placeholders.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from fastformer.locks import ForkSafeLock
from fastformer.models.quantization import Groups

_ROWS_AT_ONCE = 1 << 20  # numbers
_STORED = "_fastformer_stored"  # an attribute of a stand-in


class StoredMatrix(Protocol):
    """A matrix in a file. Its methods raise a ValueError if numbers are not finite."""

    @property
    def shape(self) -> torch.Size: ...

    def rows(self, begin: int, end: int) -> Tensor:
        """Returns numbers of rows."""

    def groups(self, begin: int, end: int) -> Groups | None:
        """Returns rows as int4; None: the file doesn't have them as int4."""


class Stored:
    """A parameter in a file: matrices one below the other.

    Attributes:
        shape: the shape of the parameter.
    """

    def __init__(self, parts: tuple[StoredMatrix, ...]) -> None:
        self._parts = parts
        self.shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

    def rows(self, begin: int, end: int) -> Tensor:
        """Returns numbers of rows in fp32; see `StoredMatrix`."""
        return _joined([part.rows(*span).float() for part, span in self._spans(begin, end)])

    def read_into(self, target: Tensor) -> None:
        """Writes all numbers into a tensor."""
        for begin, end in self.chunks():
            target[begin:end].copy_(self.rows(begin, end))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yields the bounds of some rows at a time."""
        step = max(1, _ROWS_AT_ONCE // max(1, self.shape[1:].numel()))
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])

    @cached_property
    def _firsts(self) -> list[Groups | None]:
        return [part.groups(0, 1) for part in self._parts]

    @cached_property
    def has_groups(self) -> bool:
        """Whether the file has the numbers as int4, with the same levels or none."""
        return all(first is not None and _same(first.levels, self.levels) for first in self._firsts)

    @property
    def levels(self) -> Tensor | None:
        """The levels of a parameter that `has_groups`."""
        first = self._firsts[0]
        return None if first is None else first.levels

    @property
    def has_zeros(self) -> bool:
        """Whether the file has the numbers as int4 with zeros other than 8."""
        return self.has_groups and any(first is not None and first.zero is not None for first in self._firsts)

    def groups(self, begin: int, end: int) -> Groups:
        """Returns rows as int4, of a parameter that `has_groups`; all rows have zeros, or none has."""
        parts = [part.groups(*span) for part, span in self._spans(begin, end)]
        found = [part for part in parts if part is not None]
        zeros = [
            torch.full_like(part.scale, 8, dtype=torch.uint8) if part.zero is None else part.zero for part in found
        ]
        return Groups(
            _joined([part.nibbles for part in found]),
            _joined([part.scale for part in found]),
            _joined(zeros) if self.has_zeros else None,
            self.levels,
        )

    def sample(self, count: int) -> Tensor:
        """Returns at most so many rows, in fp32: some neighbours at each of a few places."""
        places = 4
        step, size = -(-self.shape[0] // places), max(1, count // places)
        return torch.cat(
            [self.rows(begin, min(begin + size, self.shape[0])) for begin in range(0, self.shape[0], step)]
        )

    def _spans(self, begin: int, end: int) -> Iterator[tuple[StoredMatrix, tuple[int, int]]]:
        for part in self._parts:
            size = part.shape[0]
            if begin < size and end > 0:
                yield part, (max(0, begin), min(size, end))
            begin, end = begin - size, end - size


def _same(levels: Tensor | None, others: Tensor | None) -> bool:
    return levels is others or (levels is not None and others is not None and torch.equal(levels, others))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class StoredGroups(Mapping[str, Groups]):
    """The `int4_groups` of a model, which are read from the file at each access."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = dict(stored)

    def __getitem__(self, name: str) -> Groups:
        stored = self._stored[name]
        return stored.groups(0, stored.shape[0])

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # Mapping's own reads the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Place(NamedTuple):
    """A module with parameters in a file, and their placeholders by name."""

    module: weakref.ref[nn.Module]
    waiting: _Waiting
    stored: dict[str, Stored]


class _File:
    """What a model has in a file. All modules of the model share it, and it refers to none of them."""

    def __init__(self, stand_in: nn.Module) -> None:
        self.stand_in = stand_in
        self.places: list[_Place] = []
        self._lock = ForkSafeLock()

    def read(self) -> None:
        """Reads all matrices into memory, once."""
        # Whatever surrounds the first call: parameters that are made in inference mode have no versions and gradients.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for module, waiting, stored in self.places:
                plain = dict(dict.items(waiting))
                for name, source in stored.items():
                    before = plain[name]
                    tensor = torch.empty(source.shape, dtype=before.dtype)
                    source.read_into(tensor)
                    plain[name] = nn.Parameter(tensor, before.requires_grad)
                dict.update(waiting, plain)
                waiting.plain = plain
                if (owner := module()) is not None:
                    vars(owner)["_parameters"] = plain
            self.places.clear()


class _Waiting(dict[str, Any]):
    """A module's `_parameters` with placeholders; see the top of this module.

    Attributes:
        file: what the model has in the file.
        plain: the dictionary that replaced this one; None: not yet.
    """

    def __init__(self, values: Mapping[str, Any], file: _File) -> None:
        super().__init__(values)
        self.file = file
        self.plain: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)  # with a method of its own, dict(self) calls __getitem__

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _reading(name: str) -> Callable[..., Any]:
    def method(self: _Waiting, *args: Any, **kwargs: Any) -> Any:
        if self.plain is None:
            self.file.read()
        result = getattr(dict, name)(self, *args, **kwargs)
        if name in _CHANGES:
            getattr(dict, name)(self.plain, *args, **kwargs)
        return result

    return method


_CHANGES = ("__setitem__", "__delitem__", "pop", "popitem", "clear", "update", "setdefault", "__ior__")
for _name in (*_CHANGES, "__getitem__", "get", "items", "values", "copy", "__or__", "__ror__", "__eq__"):
    setattr(_Waiting, _name, _reading(_name))


def leave_in_file(model: nn.Module, stand_in: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Makes a model wait for its matrices.

    Args:
        model: a new model, whose other parameters have their values.
        stand_in: another model of the same config, on "meta".
        stored: matrices by their names in the model's state_dict.
    """
    file, modules = _File(stand_in), dict(model.named_modules())
    placeholders = dict[int, Stored]()
    setattr(stand_in, _STORED, placeholders)
    by_module: dict[str, dict[str, Stored]] = {}
    for name, source in stored.items():
        place, _, kind = name.rpartition(".")
        by_module.setdefault(place, {})[kind] = source
    for place, sources in by_module.items():
        module = modules[place]
        values = dict(module._parameters)
        for kind, source in sources.items():
            before = values[kind]
            assert before is not None
            empty = torch.full((1,) * before.dim(), torch.nan, dtype=before.dtype).expand(before.shape)
            values[kind] = nn.Parameter(empty, before.requires_grad)
            placeholders[id(values[kind])] = source
        waiting = _Waiting(values, file)
        module.__dict__["_parameters"] = waiting
        file.places.append(_Place(weakref.ref(module), waiting, sources))
    for module, other in zip(model.modules(), stand_in.modules(), strict=True):
        parameters = cast(dict[str, Any], module._parameters)
        other.__dict__.update(_parameters=dict(dict.items(parameters)), _buffers=module._buffers)
        other.training = module.training


def stand_in(model: nn.Module) -> Any:
    """Returns a model with the placeholders as ordinary parameters, to look at without reading; else the model."""
    for module in model.modules():
        if isinstance(parameters := module._parameters, _Waiting):
            return parameters.file.stand_in
    return model


def has_stored(modules: Iterable[nn.Module]) -> bool:
    """Returns whether one of these modules has matrices that are still in a file."""
    return any([isinstance(module._parameters, _Waiting) for module in modules])


def first_parameter(model: nn.Module) -> nn.Parameter | None:
    """Returns the first parameter of a model, or a placeholder of it, to look at without reading."""
    for module in model.modules():
        if isinstance(parameters := module._parameters, _Waiting):
            return next(parameters.file.stand_in.parameters(), None)
        for parameter in parameters.values():
            if parameter is not None:
                return parameter
    return None


def stored_in(model: nn.Module) -> Mapping[int, Stored]:
    """Returns what the placeholders of a `stand_in` stand for, by their ids; of any other model, nothing."""
    stored: Mapping[int, Stored] = vars(model).get(_STORED, {})
    return stored
