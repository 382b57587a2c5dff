"""A stack of encoder layers on the C++ engine: all of them in one call, over weights that are packed once.

The engine reads the weights in its own order, so it keeps a copy of them: the originals would have to be reordered in
each call. `nn.prepack` checks whether the copy still equals the stack's weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.nn.guards import layout_of
from fastformer.nn.prepack import packed, unpack
from fastformer.ops import _extension

logger = logging.getLogger("fastformer")

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.float32]
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_MOST_TOKENS = 2**31 - 1
_NAMES = (
    *("norm1.weight", "norm1.bias", "self_attn.in_proj_weight", "self_attn.in_proj_bias"),
    *("self_attn.out_proj.weight", "self_attn.out_proj.bias", "norm2.weight", "norm2.bias"),
    *("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
)
# If the weights change with each call, a copy costs more than it saves: after this many copies in a row that served
# only one call, the weights have to stay unchanged for the same number of calls before they are packed again.
_PATIENCE = 2


class _Encoder(Protocol):
    """The interface of csrc/bindings/encoder.cpp's Encoder."""

    def encode_states(self, states: Array, lengths: Sequence[int], threads: int) -> Array: ...


class StackSettings(NamedTuple):
    """The settings that all layers of a stack share.

    Attributes:
        d_model, num_heads, num_kv_heads, num_layers: the sizes of the stack.
        activation: the activation's name in csrc/common/activation.h.
        norm_first, rms_norm, eps: the settings of all norms.
        has_final_norm: whether a norm follows the last layer.
        window: the number of tokens to which a token attends on either side; None: all.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    activation: str
    norm_first: bool
    rms_norm: bool
    eps: float
    has_final_norm: bool
    window: int | None

    def options(self, precision: str) -> dict[str, object]:
        """Returns the settings as csrc/engine/packed_model.h's ModelOptions."""
        head_dim = self.d_model // self.num_heads
        return {
            "precision": precision,
            "d_model": self.d_model,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "num_encoder_layers": self.num_layers,
            "norm_placement": "pre" if self.norm_first else "sum",
            "rms_norm": self.rms_norm,
            "is_bare": True,
            "eps": self.eps,
            "attention_scale": head_dim**-0.5,
            "encoder_windows": [-1 if self.window is None else self.window] * self.num_layers,
            "max_len": _MOST_TOKENS,
            "activation": self.activation,
        }


class _Held(NamedTuple):
    """The tensors of a stack and their addresses."""

    tensors: list[Tensor]
    layout: object


class _Copies:
    """Statistics about the copies of a stack's weights.

    Attributes:
        calls: the number of calls that the current copy has served.
        wasted: the number of copies in a row that served only one call.
        quiet: the number of calls in a row that found the weights unchanged, since packing was given up.
        seen: the addresses and versions of the weights at the last of these calls.
        reason: why the engine can't use the weights at their current addresses.
    """

    def __init__(self) -> None:
        self.calls = self.wasted = self.quiet = 0
        self.seen: object = None
        self.reason: tuple[object, str | None] | None = None

    def is_worth_it(self, held: _Held) -> bool:
        """Returns whether to pack the weights, judged by the calls before this one."""
        if self.wasted < _PATIENCE:
            return True
        now = held.layout, _versions(held.tensors)
        self.quiet = self.quiet + 1 if now == self.seen else 0
        self.seen = now
        if self.quiet < _PATIENCE:
            return False
        self.wasted = self.quiet = 0
        return True

    def note_packed(self) -> None:
        """Counts a new copy."""
        self.wasted = self.wasted + 1 if self.calls == 1 else 0
        self.calls = 0


_copies: WeakKeyDictionary[nn.Module, _Copies] = WeakKeyDictionary()


@functools.cache
def why_no_engine() -> str | None:
    """Returns why the engine can't run a stack on this machine; None if it can."""
    try:
        import numpy  # noqa: F401  (tensors are passed to the engine as its arrays)
    except ImportError:
        return "numpy is not installed"
    if (missing := _extension.why_missing("Encoder")) is not None:
        return missing
    is_new = hasattr(cast(Any, _extension.module()).Encoder, "encode_states")
    return None if is_new else "the C++ extension is older than it: run `pip install -e . --no-build-isolation` again"


