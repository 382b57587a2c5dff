"""What a model computes in while it decodes: the names of precisions, and which of them is a model's own."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from fastformer.generation.config import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = get_args(Precision)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CASTS = {"fp32": "model.float()", "bf16": "model.bfloat16()", "fp16": "model.half()"}


def check_precision(precision: object) -> None:
    """Raises a ValueError for what is neither the name of a precision nor None, the model's own."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(f"expected precision fp32, bf16, fp16 or int8, got {precision!r}")


def dtype_precision(model: object) -> str:
    """What the modules of a model compute in: autocast's dtype where it is on, else that of the parameters.

    Returns:
        One of `DTYPES`; for another dtype its name in PyTorch; "mixed" where there are several.
    """
    floating: set[tuple[str, torch.dtype]] = set()
    modules = [model] if isinstance(model, nn.Module) else []
    for module in modules:  # model.parameters() takes several times as long
        modules += [child for child in module._modules.values() if child is not None]
        floating |= {(p.device.type, p.dtype) for p in module._parameters.values() if p is not None}
    floating = {pair for pair in floating if pair[1].is_floating_point}
    found = {
        torch.get_autocast_dtype(device)
        if dtype != torch.float64 and device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
        else dtype
        for device, dtype in floating
    }
    if len(found) > 1:
        return "mixed"
    dtype = found.pop() if found else torch.get_default_dtype()
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def own_precision(model: object) -> str:
    """What a model asks to be decoded in: "int8" for a quantised one, else `dtype_precision`."""
    return "int8" if getattr(model, "precision", None) == "int8" else dtype_precision(model)


def asked_precision(model: object, precision: Precision | None) -> Precision | None:
    """What remains to be asked of an engine where a precision was given for loading a model.

    The dtype of the weights says the rest, but for a quantised model, whose own precision is int8 whatever it is.
    """
    return precision if "int8" in (precision, own_precision(model)) else None


def why_not_by_modules(model: object, precision: str | None) -> str | None:
    """Why an engine that calls the model's own modules can't decode in a precision; None where it can."""
    own = dtype_precision(model)
    if precision is None or precision == own:
        return None
    if precision == "int8":
        return f"it calls the model's modules, which compute in {own}; only the engine 'cpp' computes in int8"
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    advice = "leave autocast" if is_autocast else f"decode with {_CASTS[precision]}"
    return f"it calls the model's modules, which compute in {own}: for {precision} {advice}"
