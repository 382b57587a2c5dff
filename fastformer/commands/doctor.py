"""`fastformer doctor`."""

from __future__ import annotations


def doctor() -> None:
    """Says which versions are installed, and which backend each op gets here and why."""
    from fastformer.doctor import report

    print(report())
