"""The loss curve as a picture."""

from __future__ import annotations

import os


def draw_losses(losses: list[tuple[int, float]], path: str | os.PathLike[str]) -> None:
    """Draws (update, loss) pairs, the loss in nats a target token on a logarithmic axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'fastformer[plot]'") from error
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], marker="o", markersize=3)
    axes.set_yscale("log")
    axes.set_xlabel("update")
    axes.set_ylabel("training loss, nats a target token")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=150)
