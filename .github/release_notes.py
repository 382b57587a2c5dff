"""Prints a version's part of CHANGELOG.md, the notes of its release.

    python .github/release_notes.py v0.2.0

Ends with an error if the tag is not that of `fastformer.__version__` and CITATION.cff, or if the changelog calls the
version unreleased.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(tag: str, root: Path = ROOT) -> str:
    """Returns the notes of a tag.

    Raises:
        ValueError: the tag, the version in the sources, and the heading in the changelog differ.
    """
    version = tag.removeprefix("v")
    for name, pattern in (("fastformer/__init__.py", r'^__version__ = "(.*)"'), ("CITATION.cff", "^version: (.*)")):
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None or match[1] != version or tag == version:
            raise ValueError(f"expected the tag v{match[1] if match else '...'} of {name}, got {tag}")
    parts = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for part in parts:
        heading, _, text = part.partition("\n")
        if heading.split()[0] == version:
            if "unreleased" in heading.lower():
                raise ValueError(f"expected the date of {version} in CHANGELOG.md, got {heading!r}")
            return text.strip() + "\n"
    raise ValueError(f"expected a heading of {version} in CHANGELOG.md, got none")


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(*sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
