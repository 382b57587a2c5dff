"""Extracts the texts between the tags of an HTML page, and makes the page with other texts in their places.

The rest of the page stays the same, character by character. The work grows only with the page's length, however deep
its tags are nested.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_UNTRANSLATED = _tags("code kbd pre samp textarea")  # unless they have translate="yes"
_RAW = _tags("iframe noembed noframes plaintext script style xmp")  # never prose
# Elements without an end tag.
_VOID = _tags("area base br col embed hr img input link meta param source track wbr")
_KEPT = {"yes": False, "": False, "no": True}  # by the attribute `translate`; any other value says nothing
_WHITE = re.compile(r"[ \t\n\r\f]+")

# The rules for the ends of elements, from "The rules for parsing tokens in HTML content" of the HTML standard.
# These elements stay open when an element around them ends, and end alone if their end tag comes too early.
_FORMATTING = _tags("a b big code em font i nobr s small strike strong tt u")
# The end of one of these ends all formatting inside of it.
_MARKERS = _tags("applet caption marquee object td template th")
_SCOPE = _tags("applet caption html marquee object table td template th")
_TABLE = _tags("html table template")
# Blocks, which end a paragraph.
_ENDS_P = _tags(
    "address article aside blockquote center dd details dialog dir div dl dt fieldset figcaption figure footer form h1 "
    "h2 h3 h4 h5 h6 header hgroup hr li listing main menu nav ol p plaintext pre search section summary table ul "
    "xmp"
)
_SPECIAL = (_SCOPE | _ENDS_P | _RAW) - {"dialog"} | _tags(
    "body button colgroup frameset head noscript select tbody textarea tfoot thead title tr"
)
# The kinds of barriers beyond which a tag ends no element.
_BARRIERS = {
    "scope": _SCOPE,
    "button": _SCOPE | {"button"},
    "list": _SCOPE | {"ol", "ul"},
    "table": _TABLE,
    "item": _SPECIAL - {"address", "div", "p", "li", "dd", "dt"},
    "any": _SPECIAL,
}
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_CELLS, _SECTIONS = ("td", "th"), ("tbody", "thead", "tfoot")
_IN_TABLE = frozenset((*_CELLS, *_SECTIONS, "tr", "table", "caption"))
# The elements that a start tag ends, in turn, if they are open within a barrier.
_ENDED: dict[str, Sequence[tuple[tuple[str, ...], str]]] = {
    "li": [(("li",), "item")],
    **dict.fromkeys(("dd", "dt"), [(("dd", "dt"), "item")]),
    "button": [(("button",), "scope")],
    **dict.fromkeys(_CELLS, [(_CELLS, "table")]),
    "tr": [(_CELLS, "table"), (("tr",), "table")],
    **dict.fromkeys(
        (*_SECTIONS, "caption", "colgroup"),
        [(("caption",), "table"), (_CELLS, "table"), (("tr",), "table"), (_SECTIONS, "table")],
    ),
}
# The elements that a start tag ends if they are the innermost ones.
_ENDED_INNERMOST = {
    "option": ("option",),
    "optgroup": ("option", "optgroup"),
    **dict.fromkeys(("rt", "rp"), ("rt", "rp", "rb")),
    **dict.fromkeys(_HEADINGS, _HEADINGS),
}


class HtmlPage:
    """A page whose texts are translated separately.

    Texts in elements such as <code>, and in elements with `translate="no"` or the class "notranslate", do not change,
    except those in elements inside of them with `translate="yes"`.

    Args:
        page: HTML, either a whole page or a part of one.

    Attributes:
        texts: the texts to translate, with characters in the place of entities. White space within a text is one space,
            as in a browser; that around it is left in the page.

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
        spans, self.texts = [], []
        for begin, end in reader.spans:
            text = page[begin:end]
            plain = html.unescape(text)
            if plain.strip():
                begin += len(text) - len(text.lstrip(" \t\n\r\f"))
                spans.append((begin, begin + len(text.strip(" \t\n\r\f"))))
                self.texts.append(_WHITE.sub(" ", plain).strip(" "))
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


