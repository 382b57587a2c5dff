"""The matrices of a file as tensors that are read when something asks for their numbers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fastformer.models.quantization import Groups
from fastformer.models.weights import is_finite

# Fewer numbers than PyTorch shares among threads, which wait for each other after each of several operations: beside
# busy processes a read would mostly wait. The numbers of a piece also stay in the second-level cache.
_PIECE = 2**15 - 1
_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_TURNED = (_aten.t.default, _aten.transpose.int, _aten.permute.default)


class Source(Protocol):
    """How the numbers of a tensor are stored: in parts, each of which has something for every row of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""

    @property
    def place(self) -> str:
        """The name of the tensor and of its file, for messages."""

    def numbers_of(self, shape: tuple[int, ...], *parts: Any) -> Tensor:
        """Returns the numbers of some rows."""

    def groups_of(self, shape: tuple[int, ...], *parts: Any) -> Groups | None:
        """Returns some rows of a matrix as int4; None: the file doesn't have them as int4."""

    def release(self, *parts: Any) -> None:
        """Is told that parts won't be read soon, and need no memory."""


def _is_list(*indices: Tensor) -> bool:
    """Returns whether indices are one list of places."""
    return len(indices) == 1 and indices[0].dim() == 1 and indices[0].dtype == torch.int64


def _rows_of(part: Any, places: Tensor) -> Any:
    if not isinstance(part, Tensor):
        return part[places]
    result = torch.empty((len(places), *part.shape[1:]), dtype=part.dtype)
    step = max(1, _PIECE // max(1, part.shape[1:].numel()))
    for first in range(0, len(places), step):
        torch.index_select(part, 0, places[first : first + step], out=result[first : first + step])
    return result


class FileMatrix(Tensor):
    """A tensor in a file, and a `models.stored.StoredMatrix`.

    Choosing neighbouring rows or rows by their numbers, joining the first two of three dimensions and transposing a
    matrix give another tensor in the file. Any other operation reads the numbers.
    """

    _source: Source
    _rows: tuple[Any, ...]  # the parts of all rows
    _order: Tensor | None  # the places of the rows in the parts; None: they are in order
    _is_turned: bool

    @staticmethod
    def __new__(
        cls,
        source: Source,
        shape: tuple[int, ...],
        rows: tuple[Any, ...],
        order: Tensor | None = None,
        is_turned: bool = False,
    ) -> FileMatrix:
        made: FileMatrix = Tensor._make_wrapper_subclass(cls, shape[::-1] if is_turned else shape, dtype=source.dtype)
        made._source, made._rows, made._order, made._is_turned = source, rows, order, is_turned
        return made

    def rows(self, begin: int, end: int) -> Tensor:
        """See `StoredMatrix`."""
        if self._is_turned:
            return self.read()[begin:end]
        inner = self.shape[1:-1].numel()
        parts = self._read(begin * inner, end * inner)
        result = torch.empty((end - begin, *self.shape[1:]), dtype=self.dtype, device="cpu")
        step = max(1, _PIECE // max(1, self.shape[-1]))
        numbers = result.view((end - begin) * inner, self.shape[-1])
        for first in range(0, len(numbers), step):
            piece = numbers[first : first + step]
            piece.copy_(self._source.numbers_of(tuple(piece.shape), *(part[first : first + step] for part in parts)))
            self._check(piece)
        self._release(parts)
        return result

    def groups(self, begin: int, end: int) -> Groups | None:
        """See `StoredMatrix`."""
        if self._is_turned or self.dim() != 2:
            return None
        parts = self._read(begin, end)
        result = self._source.groups_of((end - begin, self.shape[1]), *parts)
        if result is not None:
            self._check(result.scale)
            self._release(parts)
        return result

    def _release(self, parts: tuple[Any, ...]) -> None:
        self._source.release(*(parts if self._order is None else self._rows))

    def _check(self, numbers: Tensor) -> None:
        if not is_finite(numbers):
            raise ValueError(f"expected finite weights, got NaN or infinity in {self._source.place}")

    def read(self) -> Tensor:
        """Returns all numbers."""
        if self._is_turned:
            return FileMatrix(self._source, tuple(self.shape)[::-1], self._rows, self._order).read().t()
        return self.rows(0, self.shape[0])

    def float(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns all numbers in fp32. A plain tensor of fp32 would return itself, unread."""
        return self.read().float(*args, **kwargs)

    def _read(self, begin: int, end: int) -> tuple[Any, ...]:
        if self._order is None:
            return tuple(part[begin:end] for part in self._rows)
        return tuple(_rows_of(part, self._order[begin:end]) for part in self._rows)

    def _part(self, begin: int, end: int) -> FileMatrix:
        """Returns neighbouring rows."""
        shape, inner = (end - begin, *self.shape[1:]), self.shape[1:-1].numel()
        span = slice(begin * inner, end * inner)
        if self._order is None:
            return FileMatrix(self._source, shape, tuple(part[span] for part in self._rows))
        return FileMatrix(self._source, shape, self._rows, self._order[span])

    def _derived(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation that reads nothing; NotImplemented for others."""
        if func in _SAME:
            return self
        if func is _aten.empty_like.default:
            return torch.empty(self.shape, dtype=kwargs.get("dtype") or self.dtype, device=kwargs.get("device"))
        if func in _TURNED and self.dim() == 2 and args[1:] in ((), (0, 1), (1, 0), ([1, 0],)):
            shape = tuple(self.shape)[::-1] if self._is_turned else tuple(self.shape)
            return FileMatrix(self._source, shape, self._rows, self._order, not self._is_turned)
        if self._is_turned:
            return NotImplemented
        if func is _aten.slice.Tensor and (len(args) < 5 or args[4] == 1) and not kwargs:
            given = dict(zip(("dim", "begin", "end"), args[1:4], strict=False))
            if given.get("dim", 0) == 0:
                begin, end, _ = slice(given.get("begin"), given.get("end")).indices(self.shape[0])
                return self._part(begin, max(begin, end))
        if func in (_aten.split.Tensor, _aten.split_with_sizes.default) and (*args[2:], 0)[0] == 0 and not kwargs:
            sizes = args[1] if isinstance(args[1], list) else [args[1]] * -(-self.shape[0] // max(1, args[1]))
            ends = torch.tensor(sizes).cumsum(0).clamp(max=self.shape[0]).tolist()
            return [self._part(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        if func is _aten.select.int and self.dim() == 3 and args[1] == 0:
            index = range(self.shape[0])[args[2]]
            part = self._part(index, index + 1)
            return FileMatrix(part._source, tuple(self.shape[1:]), part._rows, part._order)
        if func is _aten.index.Tensor and self.dim() == 2 and _is_list(*args[1]):
            order = args[1][0] if self._order is None else self._order[args[1][0]]
            return FileMatrix(self._source, (len(order), self.shape[1]), self._rows, order)
        joined = (self.shape[:2].numel(), self.shape[-1])
        if func is _aten.view.default and self.dim() == 3 and (*args[1],) in (joined, (-1, joined[1])):
            return FileMatrix(self._source, joined, self._rows, self._order)
        return NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if isinstance(args[0], FileMatrix):
            result = args[0]._derived(func, args, kwargs)
            if result is not NotImplemented:
                return result

        def plain(value: Any) -> Any:
            return value.read() if isinstance(value, FileMatrix) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))
