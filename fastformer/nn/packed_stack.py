"""A stack of encoder layers on the C++ engine: all of them in one call, over weights that are packed once.

The engine reads the weights in an order of its own, so it keeps a copy of them. A call then takes 0.9 to 0.25 times as
long as on the weights where they lie, which have to be laid out again each time. `nn.prepack` says whether they are
still the stack's own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.nn.model_guards import layout_of
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
# A copy of weights that changes with each call costs more than it saves: after so many in a row that served one call
# alone, the weights have to stay what they are for as many calls before they are packed again.
_PATIENCE = 2


class _Encoder(Protocol):
    """csrc/bindings/encoder.cpp's Encoder."""

    def encode_states(self, states: Array, lengths: Sequence[int], threads: int) -> Array: ...

    @property
    def weight_bytes(self) -> int: ...


class StackSettings(NamedTuple):
    """What the layers of a stack have in common.

    Attributes:
        d_model, num_heads, num_kv_heads, num_layers: sizes.
        activation: by the name that csrc/common/activation.h has for it.
        norm_first, rms_norm, eps: of all norms.
        has_final_norm: whether one stands behind the layers.
        window: how far a token attends to either side; None: to all of them.
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
        """csrc/engine/packed_model.h's ModelOptions."""
        head_dim = self.d_model // self.num_heads
        return {
            "precision": precision,
            "d_model": self.d_model,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "num_encoder_layers": self.num_layers,
            "num_decoder_layers": 0,
            "norm_placement": "pre" if self.norm_first else "sum",
            "rms_norm": self.rms_norm,
            "rotary_interleaved": False,
            "parallel_residual": False,
            "is_bare": True,
            "eps": self.eps,
            "scale": 1.0,
            "attention_scale": head_dim**-0.5,
            "attention_softcap": 0.0,
            "logit_softcap": 0.0,
            "padding_idx": -1,
            "encoder_windows": [-1 if self.window is None else self.window] * self.num_layers,
            "decoder_windows": [],
            "max_len": _MOST_TOKENS,
            "activation": self.activation,
        }


class _Held(NamedTuple):
    """The tensors of a stack and where they are."""

    tensors: list[Tensor]
    layout: object


class _Copies:
    """What became of the copies of a stack's weights.

    Attributes:
        calls: that the copy there is has served.
        wasted: how many in a row served one call.
        quiet: how many calls in a row saw the weights unchanged, since packing was given up.
        seen: the weights as the last of these calls saw them.
        reason: why the engine can't take them where they are at the moment.
    """

    def __init__(self) -> None:
        self.calls = self.wasted = self.quiet = 0
        self.seen: object = None
        self.reason: tuple[object, str | None] | None = None

    def is_worth_it(self, held: _Held) -> bool:
        """Whether to pack, as far as the calls before this one tell."""
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
    """Why the engine runs no stack on this machine; None where it does."""
    try:
        import numpy  # noqa: F401  (its arrays are how tensors come to the engine)
    except ImportError:
        return "numpy is not installed"
    if (missing := _extension.why_missing("Encoder")) is not None:
        return missing
    is_new = hasattr(cast(Any, _extension.module()).Encoder, "encode_states")
    return None if is_new else "the C++ extension is older than it: run `pip install -e . --no-build-isolation` again"


def run_packed(
    stack: nn.Module, tensors: list[Tensor | None], settings: StackSettings, x: Tensor, lengths: Sequence[int]
) -> Tensor | None:
    """The output of a stack whose weights are packed, and packed again where they have changed.

    Args:
        stack: what the copy belongs to; it is dropped with it.
        tensors: twelve of each layer, in the order of `_NAMES`, and the weight and bias of the final norm.
        settings: of the stack.
        x: (batch, seqlen, dim) or (tokens, dim), fp32 or bf16, of the CPU.
        lengths: tokens of each sequence.

    Returns:
        x's shape and dtype; None where the engine doesn't take the stack's tensors, or where they change so often that
        a copy of them costs more than it saves.
    """
    own = [tensor for tensor in tensors if tensor is not None]
    held, copies = _Held(own, layout_of(own)), _copies.setdefault(stack, _Copies())
    key = held.layout, x.dtype
    if copies.reason is None or copies.reason[0] != key:
        copies.reason = key, _why_not(own, x.dtype)
    if copies.reason[1] is not None or not copies.is_worth_it(held):
        return None

    def pack() -> _Encoder:
        copies.note_packed()
        extension = cast(Any, _extension.module())
        arrays = _arrays(tensors, settings)
        return cast(_Encoder, extension.Encoder(extension.PackedModel(settings.options(PRECISIONS[x.dtype]), arrays)))

    try:
        encoder = packed(stack, "stack", pack, find=lambda _: (held, None))
    except ValueError as error:
        copies.reason = key, str(error)
        logger.debug("%s runs without the engine: %s", type(stack).__name__, error)
        return None
    copies.calls += 1
    rows = x.detach().float().contiguous().view(-1, x.shape[-1])
    out = encoder.encode_states(rows.numpy(), lengths, torch.get_num_threads())
    return torch.from_numpy(out).to(x.dtype).view(x.shape)


def copy_bytes(matrices: int, others: int, precision: str) -> int:
    """The bytes of a packed copy, nearly.

    Args:
        matrices: the numbers in the weights of products.
        others: those in the tables and vectors beside them.
        precision: of the engine.
    """
    of_matrix = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5625}[precision]  # int4 has a scale for 32 numbers
    return int(matrices * of_matrix) + others * (4 if precision == "fp32" else 2)


def megabytes(count: int) -> str:
    """A number of bytes, for people."""
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
    """The tensors by the names of csrc/engine/packed_model.h."""
    named = {
        f"encoder.layers.{i}.{name}": tensors[i * len(_NAMES) + place]
        for i in range(settings.num_layers)
        for place, name in enumerate(_NAMES)
    }
    if settings.has_final_norm:
        weight, bias = tensors[-2:]
        ones = torch.ones(settings.d_model) if weight is None else weight  # without one there would be no norm
        named |= {"encoder.norm.weight": ones, "encoder.norm.bias": bias}
    return {name: _array(tensor) for name, tensor in named.items() if tensor is not None}


def _array(tensor: Tensor) -> Any:
    import numpy as np

    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
