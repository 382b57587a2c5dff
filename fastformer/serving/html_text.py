"""Extracts the texts between the tags of an HTML page, and makes the page with other texts in their places.

The rest of the page stays the same, character by character. The work grows only with the page's length, however deep
its tags are nested.
"""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser

_UNTRANSLATED = frozenset(("script", "style", "code", "pre", "textarea", "kbd", "samp"))
# Elements without an end tag.
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
)


class HtmlPage:
    """A page whose texts are translated separately.

    Texts in elements such as <code>, and in elements with `translate="no"` or the class "notranslate", do not change.

    Args:
        page: HTML, either a whole page or a part of one.

    Attributes:
        texts: the texts to translate, with characters in the place of entities.

    Raises:
        ValueError: the markup can't be read.
    """

    def __init__(self, page: str) -> None:
        reader = _Reader(page)
        try:
            reader.feed(page)
            reader.close()
        except AssertionError as error:  # raised for a broken declaration
            raise ValueError("expected HTML that can be read, got a broken declaration") from error
        spans = [(begin, end) for begin, end in reader.spans if page[begin:end].strip()]
        self.texts = [html.unescape(page[begin:end]) for begin, end in spans]
        ends = [0, *(end for _, end in spans)]
        begins = [*(begin for begin, _ in spans), len(page)]
        self._between = [page[end:begin] for end, begin in zip(ends, begins, strict=True)]

    def plain(self) -> str:
        """Returns the texts without markup."""
        return " ".join(self.texts)

    def filled(self, texts: Sequence[str]) -> str:
        """Returns the page with other texts in the places of `texts`."""
        escaped = (html.escape(text, quote=False) for text in texts)
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(self._between, escaped, fillvalue="")))


class _Reader(HTMLParser):
    """Finds the places of the texts that are to be translated.

    Attributes:
        spans: the places of the texts, in order; a text with entities is one span.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)  # places refer to the unchanged page
        self.spans: list[tuple[int, int]] = []
        self._page = page
        self._lines = [0, *itertools.accumulate(len(line) + 1 for line in page.split("\n"))]
        self._open: list[tuple[str, bool]] = []  # open elements by name, and whether the texts of each stay unchanged
        self._names: Counter[str] = Counter()  # the names of the open elements
        self._kept = 0  # the number of open elements whose texts stay unchanged

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            return
        found = dict(attrs)
        classes = (found.get("class") or "").split()
        is_kept = tag in _UNTRANSLATED or found.get("translate") == "no" or "notranslate" in classes
        self._open.append((tag, is_kept))
        self._names[tag] += 1
        self._kept += is_kept

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handles an element that ends with its start tag: it has no text."""

    def handle_endtag(self, tag: str) -> None:
        while self._names[tag]:  # an end tag also closes all elements that are open inside its element
            name, is_kept = self._open.pop()
            self._names[name] -= 1
            self._kept -= is_kept
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        self._add(len(data))

    def handle_entityref(self, name: str) -> None:
        self._add(1 + len(name), ";")

    def handle_charref(self, name: str) -> None:
        self._add(2 + len(name), ";")

    def _add(self, length: int, closing: str = "") -> None:
        """Adds a piece of text at the reader's place, with a closing character if the page has it there."""
        if self._kept:
            return
        line, column = self.getpos()
        begin = self._lines[line - 1] + column
        end = begin + length
        if closing and self._page.startswith(closing, end):
            end += 1
        if self.spans and self.spans[-1][1] == begin:
            begin = self.spans.pop()[0]
        self.spans.append((begin, end))
