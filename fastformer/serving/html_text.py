"""The texts of an HTML page between its tags, and the page with other texts in their place.

The rest of the page stays as it came, letter by letter. The work grows with the page's length alone, however deep its
tags are nested.
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
    """A page whose texts are translated each by itself.

    Those of elements such as <code>, of elements with `translate="no"` and of the class "notranslate" stay as they are.

    Args:
        page: in HTML; a part of a page will do.

    Attributes:
        texts: with characters in the place of entities.

    Raises:
        ValueError: markup that can't be read.
    """

    def __init__(self, page: str) -> None:
        reader = _Reader(page)
        try:
            reader.feed(page)
            reader.close()
        except AssertionError as error:  # of a broken declaration
            raise ValueError("expected HTML that can be read, got a broken declaration") from error
        spans = [(begin, end) for begin, end in reader.spans if page[begin:end].strip()]
        self.texts = [html.unescape(page[begin:end]) for begin, end in spans]
        ends = [0, *(end for _, end in spans)]
        begins = [*(begin for begin, _ in spans), len(page)]
        self._between = [page[end:begin] for end, begin in zip(ends, begins, strict=True)]

    def plain(self) -> str:
        """The texts without markup."""
        return " ".join(self.texts)

    def filled(self, texts: Sequence[str]) -> str:
        """The page with these in the place of `texts`."""
        escaped = (html.escape(text, quote=False) for text in texts)
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(self._between, escaped, fillvalue="")))


class _Reader(HTMLParser):
    """Finds where texts that are to be translated begin and end.

    Attributes:
        spans: their places, in order; a text with entities is one.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)  # places are those of the page as it came
        self.spans: list[tuple[int, int]] = []
        self._page = page
        self._lines = [0, *itertools.accumulate(len(line) + 1 for line in page.split("\n"))]
        self._open: list[tuple[str, bool]] = []  # elements by name, and whether each stays as it is
        self._names: Counter[str] = Counter()  # of the open ones
        self._kept = 0  # how many of them stay as they are

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
        """An element that ends with its start tag has no text."""

    def handle_endtag(self, tag: str) -> None:
        while self._names[tag]:  # an end tag ends what is open inside of its element too
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
        """A piece of text at the reader's place, with a closing character if the page has it there."""
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
