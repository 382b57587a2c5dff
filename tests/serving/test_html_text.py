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
        ("<p>one &lt; two<b class='x notranslate'>no</b> three</p>", ["one < two", " three"]),
        ("a<code>b<i>c</i></code>d<script>e<f</script>", ["a", "d"]),
        ("<p translate=no>a<br>b<p>c</p>d</p>e", ["e"]),
        ("x\n<b>\n</b>&#65;&#x42;&unknown;\r\ny", ["x\n", "AB&unknown;\r\ny"]),
        ("</b>a</b><i>b", ["a", "b"]),
        ("<!-- a --><?b?><!DOCTYPE c>", []),
    ],
)
def test_prose_is_found(page, texts) -> None:
    found = HtmlPage(page)
    assert found.texts == texts
    if "unknown" not in page:  # an ampersand that stands for itself is escaped
        assert HtmlPage(found.filled(texts)).texts == texts
    with_others = found.filled(["<&"] * len(texts))
    assert HtmlPage(with_others).texts == ["<&"] * len(texts)


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
        for page in ("<b>x" * count, "<b>" * count + "</i>" * count, "<" * count, "&" * count):
            HtmlPage(page)
        return time.process_time() - began

    assert seconds(16_000) < 3 * 16 * max(seconds(1000), 0.001)  # were it quadratic, 256 times as much
