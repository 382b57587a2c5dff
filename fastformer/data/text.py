"""Text files in, lines out; bad lines are named by file and number, and are refused or left out and counted.

A line ends at LF or CRLF and nowhere else: other characters that some programs break lines at (form feed, U+2028, ...)
are text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("fastformer")

MAX_LINE = 20_000  # characters; longer is hardly a sentence, and one such line would fill a batch
_SHOWN = 5  # bad lines that a message names
_HINT = "; `fastformer train` leaves bad lines out with --skip_bad_lines"


@dataclass(frozen=True)
class BadLine:
    """A line that can't be used.

    Attributes:
        name: of the file.
        number: of the line, from 1.
        kind: in a word or two, to count by.
        message: what was expected and what came.
    """

    name: str
    number: int
    kind: str
    message: str


def read_lines(path: str | os.PathLike[str], *, allow_empty: bool = False) -> list[str]:
    """The lines of a UTF-8 file, without line ends and without a byte order mark.

    Args:
        path: the file.
        allow_empty: take empty lines as empty strings (text to translate keeps its paragraphs).

    Raises:
        ValueError: no such file, an empty file, or bad lines: bytes that are no UTF-8, an empty line, a line of over
            MAX_LINE characters. The message names the file, counts the bad lines, and names the first few.
    """
    return split_lines(_read(path), str(path), allow_empty=allow_empty)


def split_lines(data: bytes, name: str, *, allow_empty: bool = False, first: int = 1) -> list[str]:
    """The lines of some bytes, as `read_lines`; messages name the file `name` and count lines from `first`."""
    parsed = list(_parse(data, name, allow_empty=allow_empty, first=first))
    bad = [line for line in parsed if isinstance(line, BadLine)]
    if bad:
        raise ValueError(_refusal(bad, len(parsed)))
    return [line for line in parsed if isinstance(line, str)]


def read_pairs(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, skip_bad: bool = False
) -> list[tuple[str, str]]:
    """Two line-aligned files as pairs.

    Args:
        source, target: the files.
        skip_bad: leave out a pair with a bad line on either side, and log how many and why, instead of raising.

    Raises:
        ValueError: what `read_lines` raises, or different numbers of lines.
    """
    sources, targets = (list(_parse(_read(path), str(path))) for path in (source, target))
    if len(sources) != len(targets):
        raise ValueError(
            f"expected as many lines in {target} as in {source}, got {len(targets):,} and {len(sources):,}: "
            "the two files must be aligned line by line"
        )
    return _good(list(zip(sources, targets, strict=True)), f"{source} and {target}", skip_bad)


def read_tsv(path: str | os.PathLike[str], *, skip_bad: bool = False) -> list[tuple[str, str]]:
    """A file of "source<TAB>target" lines as pairs.

    Args:
        path: the file.
        skip_bad: leave bad lines out, and log how many and why, instead of raising.

    Raises:
        ValueError: what `read_lines` raises, or a line without exactly one tab and text on both sides.
    """
    rows: list[tuple[str | BadLine, str | BadLine]] = []
    for number, line in enumerate(_parse(_read(path), str(path)), 1):
        if isinstance(line, BadLine):
            rows.append((line, line))
            continue
        fields = line.split("\t")
        if len(fields) == 2 and all(field.strip() for field in fields):
            rows.append((fields[0], fields[1]))
            continue
        kind = "with an empty side" if len(fields) == 2 else f"of {len(fields)} field{'s' * (len(fields) > 1)}"
        bad = BadLine(str(path), number, kind, f"expected source<TAB>target, got a line {kind}")
        rows.append((bad, bad))
    return _good(rows, str(path), skip_bad)


def read_text(path: str | os.PathLike[str], *, skip_bad: bool = False) -> str:
    """A whole UTF-8 text, for a language model; line ends become LF.

    Args:
        path: the file.
        skip_bad: leave out lines that are no UTF-8, and log how many, instead of raising.

    Raises:
        ValueError: no such file, an empty file, lines that are no UTF-8.
    """
    data = _read(path)
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        lines = [(line, line) for line in _parse(data, str(path), allow_empty=True, max_line=len(data))]
        text = "\n".join(line for line, _ in _good(lines, str(path), skip_bad))
        return text + "\n" if data.endswith(b"\n") else text


def read_documents(path: str | os.PathLike[str], *, skip_bad: bool = False) -> list[str]:
    """The texts that a language model learns from: a file is one document; of a folder each *.txt file, by name.

    Raises:
        ValueError: what `read_text` raises, or a folder without *.txt files.
    """
    if not Path(path).is_dir():
        return [read_text(path, skip_bad=skip_bad)]
    files = sorted(file for file in Path(path).glob("*.txt") if file.is_file())
    if not files:
        raise ValueError(f"expected a text file or a folder of *.txt files, but there are none in {path}")
    return [read_text(file, skip_bad=skip_bad) for file in files]


def _read(path: str | os.PathLike[str]) -> bytes:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"expected a text file, but there is no file {file}")
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise ValueError(f"{file} is empty: expected at least one line of text")
    return data


def _parse(
    data: bytes, name: str, *, allow_empty: bool = False, first: int = 1, max_line: int = MAX_LINE
) -> Iterator[str | BadLine]:
    """Each line of some bytes: its text, or what is wrong with it."""
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), first):
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at position {error.start}"
            message = f"expected UTF-8, got {byte}; convert the file, for example with iconv"
            yield BadLine(name, number, "not UTF-8", message)
            continue
        if not text.strip() and not allow_empty:
            yield BadLine(name, number, "empty", "expected text, got an empty line; remove it (on both sides)")
        elif len(text) > max_line:
            message = f"expected at most {max_line:,} characters, got {len(text):,}; split it into sentences"
            yield BadLine(name, number, "too long", message)
        else:
            yield text


def _good(rows: Sequence[tuple[str | BadLine, str | BadLine]], where: str, skip_bad: bool) -> list[tuple[str, str]]:
    """The rows without a bad line; the others are logged or refused."""
    good: list[tuple[str, str]] = []
    bad: list[BadLine] = []
    for one, other in rows:
        if isinstance(one, BadLine):
            bad.append(one)
        elif isinstance(other, BadLine):
            bad.append(other)
        else:
            good.append((one, other))
    if bad and not skip_bad:
        raise ValueError(_refusal(bad, len(rows)) + _HINT)
    if not good:
        raise ValueError(f"every line of {where} is bad: {_by_kind(bad)}")
    if bad:
        logger.warning("left out %s of %s lines of %s: %s", f"{len(bad):,}", f"{len(rows):,}", where, _by_kind(bad))
    return good


def _refusal(bad: Sequence[BadLine], total: int) -> str:
    """The first bad line in full, the next few by number and kind."""
    message = f"{bad[0].name}, line {bad[0].number:,}: {bad[0].message}"
    if len(bad) == 1:
        return message
    others = ", ".join(f"{line.number:,} ({line.kind})" for line in bad[1:_SHOWN])
    more = ", ..." if len(bad) > _SHOWN else ""
    return f"{message}; {len(bad):,} of {total:,} lines are bad: also {others}{more}"


def _by_kind(bad: Sequence[BadLine]) -> str:
    """ "2 empty (lines 4, 9), 1 not UTF-8 (line 17)"."""
    parts = []
    for kind in dict.fromkeys(line.kind for line in bad):
        numbers = [line.number for line in bad if line.kind == kind]
        shown = ", ".join(f"{number:,}" for number in numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        parts.append(f"{len(numbers):,} {kind} (line{'s' * (len(numbers) > 1)} {shown})")
    return ", ".join(parts)