def run_packed(
    stack: nn.Module,
    tensors: list[Tensor | None],
    settings: StackSettings,
    x: Tensor,
    lengths: Sequence[int],
    precision: str | None = None,
) -> Tensor | None:
    """Computes a stack on the engine, and packs its weights first if there is no copy or they have changed.

    Args:
        stack: the owner of the copy, which is dropped with it.
        tensors: twelve tensors of each layer, in the order of `_NAMES`, and the weight and bias of the final norm.
        settings: the settings of the stack.
        x: (batch, seqlen, dim) or (tokens, dim), fp32 or bf16, on the CPU.
        lengths: the number of tokens of each sequence.
        precision: "fp32", "bf16" or "int8"; None: that of x.

    Returns:
        x's shape and dtype; None if the engine doesn't support the stack's tensors, or if they change so often that
        a copy of them costs more than it saves.
    """
    own = [tensor for tensor in tensors if tensor is not None]
    held, copies = _Held(own, layout_of(own)), _copies.setdefault(stack, _Copies())
    precision = precision or PRECISIONS[x.dtype]
    key = held.layout, x.dtype, precision
    reason = copies.reason  # another thread may put its own there meanwhile
    if reason is None or reason[0] != key:
        reason = copies.reason = key, _why_not(own, x.dtype)
    if reason[1] is not None or not copies.is_worth_it(held):
        return None

    def pack() -> _Encoder:
        copies.note_packed()
        extension = cast(Any, _extension.module())
        arrays = _arrays(tensors, settings)
        return cast(_Encoder, extension.Encoder(extension.PackedModel(settings.options(precision), arrays)))

    try:
        encoder = packed(stack, f"stack {precision}", pack, find=lambda _: (held, None))
    except ValueError as error:
        copies.reason = key, str(error)
        logger.debug("%s runs without the engine: %s", type(stack).__name__, error)
        return None
    copies.calls += 1
    rows = x.detach().float().contiguous().view(-1, x.shape[-1])
    out = encoder.encode_states(rows.numpy(), lengths, torch.get_num_threads())
    return torch.from_numpy(out).to(x.dtype).view(x.shape)


def precision_of(stack: Any) -> str | None:
    """Returns the precision in which the engine computes a stack; None: it doesn't know the weights' dtype."""
    weight = next(stack.parameters(), None)
    own = None if weight is None else PRECISIONS.get(weight.dtype)
    return own and (stack.packed_precision or own)


def copy_bytes(matrices: int, others: int, precision: str) -> int:
    """Estimates the bytes of a packed copy.

    Args:
        matrices: the count of numbers in the weights of products.
        others: the count of numbers in the tables and vectors.
        precision: the precision of the engine.
    """
    return int(matrices * _extension.PACKED_BYTES[precision]) + others * (4 if precision == "fp32" else 2)


def megabytes(count: int) -> str:
    """Formats a number of bytes as readable text."""
    return f"{count / 1e6:.1f} MB" if count < 1e7 else f"{count / 1e6:.0f} MB"


def forget(stack: nn.Module) -> None:
    """Drops the copy of a stack's weights."""
    _copies.pop(stack, None)
    unpack(stack)


def _why_not(tensors: list[Tensor], dtype: torch.dtype) -> str | None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype != dtype:
            return f"a weight is {tensor.dtype} of {tensor.device}, {tensor.layout}"
        if tensor.is_inference():
            return "a weight was made in inference mode, whose changes could not be noticed"
    return None


def _versions(tensors: list[Tensor]) -> object:
    count: Callable[[list[Tensor]], object] | None = _extension.host_function("tensor_versions")
    return [tensor._version for tensor in tensors] if count is None else count(tensors)


def _arrays(tensors: list[Tensor | None], settings: StackSettings) -> dict[str, Any]:
    """Returns the tensors by their names in csrc/engine/packed_model.h."""
    named = {
        f"encoder.layers.{i}.{name}": tensors[i * len(_NAMES) + index]
        for i in range(settings.num_layers)
        for index, name in enumerate(_NAMES)
    }
    if settings.has_final_norm:
        weight, bias = tensors[-2:]
        ones = torch.ones(settings.d_model) if weight is None else weight  # else the engine omits the norm
        named |= {"encoder.norm.weight": ones, "encoder.norm.bias": bias}
    return {name: _array(tensor) for name, tensor in named.items() if tensor is not None}


def _array(tensor: Tensor) -> Any:
    import numpy as np

    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
