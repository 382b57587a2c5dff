"""Refuses a PyTorch that is too old, before a name that it lacks gives an error of its own.

The package imports this first. pip would have found a newer PyTorch, unless it was told to ignore what a package needs.
"""

import re

import torch

OLDEST = (2, 11)


def check(version: str) -> None:
    """Checks a version of PyTorch, such as "2.13.0+cpu".

    Raises:
        ImportError: it is older than `OLDEST`.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"fastformer needs torch {oldest} or newer, got {version}: pip install 'torch>={oldest}'")


check(torch.__version__)