@dataclass(eq=False)
class _Element:
    """An open element.

    Attributes:
        name: its tag.
        number: the number of elements that began before it.
        is_kept: whether its texts stay unchanged; None: as those around it.
        is_open: False once it has ended.
    """

    name: str
    number: int
    is_kept: bool | None
    is_open: bool = True


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
        self._open: list[_Element] = []  # elements other than formatting, which end from the innermost on
        self._places: dict[str, list[int]] = {}  # the places in `_open` of each tag
        self._barriers: dict[str, list[int]] = {kind: [] for kind in _BARRIERS}  # their places in `_open`
        self._formatting: list[_Element] = []
        self._formats: dict[str, list[_Element]] = {}  # the same by tag
        self._deciding: list[_Element] = []  # elements whose `is_kept` isn't None, some of which may have ended
        self._count = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._start(tag)
        if tag in _VOID:
            return
        attributes = dict(reversed(attrs))  # the first of several with one name counts
        is_kept = _KEPT.get((attributes["translate"] or "").lower()) if "translate" in attributes else None
        if is_kept is None and (tag in _UNTRANSLATED or "notranslate" in (attributes.get("class") or "").split()):
            is_kept = True
        one = _Element(tag, self._count, True if tag in _RAW else is_kept)
        self._count += 1
        if one.is_kept is not None:
            self._deciding.append(one)
        if tag in _FORMATTING:
            self._formatting.append(one)
            self._formats.setdefault(tag, []).append(one)
            return
        self._places.setdefault(tag, []).append(len(self._open))
        for kind, names in _BARRIERS.items():
            if tag in names:
                self._barriers[kind].append(len(self._open))
        self._open.append(one)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handles a start tag that ends in "/>", which means nothing, except in pictures and formulas."""
        if (
            tag not in _RAW
            and tag not in ("svg", "math")
            and not self._places.get("svg")
            and not self._places.get("math")
        ):
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in _FORMATTING:
            last = self._barriers["scope"]
            formats = self._formats.get(tag)
            if formats and (not last or formats[-1].number > self._open[last[-1]].number):
                formats.pop().is_open = False
        elif tag in _HEADINGS:
            self._end(_HEADINGS, "scope")
        elif tag in _IN_TABLE:
            self._end((tag,), "table")
        elif tag == "p":
            self._end(("p",), "button")
        elif tag == "li":
            self._end(("li",), "list")
        else:
            self._end((tag,), "scope" if tag in _SPECIAL else "any")

    def _start(self, tag: str) -> None:
        """Ends the elements that a start tag ends."""
        if tag in _ENDS_P:
            self._end(("p",), "button")
        for names, kind in _ENDED.get(tag, ()):
            self._end(names, kind)
        for name in _ENDED_INNERMOST.get(tag, ()):
            if self._open and self._open[-1].name == name:
                self._pop()
        if tag in ("a", "nobr"):
            self.handle_endtag(tag)

    def _end(self, names: Sequence[str], kind: str) -> None:
        """Ends the innermost element of some tags, with all inside of it, unless a barrier is inside of it."""
        place = max((places[-1] for name in names if (places := self._places.get(name))), default=-1)
        barriers = self._barriers[kind]
        if place >= 0 and (not barriers or barriers[-1] <= place):  # it may be such a barrier itself
            while len(self._open) > place:
                self._pop()

    def _pop(self) -> None:
        one = self._open.pop()
        one.is_open = False
        self._places[one.name].pop()
        for barriers in self._barriers.values():
            if barriers and barriers[-1] == len(self._open):
                barriers.pop()
        if one.name in _MARKERS:
            while self._formatting and self._formatting[-1].number > one.number:
                inner = self._formatting.pop()
                if inner.is_open:
                    inner.is_open = False
                    self._formats[inner.name].pop()

    def handle_data(self, data: str) -> None:
        self._add(len(data))

    def handle_entityref(self, name: str) -> None:
        self._add(1 + len(name), ";")

    def handle_charref(self, name: str) -> None:
        self._add(2 + len(name), ";")

    def _add(self, length: int, closing: str = "") -> None:
        """Adds a piece of text at the reader's place, with a closing character if the page has it there."""
        while self._deciding and not self._deciding[-1].is_open:
            self._deciding.pop()
        if self._deciding and self._deciding[-1].is_kept:
            return
        line, column = self.getpos()
        begin = self._lines[line - 1] + column
        end = begin + length
        if closing and self._page.startswith(closing, end):
            end += 1
        if self.spans and self.spans[-1][1] == begin:
            begin = self.spans.pop()[0]
        self.spans.append((begin, end))
