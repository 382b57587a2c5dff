"""What the modules raise for input that they can't take."""

from fastformer.errors import InputError as InputError
