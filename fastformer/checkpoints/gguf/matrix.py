"""The matrices of a file as tensors that are read when something asks for their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fastformer.checkpoints.gguf.blocks import BLOCKS, Kind, int4_groups, numbers
from fastformer.checkpoints.gguf.file import Stored
from fastformer.models.quantization import Groups

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_TURNED = (_aten.t.default, _aten.transpose.int, _aten.permute.default)


class FileMatrix(Tensor):
    """A tensor in a file, and a `models.stored.StoredMatrix`.

    Choosing neighbouring rows, joining the first two of three dimensions and transposing a matrix give another tensor
    in the file. Any other operation reads the numbers.
    """

    _stored: Stored
    _bytes: Tensor  # (rows, bytes of a row)
    _order: Tensor | None  # the places of the rows in `_bytes`; None: they are in order
    _is_turned: bool

    @staticmethod
    def __new__(
        cls, stored: Stored, shape: tuple[int, ...], data: Tensor, order: Tensor | None = None, is_turned: bool = False
    ) -> FileMatrix:
        dtype = BLOCKS[stored.kind].dtype or torch.float32
        made: FileMatrix = Tensor._make_wrapper_subclass(cls, shape[::-1] if is_turned else shape, dtype=dtype)
        made._stored, made._bytes, made._order, made._is_turned = stored, data, order, is_turned
        return made

    @classmethod
    def of(cls, stored: Stored) -> FileMatrix:
        """Returns a tensor of a file, of two or three dimensions."""
        block, columns = BLOCKS[stored.kind], stored.shape[-1]
        return cls(stored, stored.shape, stored.data.view(-1, columns // block.numbers * block.size))

    def in_order(self, order: Tensor) -> FileMatrix:
        """Returns a matrix with the same rows at other places."""
        return FileMatrix(self._stored, tuple(self.shape), self._bytes, order)

    def rows(self, begin: int, end: int) -> Tensor:
        """See `StoredMatrix`."""
        if self._is_turned:
            return self.read()[begin:end]
        inner = self.shape[1:-1].numel()
        data = self._read(begin * inner, end * inner)
        result = numbers(self._stored.kind, (end - begin, *self.shape[1:]), data)
        result = result.clone() if result.data_ptr() == data.data_ptr() else result  # a view of the file
        self._finish(data, result)
        return result

    def groups(self, begin: int, end: int) -> Groups | None:
        """See `StoredMatrix`."""
        if self._stored.kind != Kind.Q4_0 or self._is_turned or self.dim() != 2:
            return None
        data = self._read(begin, end)
        result = int4_groups((end - begin, self.shape[1]), data)
        self._finish(data, result.scale)
        return result

    def _finish(self, data: Tensor, numbers: Tensor) -> None:
        self._stored.release(self._bytes if self._order is not None else data)
        if numbers.numel() and not all(each.isfinite() for each in numbers.aminmax()):  # NaN is both
            raise ValueError(f"expected finite weights, got NaN or infinity in {self._stored.place}")

    def read(self) -> Tensor:
        """Returns all numbers."""
        if self._is_turned:
            return FileMatrix(self._stored, tuple(self.shape)[::-1], self._bytes, self._order).read().t()
        return self.rows(0, self.shape[0])

    def _read(self, begin: int, end: int) -> Tensor:
        return (self._bytes[begin:end] if self._order is None else self._bytes[self._order[begin:end]]).flatten()

    def _part(self, begin: int, end: int) -> FileMatrix:
        """Returns neighbouring rows."""
        shape, inner = (end - begin, *self.shape[1:]), self.shape[1:-1].numel()
        span = slice(begin * inner, end * inner)
        if self._order is None:
            return FileMatrix(self._stored, shape, self._bytes[span])
        return FileMatrix(self._stored, shape, self._bytes, self._order[span])

    def _derived(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation that reads nothing; NotImplemented for others."""
        if func in _SAME:
            return self
        if func is _aten.empty_like.default:
            return torch.empty(self.shape, dtype=kwargs.get("dtype") or self.dtype, device=kwargs.get("device"))
        if func in _TURNED and self.dim() == 2 and args[1:] in ((), (0, 1), (1, 0), ([1, 0],)):
            shape = tuple(self.shape)[::-1] if self._is_turned else tuple(self.shape)
            return FileMatrix(self._stored, shape, self._bytes, self._order, not self._is_turned)
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
            return FileMatrix(part._stored, tuple(self.shape[1:]), part._bytes, part._order)
        joined = (self.shape[:2].numel(), self.shape[-1])
        if func is _aten.view.default and self.dim() == 3 and (*args[1],) in (joined, (-1, joined[1])):
            return FileMatrix(self._stored, joined, self._bytes, self._order)
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
