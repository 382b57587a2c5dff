"""fastformer: Transformers made fast, under the names that PyTorch users know."""

__version__ = "0.1.0"
