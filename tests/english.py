"""Counts words and clauses that hide the actor in texts for users and newcomers: see "Rules" in CONTRIBUTING.md.

    python -m tests.english            # the number, by kind of text
    python -m tests.english --list     # each one with its file and line

It reads Markdown pages, docstrings, comments, and the texts of errors, warnings, logs and help.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("fastformer", "kernels", "benchmarks", "examples", "docs")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "fastformer/nn/DIFFERENCES.md",
    "docs",
    ".github",
)

# "somebody" and its like name no actor; "who" mostly stands for the caller, the user or the code.
NAMELESS = re.compile(r"\b(?:somebody|nobody|whoever|anybody|someone|anyone|who|whom)\b", re.IGNORECASE)
# A sentence, or a clause behind a colon or a semicolon, that begins with "what". If it has two finite verbs, the clause
# is the subject of the second one: "What is hooked stays as it is." With one, it is a noun: "What a file is called."
CLAUSE = re.compile(r"(?:(?<=[.:;] )|^)[Ww]hat\b[^.?;:]*(?:\?|[.;:]|$)")
VERB = re.compile(
    r"\b(?:is|isn't|are|aren't|was|were|has|have|had|does|doesn't|do|don't|did|may|can|can't|cannot|must|will|would"
    r"|should|could|stays?|goes|gets|comes|needs|takes|works|counts|differs|depends|follows|runs|begins|ends|gives|lies"
    r"|stands|becomes|loads|decodes|sees|leaves|says|resembles|replaces)\b"
)
_MAYBE = re.compile(NAMELESS.pattern + r"|(?:^|[\"'.:;#] ?)\s*what\b", re.IGNORECASE | re.MULTILINE)
_COMMENT = re.compile(r"(?:^\s*|  )# (.+)")
FIELD = re.compile(r"`[^`]*`|\"[^\"\n]*\"")


class Finding(NamedTuple):
    """A text with its kind and place."""

    kind: str
    path: Path
    line: int
    text: str


def texts(root: Path) -> Iterator[Finding]:
    """Yields all texts, in pieces."""
    for name in PAGES:
        place = root / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.md")):
            if "generated" not in path.parts:
                yield from _of_page(path)
    for name in PACKAGES:
        for path in sorted((root / name).rglob("*.py")):
            if not (root / name).is_symlink() and "kernels" not in path.parts[len(root.parts) + 1 :]:
                yield from _of_python(path)
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in (".h", ".cpp"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if "//" in line:
                    yield Finding("comments", path, number, line.partition("//")[2].strip())


def _of_page(path: Path) -> Iterator[Finding]:
    text = re.sub(
        r"^(```|~~~).*?^\1", lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    number = 1
    for part in text.split("\n\n"):
        if not part.lstrip().startswith(("#", "| ---")):
            yield Finding("pages", path, number, " ".join(part.split()))
        number += part.count("\n") + 2


def _of_python(path: Path) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    if not _MAYBE.search(source):  # excludes most files quickly
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node)) is not None:
                line = node.body[0].lineno
                for paragraph in text.split("\n\n"):
                    yield Finding("docstrings", path, line, " ".join(paragraph.split()))
                    line += paragraph.count("\n") + 2
        elif isinstance(node, ast.Raise | ast.Call):
            if isinstance(node, ast.Call) and not _speaks(node.func):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield Finding("messages", path, part.lineno, part.value)
    for number, text in enumerate(source.splitlines(), 1):
        if comment := _COMMENT.search(text):
            yield Finding("comments", path, number, comment[1])


def _speaks(function: ast.expr) -> bool:
    """Returns whether a call shows its text to a user."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("warn", "warning", "info", "error", "debug", "print", "add_argument", "say")


def findings(root: Path = ROOT) -> Iterator[Finding]:
    """Yields each word and clause that hides an actor, once for each piece and word."""
    seen = set()
    for piece in texts(root):
        plain = FIELD.sub("x", piece.text)
        clauses = (match for match in CLAUSE.finditer(plain) if not match[0].endswith("?") and _is_subject(match[0]))
        for match in (*NAMELESS.finditer(plain), *clauses):
            where = Finding(piece.kind, piece.path.relative_to(root), piece.line, match[0][:110])
            if where not in seen:
                seen.add(where)
                yield where


def _is_subject(sentence: str) -> bool:
    """Returns whether the clause at the beginning has a finite verb after it, before a comma or "and"."""
    return len(VERB.findall(re.split(r",| and (?=what\b)| but ", sentence)[0])) >= 2


def main(arguments: list[str]) -> int:
    places = list(findings(Path(next((word for word in arguments if not word.startswith("-")), ROOT)).resolve()))
    if "--list" in arguments:
        for place in places:
            print(f"{place.path}:{place.line}: {place.text}")
    print(dict(Counter(place.kind for place in places)), len(places))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
