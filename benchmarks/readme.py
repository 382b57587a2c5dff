"""Checks or writes the tables of README.md, docs/benchmarks/ and docs/coming-from/, from the committed results.

    python -m benchmarks.readme           # differences, and figures that were not measured; 1 if a page is stale
    python -m benchmarks.readme --write
    python -m benchmarks.readme --list    # each figure with its file, line and command
    python -m benchmarks.readme --tables build  # the tables from the lines of your own runs in build/

A table is between `<!-- numbers: NAME -->` and `<!-- end -->`; `benchmarks/publish/tables.py` makes it. A figure
without a line in the results reads "not measured".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from benchmarks.publish.latest import RESULTS, Results
from benchmarks.publish.tables import TABLES, Numbers, tables_of

_DOCS = record.ROOT / "docs"
PAGES = (
    record.ROOT / "README.md",
    *(page for part in ("benchmarks", "coming-from") for page in sorted((_DOCS / part).glob("*.md"))),
)
_BLOCK = re.compile(r"<!-- numbers: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def written(text: str, numbers: Numbers) -> str:
    """Returns a page with the tables for the current results.

    Raises:
        ValueError: a block has no table of its name, occurs twice on the page, or doesn't end.
    """
    names = [name for name, _ in _BLOCK.findall(text)]
    if len(names) != len(set(names)) or not set(names) <= TABLES.keys():
        raise ValueError(f"expected blocks out of {sorted(TABLES)}, each once in a page; got {sorted(names)}")
    if len(names) != text.count("<!-- numbers:") or len(names) != text.count("<!-- end -->"):
        raise ValueError("expected every block of numbers to begin on a line of its own and to end, each once")

    def block(match: re.Match[str]) -> str:
        table = TABLES[match.group(1)](numbers)
        return "\n".join(line for line in (f"<!-- numbers: {match.group(1)} -->", table, "<!-- end -->") if line)

    return _BLOCK.sub(block, text)


def all_written(texts: Mapping[Path, str], numbers: Numbers) -> dict[Path, str]:
    """Returns all pages with the tables for the current results.

    Raises:
        ValueError: a block is invalid, or no page shows a table.
    """
    result = {}
    for path, text in texts.items():
        try:
            result[path] = written(text, numbers)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    shown = {name for text in texts.values() for name, _ in _BLOCK.findall(text)}
    if lacking := sorted(TABLES.keys() - shown):
        raise ValueError(f"expected the pages to show {sorted(TABLES)}, got no block for {lacking}")
    return result


def differences(texts: Mapping[Path, str], numbers: Numbers) -> str:
    """Returns the lines of pages that differ from the results; "" if there are none."""
    lines: list[str] = []
    for path, right in all_written(texts, numbers).items():
        lines += difflib.unified_diff(
            texts[path].splitlines(), right.splitlines(), path.name, "results", lineterm="", n=0
        )
    return "\n".join(lines)


def read(paths: Sequence[Path]) -> dict[Path, str]:
    """Reads the pages."""
    return {path: path.read_text(encoding="utf-8") for path in paths}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns 1 if a page is stale."""
    parser = parser_of("readme", __doc__)
    parser.add_argument("--write", action="store_true", help="write the tables")
    parser.add_argument("--list", action="store_true", help="print each figure with its line and its command")
    parser.add_argument("--tables", type=Path, help="a folder whose lines to print as tables, quick ones too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of JSON lines")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="the files to check or to write")
    options = parser.parse_args(arguments)
    try:
        if options.tables:
            tables = tables_of(Results(options.tables, with_quick=True))
            print(tables or f"{options.tables} has no line of the published tables")
            return 0
        numbers = Numbers(Results(options.results))
        texts = read(options.pages)
        if options.write:
            for path, text in all_written(texts, numbers).items():
                if text != texts[path]:
                    path.write_text(text, encoding="utf-8")
            return 0
        stale = differences(texts, numbers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.list:
        for figure in numbers.figures:
            print(f"{figure.text:>8}  {figure.what}\n          {figure.origin}: {figure.command}")
    for what in dict.fromkeys(numbers.missing):
        print(f"not measured: {what}")
    if stale:
        print(f"{stale}\nthe pages are not as the results have them: python -m benchmarks.readme --write")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
