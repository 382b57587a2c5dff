"""Pictures: the attention of a translation, the losses of a training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_attention(
    source: list[str], target: list[str], weights: Tensor, path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draws cross-attention as a source-target heatmap, one panel a layer, heads averaged.

    Args:
        source, target: the tokens, as in the result of `Translator.attention`.
        weights: (num_layers, num_heads, len(target), len(source)).
        path: the PNG to write.
        title: the title above the panels.

    Raises:
        ValueError: the path is not that of a PNG.
        ImportError: matplotlib is not installed.
    """
    check_picture(path)
    layers = weights.mean(1)
    width, height = max(2.5, 0.32 * len(source) + 1.0), max(2.5, 0.3 * len(target) + 1.4)
    figure = _figure(width * len(layers) + 0.6, height)
    panels = figure.subplots(1, len(layers), squeeze=False)[0]
    for number, (panel, layer) in enumerate(zip(panels, layers, strict=True), 1):
        image = panel.imshow(layer.numpy(), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        panel.set_xticks(range(len(source)), source, rotation=60, ha="right", rotation_mode="anchor")
        panel.set_yticks(range(len(target)), target)
        panel.set_title(f"decoder layer {number}")
        panel.set_xlabel("source token")
    panels[0].set_ylabel("target token")
    figure.colorbar(image, ax=list(panels), label="attention weight, mean of the heads")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150, format="png")


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raises a ValueError unless a path may become a PNG: matplotlib would write "/" to "/.png", and over any file."""
    if Path(path).suffix.lower() != ".png" or Path(path).is_dir():
        raise ValueError(f"expected the name of a PNG file, such as attention.png, got {os.fspath(path)!r}")


def draw_losses(losses: list[tuple[int, float]], path: str | os.PathLike[str]) -> None:
    """Draws (update, loss) pairs, the loss in nats a target token on a logarithmic axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure(6.0, 3.6)
    axes = figure.subplots()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], marker="o", markersize=3)
    axes.set_yscale("log")
    axes.set_xlabel("update")
    axes.set_ylabel("training loss, nats a target token")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=150)


def _figure(width: float, height: float) -> Figure:
    """Makes an empty figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'fastformer[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")
