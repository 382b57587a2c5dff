"""Checks whether the C++ engine supports a model, and returns the reason if it doesn't."""

from __future__ import annotations

import torch

from fastformer.engine.checks import why_not_now
from fastformer.generation.model_protocols import check_precision, own_precision
from fastformer.models import GPT, Transformer
from fastformer.models.as_made import find_guards
from fastformer.ops import _extension

PACKED_PRECISIONS = ("fp32", "bf16", "int8", "int4")


def why_no_cpp_engine() -> str | None:
    """Returns the reason why the C++ engine can't run on this machine, whatever the model, or None if it can."""
    return _extension.why_missing("Session")


def why_not_supported(model: object, precision: str | None) -> str | None:
    """Returns the reason why the C++ engine can't decode a model in a precision, with the module's name, or None.

    Args:
        model: any object.
        precision: see `choose_engine`.

    Raises:
        ValueError: the precision doesn't exist.
    """
    check_precision(precision)
    if (missing := why_no_cpp_engine()) is not None:
        return missing
    if type(model) not in (Transformer, GPT):
        return f"it only supports models.Transformer and models.GPT, and a {type(model).__name__} may differ"
    assert isinstance(model, Transformer | GPT)
    return why_not_now() or find_guards(model)[1] or why_not_in(precision, model)


def why_not_in(precision: str | None, model: object) -> str | None:
    """Returns the reason why C++ code can't compute a model in this precision (None: the model's own), or None."""
    if precision is None and torch.is_autocast_enabled("cpu"):
        precision = own_precision(model)
    if precision is not None and precision not in PACKED_PRECISIONS:
        return f"it computes in fp32, bf16, int8 and int4, not in {precision}"
    return None
