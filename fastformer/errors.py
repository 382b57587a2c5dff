"""The errors that modules and caches raise for unsuitable input."""

from __future__ import annotations


class InputError(ValueError, RuntimeError, AssertionError):
    """Shapes, dtypes or options that don't fit.

    For wrong input torch.nn raises one of these three, not always the same one. Code that catches any of them from
    torch.nn's modules also catches this error from fastformer's.
    """
