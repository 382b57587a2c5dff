"""Translates only the text of HTML pages, keeps the rest, and bounds the time for malicious pages."""

from __future__ import annotations

import random
import time

import pytest

from fastformer.serving.html_text import HtmlPage

PIECES = [
    "<b>", "</b>", "<i translate=no>", "</i>", "<br>", "<br/>", "<pre>", "</pre>", "a", "é", "&amp;", "&#65;", "&", "#",
    "\n", "\r", " ", "<", ">", "<!--", "-->", '"', "=", "</", "/>", "<a ", "<!d", ";",
]  # fmt: skip


@pytest.mark.parametrize(
    "page, texts",
    [
        ("<p>one &lt; two<b class='x notranslate'>no</b> three</p>", ["one < two", "three"]),
        ("a<code>b<i>c</i></code>d<script>e<f</script>", ["a", "d"]),
        ("x\n<b>\n</b>&#65;&#x42;&unknown;\r\ny&nbsp;", ["x", "AB&unknown; y\xa0"]),
        ("</b>a</b><i>b&nbsp;</i>&nbsp;", ["a", "b\xa0"]),
        ("<!-- a --><?b?><!DOCTYPE c>", []),
        # White space is a space
        ("<p>\n\t\tWenn eine Zeile\n\n\t\tkein Verb\fhat,&#10;ist\n</p>", ["Wenn eine Zeile kein Verb hat, ist"]),
        # translate, of which the innermost counts
        ("<p translate=NO>a<b translate=yes>b</b><i translate>c</i><u translate=x>d</u></p>e", ["b", "c", "e"]),
        ("<code translate='yes'>a</code><b translate=no translate=yes>b</b><script translate=yes>c</script>", ["a"]),
        ("<b class=notranslatex>a</b><b class=notranslate translate=yes>b</b>", ["a", "b"]),
        # Ends that are implied, or come too early or late; html5lib reads the same
        ("<p translate=no>a<br>b<p>c</p>d</p>e", ["c", "d", "e"]),
        ("<p translate=no>a<b>b</b><ul><li>c", ["c"]),
        ("<ul><li translate=no>a<li>b<ul><li translate=no>c</ul>d</ul>e", ["b", "d", "e"]),
        ("<dl><dt translate=no>a<dd>b<dt>c</dl>", ["b", "c"]),
        ("<table><tr><td translate=no>a<td>b<tr><td>c<tbody><td>d</table>e", ["b", "c", "d", "e"]),
        ("<select><option translate=no>a<option>b</select>c", ["b", "c"]),
        ("<p><i translate=no>a</p>b</i>c", ["c"]),
        ("<b><i translate=no>a</b>b</i>c", ["c"]),
        ("<table><td><b translate=no>a</td>b</table>", ["b"]),
        ("<span translate=no><div>a</span>b</div>c</span>d", ["d"]),
        ("<div translate=no><table><td></div>a</table>b</div>c", ["c"]),
        ("<i translate='no'/>a</i>b<svg><g translate='no'/><text>c</text></svg>", ["b", "c"]),
    ],
)
def test_prose_is_found(page, texts) -> None:
    found = HtmlPage(page)
    assert found.texts == texts
    if "unknown" not in page:  # an ampersand that stands for itself is escaped
        assert HtmlPage(found.filled(texts)).texts == texts
    with_others = found.filled(["<&"] * len(texts))
    assert HtmlPage(with_others).texts == ["<&"] * len(texts)


def test_white_space_around_a_text_stays_in_the_page() -> None:
    page = "<p>\n  one\n  two <b>\n three\n</b>\t</p>"
    assert HtmlPage(page).filled(["1", "2"]) == "<p>\n  1 <b>\n 2\n</b>\t</p>"
    assert HtmlPage("<i>a</i>").filled(['it\'s "b" & c']) == '<i>it\'s "b" &amp; c</i>'  # quotes mean nothing here


def test_everything_but_the_texts_is_unchanged() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        page = "".join(draw.choices(PIECES, k=draw.randrange(1, 14)))
        found = HtmlPage(page)
        between = found.filled([f"{number}@" for number in range(len(found.texts))])
        place = 0  # what stands between the texts is in the page, in order
        for number, kept in enumerate(between.replace("@", "\0").split("\0")):
            kept = kept.removesuffix(str(number)) if number < len(found.texts) else kept
            place = page.index(kept, place) + len(kept)


def test_the_time_for_a_page_depends_only_on_its_length() -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        pages = ("<b>x", "<", "&", "<div>", "<p><i translate=no>x</p>", "<table><td><b>", "<li><ul>")
        for page in (
            *(each * count for each in pages),
            "<b>" * count + "</i>" * count,
            "<p>" + "<b>" * count + "</p>" * count,
        ):
            HtmlPage(page)
        return time.process_time() - began

    assert seconds(16_000) < 3 * 16 * max(seconds(1000), 0.001)  # were it quadratic, 256 times as much
