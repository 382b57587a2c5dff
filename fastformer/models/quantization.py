"""Weights on a grid of 255 steps a row: what `model.quantize()` rounds to, and how the folder of such a model holds it.

A row of a matrix becomes scale * q, with q int8 from -127 to 127 and scale = max|row| / 127 in fp32. What was rounded
to such a grid in a dtype stays as it is when it is rounded again in that dtype (dividing 127 * scale by 127 in fp32
gives scale back, whatever its mantissa), so a folder can hold q and scale and give the same bits back. Another dtype
has a grid of its own: of a folder that was rounded in fp32, loaded as bf16 and saved again, weights differ by up to a
unit in bf16's last place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.models.weights import Entry
from fastformer.nn.attention import MultiheadAttention

INT8 = "int8"
SCALE = ".scale"  # X.scale stands beside X
_MOST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it, fp32 loses the bits that the grid needs


def quantized_names(model: nn.Module) -> list[str]:
    """The entries of a model's state_dict that are quantised: weights of linear layers, attention and embeddings."""
    names = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = f"{prefix}." if prefix else ""
        if isinstance(module, nn.Linear | nn.Embedding):
            names.append(f"{own}weight")
        elif isinstance(module, MultiheadAttention):
            fused = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
            names += [own + name for name in fused if getattr(module, name) is not None]
    return names


def to_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest point of a matrix's grid.

    Args:
        weight: (rows, columns), floating-point.

    Returns:
        (q (rows, columns) int8, scale (rows,) fp32). A row whose scale isn't a normal number becomes 0.

    Raises:
        ValueError: NaN or infinite weights.
    """
    weight = weight.detach().float()
    if not weight.isfinite().all():
        raise ValueError("expected finite weights to quantise, got NaN or infinite ones")
    scale = weight.abs().amax(1) / _MOST if weight.shape[1] else weight.new_zeros(len(weight))
    scale = torch.where(scale < _LEAST_SCALE, 0.0, scale)
    steps = torch.where(scale[:, None] > 0, weight / scale[:, None], 0.0)
    return steps.round().clamp(-_MOST, _MOST).to(torch.int8), scale


def from_grid(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * q, computed in fp32: (rows, columns) of a dtype."""
    return (q.float() * scale[:, None]).to(dtype)


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Puts the weights of a model on their grids.

    Raises:
        ValueError: NaN or infinite weights.
    """
    state = model.state_dict()
    for name in quantized_names(model):
        try:
            state[name].copy_(from_grid(*to_grid(state[name]), state[name].dtype))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def packed_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as a folder holds it: each quantised entry as int8, its scales beside it."""
    packed = dict(state)
    for name in quantized_names(model):
        packed[name], packed[name + SCALE] = to_grid(state[name])
    return packed


def packed_entries(model: nn.Module, entries: dict[str, Entry]) -> dict[str, Entry]:
    """What `packed_state` gives for a model, as names, shapes and dtypes.

    Args:
        model: on any device, "meta" too.
        entries: of its state.
    """
    packed = dict(entries)
    for name in quantized_names(model):
        shape = entries[name].shape
        packed[name], packed[name + SCALE] = Entry(shape, torch.int8), Entry(shape[:1], torch.float32)
    return packed


def unpacked_state(model: nn.Module, packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `packed_state` was given, in the model's dtype; the entries are those of `packed_entries`."""
    state, own = dict(packed), model.state_dict()
    for name in quantized_names(model):
        state[name] = from_grid(state[name], state.pop(name + SCALE), own[name].dtype)
    return state
