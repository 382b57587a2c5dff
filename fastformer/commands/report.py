"""`fastformer report`."""

from __future__ import annotations


def report(run: str) -> None:
    """Writes a page about a run: curves, scores, samples, attention, settings.

    The page is report.html in the run folder, one file that needs no network.

    Args:
        run: the run folder
    """
    from fastformer.training.report import write_report

    print(f"wrote {write_report(run)}")
