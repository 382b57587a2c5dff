"""Pictures of the committed results: `python -m benchmarks.plot` draws all of them; `style` is how they look."""

from benchmarks.plot.style import MARKERS, OURS, color_of, digest, figure, label_lines, legend, save

__all__ = ["MARKERS", "OURS", "color_of", "digest", "figure", "label_lines", "legend", "save"]
