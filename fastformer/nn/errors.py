"""What the modules raise for input that they can't take."""

from __future__ import annotations


class InputError(ValueError, RuntimeError, AssertionError):
    """Shapes, dtypes or options that don't fit a module.

    torch.nn raises one of these three, now this one and now that, where the modules of the same names here see that
    something is wrong: code that expects any of them gets it.
    """
