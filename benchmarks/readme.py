"""README's figures out of the committed results: checks that each one is one of theirs, or writes them.

    python -m benchmarks.readme           # what differs, and what was not measured; 1 where README is stale
    python -m benchmarks.readme --write
    python -m benchmarks.readme --list    # each figure with its file, line and command
    python -m benchmarks.readme --tables build  # README's tables out of the lines of your own runs in build/

They stand between `<!-- numbers: NAME -->` and `<!-- end -->`; `benchmarks/publish/blocks.py` says what stands there.
The section "Numbers" has no figure elsewhere. One whose line is missing reads "not measured".
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.publish.blocks import BLOCKS, Numbers, tables_of
from benchmarks.publish.latest import RESULTS, Results

README = Path(__file__).parents[1] / "README.md"
_SECTION = re.compile(r"^## Numbers\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"<!-- numbers: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
# fp32, x86-64 and GPT-2 are names; 2, 0.97 and 64 % are figures.
_FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*")


def section_of(text: str) -> str:
    """README's "Numbers".

    Raises:
        ValueError: there is none.
    """
    found = _SECTION.search(text)
    if found is None:
        raise ValueError("expected a section '## Numbers' in README, got none")
    return found.group(0)


def written(text: str, numbers: Numbers) -> str:
    """README with its blocks as the results have them.

    Raises:
        ValueError: a block that nobody declared, or a declared one that README doesn't have, or has twice; there is no
            section for the others.
    """
    section_of(text)
    names = [name for name, _ in _BLOCK.findall(text)]
    if sorted(names) != sorted(BLOCKS):
        raise ValueError(f"expected README's blocks to be {sorted(BLOCKS)}, each once; got {sorted(names)}")
    if len(names) != text.count("<!-- numbers:") or len(names) != text.count("<!-- end -->"):
        raise ValueError("expected every block of README's numbers to begin on a line of its own and to end")

    def block(found: re.Match[str]) -> str:
        content = BLOCKS[found.group(1)](numbers).strip()
        content += "\n" if content else ""
        return f"<!-- numbers: {found.group(1)} -->\n{content}<!-- end -->"

    return _BLOCK.sub(block, text)


def loose_figures(text: str) -> list[str]:
    """The lines of the section that hold a figure outside of all blocks."""
    outside = _BLOCK.sub("", section_of(text))
    return [line for line in outside.splitlines() if _FIGURE.search(line)]


def complaints(text: str, numbers: Numbers) -> list[str]:
    """What of README is not as the results have it."""
    found = [f"a figure outside of all blocks: {line}" for line in loose_figures(text)]
    right = written(text, numbers)
    if right != text:
        differences = difflib.unified_diff(
            text.splitlines(), right.splitlines(), "README.md", "results", lineterm="", n=0
        )
        found.append("\n".join(differences))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Does what was asked for. Returns 1 where README is stale, or has a figure outside of all blocks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the blocks")
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
            text = written(text, numbers)
            options.readme.write_text(text, encoding="utf-8")
            numbers = Numbers(numbers.results)
        found = complaints(text, numbers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.list:
        for figure in numbers.figures:
            say(f"{figure.text:>8}  {figure.what}\n          {figure.origin}: {figure.command}")
    for what in dict.fromkeys(numbers.missing):
        say(f"not measured: {what}")
    for complaint in found:
        say(complaint)
    if found:
        say("README is not as the results have it: python -m benchmarks.readme --write")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
