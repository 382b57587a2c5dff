"""What modules and caches raise for input that they can't take."""

from __future__ import annotations


class InputError(ValueError, RuntimeError, AssertionError):
    """Shapes, dtypes or options that don't fit.

    For wrong input torch.nn raises one of these three, not always the same one. Code that expects any of them from the
    modules of the same names gets it here too.
    """
