"""The old name of `guards`."""

from fastformer.nn.guards import *  # noqa: F403
