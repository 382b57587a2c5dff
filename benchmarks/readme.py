"""README's tables out of the committed results: checks that they are theirs, or writes them.

    python -m benchmarks.readme           # what differs, and what was not measured; 1 where README is stale
    python -m benchmarks.readme --write
    python -m benchmarks.readme --list    # each figure with its file, line and command
    python -m benchmarks.readme --tables build  # README's tables out of the lines of your own runs in build/

They stand between `<!-- numbers: NAME -->` and `<!-- end -->`; `benchmarks/publish/tables.py` makes them. A figure
whose line is missing reads "not measured".
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.publish.latest import RESULTS, Results
from benchmarks.publish.tables import TABLES, Numbers, tables_of

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"<!-- numbers: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def written(text: str, numbers: Numbers) -> str:
    """README with its tables as the results have them.

    Raises:
        ValueError: a block that has no table, or a table that README doesn't have, or has twice.
    """
    names = [name for name, _ in _BLOCK.findall(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"expected README's blocks to be {sorted(TABLES)}, each once; got {sorted(names)}")
    if len(names) != text.count("<!-- numbers:") or len(names) != text.count("<!-- end -->"):
        raise ValueError("expected every block of README's numbers to begin on a line of its own and to end")

    def block(found: re.Match[str]) -> str:
        made = TABLES[found.group(1)](numbers)
        return "\n".join(line for line in (f"<!-- numbers: {found.group(1)} -->", made, "<!-- end -->") if line)

    return _BLOCK.sub(block, text)


def differences(text: str, numbers: Numbers) -> str:
    """What of README is not as the results have it; "" where nothing is."""
    right = written(text, numbers)
    lines = difflib.unified_diff(text.splitlines(), right.splitlines(), "README.md", "results", lineterm="", n=0)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Does what was asked for. Returns 1 where README is stale."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables")
    parser.add_argument("--list", action="store_true", help="print each figure with its line and its command")
    parser.add_argument("--tables", type=Path, help="a folder whose lines to print as README's tables, quick ones too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of JSON lines")
    parser.add_argument("--readme", type=Path, default=README, help="the file to check or to write")
    options = parser.parse_args(arguments)
    say: Callable[[str], None] = print
    try:
        if options.tables:
            tables = tables_of(Results(options.tables, with_quick=True))
            say(tables or f"{options.tables} has no line of README's tables")
            return 0
        numbers = Numbers(Results(options.results))
        text = options.readme.read_text(encoding="utf-8")
        if options.write:
            options.readme.write_text(written(text, numbers), encoding="utf-8")
            return 0
        stale = differences(text, numbers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.list:
        for figure in numbers.figures:
            say(f"{figure.text:>8}  {figure.what}\n          {figure.origin}: {figure.command}")
    for what in dict.fromkeys(numbers.missing):
        say(f"not measured: {what}")
    if stale:
        say(f"{stale}\nREADME is not as the results have it: python -m benchmarks.readme --write")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
