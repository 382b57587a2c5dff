"""`fastformer demo`."""

from __future__ import annotations

from pathlib import Path


def demo(*, out: str = "demo", seed: int = 0) -> None:
    """Trains a number translator on this machine and shows it.

    Args:
        out: the run folder: a new or empty one, or that of an earlier demo, whose own files are replaced
        seed: of data, weights and order
    """
    from fastformer.demo import run_demo

    run_demo(Path(out), seed=seed)
