"""A stack of encoder layers on the C++ engine: all of them in one call, over weights that are packed once.

The engine reads the weights in its own order, so it keeps a copy of them: the originals would have to be reordered in
each call. `engine.frozen` checks whether the copy still equals the stack's weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from fastformer.engine.frozen import UnfitError, packed
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
    """Computes a stack on the engine, and packs its weights first if there is no copy of them with these settings.

    Args:
        stack: the owner of the copy, which is dropped with it.
        tensors: twelve tensors of each layer, in the order of `_NAMES`, and the weight and bias of the final norm.
        settings: the settings of the stack.
        x: (batch, seqlen, dim) or (tokens, dim), fp32 or bf16, on the CPU.
        lengths: the number of tokens of each sequence.
        precision: "fp32", "bf16" or "int8"; None: that of x.

    Returns:
        x's shape and dtype; None if the engine doesn't support the stack's tensors.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    precision = precision or PRECISIONS[x.dtype]

    def pack() -> _Encoder:
        extension = cast(Any, _extension.module())
        if any(tensor.dtype != x.dtype for tensor in given):
            raise UnfitError("a weight has another dtype than the input")
        try:
            weights = extension.PackedModel(settings.options(precision), _arrays(tensors, settings))
            return cast(_Encoder, extension.Encoder(weights))
        except ValueError as error:
            raise UnfitError(str(error)) from None

    try:
        encoder = packed(stack, f"stack {x.dtype} {precision}", pack, find=lambda _: given, settings=settings)
    except UnfitError as error:
        logger.debug("%s runs without the engine: %s", type(stack).__name__, error)
        return None
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
