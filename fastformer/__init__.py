"""fastformer: Transformers made fast, under the names that PyTorch users know."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`fastformer.generate`, loaded on first use: importing the package alone stays cheap."""
    if name == "generate":
        from fastformer.generation import generate

        return generate
    raise AttributeError(f"module 'fastformer' has no attribute {name!r}")
