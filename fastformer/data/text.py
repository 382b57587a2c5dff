"""Text files in, lines out; a broken line is named by file and number, and nothing is read half."""

from __future__ import annotations

import os
from pathlib import Path

MAX_LINE = 20_000  # characters; longer is hardly a sentence, and one such line would fill a batch


def read_lines(path: str | os.PathLike, *, allow_empty: bool = False) -> list[str]:
    """The lines of a UTF-8 file, without line ends (LF or CRLF) and without a byte order mark.

    Args:
        path: the file.
        allow_empty: take empty lines as empty strings (text to translate keeps its paragraphs).

    Raises:
        ValueError: no such file, an empty file, bytes that are no UTF-8, an empty line, a line of over MAX_LINE
            characters; the message names the file and the line.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"expected a text file, but there is no file {file}")
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise ValueError(f"{file} is empty: expected at least one line of text")
    return split_lines(data, str(file), allow_empty=allow_empty)


def split_lines(data: bytes, name: str, *, allow_empty: bool = False, first: int = 1) -> list[str]:
    """The lines of some bytes, as `read_lines`; messages name the file `name` and count lines from `first`."""
    lines = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), first):
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: expected UTF-8, got byte 0x{line[error.start]:02x} at position {error.start}; "
                "convert the file, for example with iconv"
            ) from error
        if not text.strip() and not allow_empty:
            raise ValueError(f"{name}, line {number}: expected text, got an empty line; remove it (on both sides)")
        if len(text) > MAX_LINE:
            raise ValueError(
                f"{name}, line {number}: expected at most {MAX_LINE:,} characters, got {len(text):,}; "
                "split it into sentences"
            )
        lines.append(text)
    return lines


def read_pairs(source: str | os.PathLike, target: str | os.PathLike) -> list[tuple[str, str]]:
    """Two line-aligned files as pairs.

    Raises:
        ValueError: what `read_lines` raises, or different numbers of lines.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"expected as many lines in {target} as in {source}, got {len(targets):,} and {len(sources):,}: "
            "the two files must be aligned line by line"
        )
    return list(zip(sources, targets, strict=True))


def read_tsv(path: str | os.PathLike) -> list[tuple[str, str]]:
    """A file of "source<TAB>target" lines as pairs.

    Raises:
        ValueError: what `read_lines` raises, or a line without exactly one tab and text on both sides.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if len(fields) != 2 or not fields[0].strip() or not fields[1].strip():
            raise ValueError(f"{path}, line {number}: expected source<TAB>target, got {len(fields)} field(s)")
        pairs.append((fields[0], fields[1]))
    return pairs


def read_text(path: str | os.PathLike) -> str:
    """A whole UTF-8 text, for a language model; line ends become LF.

    Raises:
        ValueError: no such file, an empty file, bytes that are no UTF-8 (the line is named).
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"expected a text file, but there is no file {file}")
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise ValueError(f"{file} is empty: expected some text")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: expected UTF-8, got byte 0x{data[error.start]:02x}") from error
