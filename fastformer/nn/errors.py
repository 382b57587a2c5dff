"""The error that the modules raise for unsupported input."""

from fastformer.errors import InputError as InputError
