"""Which versions of transformers have the layers that are written out here."""

from __future__ import annotations

import sys


def check_version() -> None:
    """Raises ImportError if the layers of transformers differ from those that are written out here."""
    import transformers

    if not has_transformers():
        raise ImportError(f"expected transformers 5.16 or newer, got {transformers.__version__}")


def has_transformers() -> bool:
    """Returns whether transformers is imported, in a version whose layers are those written out here."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and [int(number) for number in transformers.__version__.split(".")[:2]] >= [5, 16]
